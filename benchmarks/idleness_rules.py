"""Idle rules in use elsewhere, and other times of ours; rows of `benchmarks.idleness`, which gives users and tasks.

**Rules elsewhere** (``rules``), with the servers, GPUs, tasks, pauses and random numbers of the load ``rush``:

- ``stop_1h``: a GPU for each server; a mail after 15 min without GPU work, and a stop after 1 h. ``stop_2h``: a stop
  after 2 h. A user whose server was stopped starts another for the next task, and waits for a GPU like everybody. The
  repetition of lost work is not counted, nor is the start of a server: both favour these rules.
- ``notebookos``: a GPU belongs to a kernel only while a cell runs (NotebookOS, ASPLOS 2026). Every kernel has a replica
  on each of the three machines, so that any free GPU serves its cell, and no kernel moves. The working set is copied to
  the GPU before a cell and back after it. Memory for the replicas is not limited, their synchronization takes no time.
- ``runai``: fractions of a quarter in memory; kernels take turns of 250 ms (the lease of Run:ai's time slicing; its
  plan of 5 s divides the time in steps of 5 %), and the time of those that are idle goes to the others equally. No idle
  action: a share is held until the server ends.

``computed``: GPU-hours. ``won``: GPU-hours without a cell that others could use, in percent of those without a cell;
with ``runai`` others get the time, but no server can start on it. ``killed``: kernels that a stop ended; ``lost``:
GPU-hours that these had computed since their start. ``delayed``: percent of the cells that began more than 2 s after
their submission.

**Times of ours** (``times``): pauses of 150 users in four kinds of workload, each over 8 h; the users' medians are
spread by a lognormal factor (sigma 0.8). Downgrades are to 0.10 of 0.25. ``won``: percent of the idle units that
others could use; ``back``: actions of 100 pauses after which the user was back within 5 min. ``learned``: the time of a
release is 1.5 times the 80th percentile of the user's own pauses so far, within 5 and 30 min.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.idleness_cluster import Habits, Outcome
from benchmarks.interactive import BANDWIDTH, HOURS, TARGET, think_time
from gpushare_spawner.arbiter.replay import VirtualClock
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Idle, Template

LEASE = 0.25
"""Seconds: the lease of Run:ai's time slicing, https://docs.run.ai/latest/Researcher/scheduling/GPU-time-slicing-scheduler/."""
FRACTIONS = 4
"""Servers on each GPU with `runai`."""
BACK = 300.0
USERS, DAY = 150, 8 * HOURS


@dataclass(frozen=True)
class Users:
    """The users of one run, and the GPUs for them. Seconds."""

    gpus: int
    habits: Habits
    arrivals: Sequence[float]
    horizon: float
    seed: int


@dataclass(eq=False)
class User:
    """A user with one server."""

    chance: random.Random
    memory: int
    arrived: float
    running: bool = False
    waits: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    computed: float = 0.0
    """GPU seconds since the server's start."""
    submitted: float = 0.0
    left: float = 0.0
    """GPU seconds of the task that runs."""
    tasks: int = 0


@dataclass(frozen=True)
class Figures:
    """What a rule gives: the mean of the seeds."""

    computed: float
    """GPU-hours."""
    won: float
    killed: float
    lost: float
    delayed: float
    mean_wait_min: float
    never: float
    """Servers that had no GPU by the end."""


