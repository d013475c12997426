"""Release, tier, stop, exemption and message: what each does, twice, and who may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gpushare_spawner.model.controls import Ask, Exemption, MessageCause
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.actions import keeps, restart, share
from gpushare_spawner.service.actions.context import (
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    ReceivedAsk,
    RefusalCode,
    Target,
)
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.wording import actions as words
from gpushare_spawner.wording.amounts import utc
from tests.service.actions.conftest import ANN, ROOT, Acting
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub


async def refusal_of(action: Awaitable[object]) -> ActionRefused:
    with pytest.raises(ActionRefused) as refusal:
        await action
    return refusal.value


# -- tiers -------------------------------------------------------------------------------------------------------------


async def test_an_idle_share_is_released_by_its_user(acting: Acting, clock: Clock) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    assert await share.release(acting.actions, one, ANN) == ActionOutcome(True, words.RELEASED)
    assert acting.agent.sessions["ann"].tier is Tier.RELEASED
    assert await share.release(acting.actions, one, ANN) == ActionOutcome(False, words.RELEASED_ALREADY)
    assert acting.history == [("released", "ann", "ann")]
    assert acting.recorded[0].units == 0


async def test_a_busy_share_is_not_released(acting: Acting, agent: FakeAgent) -> None:
    agent.add("ann", gpu_busy=True)
    assert (await refusal_of(share.release(acting.actions, acting.seen(), ANN))).code is RefusalCode.BUSY
    agent.change("ann", gpu_busy=False, waiting=True)
    assert (await refusal_of(share.release(acting.actions, acting.seen(), ANN))).text == words.GPU_BUSY
    assert not acting.recorded


async def test_work_between_the_report_and_the_release_prevents_it(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    agent.before = lambda request: agent.work("ann") if request.op == "tier" else None
    refusal = await refusal_of(share.release(acting.actions, one, ANN))
    assert (refusal.code, refusal.text) == (RefusalCode.BUSY, words.WORKED_MEANWHILE)
    assert agent.sessions["ann"].tier is Tier.ACTIVE


async def test_an_ask_for_a_release_is_void_after_gpu_work(acting: Acting, agent: FakeAgent, clock: Clock) -> None:
    """Released, restored by work, and then the service, killed before its answer, sees the ask again."""
    one = acting.seen()
    clock.forward(MINUTE)
    asked = ReceivedAsk(Ask(number=1, kind=AskKind.RELEASE, at=clock()), at=clock())
    assert (await share.release(acting.actions, one, ANN, received=asked)).changed
    clock.forward(1)
    agent.work("ann")
    clock.forward(1)
    assert (await refusal_of(share.release(acting.actions, one, ANN, received=asked))).code is RefusalCode.BUSY
    assert agent.sessions["ann"].tier is Tier.ACTIVE


async def test_a_session_that_makes_way_goes_on_doing_so_when_it_is_released(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    agent.add("ann", tier=Tier.DOWNGRADED, effective_units=10, yields=True)
    clock.forward(MINUTE)
    await share.release(acting.actions, acting.seen(), ANN)
    assert agent.asked[-1].yields_until == clock() + 600
    assert agent.sessions["ann"].yields


async def test_an_admin_sets_the_tier(acting: Acting, clock: Clock) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    outcome = await share.change_tier(acting.actions, one, ROOT, Tier.DOWNGRADED)
    assert outcome == ActionOutcome(True, "The session is downgraded now and has 0.10 GPU.")
    assert not (await share.change_tier(acting.actions, one, ROOT, Tier.DOWNGRADED)).changed
    await share.change_tier(acting.actions, one, ROOT, Tier.RELEASED)
    outcome = await share.change_tier(acting.actions, one, ROOT, Tier.ACTIVE)
    assert outcome == ActionOutcome(True, "The session is active now and has 0.25 GPU.")
    assert acting.history == [(tier, "root", "ann") for tier in ("downgraded", "released", "active")]
    assert [action.units for action in acting.recorded] == [10, 0, 25]


async def test_a_tier_that_the_template_does_not_have_is_refused(acting: Acting, agent: FakeAgent) -> None:
    agent.add("ann", template="gone")
    assert (
        await refusal_of(share.change_tier(acting.actions, acting.seen(), ROOT, Tier.DOWNGRADED))
    ).text == words.no_downgrade(None)
    agent.add("ann", template="cpu")
    refusal = await refusal_of(share.change_tier(acting.actions, acting.seen(), ROOT, Tier.DOWNGRADED))
    assert refusal.text.startswith("The template CPU only has no downgrade_to")
    assert (
        await refusal_of(share.change_tier(acting.actions, acting.seen(), ROOT, Tier.STOPPED))
    ).text == words.STOP_IS_NO_TIER


# -- stop --------------------------------------------------------------------------------------------------------------


async def test_a_server_is_stopped_once(acting: Acting, hub_server: FakeHub) -> None:
    one = acting.seen()
    hub_server.add("ann")
    assert await restart.stop(acting.actions, one, ANN) == ActionOutcome(True, words.STOPS)
    assert hub_server.deleted == ["/users/ann/server"]
    assert await restart.stop(acting.actions, one, ANN) == ActionOutcome(False, words.NOT_RUNNING)
    hub_server.add("ann", pending="stop")
    assert await restart.stop(acting.actions, one, ANN) == ActionOutcome(False, words.STOPS_ALREADY)
    assert acting.history == [("stopped", "ann", "ann")]


# -- what its user is told ---------------------------------------------------------------------------------------------


async def _restart(actions: ActionContext, one: Target, by: Actor, why: str) -> ActionOutcome:
    return await restart.restart(actions, one, by, "cpu", why)


@pytest.mark.parametrize("why", ["The GPU is needed\u202e for the exam.", ""])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda actions, one, by, why: share.release(actions, one, by, why=why), "released the share"),
        (
            lambda actions, one, by, why: share.change_tier(actions, one, by, Tier.DOWNGRADED, why),
            "set the tier to downgraded",
        ),
        (
            lambda actions, one, by, why: share.change_share(actions, one, by, 0.1, why),
            "changed the share from 0.25 GPU to 0.10 GPU",
        ),
        (lambda actions, one, by, why: restart.stop(actions, one, by, why), "stopped the server"),
        (_restart, "restarted the server with the template CPU only"),
    ],
)
async def test_the_user_reads_which_admin_acted_and_why(
    acting: Acting, hub_server: FakeHub, clock: Clock, act: Callable[..., Awaitable[ActionOutcome]], said: str, why: str
) -> None:
    one = acting.seen()
    hub_server.add("ann", user_options={"profile": "quarter"})
    clock.forward(MINUTE)
    assert (await act(acting.actions, one, ROOT, why)).changed
    text = f"root {said}: The GPU is needed for the exam." if why else f"root {said}."
    (message,) = acting.agent.sessions["ann"].messages
    assert (message.text, message.by, message.cause) == (text, "root", MessageCause.ACTION)
    assert [action.reason for action in acting.recorded] == [text]
    if act is _restart:
        # on the hub's page, while the new server starts
        note = {"text": text}
        assert hub_server.users["ann"]["servers"][""]["user_options"] == {"profile": "cpu", "gpushare_note": note}
    if hub_server.deleted and act is not _restart:
        # on the hub's pages, until the server starts again
        assert await hub_server.noted() == {"/users/ann/server": f"{utc(clock())}: {text}"}


async def test_a_user_is_not_told_of_what_the_user_did(acting: Acting, hub_server: FakeHub, clock: Clock) -> None:
    one = acting.seen()
    hub_server.add("ann")
    clock.forward(MINUTE)
    await share.release(acting.actions, one, ANN, why="lunch")
    await restart.stop(acting.actions, one, ANN, "done")
    assert acting.agent.sessions["ann"].messages == ()
    assert not acting.actions.notes._under_way
    assert not hub_server.notes


async def test_a_stop_that_the_hub_refuses_is_not_said_to_the_user(acting: Acting, hub_server: FakeHub) -> None:
    one = acting.seen()
    hub_server.add("ann")
    hub_server.faults = [None, 403]
    assert (await refusal_of(restart.stop(acting.actions, one, ROOT, "exam"))).code is RefusalCode.HUB_UNAVAILABLE
    assert hub_server.asked[-1][0] == "DELETE"
    assert [request.op for request in acting.agent.asked].count("message") == 2, "written, and withdrawn"
    assert acting.agent.sessions["ann"].messages == ()


async def test_an_action_is_done_where_its_user_cannot_be_told(acting: Acting, agent: FakeAgent, clock: Clock) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    agent.older = True
    outcome = await share.release(acting.actions, one, ROOT, why="exam")
    assert outcome == ActionOutcome(True, f"{words.RELEASED} {words.NOT_NOTIFIED}")


async def test_a_hub_that_refuses_is_said_so(acting: Acting, hub: Hub, hub_server: FakeHub) -> None:
    hub_server.add("ann")
    hub_server.faults = [403]
    refusal = await refusal_of(restart.stop(acting.actions, acting.seen(), ANN))
    assert refusal.code is RefusalCode.HUB_UNAVAILABLE
    assert "Nothing was done. The hub forbids GET /users/ann" in refusal.text
    assert not acting.recorded


# -- of admins ---------------------------------------------------------------------------------------------------------


async def test_an_exemption_begins_and_ends(acting: Acting, clock: Clock) -> None:
    one, until = acting.seen(), clock() + 24 * HOUR
    assert (
        await keeps.exempt(acting.actions, one, ROOT, until, "exam")
    ).text == "The session is exempt from idle actions for 24 h."
    assert acting.agent.sessions["ann"].exemption == Exemption(until=until, by="root", reason="exam")
    assert not (await keeps.exempt(acting.actions, one, ROOT, until, "exam")).changed
    assert (await keeps.exempt(acting.actions, one, ROOT)).text == "The session is exempt from idle actions."
    assert (await keeps.end_exemption(acting.actions, one, ROOT)).changed
    assert await keeps.end_exemption(acting.actions, one, ROOT) == ActionOutcome(False, words.NOT_EXEMPT)
    assert acting.agent.sessions["ann"].exemption is None
    assert acting.history == [(name, "root", "ann") for name in ("exempt", "exempt", "exempt-ended")]
    assert acting.recorded[0].reason == "The session is exempt from idle actions for 24 h. exam"


@pytest.mark.parametrize("until", [0.0, float("nan"), float("inf"), 1e18, -1.0])
async def test_an_exemption_ends_in_the_future(acting: Acting, until: float) -> None:
    assert (await refusal_of(keeps.exempt(acting.actions, acting.seen(), ROOT, until))).code is RefusalCode.BAD_REQUEST


async def test_a_message_reaches_the_agent_once(acting: Acting, clock: Clock) -> None:
    one = acting.seen()
    assert (await keeps.message(acting.actions, one, ROOT, " Please save your work. ")).changed
    message = acting.agent.sessions["ann"].messages[0]
    assert (message.text, message.by, message.at) == ("Please save your work.", "root", clock())
    assert not (await keeps.message(acting.actions, one, ROOT, "Please save your work.")).changed
    clock.forward(2 * MINUTE)
    assert (await keeps.message(acting.actions, one, ROOT, "Please save your work.")).changed
    assert [(action.action, action.reason) for action in acting.recorded] == [("message", "Please save your work.")] * 2


@pytest.mark.parametrize(("text", "says"), [("  ", "is empty"), ("x" * 501, "has 501 characters")])
async def test_a_message_without_text_or_with_too_much_is_refused(acting: Acting, text: str, says: str) -> None:
    refusal = await refusal_of(keeps.message(acting.actions, acting.seen(), ROOT, text))
    assert refusal.code is RefusalCode.BAD_REQUEST
    assert says in refusal.text
