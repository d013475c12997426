"""Change of a running session's share: within templates, quota and queue, and by admins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpushare_spawner.model.control import ControlRefused, ResizeRequest
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.model.template import Limits, Template
from gpushare_spawner.service.actions import share
from gpushare_spawner.service.actions.context import ActionOutcome, RefusalCode
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording import actions as words
from tests.service.actions.conftest import ANN, ROOT, Acting
from tests.service.actions.test_other_actions import refusal_of
from tests.service.fake_agent import GIB, FakeAgent
from tests.service.fake_hub import FakeHub


def template(name: str, fraction: float, limit: str = "100%", **more: Any) -> Template:
    gpu = {"fraction": fraction, "memory": {"limit": limit} | more.pop("memory", {})} | more.pop("gpu", {})
    return Template(name=name, display_name=f"{fraction} GPU", gpu=gpu, **more)


@pytest.fixture
def templates() -> dict[str, Template]:
    """A quarter for all, a half for members of ml, and shares that are of another kind."""
    found = [
        template("quarter", 0.25),
        template("half", 0.5, "50%", access={"groups": ["ml"]}),
        template("tenth", 0.1),
        template("other-gpu", 0.3, gpu={"models": ["*H100*"]}),
        template("plain", 0.4, memory={"oversubscribe": False}),
        Template(name="two", display_name="2 GPUs", gpu={"count": 2}),
        Template(name="cpu", display_name="CPU"),
    ]
    return {one.name: one for one in found}


@pytest.fixture
def ann(hub_server: FakeHub) -> None:
    """Her server, and her groups."""
    hub_server.add("ann", groups=["ml"])
    hub_server.users["ann"]["groups"] = ["ml"]


@pytest.mark.usefixtures("ann")
async def test_user_changes_the_share_within_her_templates(acting: Acting) -> None:
    one = acting.seen()
    outcome = await share.change_share(acting.actions, one, ANN, 0.5)
    assert outcome == ActionOutcome(True, words.changed(Share(25), Share(50), 0, Tier.ACTIVE, 8 * GIB))
    assert acting.agent.sessions["ann"].share_units == 50
    (asked,) = acting.agent.asked
    assert asked == ResizeRequest(
        id="ann", share_units=50, memory_limit="50%", reason="ann changed the share from 0.25 GPU to 0.50 GPU."
    )
    assert await share.change_share(acting.actions, one, ANN, 0.5) == ActionOutcome(False, words.same(Share(50)))
    assert acting.history == [("share", "ann", "ann")]
    assert acting.recorded[0].units == 50


@pytest.mark.usefixtures("ann")
async def test_smaller_share_of_a_released_session_says_that_work_restores_it(acting: Acting) -> None:
    acting.agent.add("ann", tier=Tier.RELEASED, effective_units=0, guaranteed_units=0)
    outcome = await share.change_share(acting.actions, acting.seen(), ANN, 0.1)
    assert (
        outcome.text
        == "The share is now 0.10 GPU (previously 0.25 GPU). It is released: some seconds of GPU time restore it."
    )


@pytest.mark.parametrize("fraction", [0.3, 0.4, 0.45, 1.0])
@pytest.mark.usefixtures("ann")
async def test_share_of_no_template_that_the_user_may_use_is_refused(acting: Acting, fraction: float) -> None:
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, fraction))
    assert refusal.code is RefusalCode.LIMIT
    assert refusal.text == words.not_allowed([10, 50])
    assert "0.10 GPU or 0.50 GPU" in refusal.text


RULES: list[dict[str, Any]] = [
    {"labels": ["exam"]},
    {"placement": {"alone": True}},
    {"placement": {"apart_from": ["exam"]}},
    {"placement": {"near": ["exam"]}},
    {"placement": {"nodes": ["other"]}},
    {"placement": {"gpu": "GPU-8f6b2c1e-0000-5000-8000-0123456789ab"}},
    {"gpu": {"time": {"limit": "60%"}}},
    {"gpu": {"bypass": {"action": "stop"}}},
    {"priority": "high"},
    {"reclaimable": False},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["own", "other"])
@pytest.mark.usefixtures("ann")
async def test_share_of_a_template_with_other_rules_is_refused_to_users(
    acting: Acting, templates: dict[str, Template], rules: dict[str, Any], own: bool
) -> None:
    """The rules are those of the session's own template, or of the other one."""
    templates.clear()
    templates["quarter"] = template("quarter", 0.25, **(dict(rules) if own else {}))
    templates["half"] = template("half", 0.5, **({} if own else dict(rules)))
    one = acting.seen()
    refusal = await refusal_of(share.change_share(acting.actions, one, ANN, 0.5))
    assert (refusal.code, refusal.text) == (RefusalCode.LIMIT, words.not_allowed(()))
    assert (await refusal_of(share.other_shares(acting.actions, one))).text == words.not_allowed(())
    assert not acting.agent.asked
    assert (await share.change_share(acting.actions, one, ROOT, 0.5)).changed


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.usefixtures("ann")
async def test_share_of_a_template_with_the_same_rules_is_allowed(
    acting: Acting, templates: dict[str, Template], rules: dict[str, Any]
) -> None:
    templates["quarter"] = template("quarter", 0.25, **rules)
    templates["more"] = template("more", 0.6, **rules)
    one = acting.seen()
    assert await share.other_shares(acting.actions, one) == (60,)
    assert (await share.change_share(acting.actions, one, ANN, 0.6)).changed
    # back, and not to a share without the rules: the session still has its own template
    assert await share.other_shares(acting.actions, acting.seen()) == (25,)


