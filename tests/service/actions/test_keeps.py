"""Keep a share and end the keep: limits, repetition, clocks, and who may."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.model.controls import Ask, Exemption, Keep
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.actions import keeps
from gpushare_spawner.service.actions.context import ActionRefused, Actor, ReceivedAsk, RefusalCode
from gpushare_spawner.service.actions.keeps import needs_cleanup
from gpushare_spawner.service.reports import MachineAgent
from gpushare_spawner.wording import actions as words
from tests.present import present
from tests.service.actions.conftest import ANN, ROOT, Acting, Seen
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent, fake_agent

DAY = 24 * HOUR


async def refused(acting: Acting, actor: Actor = ANN, user: str = "ann", **how: float) -> tuple[RefusalCode, str]:
    before = acting.agent.sessions.get(user)
    with pytest.raises(ActionRefused) as refusal:
        await keeps.keep(acting.actions, acting.seen(user), actor, **how)  # type: ignore[arg-type]
    assert before in (None, acting.agent.sessions[user])
    return refusal.value.code, refusal.value.text


async def test_a_kept_share_is_in_the_report_and_in_the_history(acting: Acting, clock: Clock) -> None:
    outcome = await keeps.keep(acting.actions, acting.seen(), ANN, seconds=4 * HOUR)
    assert (outcome.changed, outcome.text) == (True, "The GPU share is kept for 4 h.")
    session = acting.agent.sessions["ann"]
    assert session.keep == Keep(until=clock() + 4 * HOUR, since=clock(), by="ann")
    assert session.keeps == (clock(),)
    assert acting.history == [("keep", "ann", "ann")]
    assert acting.recorded[0].reason == "The GPU share is kept for 4 h."


async def test_the_same_request_twice_changes_nothing(acting: Acting, clock: Clock) -> None:
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=4 * HOUR)
    before = acting.agent.sessions["ann"]
    clock.forward(2)
    again = await keeps.keep(acting.actions, acting.seen(), ANN, seconds=4 * HOUR)
    assert (again.changed, again.text) == (False, "The GPU share is already kept for another 3 h 59 min.")
    assert acting.agent.sessions["ann"] == before
    assert len(acting.recorded) == 1


async def test_a_keep_can_be_extended_which_counts_and_shortened_which_does_not(acting: Acting, clock: Clock) -> None:
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    began = clock()
    clock.forward(10 * MINUTE)
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=8 * HOUR)
    session = acting.agent.sessions["ann"]
    assert session.keep == Keep(until=clock() + 8 * HOUR, since=clock(), by="ann")
    assert session.keeps == (began, clock())
    clock.forward(MINUTE)
    await keeps.keep(acting.actions, acting.seen(), ANN, until=clock() + HOUR)
    shorter = acting.agent.sessions["ann"]
    assert present(shorter.keep).until == clock() + HOUR
    assert present(shorter.keep).since == clock() - MINUTE
    assert shorter.keeps == session.keeps


async def test_a_keep_is_ended_by_its_user_or_an_admin(acting: Acting) -> None:
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    assert (await keeps.end_keep(acting.actions, acting.seen(), ROOT)).changed
    assert acting.agent.sessions["ann"].keep is None
    assert (await keeps.end_keep(acting.actions, acting.seen(), ANN)).text == words.NO_KEEP
    assert acting.history == [("keep", "ann", "ann"), ("keep-ended", "root", "ann")]
    # what was kept today still counts
    assert len(acting.agent.sessions["ann"].keeps) == 1


async def test_users_keep_within_limits_over_all_their_sessions(acting: Acting, agent: FakeAgent, clock: Clock) -> None:
    assert (await refused(acting, seconds=8 * HOUR + 1))[0] is RefusalCode.LIMIT
    labs = [agent.add("ann", name) for name in ("one", "two")]
    for lab in labs:
        await keeps.keep(acting.actions, acting.seen(lab), ANN, seconds=HOUR)
    code, text = await refused(acting, seconds=HOUR)
    assert (code, text) == (
        RefusalCode.LIMIT, "You can keep 2 sessions at a time. End the keep of another session first."
    )  # fmt: skip
    await keeps.end_keep(acting.actions, acting.seen(labs[0]), ANN)
    clock.forward(HOUR / 2)
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR / 4)
    clock.forward(HOUR)
    code, text = await refused(acting, seconds=HOUR)
    assert "You can keep shares 3 times within 24 hours. You can keep a share again in 22 h 30 min." in text
    clock.forward(22.5 * HOUR)
    assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)).changed


async def test_a_server_that_is_started_anew_brings_no_further_keeps(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    for _ in range(3):
        await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
        clock.forward(MINUTE)
        del agent.sessions["ann"]
    code, text = await refused(acting, seconds=HOUR)
    assert code is RefusalCode.LIMIT
    assert "You can keep shares 3 times within 24 hours. You can keep a share again in 23 h 57 min." in text
    clock.forward(DAY - 3 * MINUTE + 1)
    assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)).changed


async def test_keeps_before_the_clock_was_set_back_count_once(acting: Acting, clock: Clock) -> None:
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    clock.forward(-10 * DAY)
    for hours in (2, 3):
        assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=hours * HOUR)).changed


async def test_keeps_before_the_clock_was_set_back_are_forgotten_after_a_day(acting: Acting, clock: Clock) -> None:
    for hours in (1, 2, 3):
        await keeps.keep(acting.actions, acting.seen(), ANN, seconds=hours * HOUR)
    await keeps.end_keep(acting.actions, acting.seen(), ANN)
    assert not needs_cleanup(acting.agent.sessions["ann"], clock())
    clock.forward(-10 * DAY)
    assert needs_cleanup(acting.agent.sessions["ann"], clock())
    assert await keeps.clean_up(acting.actions, acting.seen())
    assert not await keeps.clean_up(acting.actions, acting.seen())
    assert (await refused(acting, seconds=HOUR))[0] is RefusalCode.LIMIT
    clock.forward(DAY + 1)
    assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)).changed


async def test_two_requests_at_once_keep_no_more_sessions_than_allowed(acting: Acting, agent: FakeAgent) -> None:
    labs = [agent.add("ann", f"lab{number}") for number in range(4)]
    results = await asyncio.gather(
        *(keeps.keep(acting.actions, acting.seen(lab), ANN, seconds=HOUR) for lab in labs), return_exceptions=True
    )
    assert sum(not isinstance(one, ActionRefused) for one in results) == 2
    assert sum(agent.sessions[lab].keep is not None for lab in labs) == 2


async def test_limits_do_not_bind_admins_nor_count_what_admins_keep(acting: Acting, clock: Clock) -> None:
    outcome = await keeps.keep(acting.actions, acting.seen(), ROOT, seconds=30 * DAY)
    assert outcome.changed
    session = acting.agent.sessions["ann"]
    assert (present(session.keep).by, session.keeps) == ("root", ())


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, -math.inf, 1e18, 1e300])
@pytest.mark.parametrize("actor", [ANN, ROOT])
async def test_durations_that_no_calendar_has_are_refused(acting: Acting, actor: Actor, seconds: float) -> None:
    code, text = await refused(acting, actor, seconds=seconds)
    assert (code, text) == (RefusalCode.BAD_REQUEST, words.KEEP_NOT_IN_FUTURE)
    assert (await refused(acting, actor, until=seconds))[0] is RefusalCode.BAD_REQUEST


async def test_a_released_share_is_kept_from_its_next_gpu_work(acting: Acting, agent: FakeAgent) -> None:
    agent.add("ann", tier=Tier.RELEASED, effective_units=0)
    outcome = await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    assert outcome.text == "The GPU share is kept for 1 h. It is released now: some seconds of GPU time restore it."
    assert agent.sessions["ann"].tier is Tier.RELEASED


async def test_an_ask_carried_out_twice_has_one_effect_and_one_answer(acting: Acting, clock: Clock) -> None:
    """The service is killed after the keep was set and before it knew, and sees the ask again."""
    asked = ReceivedAsk(Ask(number=7, kind=AskKind.KEEP, value=HOUR, at=clock()), at=clock())
    clock.forward(1.5)
    first = await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR, received=asked)
    assert first.text == "The GPU share is kept for 1 h."
    assert [(answer.number, answer.done, answer.text) for answer in acting.agent.answers] == [(7, True, first.text)]
    before = acting.agent.sessions["ann"]
    assert present(before.keep).until == asked.at + HOUR
    clock.forward(50)
    again = await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR, received=asked)
    assert not again.changed
    assert acting.agent.sessions["ann"] == before
    assert len(acting.recorded) == 1


async def test_an_exemption_stays_when_the_share_is_kept(acting: Acting) -> None:
    await keeps.exempt(acting.actions, acting.seen(), ROOT, reason="exam")
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    await keeps.end_keep(acting.actions, acting.seen(), ANN)
    assert acting.agent.sessions["ann"].exemption == Exemption(by="root", reason="exam")


# -- agents that are silent ------------------------------------------------------------------------------------------


@pytest.fixture
async def far(tmp_path: Path, acting: Acting, clock: Clock) -> AsyncIterator[FakeAgent]:
    """The agent of a second node, with two kept sessions of ann; the limit is two at a time."""
    async with fake_agent(tmp_path / "far.sock", clock) as agent:
        agent.node = "far"
        client = MachineAgent(agent.path)
        acting.agents.append(client)
        for name in ("one", "two"):
            lab = agent.add("ann", name)
            await keeps.keep(acting.actions, Seen(client, agent.sessions[lab], "far"), ANN, seconds=HOUR)
        yield agent


async def test_kept_sessions_count_while_the_agent_of_their_node_is_silent(
    acting: Acting, far: FakeAgent, clock: Clock
) -> None:
    acting.rule = replace(acting.rule, per_day=9)
    far.path.rename(far.path.with_suffix(".away"))
    code, text = await refused(acting, seconds=HOUR)
    assert (code, "You can keep 2 sessions at a time" in text) == (RefusalCode.LIMIT, True)
    clock.forward(HOUR)
    assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)).changed, "their keeps are over"


async def test_kept_sessions_that_have_ended_do_not_count(acting: Acting, far: FakeAgent) -> None:
    acting.rule = replace(acting.rule, per_day=9)
    far.sessions.clear()
    assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)).changed


async def test_keeps_that_were_ended_do_not_count_while_the_agent_is_silent(acting: Acting, far: FakeAgent) -> None:
    acting.rule = replace(acting.rule, per_day=9)
    lab = next(iter(far.sessions.values()))
    await keeps.end_keep(acting.actions, Seen(MachineAgent(far.path), lab, "far"), ANN)
    far.path.rename(far.path.with_suffix(".away"))
    assert (await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)).changed


# -- what is over ------------------------------------------------------------------------------------------------------


async def test_what_is_over_is_removed_once_and_entered_in_the_history(acting: Acting, clock: Clock) -> None:
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    await keeps.exempt(acting.actions, acting.seen(), ROOT, until=clock() + HOUR)
    assert not needs_cleanup(acting.agent.sessions["ann"], clock())
    assert not await keeps.clean_up(acting.actions, acting.seen())
    clock.forward(HOUR)
    assert needs_cleanup(acting.agent.sessions["ann"], clock())
    assert await keeps.clean_up(acting.actions, acting.seen())
    session = acting.agent.sessions["ann"]
    assert (session.keep, session.exemption) == (None, None)
    assert acting.history[2:] == [("keep-ended", "culler", "ann"), ("exempt-ended", "culler", "ann")]
    assert not await keeps.clean_up(acting.actions, acting.seen())


async def test_a_clock_that_is_set_back_by_a_day_makes_no_keep_last_a_day(acting: Acting, clock: Clock) -> None:
    await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    clock.forward(-DAY)
    assert needs_cleanup(acting.agent.sessions["ann"], clock())
    assert await keeps.clean_up(acting.actions, acting.seen())
    session = acting.agent.sessions["ann"]
    assert session.keep == Keep(until=clock() + HOUR, since=clock(), by="ann")
    assert session.keeps == (clock(),)
    assert len(acting.recorded) == 1


# -- agents that fail --------------------------------------------------------------------------------------------------


async def test_a_session_that_has_ended_is_said_so(acting: Acting, agent: FakeAgent) -> None:
    one = acting.seen()
    agent.sessions.clear()
    with pytest.raises(ActionRefused) as refusal:
        await keeps.keep(acting.actions, one, ANN, seconds=HOUR)
    assert refusal.value.code is RefusalCode.UNKNOWN_SESSION


async def test_an_agent_that_is_gone_is_said_so(acting: Acting, agent: FakeAgent) -> None:
    one = acting.seen()
    agent.path.unlink()
    with pytest.raises(ActionRefused) as refusal:
        await keeps.keep(acting.actions, one, ANN, seconds=HOUR)
    assert refusal.value.code is RefusalCode.AGENT_UNAVAILABLE
    assert refusal.value.text == words.AGENT_FAILED
    assert "Nothing was done: no agent runs here" in refusal.value.to_admins
    assert str(agent.path) in refusal.value.to_admins


async def test_an_older_agent_is_said_to_be_older(acting: Acting, agent: FakeAgent) -> None:
    agent.older = True
    with pytest.raises(ActionRefused) as refusal:
        await keeps.keep(acting.actions, acting.seen(), ANN, seconds=HOUR)
    assert (refusal.value.code, refusal.value.text) == (RefusalCode.OLDER_AGENT, words.OLDER_AGENT)
    assert not acting.recorded