class Rule:
    """GPUs that are given to servers; a stop of idle servers after `stop_after` seconds."""

    servers_per_gpu = 1

    def __init__(self, users: Users, stop_after: float = math.inf) -> None:
        self.clock = VirtualClock()
        self._habits, self._horizon = users.habits, users.horizon
        self.free = users.gpus * self.servers_per_gpu
        self._stop_after = stop_after
        self._queue: deque[User] = deque()
        self.users: list[User] = []
        self.computed = self.lost = self.won = self.idle = 0.0
        self.killed = 0
        for number, arrived in enumerate(users.arrivals):
            chance = random.Random(f"{users.seed}-{number}")
            user = User(chance, self._habits.memory(chance), arrived)
            self.users.append(user)
            self.clock.at(arrived, lambda user=user: self.arrive(user))  # type: ignore[misc]

    def arrive(self, user: User) -> None:
        """Start a server, or let it wait."""
        self._queue.append(user)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self.free and self._queue:
            self.free -= 1
            user = self._queue.popleft()
            user.running, user.computed = True, 0.0
            if user.submitted:
                self.run(user, self.clock.now - user.submitted)
            else:
                user.waits.append(self.clock.now - user.arrived)
                self.think(user)

    def think(self, user: User) -> None:
        """Let the user pause; the server stops meanwhile if the pause is long."""
        pause = self._habits.think(user.chance)
        self.idle += min(pause, self._horizon - self.clock.now)
        if pause > self._stop_after:
            self.clock.after(self._stop_after, lambda: self._stop(user, pause - self._stop_after))
        self.clock.after(pause, lambda: self.submit(user))

    def _stop(self, user: User, early: float) -> None:
        user.running = False
        self.killed += 1
        self.lost += user.computed
        self.won += min(early, self._horizon - self.clock.now)
        self.free += 1
        self._start_waiting()

    def submit(self, user: User) -> None:
        """The user submits a cell."""
        user.submitted, user.left = self.clock.now, self._habits.work(user.chance)
        if user.running:
            self.run(user, 0.0)
        else:
            self._queue.append(user)
            self._start_waiting()

    def run(self, user: User, delay: float) -> None:
        """Run a cell that has waited for so many seconds."""
        user.delays.append(delay)
        self.clock.after(user.left, lambda: self.end(user))

    def end(self, user: User) -> None:
        """End a cell."""
        self.count(user, user.left)
        user.submitted = 0.0
        self.think(user)

    def count(self, user: User, seconds: float) -> None:
        """Count GPU seconds that were computed."""
        user.computed += seconds
        self.computed += seconds

    def figures(self) -> Figures:
        """Return the figures at the end of the run."""
        self.clock.run(self._horizon)
        never = [user for user in self.users if not user.waits]
        waits = [wait for user in self.users for wait in user.waits] + [self._horizon - user.arrived for user in never]
        delays = [delay for user in self.users for delay in user.delays]
        delays += [self._horizon - user.submitted for user in self.users if user.submitted and not user.running]
        return Figures(
            computed=self.computed / HOURS,
            won=100 * self.won / max(1.0, self.idle),
            killed=self.killed,
            lost=self.lost / HOURS,
            delayed=100 * sum(delay > TARGET for delay in delays) / max(1, len(delays)),
            mean_wait_min=sum(waits) / len(waits) / 60,
            never=len(never),
        )


class PerCell(Rule):
    """A GPU belongs to a kernel only while a cell runs (NotebookOS)."""

    def arrive(self, user: User) -> None:
        """Start the server at once: it needs no GPU."""
        user.waits.append(0.0)
        self.think(user)

    def think(self, user: User) -> None:
        """Let the user pause, without a GPU."""
        pause = self._habits.think(user.chance)
        spent = min(pause, self._horizon - self.clock.now)
        self.idle += spent
        self.won += spent
        self.clock.after(pause, lambda: self.submit(user))

    def run(self, user: User, delay: float) -> None:
        """Copy the working set in, run the cell, and copy the working set out."""
        copy = user.memory / BANDWIDTH
        user.delays.append(delay + copy)
        self.clock.after(user.left + 2 * copy, lambda: self.end(user))

    def end(self, user: User) -> None:
        """End a cell, and give the GPU to the first cell that waits."""
        user.running = False
        self.free += 1
        super().end(user)
        self._start_waiting()


