"""Release, tier, stop, exemption and message: what each does, twice, and who may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gpushare_spawner.model.controls import Ask, Exemption, MessageCause
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.actions.outcome import (
    ActionOutcome,
    ActionRefused,
    Actor,
    ReceivedAsk,
    RefusalCode,
    Target,
)
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.wording import actions as words
from gpushare_spawner.wording.amounts import utc
from tests.present import present
from tests.service.actions.conftest import ANN, ROOT, Acting
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub

EVE = Actor("eve")


async def refusal_of(action: Awaitable[object]) -> ActionRefused:
    with pytest.raises(ActionRefused) as refusal:
        await action
    return refusal.value


# -- tiers -------------------------------------------------------------------------------------------------------------


async def test_an_idle_share_is_released_by_its_user(acting: Acting, clock: Clock) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    assert await acting.actions.release(one, ANN) == ActionOutcome(True, words.RELEASED)
    assert acting.agent.sessions["ann"].tier is Tier.RELEASED
    assert await acting.actions.release(one, ANN) == ActionOutcome(False, words.RELEASED_ALREADY)
    assert acting.history == [("released", "ann", "ann")]
    assert acting.recorded[0].units == 0


async def test_a_busy_share_is_not_released(acting: Acting, agent: FakeAgent) -> None:
    agent.add("ann", gpu_busy=True)
    assert (await refusal_of(acting.actions.release(acting.seen(), ANN))).code is RefusalCode.BUSY
    agent.change("ann", gpu_busy=False, waiting=True)
    assert (await refusal_of(acting.actions.release(acting.seen(), ANN))).text == words.GPU_BUSY
    assert not acting.recorded


async def test_work_between_the_report_and_the_release_prevents_it(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    agent.before = lambda request: agent.work("ann") if request.op == "tier" else None
    refusal = await refusal_of(acting.actions.release(one, ANN))
    assert (refusal.code, refusal.text) == (RefusalCode.BUSY, words.WORKED_MEANWHILE)
    assert agent.sessions["ann"].tier is Tier.ACTIVE


async def test_an_ask_for_a_release_is_void_after_gpu_work(acting: Acting, agent: FakeAgent, clock: Clock) -> None:
    """Released, restored by work, and then the service, killed before its answer, sees the ask again."""
    one = acting.seen()
    clock.forward(MINUTE)
    asked = ReceivedAsk(Ask(number=1, kind=AskKind.RELEASE, at=clock()), at=clock())
    assert (await acting.actions.release(one, ANN, asked)).changed
    clock.forward(1)
    agent.work("ann")
    clock.forward(1)
    assert (await refusal_of(acting.actions.release(one, ANN, asked))).code is RefusalCode.BUSY
    assert agent.sessions["ann"].tier is Tier.ACTIVE


async def test_a_session_that_makes_way_goes_on_doing_so_when_it_is_released(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    agent.add("ann", tier=Tier.DOWNGRADED, effective_units=10, yields=True)
    clock.forward(MINUTE)
    await acting.actions.release(acting.seen(), ANN)
    assert agent.asked[-1].yields_until == clock() + 600
    assert agent.sessions["ann"].yields


async def test_an_admin_sets_the_tier_and_users_do_not(acting: Acting, clock: Clock) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    assert (await refusal_of(acting.actions.tier(one, Tier.DOWNGRADED, ANN))).code is RefusalCode.FORBIDDEN
    outcome = await acting.actions.tier(one, Tier.DOWNGRADED, ROOT)
    assert outcome == ActionOutcome(True, "The session is downgraded now and has 0.10 GPU.")
    assert not (await acting.actions.tier(one, Tier.DOWNGRADED, ROOT)).changed
    await acting.actions.tier(one, Tier.RELEASED, ROOT)
    outcome = await acting.actions.tier(one, Tier.ACTIVE, ROOT)
    assert outcome == ActionOutcome(True, "The session is active now and has 0.25 GPU.")
    assert acting.history == [(tier, "root", "ann") for tier in ("downgraded", "released", "active")]
    assert [action.units for action in acting.recorded] == [10, 0, 25]


async def test_a_tier_that_the_template_does_not_have_is_refused(acting: Acting, agent: FakeAgent) -> None:
    agent.add("ann", template="gone")
    assert (await refusal_of(acting.actions.tier(acting.seen(), Tier.DOWNGRADED, ROOT))).text == words.no_downgrade(
        None
    )
    agent.add("ann", template="cpu")
    refusal = await refusal_of(acting.actions.tier(acting.seen(), Tier.DOWNGRADED, ROOT))
    assert refusal.text.startswith("The template CPU only has no downgrade_to")
    assert (await refusal_of(acting.actions.tier(acting.seen(), Tier.STOPPED, ROOT))).text == words.STOP_IS_NO_TIER


# -- stop --------------------------------------------------------------------------------------------------------------


async def test_a_server_is_stopped_once(acting: Acting, hub_server: FakeHub) -> None:
    one = acting.seen()
    hub_server.add("ann")
    assert await acting.actions.stop(one, ANN) == ActionOutcome(True, words.STOPS)
    assert hub_server.deleted == ["/users/ann/server"]
    assert await acting.actions.stop(one, ANN) == ActionOutcome(False, words.NOT_RUNNING)
    hub_server.add("ann", pending="stop")
    assert await acting.actions.stop(one, ANN) == ActionOutcome(False, words.STOPS_ALREADY)
    assert acting.history == [("stopped", "ann", "ann")]


# -- what its user is told ---------------------------------------------------------------------------------------------


async def _restart(actions: SessionActions, one: Target, by: Actor, why: str) -> ActionOutcome:
    return await actions.restart(one, "cpu", by, why)


@pytest.mark.parametrize("why", ["The GPU is needed\u202e for the exam.", ""])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda actions, one, by, why: actions.release(one, by, why=why), "released the share"),
        (lambda actions, one, by, why: actions.tier(one, Tier.DOWNGRADED, by, why), "set the tier to downgraded"),
        (lambda actions, one, by, why: actions.share(one, by, 0.1, why), "changed the share from 0.25 GPU to 0.10 GPU"),
        (lambda actions, one, by, why: actions.stop(one, by, why), "stopped the server"),
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
    await acting.actions.release(one, ANN, why="lunch")
    await acting.actions.stop(one, ANN, "done")
    assert acting.agent.sessions["ann"].messages == ()
    assert not acting.actions._servers._notes._under_way
    assert not hub_server.notes


async def test_a_stop_that_the_hub_refuses_is_not_said_to_the_user(acting: Acting, hub_server: FakeHub) -> None:
    one = acting.seen()
    hub_server.add("ann")
    hub_server.faults = [None, 403]
    assert (await refusal_of(acting.actions.stop(one, ROOT, "exam"))).code is RefusalCode.HUB_UNAVAILABLE
    assert hub_server.asked[-1][0] == "DELETE"
    assert [request.op for request in acting.agent.asked].count("message") == 2, "written, and withdrawn"
    assert acting.agent.sessions["ann"].messages == ()


async def test_an_action_is_done_where_its_user_cannot_be_told(acting: Acting, agent: FakeAgent, clock: Clock) -> None:
    one = acting.seen()
    clock.forward(MINUTE)
    agent.older = True
    outcome = await acting.actions.release(one, ROOT, why="exam")
    assert outcome == ActionOutcome(True, f"{words.RELEASED} {words.NOT_NOTIFIED}")


async def test_a_hub_that_refuses_is_said_so(acting: Acting, hub: Hub, hub_server: FakeHub) -> None:
    hub_server.add("ann")
    hub_server.faults = [403]
    refusal = await refusal_of(acting.actions.stop(acting.seen(), ANN))
    assert refusal.code is RefusalCode.HUB_UNAVAILABLE
    assert "Nothing was done. The hub forbids GET /users/ann" in refusal.text
    assert not acting.recorded


# -- of admins ---------------------------------------------------------------------------------------------------------


async def test_an_exemption_begins_and_ends(acting: Acting, clock: Clock) -> None:
    one, until = acting.seen(), clock() + 24 * HOUR
    assert (
        await acting.actions.exempt(one, ROOT, until, "exam")
    ).text == "The session is exempt from idle actions for 24 h."
    assert acting.agent.sessions["ann"].exemption == Exemption(until=until, by="root", reason="exam")
    assert not (await acting.actions.exempt(one, ROOT, until, "exam")).changed
    assert (await acting.actions.exempt(one, ROOT)).text == "The session is exempt from idle actions."
    assert (await acting.actions.end_exemption(one, ROOT)).changed
    assert await acting.actions.end_exemption(one, ROOT) == ActionOutcome(False, words.NOT_EXEMPT)
    assert acting.agent.sessions["ann"].exemption is None
    assert acting.history == [(name, "root", "ann") for name in ("exempt", "exempt", "exempt-ended")]
    assert acting.recorded[0].reason == "The session is exempt from idle actions for 24 h. exam"


@pytest.mark.parametrize("until", [0.0, float("nan"), float("inf"), 1e18, -1.0])
async def test_an_exemption_ends_in_the_future(acting: Acting, until: float) -> None:
    assert (await refusal_of(acting.actions.exempt(acting.seen(), ROOT, until))).code is RefusalCode.BAD_REQUEST


async def test_a_message_reaches_the_agent_once(acting: Acting, clock: Clock) -> None:
    one = acting.seen()
    assert (await acting.actions.message(one, ROOT, " Please save your work. ")).changed
    message = present(acting.agent.sessions["ann"].message)
    assert (message.text, message.by, message.at) == ("Please save your work.", "root", clock())
    assert not (await acting.actions.message(one, ROOT, "Please save your work.")).changed
    clock.forward(2 * MINUTE)
    assert (await acting.actions.message(one, ROOT, "Please save your work.")).changed
    assert [(action.action, action.reason) for action in acting.recorded] == [("message", "Please save your work.")] * 2


@pytest.mark.parametrize(("text", "says"), [("  ", "is empty"), ("x" * 501, "has 501 characters")])
async def test_a_message_without_text_or_with_too_much_is_refused(acting: Acting, text: str, says: str) -> None:
    refusal = await refusal_of(acting.actions.message(acting.seen(), ROOT, text))
    assert refusal.code is RefusalCode.BAD_REQUEST
    assert says in refusal.text


ACTIONS: dict[str, Callable[[Acting, Actor], Awaitable[ActionOutcome]]] = {
    "keep": lambda acting, actor: acting.actions.keep(acting.seen(), actor, seconds=HOUR),
    "end_keep": lambda acting, actor: acting.actions.end_keep(acting.seen(), actor),
    "release": lambda acting, actor: acting.actions.release(acting.seen(), actor),
    "stop": lambda acting, actor: acting.actions.stop(acting.seen(), actor),
    "tier": lambda acting, actor: acting.actions.tier(acting.seen(), Tier.RELEASED, actor),
    "exempt": lambda acting, actor: acting.actions.exempt(acting.seen(), actor),
    "end_exemption": lambda acting, actor: acting.actions.end_exemption(acting.seen(), actor),
    "message": lambda acting, actor: acting.actions.message(acting.seen(), actor, "Hello."),
}
FOR_ADMINS = {"tier", "exempt", "end_exemption", "message"}


@pytest.mark.parametrize("name", ACTIONS)
async def test_nobody_acts_on_the_session_of_somebody_else(acting: Acting, hub_server: FakeHub, name: str) -> None:
    hub_server.add("ann")
    strangers = [EVE, *([ANN] if name in FOR_ADMINS else [])]
    for actor in strangers:
        assert (await refusal_of(ACTIONS[name](acting, actor))).code is RefusalCode.FORBIDDEN
    assert not acting.recorded
    assert not acting.agent.asked
    assert not hub_server.asked
