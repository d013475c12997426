"""Idle actions in words."""

from __future__ import annotations

import pytest

from gpushare_spawner.idle.policy import IdleAction, NoAction, Overdue
from gpushare_spawner.model.share import IdleCause, Share, Tier, UseRule
from gpushare_spawner.wording import idle_decisions

QUARTER = Share(units=25)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (
            IdleAction(Tier.DOWNGRADED, 10, 0, 900),
            "After 15 min without GPU work, this share is downgraded from 0.25 GPU to 0.10 GPU. "
            "Kernels keep running and keep their data. GPU work runs at once; some seconds of it restore the share.",
        ),
        (
            IdleAction(Tier.RELEASED, 0, 0, 2700),
            "After 45 min without GPU work, this share (0.25 GPU) is released and lent. "
            "Kernels keep running and keep their data. GPU work runs at once; some seconds of it restore the share.",
        ),
        (
            IdleAction(Tier.RELEASED, 0, 0, 2700, short_of=UseRule(min_use=0.2, window=300)),
            "After 45 min without GPU work of at least 0.2 s at a time or within 5 min, this share (0.25 GPU) is "
            "released and lent. "
            "Kernels keep running and keep their data. GPU work runs at once; some seconds of it restore the share.",
        ),
        (
            IdleAction(Tier.STOPPED, 0, 0, 8 * 3600),
            "After 8 h without GPU work, busy kernels or other activity, this server is stopped. "
            "Files stay. Variables in kernels are lost. Any activity keeps the server running.",
        ),
        (
            IdleAction(Tier.STOPPED, 0, 0, 86400, IdleCause.MAX_AGE),
            "A server runs for at most 24 h, busy or not, and is then stopped. "
            "Files stay. Variables in kernels are lost.",
        ),
    ],
)
def test_each_action_says_what_is_lost_and_what_is_not(action: IdleAction, said: str) -> None:
    assert idle_decisions.explained(action, QUARTER) == said


def test_a_downgrade_of_several_gpus_says_what_is_left_on_each() -> None:
    said = idle_decisions.explained(IdleAction(Tier.DOWNGRADED, 10, 0, 900), Share(units=100, count=2))
    assert "from 2 GPUs to 0.10 GPU on each of its 2 GPUs" in said


def test_every_reason_for_no_action_has_words() -> None:
    assert all(idle_decisions.why_none(reason) for reason in NoAction)


def test_the_next_action_is_said_in_a_few_words() -> None:
    assert idle_decisions.upcoming(Tier.DOWNGRADED, 10) == "downgrade to 0.10 GPU"
    assert idle_decisions.upcoming(Tier.RELEASED, 0) == "release of the share"
    assert idle_decisions.upcoming(Tier.STOPPED, 0) == "stop of the server"


def test_an_overdue_server_is_idle_or_old() -> None:
    assert idle_decisions.overdue(Overdue(IdleCause.IDLE, 600)) == "no activity for 10 min"
    assert idle_decisions.overdue(Overdue(IdleCause.MAX_AGE, 7200)) == "2 h old"