class Turns(Rule):
    """Fixed fractions of the memory; kernels take turns in leases (Run:ai's time slicing, fair)."""

    servers_per_gpu = FRACTIONS

    def __init__(self, users: Users) -> None:
        super().__init__(users)
        self._gpu_of: dict[User, int] = {}
        self._active: list[list[User]] = [[] for _ in range(users.gpus)]
        self._since = [0.0] * users.gpus
        self._plans = [0] * users.gpus

    def run(self, user: User, delay: float) -> None:
        """Let the cell take turns with the others of its GPU."""
        gpu = self._gpu_of.setdefault(user, len(self._gpu_of) // FRACTIONS)
        others = len(self._active[gpu])
        user.delays.append(delay + (others - 0.5) * LEASE if others else delay)
        self._advance(gpu)
        self._active[gpu].append(user)
        self._plan(gpu)

    def _advance(self, gpu: int) -> None:
        active, now = self._active[gpu], self.clock.now
        for user in active:
            seconds = (now - self._since[gpu]) / len(active)
            user.left -= seconds
            self.count(user, seconds)
        self._since[gpu] = now

    def _plan(self, gpu: int) -> None:
        self._plans[gpu] += 1
        plan, active = self._plans[gpu], self._active[gpu]
        if active:
            first = min(active, key=lambda user: user.left)
            seconds = max(0.0, first.left) * len(active)
            self.clock.after(seconds, lambda: self._end_first(gpu, first) if self._plans[gpu] == plan else None)

    def _end_first(self, gpu: int, user: User) -> None:
        self._advance(gpu)
        self._active[gpu].remove(user)
        self._plan(gpu)
        user.submitted = 0.0
        self.think(user)


def figures_of(outcome: Outcome) -> Figures:
    """Return the figures of a run of `benchmarks.idleness`, in which idle actions keep the kernels."""
    return Figures(
        computed=outcome.delivered,
        won=100 * outcome.recovered / outcome.idle,
        killed=0,
        lost=0.0,
        delayed=100 * sum(delay > TARGET for delay in outcome.delays) / len(outcome.delays),
        mean_wait_min=sum(outcome.waits) / len(outcome.waits) / 60,
        never=outcome.never,
    )


def mean(runs: Sequence[Figures]) -> dict[str, float]:
    """Return the mean of each figure."""
    return {key: round(sum(getattr(run, key) for run in runs) / len(runs), 2) for key in asdict(runs[0])}


def rules(users: Sequence[Users]) -> dict[str, dict[str, float]]:
    """Return the figures of the rules elsewhere, the means of the runs."""
    makers: dict[str, Callable[[Users], Rule]] = {
        "stop_1h": lambda run: Rule(run, HOURS),
        "stop_2h": lambda run: Rule(run, 2 * HOURS),
        "notebookos": PerCell,
        "runai": Turns,
    }
    return {name: mean([maker(run).figures() for run in users]) for name, maker in makers.items()}


# -- times of the idle actions ----------------------------------------------------------------------------------------

PAUSES: dict[str, Callable[[random.Random], float]] = {
    "tasks": think_time,
    "short cells": lambda chance: 120 * math.exp(chance.gauss(0, 1)),
    "long cells": lambda chance: 600 * math.exp(chance.gauss(0, 1)),
    "course": lambda chance: (
        60 * math.exp(chance.gauss(0, 1.2)) if chance.random() < 0.95 else chance.uniform(15, 90) * 60
    ),
}
"""Seconds between two cells. A course: exercises of a minute, and now and then a lecture of 15 to 90 min."""


def idle_times(quarter: Template) -> dict[str, Idle]:
    """Return times of idle actions, by name: minutes until the downgrade and the release."""

    def idle(downgrade: float | None, release: float) -> Idle:
        return Idle(
            downgrade_after=downgrade, downgrade_to=downgrade and 0.10, release_after=release, warn_before=120.0
        )

    return {
        "5/10": idle(300.0, 600.0),
        "-/7": idle(None, 420.0),
        "-/8": idle(None, 480.0),
        "-/10": idle(None, 600.0),
        "10/15": idle(600.0, 900.0),
        "15/45": idle(900.0, 2700.0),
        "shipped": quarter.idle,
    }


def release_after(pauses: list[float]) -> float:
    """Return the time of a release that is learned from a user's pauses so far."""
    if len(pauses) < 5:
        return BACK
    usual = sorted(pauses[-50:])[int(0.8 * len(pauses[-50:]))]
    return min(30 * 60.0, max(BACK, 1.5 * usual))


@dataclass
class Pauses:
    """What idle actions do in the pauses of all users. Units of 1 % times seconds."""

    idle: float = 0.0
    won: float = 0.0
    pauses: int = 0
    back: int = 0

    def add(self, pause: float, actions: Sequence[tuple[float, int]], share: int) -> None:
        """Count a pause in which units are left after some seconds."""
        self.pauses += 1
        self.idle += pause * share
        left, times = share, [after for after, _ in actions if after < pause]
        for after, units in actions[: len(times)]:
            self.won += (pause - after) * (left - units)
            left = units
        self.back += bool(times) and pause < times[0] + BACK


def times(quarter: Template) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures by workload and by the times of idle actions."""
    share = quarter.share
    assert share is not None, "a share of one GPU"
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for workload, draw in PAUSES.items():
        for name, idle in [*idle_times(quarter).items(), ("learned", None)]:
            chance, counted = random.Random(5), Pauses()
            for _ in range(USERS):
                spread, at, past = math.exp(chance.gauss(0, 0.8)), 0.0, list[float]()
                while at < DAY:
                    pause = min(DAY, draw(chance) * spread)
                    at += pause + 200
                    actions = [(release_after(past), 0)]
                    if idle is not None:
                        tiers = (Tier.DOWNGRADED, Tier.RELEASED)
                        after = [(idle.after(tier), idle.units(tier, share)) for tier in tiers]
                        actions = [(seconds, units) for seconds, units in after if seconds is not None]
                    past.append(pause)
                    counted.add(pause, actions, share.units)
            figures.setdefault(workload, {})[name] = {
                "won": round(100 * counted.won / counted.idle, 1),
                "back": round(100 * counted.back / counted.pauses, 1),
            }
    return figures
