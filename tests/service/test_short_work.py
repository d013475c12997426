"""GPU work that is too short keeps no share and restores none, and runs at once all the same: 4 hours of virtual time.

The culler, the agent's tiers, and what both write to a pod's annotations are the product's; the times are those of the
shipped templates, and those of a template that downgrades late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from tests.service.agent_parts import AgentParts, PodAgent
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_hub import FakeHub

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

    def made(times: dict[str, Any]) -> Life:
        idle = templates["quarter"].idle.model_copy(update=times)
        found = {"quarter": templates["quarter"].model_copy(update={"idle": idle})}
        settings = CullerSettings(cull_every=1e-9)
        return Life(agent, Culler([agent], hub, lambda: found, settings, clock=clock), clock, idle)

    return made


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
    uses = int(length >= CullerSettings().use_rule(life.idle).min_use)
    assert len(life.notices) <= 2 * (1 + uses * int(4 * HOUR / every)), "of the downgrade and of the release, once each"


async def test_the_first_cell_after_a_release_runs_at_once_and_restores_the_share_when_it_counts_as_use(
    make_life: Callable[[dict[str, Any]], Life],
) -> None:
    life = make_life(SHIPPED)
    await life.until(life.clock() + HOUR)
    assert life.tier is Tier.RELEASED
    await life.work(3.0)
    assert life.tier is Tier.RELEASED
    assert life.agent.session.lent_units, "with the weight of its share"
    await life.until(life.clock() + MINUTE)
    assert not life.agent.session.lent_units
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


async def test_short_work_delays_no_action_and_withdraws_no_notice(
    make_life: Callable[[dict[str, Any]], Life],
) -> None:
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