@pytest.mark.usefixtures("ann")
async def test_session_of_an_unknown_template_has_the_shares_of_templates_without_rules(
    acting: Acting, templates: dict[str, Template]
) -> None:
    for number, rules in enumerate(RULES):
        templates[f"rules-{number}"] = template(f"rules-{number}", (51 + number) / 100, **rules)
    templates["written"] = template("written", 0.6, labels=[], placement={}, gpu={"time": {"limit": "100%"}})
    acting.agent.add("ann", template="gone")
    assert await share.other_shares(acting.actions, acting.seen()) == (10, 40, 50, 60)
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.51))
    assert refusal.code is RefusalCode.LIMIT


@pytest.mark.usefixtures("ann")
async def test_shares_to_choose_from_are_those_that_a_change_accepts(acting: Acting) -> None:
    one = acting.seen()
    choices = await share.other_shares(acting.actions, one)
    assert choices == (10, 50)
    for units in choices:
        assert (await share.change_share(acting.actions, one, ANN, units / 100)).changed


@pytest.mark.usefixtures("ann")
async def test_without_another_share_to_choose_the_user_is_told_so(
    acting: Acting, templates: dict[str, Template]
) -> None:
    del templates["half"], templates["tenth"]
    refusal = await refusal_of(share.other_shares(acting.actions, acting.seen()))
    assert (refusal.code, refusal.text) == (RefusalCode.LIMIT, words.not_allowed([]))


async def test_user_of_other_groups_may_not_have_that_share(acting: Acting, hub_server: FakeHub) -> None:
    hub_server.add("ann")
    hub_server.users["ann"]["groups"] = ["art"]
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.5))
    assert refusal.text == words.not_allowed([10])
    assert not acting.recorded


@pytest.mark.parametrize("fraction", [0, 65, -1, 0.123, float("nan"), float("inf")])
async def test_what_is_no_fraction_is_refused(acting: Acting, fraction: float) -> None:
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ROOT, fraction))
    assert (refusal.code, refusal.text) == (RefusalCode.BAD_REQUEST, words.NO_FRACTION)


async def test_admin_may_choose_any_share_for_anybody_and_the_memory_limit_stays(acting: Acting) -> None:
    acting.quotas = Quotas.model_validate({"users": {"ann": {"maximum": 0.25}}})
    acting.pending = [HubServer("zoe", "", ready=False, pending="spawn", profile="quarter")]
    outcome = await share.change_share(acting.actions, acting.seen(), ROOT, 0.45)
    assert outcome.text == "The share is now 0.45 GPU (previously 0.25 GPU)."
    assert acting.agent.asked[0].memory_limit is None
    assert acting.history == [("share", "root", "ann")]


@pytest.mark.usefixtures("ann")
async def test_without_free_units_the_refusal_offers_the_queue(acting: Acting) -> None:
    acting.agent.add("bob", share_units=70, effective_units=70)
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.5))
    assert refusal.code is RefusalCode.CAPACITY
    assert refusal.text == (
        "The session's GPU does not have 0.25 GPU more free now. Try again later, or restart the server with 0.5 GPU: "
        "then it waits in the queue, and its kernels end."
    )
    assert not acting.recorded
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ROOT, 0.6))
    assert refusal.text == "The session's GPU does not have 0.35 GPU more free now. Try again later."


@pytest.mark.usefixtures("ann")
async def test_units_go_to_spawns_that_wait_for_them_first(acting: Acting) -> None:
    def waits(profile: str) -> HubServer:
        return HubServer("zoe", "", ready=False, pending="spawn", profile=profile)

    acting.pending = [waits("other-gpu"), waits("cpu")]
    assert (await share.change_share(acting.actions, acting.seen(), ANN, 0.5)).changed
    acting.pending = [waits("quarter")]
    assert (await share.change_share(acting.actions, acting.seen(), ANN, 0.25)).changed, "a smaller share helps them"
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.5))
    assert refusal.code is RefusalCode.CAPACITY
    assert refusal.text.startswith("1 server waits for this kind of GPU, and free units go to the queue first.")


