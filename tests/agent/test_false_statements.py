"""Whatever the processes of a session say, and whether or not they run anything: others keep their GPU time."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import Feature, Kind
from tests.agent.peers import FIRST, GIB
from tests.agent.virtual_node import Process, VirtualNode, Worker, virtual_node

REAL = dataclasses.replace(FIRST, simulated=False)
FRAMES = (Kind.MEMORY, Kind.REQUEST, Kind.RESERVE, Kind.RETURN, Kind.IDLE, Kind.BUSY, Kind.RELEASE, Kind.PAGED_OUT)


@dataclass(frozen=True)
class Step:
    """A frame, and the seconds until the next one."""

    kind: Kind
    amount: int
    """Bytes, or nanoseconds."""
    other: int
    pause: float


@dataclass(frozen=True)
class Attack:
    """What each process of the attacking session does. None of them runs a kernel, or has memory on the GPU."""

    connections: int
    units: int
    limit: str
    features: Feature
    steps: tuple[Step, ...]
    keeps: float | None
    """Seconds for which it keeps its lease after REVOKE; None: for ever."""
    listed: bool
    """Whether the driver lists the processes."""


@dataclass(eq=False)
class Attacker(Process):
    attack: Attack | None = None
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def begin(self, at: float) -> None:
        assert self.attack is not None
        self.shown = 0 if self.attack.listed else None
        self.agent.loop.call_later(at, self._step, itertools.cycle(self.attack.steps))

    def told(self, kind: Kind, fields: tuple[int, ...]) -> None:
        super().told(kind, fields)
        assert self.attack is not None
        if kind is Kind.REVOKE and self.attack.keeps is not None:
            self.agent.loop.call_later(self.attack.keeps, self._gives_back, fields[0])
        if kind is Kind.RECALL:
            self.say(Kind.RETURN, 0, 0, fields[1])

    def _gives_back(self, lease: int) -> None:
        if self.lease == lease:
            self.lease = 0
        self.say(Kind.RELEASE, lease, 0, 1)

    def _step(self, steps: itertools.cycle[Step]) -> None:
        step, number = next(steps), next(self.numbers)
        match step.kind:
            case Kind.MEMORY | Kind.REQUEST:
                self.say(step.kind, step.amount, step.other, number)
            case Kind.RESERVE:
                self.say(step.kind, step.amount, 0, step.amount - step.amount % 2, number, step.other % 3)
            case Kind.RETURN:
                self.say(step.kind, step.amount, step.other, number)
            case Kind.RELEASE:
                self._gives_back(self.lease)
            case _:
                self.say(step.kind, self.lease, step.amount, step.other)
        self.agent.loop.call_later(step.pause, self._step, steps)


def time_of_victims(agent: VirtualNode, attack: Attack, memory: int, seconds: float) -> float:
    """GPU time of a session that always has work, as a part of what it is entitled to beside the attack."""

    async def begin() -> Worker:
        agent.session("bob", 100 - attack.units)
        agent.session("eve", attack.units, attack.limit)
        victim: Worker = agent.process("bob", Worker, managed=memory)
        for number in range(attack.connections):
            one: Attacker = agent.process("eve", Attacker, attack.features, attack=attack)
            one.begin(number / 40)
        victim.begin()
        return victim

    victim = agent.loop.run_until_complete(begin())
    agent.run(seconds)
    return victim.busy / seconds / (1 - attack.units / 100)


AMOUNTS = st.sampled_from([0, 2**26, GIB, 5 * GIB, 12 * GIB, 16 * GIB, 10**9, 2**63, 2**64 - 1])
STEPS = st.builds(Step, st.sampled_from(FRAMES), AMOUNTS, AMOUNTS, st.sampled_from([0.05, 0.3, 0.95, 3.0]))
ATTACKS = st.builds(
    Attack,
    connections=st.sampled_from([1, 20]),
    units=st.sampled_from([50, 5, 95]),
    limit=st.sampled_from(["1GiB", "100%"]),
    features=st.sampled_from([Feature(0), Feature.RESERVE | Feature.PACE]),
    steps=st.lists(STEPS, min_size=1, max_size=6).map(tuple),
    keeps=st.sampled_from([0.0, 0.0, 2.0, None]),
    listed=st.booleans(),
)
SECONDS = 600.0
"""Some rounds of time slices. Where two sessions of 12 GiB and 50 units take turns, moving both takes 2 s, and rounds
of 80 s keep that at 2.5 % of the time (`overhead_bound`). What a session has over less than a round says when its time
slice began: beside an attack that says so much a victim has 0.54 of its part over 25 s, 0.23 over 60 s, 0.74 over
120 s, 0.81 over 300 s and 0.97 over 600 s; beside a session that really works 0.72, 0.30, 0.99, 0.83 and 0.97. Shorter
rounds would break the bound of overhead for all."""
CLAIM = Attack(20, 50, "1GiB", Feature(0), (Step(Kind.REQUEST, 2**41, 0, 1.0),), 0.0, False)
NEARLY_ALL = Attack(1, 95, "100%", Feature(0), (Step(Kind.REQUEST, 0, 12 * GIB, 1.0),), 0.0, True)
"""A session that has most of the units, says that it needs most of the memory, and runs nothing."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(
    max_examples=5, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=[HealthCheck.too_slow]
)
@given(ATTACKS, st.sampled_from([2 * GIB, 12 * GIB]), st.booleans(), st.booleans())
@example(CLAIM, 12 * GIB, True, False)
@example(dataclasses.replace(CLAIM, units=5), 12 * GIB, False, True)
@example(NEARLY_ALL, 12 * GIB, True, False)
def test_a_session_that_runs_nothing_takes_no_more_than_its_share_whatever_it_says(
    attack: Attack, memory: int, samples: bool, real: bool
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    try:
        with virtual_node(folder, REAL if real else FIRST, samples, real) as agent:
            assert time_of_victims(agent, attack, memory, SECONDS) > 0.9
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("units", "keeps"),
    [
        pytest.param(units, keeps, marks=() if (units, keeps) == (50, 2.0) else pytest.mark.slow)
        for units in (5, 50, 95)
        for keeps in (0.0, 2.0, None)
    ],
)
def test_bound_of_debts_forgives_no_time_for_which_others_waited(
    short_folder: Path, units: int, keeps: float | None
) -> None:
    """A lease that is held without a kernel is charged in full: where debts have no bound victims get no more."""
    attack = dataclasses.replace(NEARLY_ALL, units=units, keeps=keeps)
    parts = []
    for bound in (ArbiterSettings().max_debt, 1e9):
        with virtual_node(short_folder, FIRST, arbiter=ArbiterSettings(max_debt=bound)) as agent:
            parts.append(time_of_victims(agent, attack, 12 * GIB, 240.0))
    assert parts[0] == pytest.approx(parts[1], rel=0.01)
