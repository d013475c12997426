"""A machine whose clock is set by a day: nobody is idle for longer by that, and nobody for shorter."""

from __future__ import annotations

import pytest

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.history.recorder import Meter
from gpushare_spawner.service.reports import MachineAgent
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import DirectHub, FakeHub

DAY = 24 * HOUR
USERS = [f"user-{number}" for number in range(10)]


class Machine:
    """Agent, hub and service on one machine."""

    def __init__(self, clock: Clock, agent: FakeAgent, hub_server: FakeHub, templates: dict[str, Template]) -> None:
        self.clock, self.agent, self.hub_server = clock, agent, hub_server
        self.stepped = 0.0
        wall = WallClock(clock, lambda: clock.now - self.stepped)
        self.hub = DirectHub(hub_server, backoff=0.01, since_set=wall.since_set)
        settings = CullerSettings(cull_every=1e-9, cull_users=True, timeout=HOUR, max_age=10 * HOUR)
        self.culler = Culler(
            ActionContext([MachineAgent(agent.path)], self.hub, lambda: templates, clock=wall), settings
        )
        wall.was_set = self.culler.clock_was_set

    def set_clock(self, by: float) -> None:
        """As an agent does it: tests/agent/test_clock_steps.py."""
        self.stepped += by
        self.clock.forward(by)
        for name, session in self.agent.sessions.items():
            last = session.last_gpu_activity
            self.agent.change(
                name, clock_moved=session.clock_moved + by, tier_since=session.tier_since + by,
                last_gpu_activity=last + by if last is not None else None,
                notice=session.notice.model_copy(update={"at": session.notice.at + by}) if session.notice else None,
            )  # fmt: skip

    @property
    def acted(self) -> list[str]:
        """Idle actions."""
        return [*self.hub_server.deleted, *(one.id for one in self.agent.asked if one.op == "tier")]


@pytest.fixture
def machine(clock: Clock, agent: FakeAgent, hub_server: FakeHub, templates: dict[str, Template]) -> Machine:
    now = clock()
    for user in USERS:
        agent.add(user, opened_at=now, last_gpu_activity=now)
        hub_server.add(user, started=now, last_activity=now)
    agent.add("never-worked")
    hub_server.add("never-worked", started=now, last_activity=now)
    for user in ("cpu", "without"):
        hub_server.add(user, started=now, last_activity=now, user_options={"profile": "cpu"} if user == "cpu" else {})
    hub_server.add("no-server", None, created=now, last_activity=now)
    return Machine(clock, agent, hub_server, templates)


@pytest.mark.parametrize("by", [DAY, -DAY])
async def test_nothing_happens_to_servers_that_were_idle_for_a_minute(machine: Machine, by: float) -> None:
    machine.clock.forward(MINUTE)
    await machine.culler.round()
    machine.set_clock(by)
    for _ in range(5):
        await machine.culler.round()
        machine.clock.forward(MINUTE)
    assert machine.acted == []
    assert not [one for one in machine.agent.asked if one.op == "notice"], "and nobody is warned"


@pytest.mark.parametrize("by", [DAY, -DAY])
async def test_what_is_idle_is_released_and_stopped_at_its_time_all_the_same(machine: Machine, by: float) -> None:
    begun, told = machine.clock(), {}
    for minute in range(9 * 60):
        if minute == 7:
            machine.set_clock(by)
        await machine.culler.round()
        for one in machine.agent.asked:
            if one.op == "tier" and one.id == USERS[0]:
                told[one.tier] = round((machine.clock() - machine.stepped - begun) / MINUTE)
        machine.agent.asked.clear()
        if f"/users/{USERS[0]}/server" in machine.hub_server.deleted:
            told[Tier.STOPPED] = round((machine.clock() - machine.stepped - begun) / MINUTE)
            break
        machine.clock.forward(MINUTE)
    assert told == {Tier.DOWNGRADED: 15, Tier.RELEASED: 45, Tier.STOPPED: 480}
    machine.hub.close()


async def test_a_service_that_starts_after_the_step_finds_sessions_as_idle_as_they_are(
    machine: Machine, templates: dict[str, Template]
) -> None:
    machine.clock.forward(MINUTE)
    machine.set_clock(DAY)
    settings = CullerSettings(cull_every=1e-9)
    later = Culler(
        ActionContext([MachineAgent(machine.agent.path)], machine.hub, lambda: templates, clock=machine.clock), settings
    )
    for _ in range(3):
        await later.round()
        machine.clock.forward(MINUTE)
    assert [one for one in machine.acted if "user-" in one or one == "never-worked"] == []


@pytest.mark.parametrize("by", [DAY, -DAY])
def test_the_step_is_no_time_in_the_history(by: float) -> None:
    gpu = GpuReport(index=0, uuid="GPU-0", model="A100", memory_bytes=2**30)
    begin = 1_000_000 * HOUR
    session = SessionReport(
        id="ann", user="ann", template="quarter", gpus=("GPU-0",), share_units=25, opened_at=begin, tier_since=begin,
        effective_units=25, guaranteed_units=25, gpu_seconds=30.0,
    )  # fmt: skip
    moved = session.model_copy(update={"clock_moved": by, "gpu_seconds": 40.0})
    meter = Meter()
    for at, one in ((begin + 60, session), (begin + by + 120, moved), (begin + by + 180, moved)):
        meter.observe(Report(node="n", published_at=at, gpus=(gpu,), sessions=(one,)), lambda session: "")
    amounts = list(meter.take()[0].values())
    assert sum(amount.reserved for amount in amounts) == pytest.approx(0.25 * 180)
    assert sum(amount.used for amount in amounts) == pytest.approx(40)