@pytest.mark.usefixtures("ann")
async def test_maximum_of_the_quota_bounds_the_larger_share_and_not_the_smaller_one(acting: Acting) -> None:
    acting.quotas = Quotas.model_validate({"users": {"ann": {"maximum": 0.4, "servers": 1}}})
    acting.agent.add("ann", quota="user:ann")
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.5))
    assert refusal.code is RefusalCode.LIMIT
    assert refusal.text.startswith("This needs 0.50 GPU, and the quota of user ann is limited to 0.40 GPU")
    assert (await share.change_share(acting.actions, acting.seen(), ANN, 0.1)).changed


@pytest.mark.usefixtures("ann")
async def test_session_that_never_yields_stays_within_the_guarantee(
    acting: Acting, templates: dict[str, Template]
) -> None:
    templates["quarter"] = template("quarter", 0.25, reclaimable=False)
    templates["half"] = template("half", 0.5, reclaimable=False)
    acting.quotas = Quotas.model_validate({"users": {"ann": {"guarantee": 0.3}}})
    acting.agent.add("ann", quota="user:ann")
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.5))
    assert refusal.code is RefusalCode.LIMIT
    acting.quotas = Quotas.model_validate({"users": {"ann": {"guarantee": 0.5}}})
    assert (await share.change_share(acting.actions, acting.seen(), ANN, 0.5)).changed


@pytest.mark.usefixtures("ann")
async def test_limit_of_a_template_counts_servers_with_its_share(
    acting: Acting, templates: dict[str, Template], hub_server: FakeHub
) -> None:
    templates["half"] = templates["half"].model_copy(update={"limits": Limits(per_user=1)})
    hub_server.add("ann", "second")
    second = acting.agent.add("ann", "second", gpus=("GPU-1",))
    assert (await share.change_share(acting.actions, acting.seen(), ANN, 0.5)).changed
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(second), ANN, 0.5))
    assert (refusal.code, refusal.text) == (RefusalCode.LIMIT, words.too_many("0.5 GPU", 1))


@pytest.mark.usefixtures("ann")
async def test_share_of_several_gpus_changes_on_each_of_them(acting: Acting, templates: dict[str, Template]) -> None:
    templates["halves"] = Template(name="halves", display_name="Halves", gpu={"count": 2, "fraction": 0.5})
    acting.agent.add("ann", gpus=("GPU-0", "GPU-1"), share_units=100, effective_units=100)
    assert await share.other_shares(acting.actions, acting.seen()) == (50,)
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ANN, 0.25))
    assert "You can change this share to 2 × 0.50 GPU" in refusal.text
    outcome = await share.change_share(acting.actions, acting.seen(), ANN, 0.5)
    assert outcome.text.startswith("The share is now 2 × 0.50 GPU (previously 2 GPUs).")
    assert acting.agent.sessions["ann"].share == Share(50, 2)
    outcome = await share.change_share(acting.actions, acting.seen(), ROOT, 1.2)
    assert outcome.text.startswith("The share is now 1.20 GPU (previously 2 × 0.50 GPU).")
    assert acting.agent.sessions["ann"].share == Share(100, 2, 20)
    templates["more"] = Template(name="more", display_name="More", gpu={"fraction": 1.5})
    assert await share.other_shares(acting.actions, acting.seen()) == (50, 150, 100)
    assert (await share.change_share(acting.actions, acting.seen(), ANN, 1.5)).changed
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen(), ROOT, 2.5))
    assert refusal.text.startswith("A share of 2.50 GPU is on 3 GPUs, and the session has 2.")


async def test_share_of_a_session_that_makes_way_stays(acting: Acting) -> None:
    acting.agent.add("bob", yields=True)
    refusal = await refusal_of(share.change_share(acting.actions, acting.seen("bob"), ROOT, 0.5))
    assert refusal.text == words.MAKES_WAY


@pytest.mark.usefixtures("ann")
async def test_changes_at_the_same_time_stay_within_the_quota(
    acting: Acting, agent: FakeAgent, hub_server: FakeHub
) -> None:
    acting.quotas = Quotas.model_validate({"users": {"ann": {"maximum": 0.75}}})
    hub_server.add("ann", "second")
    first, second = (
        agent.add("ann", name, gpus=(gpu,), quota="user:ann") for name, gpu in (("", "GPU-0"), ("second", "GPU-1"))
    )
    targets = [acting.seen(first), acting.seen(second)]
    done = await asyncio.gather(
        *(share.change_share(acting.actions, one, ANN, 0.5) for one in targets), return_exceptions=True
    )
    assert sum(isinstance(one, ActionOutcome) for one in done) == 1, done
    assert sum(one.share_units for one in agent.sessions.values()) == 75


async def test_older_agent_is_named(acting: Acting, agent: FakeAgent) -> None:
    one = acting.seen()

    class Older:
        report = acting.client.report

        async def send(self, request: ResizeRequest) -> None:
            raise ControlRefused("bad-request", "op: no such request")

    old: Any = type("Seen", (), {"agent": Older(), "session": one.session, "node": "fake"})()
    assert (await refusal_of(share.change_share(acting.actions, old, ROOT, 0.5))).code is RefusalCode.OLDER_AGENT
