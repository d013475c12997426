"""The consequence of GPU work without the library that the template names: a notice, and a stop after its grace."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.report import BypassingProcess
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.reports import MachineAgent
from tests.service.conftest import Clock
from tests.service.fake_agent import GIB, FakeAgent
from tests.service.fake_hub import FakeHub

HOG, SECOND = BypassingProcess(pid=4711, started=5), BypassingProcess(pid=42, started=9)
NOTICE = (
    "Process 4711 (as numbered on the node) uses the GPU without GPU sharing: LD_PRELOAD was unset. The session holds "
    "more GPU memory than it may (4 GiB)."
)


class Bypassing:
    """A culler, and a machine on which ann's session exceeds its limit by a process without the library."""

    def __init__(self, agent: FakeAgent, hub: Hub, hub_server: FakeHub, clock: Clock) -> None:
        self.agent, self.clock = agent, clock
        self.recorded: list[Action] = []
        for user, over in (("ann", (HOG,)), ("bob", ())):
            agent.add(user, template="exam", memory_limit_bytes=4 * GIB, bypassing_pids=(4711, 42), exceeding=over)
            hub_server.add(user, last_activity=clock())
        self._agents, self._hub = [MachineAgent(agent.path)], hub
        self.culler = self.another("stop")

    def another(self, action: str, dry_run: bool = False) -> Culler:
        template = Template.model_validate({
            "name": "exam", "display_name": "Exam", "gpu": {"fraction": 0.25, "bypass": {"action": action}},
        })  # fmt: skip
        actions = ActionContext(
            self._agents, self._hub, lambda: {"exam": template}, record=self.recorded.append, clock=self.clock
        )
        return Culler(actions, CullerSettings(cull_every=1e-9, dry_run=dry_run))

    def message(self, cause: MessageCause = MessageCause.BYPASS) -> str | None:
        message = self.agent.sessions["ann"].message_of(cause)
        return message.text if message is not None else None

    def stopped(self) -> list[tuple[str, BypassingProcess]]:
        """What the agent was asked to stop."""
        asked: list[Any] = [request for request in self.agent.asked if request.op == "stop-processes"]
        return [(request.id, process) for request in asked for process in request.processes]

    async def rounds(self, seconds: float = 0.0, number: int = 2) -> None:
        self.clock.forward(seconds)
        for _ in range(number):
            await self.culler.round()


@pytest.fixture
def world(agent: FakeAgent, hub: Hub, hub_server: FakeHub, clock: Clock) -> Bypassing:
    return Bypassing(agent, hub, hub_server, clock)


async def test_process_is_stopped_after_the_notice_and_the_grace(world: Bypassing) -> None:
    await world.culler.round()
    assert world.message() == f"{NOTICE} It will be stopped 1 min after this message if the session still does."
    again = await world.culler.round()
    assert again is not None
    assert again <= world.clock() + 60
    await world.rounds(59)
    assert world.stopped() == []
    await world.rounds(1)
    assert world.stopped() == [("ann", HOG)]
    assert [(one.action, one.actor, one.user) for one in world.recorded] == [
        ("message", "culler", "ann"), ("stop-process", "culler", "ann"),
    ]  # fmt: skip
    why = (
        "Process 4711 is stopped: it used the GPU without GPU sharing, and the session held more GPU memory than it "
        "may (4 GiB)."
    )
    assert world.recorded[-1].reason == world.message(MessageCause.ACTION) == why
    world.agent.change("ann", exceeding=())
    await world.rounds()
    assert world.message() is None
    assert world.message(MessageCause.ACTION) == why, "its user has not seen it yet"
    assert world.stopped() == [("ann", HOG)]


async def test_process_that_is_still_there_is_named_again_after_a_minute(world: Bypassing) -> None:
    await world.rounds()
    await world.rounds(60)
    await world.rounds(59)
    assert len(world.stopped()) == 1
    await world.rounds(1)
    assert world.stopped() == [("ann", HOG)] * 2


async def test_session_that_is_within_its_limit_again_in_time_loses_no_process(world: Bypassing) -> None:
    await world.rounds()
    world.clock.forward(50)
    world.agent.change("ann", exceeding=())
    await world.rounds()
    assert world.message() is None
    world.agent.change("ann", exceeding=(HOG,))
    await world.rounds()
    await world.rounds(59)
    assert world.stopped() == []
    await world.rounds(1)
    assert world.stopped() == [("ann", HOG)]


async def test_later_process_has_a_grace_of_its_own(world: Bypassing) -> None:
    await world.rounds()
    world.clock.forward(50)
    world.agent.change("ann", exceeding=(HOG, SECOND))
    await world.rounds()
    assert "Processes 42, 4711 " in (world.message() or "")
    await world.rounds(10)
    assert world.stopped() == [("ann", HOG)]
    await world.rounds(49)
    assert world.stopped() == [("ann", HOG)]
    await world.rounds(1)
    assert world.stopped()[1:] == [("ann", SECOND)]


async def test_process_that_starts_again_and_again_delays_no_stop_of_another(world: Bypassing) -> None:
    await world.rounds()
    for number in range(7):
        world.agent.change("ann", exceeding=(HOG, BypassingProcess(pid=100 + number, started=9)))
        await world.rounds(10, number=1)
    assert world.stopped() == [("ann", HOG)]


async def test_grace_begins_again_after_a_restart_of_the_service(world: Bypassing) -> None:
    await world.rounds()
    world.culler = world.another("stop")
    await world.rounds(60)
    assert world.stopped() == []
    await world.rounds(60)
    assert world.stopped() == [("ann", HOG)]
    assert [one.action for one in world.recorded] == ["message", "stop-process"]


async def test_report_is_the_default_and_a_dry_run_does_nothing(world: Bypassing) -> None:
    assert Template.model_validate({"name": "a", "display_name": "A", "gpu": {"fraction": 1}}).gpu is not None
    for culler in (world.another("report"), world.another("stop", dry_run=True)):
        world.culler = culler
        await world.rounds()
        await world.rounds(60)
    assert (world.recorded, world.message(), world.stopped()) == ([], None, [])


async def test_notice_is_withdrawn_when_the_template_only_reports_now(world: Bypassing) -> None:
    await world.rounds()
    world.culler = world.another("report")
    await world.rounds()
    assert world.message() is None


@pytest.mark.parametrize(("action", "trouble"), [("notify", None), ("stop", "it lacks the capability KILL")])
async def test_user_is_only_notified_where_nothing_is_stopped(
    world: Bypassing, action: str, trouble: str | None
) -> None:
    world.agent.stop_trouble = trouble
    world.culler = world.another(action)
    await world.rounds()
    await world.rounds(3600)
    assert world.message() == f"{NOTICE} Please end it."
    assert world.stopped() == []
    assert [one.action for one in world.recorded] == ["message"]


async def test_clock_that_is_set_shortens_no_grace(world: Bypassing) -> None:
    await world.rounds()
    world.clock.forward(3600)
    world.culler.clock_was_set(3600)
    await world.rounds()
    assert world.stopped() == []
    await world.rounds(60)
    assert world.stopped() == [("ann", HOG)]
