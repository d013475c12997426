"""What notebook servers ask is carried out as the session's user, once, and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gpushare_spawner.model.control import REQUEST, AskedRequest, Request
from gpushare_spawner.model.controls import Ask, AskAnswer, Keep
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service import reports as agents_module
from gpushare_spawner.service.culler.asks import AskResponder
from gpushare_spawner.service.reports import Agent, MachineAgent, MachineAgents
from gpushare_spawner.wording import actions as words
from tests.present import present
from tests.service.actions.conftest import Acting
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent, Refuse
from tests.service.fake_hub import FakeHub


def asks_of(acting: Acting, clock: Clock) -> AskResponder:
    """A service that has just started."""
    return AskResponder(MachineAgents(acting.client), acting.actions)


@pytest.fixture
def asks(acting: Acting, clock: Clock) -> AskResponder:
    return asks_of(acting, clock)


def ask(agent: FakeAgent, clock: Clock, kind: int, value: float = 0.0, number: int = 1, user: str = "ann") -> None:
    """The notebook server of a user asks; the session is opened where there is none."""
    if user not in agent.sessions:
        agent.add(user)
    agent.change(user, asks=(*agent.sessions[user].asks, Ask(number=number, kind=kind, value=value, at=clock())))


async def answers(asks: AskResponder, agent: FakeAgent) -> list[AskAnswer]:
    agent.answers.clear()
    await asks.poll()
    await asks.answered()
    return list(agent.answers)


async def test_a_keep_is_set_and_answered_in_one_request(
    asks: AskResponder, acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    ask(agent, clock, AskKind.KEEP, 2 * HOUR)
    asked_at = clock()
    clock.forward(1)
    assert [(one.number, one.done, one.text) for one in await answers(asks, agent)] == [
        (1, True, "The GPU share is kept for 2 h.")
    ]
    assert agent.sessions["ann"].keep == Keep(until=asked_at + 2 * HOUR, since=clock(), by="ann")
    assert [request.op for request in agent.asked] == ["controls"]
    assert acting.history == [("keep", "ann", "ann")]


async def test_all_kinds_are_carried_out_in_order(
    asks: AskResponder, acting: Acting, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    agent.add("ann")
    hub_server.add("ann")
    clock.forward(MINUTE)
    for number, kind in enumerate((AskKind.KEEP, AskKind.END_KEEP, AskKind.RELEASE, AskKind.STOP), 1):
        ask(agent, clock, kind, HOUR, number)
    said = await answers(asks, agent)
    assert [(one.number, one.done) for one in said] == [(1, True), (2, True), (3, True), (4, True)]
    assert [one.text for one in said[1:]] == [words.KEEP_ENDED, words.RELEASED, words.STOPS]
    assert agent.sessions["ann"].keep is None
    assert agent.sessions["ann"].tier is Tier.RELEASED
    assert hub_server.deleted == ["/users/ann/server"]
    assert acting.history == [(name, "ann", "ann") for name in ("keep", "keep-ended", "released", "stopped")]


async def test_another_share_is_asked_for_in_units(
    asks: AskResponder,
    acting: Acting,
    agent: FakeAgent,
    hub_server: FakeHub,
    clock: Clock,
    templates: dict[str, Template],
) -> None:
    templates["tenth"] = Template(name="tenth", display_name="0.10 GPU", gpu={"fraction": 0.1})
    agent.add("ann")
    hub_server.add("ann")
    ask(agent, clock, AskKind.SHARE, 10)
    ask(agent, clock, AskKind.SHARE, 0.5, 2)
    said = await answers(asks, agent)
    assert [one.done for one in said] == [True, False]
    assert said[0].text == "The share is now 0.10 GPU (previously 0.25 GPU)."
    assert agent.sessions["ann"].share_units == 10
    assert acting.history == [("share", "ann", "ann")]


async def test_shares_to_choose_from_are_answered_as_a_list_of_units(
    asks: AskResponder,
    acting: Acting,
    agent: FakeAgent,
    hub_server: FakeHub,
    clock: Clock,
    templates: dict[str, Template],
) -> None:
    agent.add("ann")
    hub_server.add("ann")
    for units in (50, 10, 25):
        templates[str(units)] = Template(name=str(units), display_name=str(units), gpu={"fraction": units / 100})
    ask(agent, clock, AskKind.SHARES, 0)
    said = await answers(asks, agent)
    assert [(one.done, one.text) for one in said] == [(True, "[10, 50]")]
    assert acting.history == [], "nothing was changed"


async def test_a_session_with_a_limit_of_gpu_time_cannot_ask_for_a_share_without_it(
    asks: AskResponder,
    acting: Acting,
    agent: FakeAgent,
    hub_server: FakeHub,
    clock: Clock,
    templates: dict[str, Template],
) -> None:
    agent.add("ann", template="exam")
    hub_server.add("ann")
    for name, gpu in {
        "exam": {"fraction": 0.25, "time": {"limit": "25%"}},
        "exam-small": {"fraction": 0.1, "time": {"limit": "25%"}},
        "half": {"fraction": 0.5},
    }.items():
        templates[name] = Template(name=name, display_name=name, gpu=gpu)
    ask(agent, clock, AskKind.SHARES, 0)
    ask(agent, clock, AskKind.SHARE, 50, 2)
    offered, changed = await answers(asks, agent)
    assert (offered.done, offered.text) == (True, "[10]")
    assert (changed.done, changed.text) == (False, words.not_allowed([10]))
    assert agent.sessions["ann"].share_units == 25


async def test_keeps_that_are_left_are_answered_as_a_sentence_and_none_is_spent(
    asks: AskResponder, acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    agent.add("ann")
    said = []
    for number in range(1, 8, 2):
        ask(agent, clock, AskKind.KEEPS, 0, number)
        ask(agent, clock, AskKind.KEEP, number * HOUR, number + 1)
        said.append([one.text for one in await answers(asks, agent)])
        clock.forward(MINUTE)
    assert [left for left, _ in said] == [
        "3 of 3 keeps left within 24 hours, each for at most 8 h, 2 sessions at a time.",
        "2 of 3 keeps left within 24 hours, each for at most 8 h, 2 sessions at a time.",
        "1 of 3 keeps left within 24 hours, each for at most 8 h, 2 sessions at a time.",
        "0 of 3 keeps left within 24 hours. You can keep a share again in 23 h 57 min.",
    ]
    assert acting.history == [("keep", "ann", "ann")] * 3, "what was asked is no action"


@pytest.mark.parametrize("kind", [kind for kind in AskKind if kind.reads])
async def test_what_only_reads_changes_nothing(
    asks: AskResponder, acting: Acting, agent: FakeAgent, hub_server: FakeHub, clock: Clock, kind: AskKind
) -> None:
    agent.add("ann")
    hub_server.add("ann")
    before = agent.sessions["ann"]
    ask(agent, clock, kind)
    await answers(asks, agent)
    assert agent.sessions["ann"].model_copy(update={"asks": ()}) == before.model_copy(update={"asks": ()})
    assert acting.history == []
    assert not [request for request in agent.asked if request.op not in ("answer", "report")]


async def test_what_is_refused_is_answered_with_the_reason(asks: AskResponder, agent: FakeAgent, clock: Clock) -> None:
    ask(agent, clock, AskKind.KEEP, 1e18)
    ask(agent, clock, AskKind.KEEP, 0, 2)
    ask(agent, clock, 99, 0, 3)
    said = await answers(asks, agent)
    assert [one.done for one in said] == [False] * 3
    # no calendar has the end of the first one
    assert [one.text for one in said] == [words.KEEP_NOT_IN_FUTURE] * 2 + [words.ASK_NOT_SUPPORTED]
    ask(agent, clock, AskKind.KEEP, 9 * HOUR, 4)
    assert [one.text for one in await answers(asks, agent)] == [
        "A share can be kept for at most 8 h. Choose a shorter time."
    ]
    assert agent.sessions["ann"].keep is None


async def test_a_program_of_an_admin_has_the_limits_of_a_user(
    asks: AskResponder, agent: FakeAgent, clock: Clock
) -> None:
    ask(agent, clock, AskKind.KEEP, 9 * HOUR, user="root")
    assert [one.done for one in await answers(asks, agent)] == [False]


async def test_a_service_that_was_killed_before_its_answer_has_no_second_effect(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    """The keep is set, and the answer is lost with the service; the next service sees the ask again."""
    ask(agent, clock, AskKind.KEEP, HOUR)
    asked = agent.sessions["ann"].asks
    await answers(asks_of(acting, clock), agent)
    session = agent.sessions["ann"]
    agent.change("ann", asks=asked)
    clock.forward(20)
    said = await answers(asks_of(acting, clock), agent)
    assert [(one.done, one.text) for one in said] == [(True, "The GPU share is already kept for another 59 min 40 s.")]
    assert agent.sessions["ann"] == session
    assert len(acting.recorded) == 1


async def test_a_service_that_was_killed_before_it_acted_leaves_everything_as_it_was(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    ask(agent, clock, AskKind.KEEP, HOUR)

    def fail(request: Request) -> None:
        if request.op == "controls":
            raise Refuse("the agent fails")

    agent.before = fail
    said = await answers(asks_of(acting, clock), agent)
    assert [(one.done, one.text) for one in said] == [(False, words.AGENT_FAILED)]
    assert agent.sessions["ann"].keep is None
    assert not acting.recorded


async def test_an_answer_that_is_not_delivered_is_sent_again_without_a_second_action(
    asks: AskResponder, acting: Acting, agent: FakeAgent, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_spawner.service.culler.asks.AFTER_FAILURE", 0.0)
    agent.add("ann")
    clock.forward(MINUTE)
    ask(agent, clock, AskKind.RELEASE)
    lost = iter([True, False])

    def lose_the_first(request: Request) -> None:
        if request.op == "answer" and next(lost):
            raise Refuse("full disk")

    agent.before = lose_the_first
    assert await answers(asks, agent) == []
    assert [one.text for one in await answers(asks, agent)] == [words.RELEASED]
    assert [request.op for request in agent.asked] == ["tier", "answer"]
    assert len(acting.recorded) == 1


async def test_a_hub_that_hangs_delays_one_session_only(
    asks: AskResponder, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    hub_server.add("bob")
    hub_server.delay = 0.4
    ask(agent, clock, AskKind.STOP, user="bob")
    ask(agent, clock, AskKind.KEEP, HOUR, user="ann")
    await asks.poll()
    await asyncio.sleep(0.1)
    assert agent.sessions["ann"].keep is not None
    # bob's is under way: it is not begun a second time
    await asks.poll()
    await asks.answered()
    assert hub_server.deleted == ["/users/bob/server"]
    assert [one.text for one in agent.answers if one.text == words.STOPS] == [words.STOPS]


async def test_nodes_with_other_clocks_keep_for_as_long_as_was_asked(
    acting: Acting, agent: FakeAgent, clock: Clock
) -> None:
    node_clock = Clock()
    node_clock.now = clock() - 3 * HOUR
    agent.clock = node_clock
    ask(agent, node_clock, AskKind.KEEP, HOUR)
    node_clock.forward(2)
    await answers(asks_of(acting, clock), agent)
    assert present(agent.sessions["ann"].keep).until == clock() - 2 + HOUR


class OneQuestion(MachineAgent):
    """Counts how often it is asked whether something waits."""

    def __init__(self, agent: FakeAgent) -> None:
        super().__init__(agent.path)
        self.questions = 0

    async def wait_for_ask(self, within: float) -> bool:
        self.questions += 1
        return await super().wait_for_ask(within)


async def test_agents_that_are_older_or_gone_are_asked_seldom(
    agent: FakeAgent, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_module, "LONG_POLL", 0.2)
    monkeypatch.setattr(agents_module, "AGENT_BACK", 0.1)
    client = OneQuestion(agent)
    waiting: asyncio.Task[Sequence[Agent]] = asyncio.create_task(_asking(MachineAgents(client)))
    agent.older = True
    ask(agent, clock, AskKind.STOP)
    await asyncio.sleep(0.5)
    assert 1 <= client.questions <= 4
    agent.older = False
    assert await asyncio.wait_for(waiting, 5) == [client]


async def _asking(agents: MachineAgents) -> Sequence[Agent]:
    return await agents.asking()


def test_the_question_whether_something_waits_has_a_bound() -> None:
    with pytest.raises(ValueError, match="within"):
        REQUEST.validate_json(b'{"op": "asked", "within": 61}')
    assert REQUEST.validate_json(AskedRequest(within=0).model_dump_json()) == AskedRequest(within=0)
