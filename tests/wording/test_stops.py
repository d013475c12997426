"""Why a server was stopped, as the hub's pages say it."""

from __future__ import annotations

import pytest

from gpushare_spawner.idle.policy import Decision, IdleAction
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.wording import stops

HOUR = 3600.0


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (IdleCause.IDLE, "for 8 h there was no GPU work, no busy kernel and no other activity"),
        (IdleCause.MAX_AGE, "servers run for at most 8 h here"),
        (IdleCause.RECLAIM, "somebody within their quota waited for its GPU; it was over quota and idle for 8 h"),
        (IdleCause.OTHER, "it was idle"),
        (None, "it was idle"),
    ],
)
def test_the_culler_says_why(cause: IdleCause | None, why: str) -> None:
    action = IdleAction(Tier.STOPPED, 0, 1000.0, 8 * HOUR, cause) if cause is not None else None
    decision = Decision(
        tier=Tier.STOPPED, units=0, no_action=None, notice=None, upcoming=action, idle_since=0.0, worked_at=0.0,
        decide_again_at=None,
    )  # fmt: skip
    said = f"The server was stopped: {why}. Files stay. Variables in kernels are lost."
    assert stops.by_culler(decision) == said
    assert stops.note(said, 1_800_000_000.0) == f"2027-01-15 08:00 UTC: {said}"
