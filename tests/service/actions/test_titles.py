"""Answers name a template by its title. The name that programs use stands at most beside it, in parentheses."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions import restart, share
from gpushare_spawner.service.hub.client import HubServer
from tests.service.actions.conftest import ANN, ROOT, Acting
from tests.service.actions.test_other_actions import refusal_of
from tests.service.fake_hub import FakeHub

BESIDE_ITS_TITLE = re.compile(r" \(slug-[a-z0-9]+\)")


@pytest.fixture
def templates() -> dict[str, Template]:
    half = {"fraction": 0.5}
    found = [
        Template(name="slug-quarter", display_name="A quarter", gpu={"fraction": 0.25}, limits={"per_user": 1}),
        Template(name="slug-half", display_name="A half", gpu=half, limits={"per_user": 1}),
        Template(name="slug-course", display_name="The course", gpu={"fraction": 0.3}, access={"groups": ["ml"]}),
        Template(name="slug-h100", display_name="Half an H100", gpu=half | {"models": ["*H100*"]}),
        Template(name="slug-several", display_name="Three", gpu={"count": 3}),
        Template(name="slug-cpu", display_name="No GPU"),
    ]
    return {one.name: one for one in found}


@pytest.fixture
def acting(acting: Acting, hub_server: FakeHub) -> Acting:
    """Ann runs a server with a quarter and one with a half; units are short, and others wait for them."""
    hub_server.add("ann", user_options={"profile": "slug-quarter"})
    hub_server.add("ann", "second", user_options={"profile": "slug-half"})
    hub_server.users["ann"]["groups"] = ["physics"]
    acting.agent.add("ann", template="slug-quarter", quota="user:ann")
    acting.agent.add("ann", "second", template="slug-half", gpus=("GPU-1",), share_units=50)
    return acting


def crowded(acting: Acting) -> None:
    acting.agent.add("bob", template="slug-half", share_units=70, effective_units=70)


def queued(acting: Acting) -> None:
    acting.pending = [HubServer("zoe", "", ready=False, pending="spawn", profile="slug-quarter")]


def limited(acting: Acting) -> None:
    acting.quotas = Quotas.model_validate({"users": {"ann": {"maximum": 0.3}}})
    acting.actions.quotas = lambda: acting.quotas


def as_it_is(acting: Acting) -> None:
    pass


Act = Callable[[Acting], Awaitable[object]]
REFUSED: dict[str, tuple[Callable[[Acting], None], Act]] = {
    "downgrade": (as_it_is, lambda acting: share.change_tier(acting.actions, acting.seen(), ROOT, Tier.DOWNGRADED)),
    "other share": (as_it_is, lambda acting: share.change_share(acting.actions, acting.seen(), ANN, 0.45)),
    "too many": (as_it_is, lambda acting: share.change_share(acting.actions, acting.seen(), ANN, 0.5)),
    "no units": (crowded, lambda acting: share.change_share(acting.actions, acting.seen(), ROOT, 0.6)),
    "others wait": (queued, lambda acting: share.change_share(acting.actions, acting.seen(), ANN, 0.5)),
    "no template": (as_it_is, lambda acting: restart.restart(acting.actions, acting.seen(), ANN, "nonsense")),
    "not allowed": (as_it_is, lambda acting: restart.restart(acting.actions, acting.seen(), ANN, "slug-course")),
    "not allowed by admin": (
        as_it_is,
        lambda acting: restart.restart(acting.actions, acting.seen(), ROOT, "slug-course"),
    ),
    "one at a time": (as_it_is, lambda acting: restart.restart(acting.actions, acting.seen(), ANN, "slug-half")),
    "no such GPU": (as_it_is, lambda acting: restart.restart(acting.actions, acting.seen(), ROOT, "slug-h100")),
    "not so many GPUs": (as_it_is, lambda acting: restart.restart(acting.actions, acting.seen(), ANN, "slug-several")),
    "quota": (limited, lambda acting: restart.restart(acting.actions, acting.seen(), ANN, "slug-half")),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_action_names_templates_by_their_titles(acting: Acting, name: str) -> None:
    prepare, act = REFUSED[name]
    prepare(acting)
    refusal = await refusal_of(act(acting))
    for text in (refusal.text, refusal.to_admins):
        assert "slug-" not in BESIDE_ITS_TITLE.sub("", text)
    if name == "downgrade":
        assert refusal.text.startswith("The template A quarter has no downgrade_to")


async def test_a_restart_that_the_hub_refuses_names_the_template_by_its_title(
    acting: Acting, hub_server: FakeHub
) -> None:
    hub_server.faults = [None, None, None, 400, 400]  # look, stop, look, start, start as before
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ROOT, "slug-cpu"))
    assert "with the template No GPU." in refusal.text
    assert "slug-" not in refusal.text + "".join(action.reason for action in acting.recorded)


async def test_what_is_done_is_said_and_recorded_with_the_title(acting: Acting) -> None:
    outcome = await restart.restart(acting.actions, acting.seen(), ROOT, "slug-cpu", "A class begins.")
    assert outcome.text.startswith("The server restarts with the template No GPU.")
    assert "slug-" not in outcome.text + "".join(action.reason for action in acting.recorded)
    (told,) = [one.message.text for one in acting.agent.asked if one.op == "message" and one.message is not None]
    assert told == "root restarted the server with the template No GPU: A class begins."
