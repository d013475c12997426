"""Answers of the plan: GPUs that each way to offer them needs, waits, start delays, groups, and people served.

Whole GPUs and static parts are counted from starts and stops. Shares run in `cluster`, without arbiters while the
number of GPUs is searched for; the start delays then come from replays of GPUs, chosen by the seed, with the arbiter.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from gpushare_spawner.arbiter.replay import VirtualClock, VirtualGpu, VirtualProcess
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import Limits, Template
from gpushare_spawner.plan.cluster import BANDWIDTH, GPUS_OF_NODE, HOUR, Lateness, Outcome, PlannedCluster
from gpushare_spawner.plan.servers import GIB, PlannedBurst, RecordedServer, Running, ServerPlan, Trace, merged
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.wording.amounts import plural, utc

BUSY_SHARES = (0.05, 0.19, 0.40)
"""Parts of a server's time with GPU work that are assumed where no source says it: low, middle, high.

Middle: reserved GPUs of notebooks were idle for 81 % of the time; three of four sessions worked for at most 5 %
(NotebookOS, ASPLOS 2026, on Adobe's cluster). High: twice the middle."""
TASK_MEDIAN, TASK_SIGMA = 300.0, 1.0
"""Seconds, and sigma of the lognormal distribution, of assumed GPU work (same source)."""
PAUSES = ((0.0, 0.5), (0.5, 3.0), (0.75, 7.0), (0.9, 35.0), (1.0, 700.0))
"""(part of the pauses, minutes) of assumed pauses, before they are scaled to the busy share (same source)."""
PAUSE_MEAN = 1601.0
"""Seconds: the mean of `PAUSES`."""
MEMORY_MEDIAN, MEMORY_SIGMA, MEMORY_MOST = 8 * GIB, 0.7, 0.25
"""Bytes, sigma, and the largest part of a GPU, of the assumed GPU memory of a server."""
WINDOW = 2 * HOUR
"""Seconds of one replay of a GPU."""
REPLAYED_BURSTS = 300
MOST_WINDOWS = 100
"""Replays with GPU work."""
REPLAY_PERIOD = 30.0
"""Seconds in which sessions that run together get their parts, instead of `ArbiterSettings.period`: hours of many GPUs
with turns of 0.2 s would take hours. Start delays do not depend on it."""
LONGEST = 10 * 365.25 * 86400
"""Seconds of the longest trace. Our choice: times that are further apart are mistakes."""
BUSIEST_DAYS = 2
"""Days of the trace for which more people are added."""
MOST_RUNS = 12
STATIC_PARTS = 4
"""Parts into which GPUs would be divided for good, to compare: as many as the shipped default share has in a GPU."""
WHOLE, STATIC, SHARES, CULLER = "whole", "static", "shares", "culler"


@dataclass(frozen=True)
class Goal:
    """What the GPUs must achieve, and what there is."""

    templates: tuple[Template, ...]
    quotas: Quotas | None = None
    gpus: int | None = None
    """GPUs that there are; None: as many as whole GPUs need."""
    memory: int = 80 * GIB
    """Bytes of each GPU."""
    wait_p95: float = 60.0
    """Seconds that 95 % of the spawns may wait at most."""
    start_delay: float = 2.0
    """Seconds by which the start of 95 % of GPU work may be delayed at most."""
    seed: int = 1
    limits: bool = False
    """Whether the templates' limits for each user apply."""


class CountedServer(NamedTuple):
    """A server as whole GPUs and static parts count it. Seconds since the trace's start."""

    arrives: float
    lasts: float
    gpus: int
    parts: int
    """Static parts that it takes: by its GPU memory."""
    user: str


@dataclass
class PlannedWorkload:
    """The servers of a trace, ready to run. Instants in seconds since `began`."""

    began: float
    horizon: float
    needs: list[CountedServer]
    plans: list[ServerPlan]
    """With the work of the sources, or with the middle busy share."""
    busy: float | None
    """The assumed busy share; None: the sources say it."""
    on_shares: bool = False
    """See `Trace.on_shares`."""
    users: int = 0
    worked: dict[str, float] = field(default_factory=dict)
    """GPU-hours of work by group, in the sources or assumed."""
    reserved: dict[str, float] = field(default_factory=dict)
    """GPU-hours by group, with whole GPUs for each server."""


@dataclass
class WayAnswer:
    """One way to offer GPUs."""

    way: str
    gpus: int | None = None
    """The smallest number that meets the goal; None: none does."""
    start_delay_p95: float | None = 0.0
    """Seconds, on `gpus`; None: no GPU work was replayed."""
    slowdown: float = 1.0
    """Time of GPU work on `gpus` by its time alone on a whole GPU."""
    on_gpus: int = 0
    """GPUs that there are: the following figures are those on them."""
    mean_wait: float = 0.0
    p95_wait: float = 0.0
    never: int = 0
    refused: int = 0
    reserved: float = 0.0
    """GPU-hours."""
    held: float = 0.0
    """GPU-hours that other sessions could not have."""
    people: int | None = None
    """People whom the same GPUs serve within the goal."""
    series: list[float] = field(default_factory=list)
    """GPUs held in each hour, if nobody waits."""


@dataclass
class GroupAnswer:
    """What a group used of what it held. GPU-hours."""

    name: str
    servers: int
    today: float
    """Held by a whole GPU for each server."""
    worked: float
    held: float
    """With shares and idle actions."""
    mean_wait: float
    """Seconds, on the GPUs that there are, with shares and idle actions."""


@dataclass
class Answers:
    """All answers of a plan."""

    ways: list[WayAnswer]
    groups: list[GroupAnswer]
    busy_range: list[tuple[float, int | None]] = field(default_factory=list)
    """(assumed busy share, GPUs with shares and idle actions)."""
    notes: list[str] = field(default_factory=list)
    users: int = 0
    servers: int = 0
    days: float = 0.0
    began: float = 0.0
    replayed_bursts: int = 0


# -- from a trace to a workload --------------------------------------------------------------------------------------


def workload(trace: Trace, goal: Goal, notes: list[str], busy: float | None = None) -> PlannedWorkload:
    """Make plans of the servers of a trace. Adds what is assumed to the notes. `busy`: instead of the middle share."""
    servers = [server for server in trace.servers if server.gpus is None or server.gpus > 0]
    if not servers:
        raise ValueError("there is no server with a GPU in the sources")
    began = min(server.start for server in servers)
    if trace.now - began > LONGEST:
        years = (trace.now - began) / (365.25 * 86400)
        raise ValueError(
            f"the sources are of {years:.0f} years, and a plan is of {LONGEST / (365.25 * 86400):.0f} at most: the "
            f"first server started {utc(began)}, and the last time is {utc(trace.now)}; is one of them wrong?"
        )
    assumed = None if trace.has_work else busy if busy is not None else BUSY_SHARES[1]
    work = PlannedWorkload(began, max(HOUR, trace.now - began), [], [], assumed, trace.on_shares)
    templates = goal.templates if goal.limits else tuple(map(_without_limits, goal.templates))
    kept = replace(goal, templates=tuple(template for template in templates if template.gpu is not None))
    accounts = QuotaAccounts(goal.quotas) if goal.quotas is not None else None
    chosen: Counter[str] = Counter()
    larger: dict[int, Template] = {}
    for number, server in enumerate(servers):
        end = server.end if server.end is not None else trace.now
        lasts = end - server.start - server.wait
        if lasts <= 0:
            continue
        chance = random.Random(f"{goal.seed}-{number}")
        memory = server.memory if server.memory is not None else _assumed_memory(chance, goal.memory)
        template = _template_of(server, memory, kept, larger)
        chosen[template.display_name] += 1
        bursts = tuple(_bursts(server, lasts, assumed, chance))
        gpus = max(1, math.ceil(server.gpus if server.gpus is not None else 1))
        account = ""
        if accounts is not None:
            of_user = accounts.of_user(server.user, [server.group] if server.group else [])
            account = of_user[0].key if of_user else f"user:{server.user}"
        plan = ServerPlan(
            f"{server.user}#{number}", server.user, template, server.start - began, partial(_same, bursts), lasts,
            min(memory, goal.memory), account, server.group,
        )  # fmt: skip
        work.plans.append(plan)
        parts = gpus * STATIC_PARTS
        if gpus == 1:
            parts = min(parts, max(1, math.ceil(memory * STATIC_PARTS / goal.memory)))
        work.needs.append(CountedServer(plan.arrives, lasts, gpus, parts, server.user))
        worked = sum(burst.gpu_seconds for burst in bursts) * gpus / HOUR
        work.worked[server.group] = work.worked.get(server.group, 0.0) + worked
        work.reserved[server.group] = work.reserved.get(server.group, 0.0) + lasts * gpus / HOUR
    if not work.plans:
        raise ValueError("no server with a GPU in the sources ran for longer than its start")
    work.users = len({need.user for need in work.needs})
    _note_assumptions(trace, goal, servers, chosen, assumed, notes)
    return work


def _note_assumptions(
    trace: Trace,
    goal: Goal,
    servers: Sequence[RecordedServer],
    chosen: Counter[str],
    assumed: float | None,
    notes: list[str],
) -> None:
    without = len(trace.servers) - len(servers)
    running = sum(server.end is None for server in servers)
    no_gpus, no_memory = (sum(getattr(server, name) is None for server in servers) for name in ("gpus", "memory"))
    if without:
        notes.append(f"{plural(without, 'server')} without a GPU: left out")
    if running:
        notes.append(f"{plural(running, 'server')} had not stopped: counted until the end of the sources")
    if no_gpus:
        notes.append(f"The GPUs of {plural(no_gpus, 'server')} are unknown: one each is assumed")
    if no_memory:
        notes.append(
            f"The GPU memory of {plural(no_memory, 'server')} is unknown: a median of {MEMORY_MEDIAN // GIB} GiB, at "
            f"most {MEMORY_MOST:.0%} of a GPU, is assumed"
        )
    if assumed is not None:
        notes.append(
            f"No source says when GPUs worked: GPU work for {assumed:.0%} of a server's time is assumed, with tasks of "
            f"{TASK_MEDIAN / 60:.0f} min (median); the range is that of {BUSY_SHARES[0]:.0%} to {BUSY_SHARES[-1]:.0%}"
        )
    largest = max(map(_size, goal.templates))
    more = sum((server.gpus or 1) > max(1.0, largest) for server in servers)
    if more and goal.limits:
        notes.append(f"{plural(more, 'server')} had more GPUs than any template: each counts with the largest template")
    if not any(server.template for server in servers):
        shares = ", ".join(f"{number} as {name}" for name, number in chosen.most_common())
        notes.append(f"The templates that users would choose are unknown: by GPUs and GPU memory, {shares}")
    notes.append("CPU and memory of nodes, and the seconds in which a server starts, are not modelled")
    if any(template.gpu is not None and template.gpu.models for template in goal.templates):
        notes.append("Templates' patterns for GPU models are left out: all GPUs are alike")


def _same(bursts: tuple[PlannedBurst, ...]) -> tuple[PlannedBurst, ...]:
    return bursts


def _without_limits(template: Template) -> Template:
    return template.model_copy(update={"limits": Limits()})


def _without_models(template: Template) -> Template:
    if template.gpu is None or not template.gpu.models:
        return template
    return template.model_copy(update={"gpu": template.gpu.model_copy(update={"models": ()})})


def _template_of(server: RecordedServer, memory: int, goal: Goal, larger: dict[int, Template]) -> Template:
    """Return the recorded template, or the smallest that has the GPUs and guarantees the GPU memory.

    `larger`: templates with more GPUs than the shipped ones, by the number of GPUs; a missing one is added.
    For servers with one GPU the default template is the smallest choice: a user with a little memory takes it too.
    """
    offered = sorted(goal.templates, key=_size)
    named = next((template for template in offered if server.template in (template.name, template.display_name)), None)
    if server.template and named is not None:
        return named
    gpus = server.gpus if server.gpus is not None else 1.0
    if gpus < 1:
        return next((template for template in offered if _size(template) >= gpus - 0.005), offered[-1])
    if gpus >= 2:
        enough = next((template for template in offered if _size(template) >= gpus), None)
        if enough is not None or goal.limits:
            return enough or offered[-1]
        count = min(GPUS_OF_NODE, math.ceil(gpus))
        return larger.setdefault(count, _of_gpus(offered[-1], count))
    default = next((template for template in offered if template.default), offered[0])
    fitting = [
        template for template in offered if _size(template) >= _size(default) and _guaranteed(template, goal) >= memory
    ]
    return fitting[0] if fitting else offered[-1]


def _of_gpus(template: Template, count: int) -> Template:
    """Return the template with so many whole GPUs, which the shipped templates do not have."""
    fields = template.model_dump(exclude={"gpu", "default"}, exclude_unset=True)
    names = {"name": f"{count}-gpus", "display_name": f"{count} GPUs", "gpu": {"count": count}}
    return Template.model_validate(fields | names)


def _size(template: Template) -> float:
    return template.share.fraction if template.share is not None else 0.0


def _guaranteed(template: Template, goal: Goal) -> float:
    share = template.share
    return share.units / 100 * goal.memory if share is not None else 0.0


def _assumed_memory(chance: random.Random, gpu_memory: int) -> int:
    drawn = MEMORY_MEDIAN * math.exp(chance.gauss(0, MEMORY_SIGMA))
    return int(min(drawn, gpu_memory * MEMORY_MOST))


def _bursts(
    server: RecordedServer, lasts: float, assumed: float | None, chance: random.Random
) -> Iterator[PlannedBurst]:
    if assumed is None:
        at = began = server.start + server.wait
        for work in server.work or ():
            start, end = max(work.start, at), min(work.end, began + lasts)
            if end > start and work.demand > 0:
                yield PlannedBurst(start - at, (end - start) * work.demand, work.demand)
                at = end
        return
    scale = TASK_MEDIAN * math.exp(TASK_SIGMA**2 / 2) * (1 - assumed) / assumed / PAUSE_MEAN
    passed = 0.0
    while passed < lasts:
        pause = scale * pause_of(chance.random())
        task = TASK_MEDIAN * math.exp(chance.gauss(0, TASK_SIGMA))
        passed += pause + task
        yield PlannedBurst(pause, task)


def pause_of(part: float) -> float:
    """Return the pause in seconds that this part of the pauses does not exceed."""
    for (low, short), (high, long) in pairwise(PAUSES):
        if part <= high:
            return 60 * short * math.pow(long / short, (part - low) / (high - low))
    return 60 * PAUSES[-1][1]


# -- whole GPUs and static parts: counted ----------------------------------------------------------------------------


def counted_waits(needs: Iterable[tuple[float, float, int]], capacity: int) -> list[float]:
    """Return the waits of servers in the order of their arrival, in a first-come-first-served pool.

    `needs`: (arrival, seconds that it lasts, places that it takes), by arrival. A server that needs more places than
    there are waits forever.
    """
    ends: list[tuple[float, int]] = []
    free, earliest = capacity, 0.0
    waits: list[float] = []
    for arrives, lasts, places in needs:
        if places > capacity:
            waits.append(math.inf)
            continue
        start = max(arrives, earliest)
        while ends and ends[0][0] <= start:
            free += heapq.heappop(ends)[1]
        while free < places:
            start, returned = heapq.heappop(ends)
            free += returned
        earliest = start
        free -= places
        heapq.heappush(ends, (start + lasts, places))
        waits.append(start - arrives)
    return waits


def counted_series(needs: Iterable[tuple[float, float, float]], horizon: float) -> list[float]:
    """Return the places in use in each hour, on average, if no server waits."""
    hours = [0.0] * math.ceil(horizon / HOUR)
    for arrives, lasts, places in needs:
        at, end = arrives, min(arrives + lasts, horizon)
        while at < end:
            hour = int(at / HOUR)
            until = min(end, (hour + 1) * HOUR)
            hours[hour] += places * (until - at) / HOUR
            at = until
    return hours


def quantile(values: Sequence[float], part: float = 0.95) -> float:
    """Return the value that this part of the values does not exceed; 0 of none."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)] if values else 0.0


def smallest(meets: Callable[[int], bool], guess: int, least: int = 1, most: int = 1 << 20) -> int | None:
    """Return the smallest number that meets a goal, by search around a guess; None: no number up to `most` does."""
    tried: dict[int, bool] = {}

    def good(number: int) -> bool:
        if number not in tried:
            tried[number] = meets(number)
        return tried[number]

    low, high, step = least - 1, max(least, min(guess, most)), max(1, guess // 8)
    while not good(high):
        if high >= most or len(tried) > MOST_RUNS:
            return None
        low, high, step = high, min(most, high + step), 2 * step
    step = max(1, guess // 8)
    while high - low > 1 and low < least:
        lower = max(least, high - step)
        if lower == high or not good(lower):
            low = max(low, lower if lower < high else low)
            break
        high, step = lower, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


# -- shares: the product in virtual time -----------------------------------------------------------------------------


class ShareRuns:
    """Runs of one workload with the product's parts."""

    def __init__(self, goal: Goal, work: PlannedWorkload, idle_actions: bool) -> None:
        self.goal = goal
        self.work = work
        self.idle_actions = idle_actions
        self._templates = _used(work.plans)
        below = _longest_merged(self._templates, goal.quotas) if idle_actions else math.inf
        self._plans = [replace(plan, bursts=partial(_same, tuple(merged(plan.bursts(), below)))) for plan in work.plans]
        self._runs: dict[int, tuple[Outcome, list[Running]]] = {}

    def run(self, gpus: int, to_the_end: bool = False) -> tuple[Outcome, list[Running]]:
        """Run on so many GPUs; without `to_the_end` the run ends early if too many spawns wait too long."""
        done = self._runs.get(gpus)
        if done is None or (to_the_end and done[0].gave_up):
            lateness = Lateness(self.goal.wait_p95, int(len(self._plans) * 0.05))
            self._runs[gpus] = done = _simulated(
                self.goal,
                self._templates,
                self._plans,
                self.work.horizon,
                gpus,
                self.idle_actions,
                None if to_the_end else lateness,
                self.work.on_shares,
            )
        return done

    def meets(self, gpus: int) -> bool:
        """Return whether 95 % of the spawns wait within the goal on so many GPUs."""
        outcome, _ = self.run(gpus)
        return not outcome.gave_up and quantile(outcome.waits) <= self.goal.wait_p95

    def delays(self, gpus: int) -> Replayed:
        """Return the start delays on so many GPUs, by replays with the arbiter."""
        _, servers = self.run(gpus)
        return replayed(servers, self.work, self.goal, gpus)


def _simulated(
    goal: Goal,
    templates: Iterable[Template],
    plans: Iterable[ServerPlan],
    horizon: float,
    gpus: int,
    idle_actions: bool,
    lateness: Lateness | None,
    on_shares: bool,
) -> tuple[Outcome, list[Running]]:
    cluster = PlannedCluster(
        gpus, goal.memory, templates, goal.quotas, idle_actions=idle_actions, round_seconds=60.0, slows=not on_shares
    )
    return cluster.run(plans, horizon, lateness), cluster.servers


def _used(plans: Iterable[ServerPlan]) -> list[Template]:
    return list({id(plan.template): plan.template for plan in plans}.values())


def _longest_merged(templates: Iterable[Template], quotas: Quotas | None) -> float:
    """Return the seconds of pauses after which no idle action is due in any template, nor a reclaim."""
    firsts = [
        template.idle.first_after - (template.idle.warn_before if template.idle.when == "pressure" else 0.0)
        for template in templates
        if template.idle.first_after is not None
    ]
    if quotas is not None and quotas.reclaim.enabled:
        firsts.append(quotas.reclaim.idle_after)
    return max(0.0, min(firsts, default=math.inf))


class Replayed(NamedTuple):
    """Start delays of GPU work, by replays of some GPUs for some hours."""

    delays: list[float]
    slowdown: float


def replayed(servers: Sequence[Running], work: PlannedWorkload, goal: Goal, gpus: int) -> Replayed:
    """Replay GPU work of randomly chosen GPUs and times with the arbiter, with the tiers of the run."""
    on_gpu: dict[str, list[Running]] = defaultdict(list)
    for server in servers:
        for uuid in server.gpus:
            on_gpu[uuid].append(server)
    chance = random.Random(f"replay-{goal.seed}")
    slots = [(uuid, number * WINDOW) for uuid in sorted(on_gpu) for number in range(math.ceil(work.horizon / WINDOW))]
    chance.shuffle(slots)
    delays: list[float] = []
    took = alone = 0.0
    windows = 0
    for uuid, begin in slots:
        if len(delays) >= REPLAYED_BURSTS or windows >= MOST_WINDOWS:
            break
        here = [server for server in on_gpu[uuid] if server.tiers and _runs_in(server, begin, begin + WINDOW)]
        if here:
            replay = _Replay(here, begin, goal.memory)
            delays += replay.delays
            took += replay.took
            alone += replay.alone
            windows += replay.took > 0
    return Replayed(delays, took / alone if alone else 1.0)


def _runs_in(server: Running, begin: float, end: float) -> bool:
    last = server.tiers[-1]
    return server.tiers[0][0] < end and (last[1] >= 0 or last[0] > begin)


class _Replay:
    """One GPU for `WINDOW` seconds."""

    def __init__(self, servers: Iterable[Running], begin: float, memory: int) -> None:
        self.delays: list[float] = []
        self.took = self.alone = 0.0
        self._clock = VirtualClock()
        self._gpu = VirtualGpu(self._clock, memory, BANDWIDTH, ArbiterSettings(period=REPLAY_PERIOD))
        processes = []
        for server in servers:
            bursts = _within(server, begin, begin + WINDOW)
            if bursts:
                processes.append(self._add(server, begin, bursts))
        while any(process.wants for process in processes) or self._clock.now < WINDOW:
            if self._clock.now >= 2 * WINDOW:
                break
            self._clock.run(self._clock.now + WINDOW / 8)
        for process in processes:
            self.delays += [delay for _, delay in process.delays]

    def _add(self, server: Running, begin: float, bursts: list[tuple[float, PlannedBurst]]) -> VirtualProcess:
        name = server.plan.name
        weights = [(at - begin, units) for at, units in server.tiers if units >= 0]
        first = max((number for number, (at, _) in enumerate(weights) if at <= 0), default=0)
        process = VirtualProcess(name, server.plan.memory)
        self._gpu.session(name, weights[first][1])
        self._gpu.connect(process)
        for at, units in weights[first + 1 :]:
            if at < WINDOW:
                self._clock.at(at, partial(self._gpu.weigh, name, units))
        self._submit(process, bursts, 0)
        return process

    def _submit(self, process: VirtualProcess, bursts: list[tuple[float, PlannedBurst]], number: int) -> None:
        """Begin a burst at its time, or now if the one before has just ended."""
        at, burst = bursts[number]

        def begin() -> None:
            submitted = self._clock.now

            def done() -> None:
                self.took += self._clock.now - submitted
                self.alone += burst.gpu_seconds / burst.demand
                if number + 1 < len(bursts):
                    self._submit(process, bursts, number + 1)

            process.done = done
            self._gpu.submit(process, burst.gpu_seconds, burst.demand)

        self._clock.at(at, begin)


def _within(server: Running, begin: float, end: float) -> list[tuple[float, PlannedBurst]]:
    """Return a server's bursts that start between two instants, with their times since the first of them."""
    at, bursts = server.tiers[0][0], []
    for burst in server.plan.bursts():
        at += burst.pause
        if at >= end:
            break
        if at >= begin:
            bursts.append((at - begin, burst))
        at += burst.gpu_seconds / burst.demand
    return bursts


# -- all answers -----------------------------------------------------------------------------------------------------


def answer(trace: Trace, goal: Goal, progress: Callable[[str], None] = lambda text: None) -> Answers:
    """Return all answers of a plan. Raises ValueError if there is no server with a GPU."""
    goal = replace(goal, templates=tuple(map(_without_models, goal.templates)))
    notes = list(trace.notes)
    progress("reading the servers")
    work = workload(trace, goal, notes)
    whole, static = counted(WHOLE, work, goal), counted(STATIC, work, goal)
    there = goal.gpus or whole.gpus or 1
    shares, culler = ShareRuns(goal, work, False), ShareRuns(goal, work, True)
    guess = max(1, math.ceil(sum(_size(plan.template) for plan in work.plans) / len(work.plans) * (whole.gpus or 1)))
    answers = [whole, static]
    replays = 0
    for way, runs in ((SHARES, shares), (CULLER, culler)):
        progress(f"searching for the number of GPUs: {way}")
        found, replay = _searched(runs, way, guess, progress)
        if way == SHARES:
            # with idle actions about as many as are held then, where capacity is plenty
            outcome, _ = culler.run(found.gpus or guess)
            guess = max(1, math.ceil(quantile(outcome.held, 0.99)))
        answers.append(found)
        replays += len(replay.delays) if replay is not None else 0
    for each in answers:
        progress(f"{plural(there, 'GPU')}: {each.way}")
        _fill(each, there, work, goal, {SHARES: shares, CULLER: culler}.get(each.way))
    busy_range = _range(trace, goal, work, answers[-1], progress)
    outcome, _ = culler.run(there, to_the_end=True)
    groups = [
        GroupAnswer(
            name, use.servers, work.reserved.get(name, 0.0), work.worked.get(name, 0.0), use.held,
            use.waited / max(1, use.servers),
        )
        for name, use in sorted(outcome.groups.items())
    ]  # fmt: skip
    return Answers(
        answers, groups, busy_range, notes, work.users, len(work.plans), work.horizon / 86400, work.began, replays
    )


def _places(way: str, work: PlannedWorkload, goal: Goal) -> tuple[list[tuple[float, float, int]], int]:
    """Return the servers as a way counts them, and the places of one GPU."""
    if way == WHOLE:
        return [(need.arrives, need.lasts, need.gpus) for need in work.needs], 1
    return [(need.arrives, need.lasts, need.parts) for need in work.needs], STATIC_PARTS


def counted(way: str, work: PlannedWorkload, goal: Goal) -> WayAnswer:
    """Return the answer for whole GPUs or static parts, counted from starts and stops."""
    places, parts = _places(way, work, goal)

    def meets(gpus: int) -> bool:
        return quantile(counted_waits(places, gpus * parts)) <= goal.wait_p95

    guess = math.ceil(max(counted_series(places, work.horizon), default=1.0) / parts)
    found = WayAnswer(way, smallest(meets, max(1, guess), most=max(1, len(places) * 64)))
    found.series = [used / parts for used in counted_series(places, work.horizon)]
    found.reserved = found.held = sum(found.series)
    if way == STATIC:
        found.slowdown = _slowdown_of_parts(work, goal)
    return found


def _slowdown_of_parts(work: PlannedWorkload, goal: Goal) -> float:
    """Return the time of GPU work in static parts by its time on a whole GPU: a part has its part of the speed."""
    took = alone = 0.0
    for plan, need in zip(work.plans, work.needs, strict=True):
        part = min(1.0, need.parts / STATIC_PARTS)
        for burst in plan.bursts():
            alone += burst.gpu_seconds / burst.demand
            took += burst.gpu_seconds / min(burst.demand, part)
    return took / alone if alone else 1.0


def _searched(
    runs: ShareRuns, way: str, guess: int, progress: Callable[[str], None]
) -> tuple[WayAnswer, Replayed | None]:
    """Return the smallest number of GPUs that meets both goals: first by the waits, then by the start delays."""

    def meets(gpus: int) -> bool:
        progress(f"searching for the number of GPUs: {way}, {gpus}")
        return runs.meets(gpus)

    most = sum(max(1, math.ceil(_size(plan.template))) for plan in runs.work.plans)
    least = max(math.ceil(_size(template)) for template in _used(runs.work.plans))
    gpus = smallest(meets, max(least, guess), least, most)
    found = WayAnswer(way, gpus)
    replay: Replayed | None = None
    while gpus is not None:
        progress(f"replaying GPU work: {way}, {gpus}")
        replay = runs.delays(gpus)
        found.gpus, found.slowdown = gpus, replay.slowdown
        found.start_delay_p95 = quantile(replay.delays) if replay.delays else None
        if (found.start_delay_p95 or 0.0) <= runs.goal.start_delay or gpus >= most:
            break
        gpus = min(most, max(gpus + 1, round(gpus * 1.15)))
    return found, replay


def _fill(found: WayAnswer, there: int, work: PlannedWorkload, goal: Goal, runs: ShareRuns | None) -> None:
    """Add the figures on the GPUs that there are, and the people whom they serve."""
    found.on_gpus = there
    if runs is None:
        places, parts = _places(found.way, work, goal)
        waits = counted_waits(places, there * parts)
        found.never = sum(
            math.isinf(wait) or need.arrives + wait > work.horizon for wait, need in zip(waits, work.needs, strict=True)
        )
        waits = [min(wait, work.horizon - need.arrives) for wait, need in zip(waits, work.needs, strict=True)]
    else:
        outcome, _ = runs.run(there, to_the_end=True)
        waits = list(outcome.waits)
        found.never, found.refused = outcome.never, outcome.refused
        found.reserved, found.held = outcome.use.reserved, outcome.use.held
        found.series = list(outcome.held)
    found.mean_wait = sum(waits) / max(1, len(waits))
    found.p95_wait = quantile(waits)
    found.people = _people(found, there, work, goal)


def _people(found: WayAnswer, there: int, work: PlannedWorkload, goal: Goal) -> int | None:
    """Return how many people the GPUs serve within the goal for waits, on the busiest days of the trace."""
    if found.gpus is None:
        return None
    # quotas are for the people that there are
    goal = replace(goal, quotas=None)
    begin = _busiest(work)
    end = begin + BUSIEST_DAYS * 86400
    chosen = [
        number for number, need in enumerate(work.needs) if need.arrives < end and need.arrives + need.lasts > begin
    ]
    users = sorted({work.needs[number].user for number in chosen})
    random.Random(f"people-{goal.seed}").shuffle(users)
    by_user: dict[str, list[int]] = defaultdict(list)
    for number in chosen:
        by_user[work.needs[number].user].append(number)

    def fails(people: int) -> bool:
        grown = [
            (number, copy)
            for copy in range(people // len(users) + 1)
            for user in users[: people - copy * len(users)]
            for number in by_user[user]
        ]
        return not _serves(found.way, grown, there, work, goal, begin, end)

    guess = round(len(users) * there / found.gpus)
    step = max(1, guess // 20)
    most = smallest(lambda steps: fails(steps * step), max(1, guess // step), most=guess * 3 // step + 4)
    if most is None:
        return None
    return round((most - 1) * step * work.users / len(users))


def _serves(
    way: str, grown: Sequence[tuple[int, int]], there: int, work: PlannedWorkload, goal: Goal, begin: float, end: float
) -> bool:
    """Return whether the goal for waits holds with copies of servers: (number, which copy).

    Copies come up to 30 minutes earlier or later.
    """
    chance = random.Random(f"copies-{goal.seed}")
    shifted: list[tuple[float, int, int]] = []
    for number, copy in grown:
        by = chance.uniform(-1800, 1800) if copy else 0.0
        shifted.append((max(0.0, work.needs[number].arrives - begin + by), number, copy))
    shifted.sort()
    if way in (WHOLE, STATIC):
        places, parts = _places(way, work, goal)
        waits = counted_waits(((at, places[number][1], places[number][2]) for at, number, _ in shifted), there * parts)
        return quantile(waits) <= goal.wait_p95
    below = _longest_merged(_used(work.plans), goal.quotas) if way == CULLER else math.inf
    plans = []
    for at, number, copy in shifted:
        plan = work.plans[number]
        bursts = partial(_same, tuple(merged(plan.bursts(), below)))
        suffix = f"+{copy}" if copy else ""
        plans.append(replace(plan, name=plan.name + suffix, user=plan.user + suffix, arrives=at, bursts=bursts))
    lateness = Lateness(goal.wait_p95, int(len(plans) * 0.05))
    outcome, _ = _simulated(
        goal, _used(plans), plans, end - begin, there, way == CULLER,
        lateness, work.on_shares,
    )  # fmt: skip
    return not outcome.gave_up and quantile(outcome.waits) <= goal.wait_p95


def _busiest(work: PlannedWorkload) -> float:
    """Return when the days begin in which the most whole GPUs are in use."""
    series = counted_series(((need.arrives, need.lasts, need.gpus) for need in work.needs), work.horizon)
    length = BUSIEST_DAYS * 24
    sums = [sum(series[begin : begin + length]) for begin in range(0, max(1, len(series) - length + 1), 24)]
    return max(range(len(sums)), key=sums.__getitem__) * 86400.0


def _range(
    trace: Trace, goal: Goal, work: PlannedWorkload, middle: WayAnswer, progress: Callable[[str], None]
) -> list[tuple[float, int | None]]:
    """Return the GPUs with shares and idle actions for the other assumed busy shares."""
    if work.busy is None:
        return []
    needed = [(work.busy, middle.gpus)]
    for busy in (BUSY_SHARES[0], BUSY_SHARES[-1]):
        progress(f"assuming GPU work for {busy:.0%} of the time")
        runs = ShareRuns(goal, workload(trace, goal, [], busy), True)
        found, _ = _searched(runs, CULLER, middle.gpus or 1, progress)
        needed.append((busy, found.gpus))
    return sorted(needed)
