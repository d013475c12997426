"""GPU work that is too short keeps no share and restores none, and runs at once all the same: 4 hours of virtual time.

The culler, the agent's tiers, and what both write to a pod's annotations are the product's; the times are those of the
shipped templates, and those of a template that downgrades late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.idle.use import use_rule
from gpushare_spawner.model.report import NOTHING
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever
from tests.service.agent_parts import AgentParts, PodAgent
from tests.service.conftest import HOUR, MINUTE, Clock, direct_hub
from tests.service.fake_hub import FakeHub

hub = direct_hub

SHIPPED = {"downgrade_after": 5 * MINUTE, "release_after": 10 * MINUTE, "warn_before": 2 * MINUTE}
LATE = {"downgrade_after": 15 * MINUTE, "release_after": 45 * MINUTE, "warn_before": 5 * MINUTE}
ROUND = 60.0
"""Seconds between two rounds of the culler. With the shipped 10 s all is up to 50 s earlier."""
PATTERNS = [(20, 0.003), (30, 0.019), (299, 0.2), (590, 0.5), (1801, 1.7), (7000, 6.9)]
"""Seconds between two bursts, and their length."""


@dataclass
class Life:
    """A session and its agent under a culler; `full` adds up the seconds for which it had its full share."""

    agent: AgentParts
    culler: Culler
    clock: Clock
    idle: Idle
    next_round: float = 0.0
    full: float = 0.0
    notices: list[float] = field(default_factory=list)

    async def until(self, instant: float) -> None:
        while (due := max(self.next_round, self.clock())) <= instant:
            self._pass(due - self.clock())
            await self.culler.round()
            self.agent.look()
            self.next_round = due + ROUND
        self._pass(instant - self.clock())

    async def wait(self, seconds: float) -> None:
        """A request that waits, or pages that come in: none of it is GPU time. Then comes a burst."""
        self.agent.work_begins()
        end = self.clock() + seconds
        while self.clock() < end:
            await self.until(min(end, self.clock() + 5.0))
            self.agent.look()

    async def work(self, seconds: float) -> None:
        """A burst of this length; the agent looks every second, the culler every round."""
        self.agent.work_begins()
        for _ in range(int(seconds)):
            self._pass(1.0)
            self.agent.gpu_seconds += 1.0
            self.agent.look()
        self._pass(seconds % 1.0)
        self.agent.work_ends(seconds % 1.0)

    def _pass(self, seconds: float) -> None:
        self.clock.forward(seconds)
        record = self.agent.session.record
        if record.effective_units == record.request.share_units:
            self.full += seconds
        if record.notice is not None and record.notice.at not in self.notices:
            self.notices.append(record.notice.at)

    @property
    def tier(self) -> Tier:
        return self.agent.session.record.tier


@pytest.fixture(params=[AgentParts, PodAgent], ids=["one machine", "pod"])
def make_life(
    request: pytest.FixtureRequest, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
) -> Callable[[dict[str, Any]], Life]:
    hub_server.add("ann", last_activity=clock() + 9 * HOUR)
    agent = request.param(clock)

    return lambda times: Life(agent, *_culler(agent, hub, templates, clock, times))


def _culler(
    agent: AgentParts, hub: Hub, templates: dict[str, Template], clock: Clock, times: dict[str, Any]
) -> tuple[Culler, Clock, Idle]:
    idle = templates["quarter"].idle.model_copy(update=times)
    found = {"quarter": templates["quarter"].model_copy(update={"idle": idle})}
    settings = CullerSettings(cull_every=1e-9)
    return Culler(ActionContext([agent], hub, lambda: found, clock=clock), settings), clock, idle


@pytest.mark.parametrize(
    ("times", "every", "length"),
    [*((SHIPPED, *pattern) for pattern in PATTERNS), (LATE, *PATTERNS[0]), (LATE, *PATTERNS[-1])],
)
async def test_use_below_a_thousandth_keeps_the_full_share_for_less_than_a_tenth_of_the_time(
    make_life: Callable[[dict[str, Any]], Life], times: dict[str, Any], every: float, length: float
) -> None:
    life = make_life(times)
    begin = life.clock()
    for number in range(1, int(4 * HOUR / every) + 1):
        await life.until(begin + number * every - length)
        await life.work(length)
    await life.until(begin + 4 * HOUR)
    assert life.full / (4 * HOUR) <= 0.1
    assert life.tier is not Tier.ACTIVE
    uses = int(length >= use_rule(life.idle).min_use)
    assert len(life.notices) <= 2 * (1 + uses * int(4 * HOUR / every)), "of the downgrade and of the release, once each"


WAITS = [
    (299, 0.2, 0.0, 8.0), (299, 0.003, 15.0, 0.0), (120, 0.1, 60.0, 2.0), (590, 0.5, 5.0, 8.0), (1801, 1.7, 60.0, 8.0),
    (62.1, 0.06, 60.0, 2.0),
]  # fmt: skip
"""Seconds between two bursts, their length, for how long each waits for its lease, and for how long pages come in."""


@pytest.mark.parametrize(("every", "length", "waits", "page_in"), WAITS)
async def test_waits_and_pages_that_come_in_make_short_work_no_use(
    make_life: Callable[[dict[str, Any]], Life], every: float, length: float, waits: float, page_in: float
) -> None:
    life = make_life(SHIPPED)
    begin = life.clock()
    while life.clock() < begin + 4 * HOUR:
        await life.until(life.clock() + max(0.0, every - length - waits - page_in))
        await life.wait(waits + page_in)
        await life.work(length)
    assert life.full / (4 * HOUR) <= 0.1
    assert life.tier is Tier.RELEASED
    assert len(life.notices) <= 2


async def test_a_cell_that_waits_for_a_minute_restores_the_share_when_it_has_run_for_min_use(
    make_life: Callable[[dict[str, Any]], Life],
) -> None:
    life = make_life(SHIPPED)
    await life.until(life.clock() + HOUR)
    await life.wait(60.0)
    assert life.agent.session.record.effective_units == 0
    assert life.agent.session.works_on_lent_units, "with the weight of its share"
    await life.work(6.0)
    assert life.agent.session.record.effective_units == 25


@pytest.mark.parametrize(("every", "length"), [(60, 2.0), (240, 5.0)])
async def test_a_session_that_waits_for_each_of_its_cells_keeps_its_share(
    make_life: Callable[[dict[str, Any]], Life], every: float, length: float
) -> None:
    life = make_life(SHIPPED)
    begin = life.clock()
    for number in range(1, int(HOUR / every) + 1):
        await life.until(begin + number * every - length - 30.0)
        await life.wait(30.0)
        await life.work(length)
    assert life.full == pytest.approx(life.clock() - begin)


async def test_the_first_cell_after_a_release_runs_at_once_and_restores_the_share_when_it_counts_as_use(
    make_life: Callable[[dict[str, Any]], Life],
) -> None:
    life = make_life(SHIPPED)
    await life.until(life.clock() + HOUR)
    assert life.tier is Tier.RELEASED
    await life.work(3.0)
    assert life.tier is Tier.RELEASED
    assert life.agent.session.works_on_lent_units, "with the weight of its share"
    await life.until(life.clock() + MINUTE)
    assert not life.agent.session.works_on_lent_units
    await life.work(6.0)
    assert life.tier is Tier.ACTIVE
    assert life.agent.session.record.effective_units == 25


@pytest.mark.parametrize(("every", "length"), [(60, 2.0), (240, 5.0), (290, 6.0)])
async def test_a_session_that_uses_its_gpu_now_and_then_keeps_its_share(
    make_life: Callable[[dict[str, Any]], Life], every: float, length: float
) -> None:
    life = make_life(SHIPPED)
    begin = life.clock()
    for number in range(1, int(HOUR / every) + 1):
        await life.until(begin + number * every - length)
        await life.work(length)
    assert life.full == pytest.approx(life.clock() - begin)


async def test_short_work_delays_no_action_and_withdraws_no_notice(make_life: Callable[[dict[str, Any]], Life]) -> None:
    life = make_life(SHIPPED)
    begin = life.clock()
    await life.until(begin + 4 * MINUTE)
    for second in range(int(4 * MINUTE), int(5.5 * MINUTE)):
        await life.work(0.003)
        await life.until(begin + second + 1)
        if second % 10 == 0:
            await life.culler.round()
            life.agent.look()
    assert life.tier is Tier.DOWNGRADED
    assert life.agent.session.record.tier_since <= begin + 5 * MINUTE + 2 * ROUND
    assert len(life.notices) == 1


class BusyGpu(VirtualGpu):
    """A GPU under the product's arbiter, with the session "ann" and neighbours that always work and do not fit."""

    def __init__(self, neighbours: int, working_set: int) -> None:
        super().__init__(GpuArbiter(80 * GIB))
        self.agent: AgentOfGpu | None = None
        self.session("ann", 25)
        for number in range(neighbours):
            name = f"neighbour-{number}"
            self.session(name, 75 // neighbours)
            self.start(Job(name, name, working_set, forever()))

    def _ask(self, job: Job) -> None:
        if job.session == "ann" and self.agent is not None:
            self.agent.work_begins()
        super()._ask(job)


class AgentOfGpu(AgentParts):
    """The agent of one machine that reads the session's work from the arbiter, and sets its weight there."""

    def __init__(self, clock: Clock, gpu: BusyGpu) -> None:
        self.gpu, self.weight = gpu, 25
        gpu.agent = self
        super().__init__(clock)

    def activity(self, session: Session) -> Activity:
        view = self.gpu.arbiter.session_snapshot("ann", self.gpu.now)
        last = None if view.last_activity is None else self.clock() - self.gpu.now + view.last_activity
        return Activity(view.running or view.waiting, view.waiting, last, view.gpu_seconds, 0, 0, NOTHING)

    def look(self) -> None:
        super().look()
        weight = 25 if self.session.works_on_lent_units else self.session.record.effective_units
        if weight != self.weight:
            self.weight = weight
            self.gpu.set_weight("ann", weight)


@dataclass
class LifeOnGpu(Life):
    """A session on a GPU that others use too."""

    async def live(self, seconds: float) -> None:
        """Let time go by; the agent looks every second."""
        end = self.clock() + seconds
        while self.clock() < end:
            await self.until(min(end, self.clock() + 1.0))
            assert isinstance(self.agent, AgentOfGpu)
            self.agent.gpu.run(self.agent.gpu.now + 1.0)
            self.agent.look()


@pytest.fixture
def life_on_gpu(
    hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
) -> Callable[[int, int], LifeOnGpu]:
    hub_server.add("ann", last_activity=clock() + 9 * HOUR)

    def made(neighbours: int, working_set: int) -> LifeOnGpu:
        agent = AgentOfGpu(clock, BusyGpu(neighbours, working_set))
        return LifeOnGpu(agent, *_culler(agent, hub, templates, clock, SHIPPED))

    return made


@pytest.mark.parametrize(
    ("neighbours", "every", "length"),
    [
        (1, 290, 0.05),
        (2, 60, 0.03),
        *(pytest.param(*figures, marks=pytest.mark.slow) for figures in ((1, 299, 0.2), (3, 120, 0.05), (4, 299, 0.2))),
    ],
)
async def test_short_work_among_neighbours_that_always_work_keeps_no_share(
    life_on_gpu: Callable[[int, int], LifeOnGpu], neighbours: int, every: float, length: float
) -> None:
    life = life_on_gpu(neighbours, 70 * GIB)
    assert isinstance(life.agent, AgentOfGpu)
    job = life.agent.gpu.start(Job("ann", "ann", 70 * GIB, alternating(every - length, length)))
    await life.live(4 * HOUR)
    assert 0 < job.gpu_seconds <= 0.001 * 4 * HOUR
    assert life.full / (4 * HOUR) <= 0.1


@pytest.mark.parametrize("neighbours", [1, 3])
async def test_cells_of_seconds_among_neighbours_that_always_work_keep_the_share(
    life_on_gpu: Callable[[int, int], LifeOnGpu], neighbours: int
) -> None:
    life = life_on_gpu(neighbours, 70 * GIB)
    assert isinstance(life.agent, AgentOfGpu)
    life.agent.gpu.start(Job("ann", "ann", 70 * GIB, alternating(180.0, 8.0)))
    await life.live(HOUR)
    assert life.full == pytest.approx(HOUR)
