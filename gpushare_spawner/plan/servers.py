"""A server as it was recorded, as it is planned, and as it runs in virtual time, with its template's idle actions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpushare_spawner.arbiter.replay import VirtualProcess
from gpushare_spawner.idle.policy import decide
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.service.culler.actions import notice_of

GIB = 2**30
MOST_PROBLEMS = 20
"""Problems that are named; the others are only counted."""
LONGEST_STEPS = 400 * 86400.0
"""Seconds of idleness after which the idle policy is not asked for further actions."""


class Work(NamedTuple):
    """GPU work of a user. Instants in seconds since the epoch."""

    start: float
    end: float
    demand: float = 1.0
    """Fraction of the GPU that it used."""


@dataclass
class RecordedServer:
    """A server that ran. Instants in seconds since the epoch."""

    user: str
    server: str
    start: float
    """When the user wanted it."""
    end: float | None
    """None: it has not stopped."""
    gpus: float | None = None
    """None: unknown."""
    memory: int | None = None
    """Bytes of GPU memory; None: unknown."""
    group: str = ""
    template: str = ""
    wait: float = 0.0
    """Seconds of its start, waits for a GPU included."""
    work: list[Work] | None = None
    """None: unknown."""
    source: str = ""
    """Kind of the source."""


@dataclass
class Trace:
    """What the sources say."""

    servers: list[RecordedServer] = field(default_factory=list)
    work: dict[str, list[Work]] = field(default_factory=lambda: defaultdict(list))
    """GPU work by user, which no source gives to a server."""
    groups: dict[str, str] = field(default_factory=dict)
    """The first group of each user by name."""
    notes: list[str] = field(default_factory=list)
    """What is missing and what was assumed in its place, as sentences."""
    problems: list[str] = field(default_factory=list)
    """Wrong rows and files, at most `MOST_PROBLEMS`."""
    problem_count: int = 0
    naive_times: int = 0
    """Times without a time zone."""
    has_work: bool = False
    """Whether any source says when GPUs worked."""
    on_shares: bool = False
    """Whether GPU work was measured on shared GPUs, beside other sessions."""
    now: float = 0.0
    """The latest instant in the sources: servers without an end have run until then."""

    def problem(self, where: str, text: str) -> None:
        """Record a wrong row or file."""
        self.problem_count += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{where}: {text}")


class PlannedBurst(NamedTuple):
    """GPU work of a session."""

    pause: float
    """Seconds since the end of the session's last burst, or since the server's start."""
    gpu_seconds: float
    """On each GPU of the session, alone."""
    demand: float = 1.0
    """Fraction of the GPU's time that the work uses at most."""
    quiet: float = 0.0
    """Seconds of short pauses within the burst, see `merged`."""


def merged(bursts: Iterable[PlannedBurst], below: float) -> list[PlannedBurst]:
    """Join bursts with shorter pauses than `below` (seconds), for runs without arbiters.

    Exact for tiers and waits if no idle action is due after so short a pause.
    """
    joined: list[PlannedBurst] = []
    for burst in bursts:
        if not joined or burst.pause >= below:
            joined.append(burst)
            continue
        last = joined[-1]
        seconds = last.gpu_seconds + burst.gpu_seconds
        lasts = last.gpu_seconds / last.demand + burst.pause + burst.gpu_seconds / burst.demand
        joined[-1] = PlannedBurst(last.pause, seconds, seconds / lasts, last.quiet + burst.pause + burst.quiet)
    return joined


@dataclass(frozen=True, eq=False)
class ServerPlan:
    """A server that a user starts. Instants and durations in seconds."""

    name: str
    """Unique: the session's id."""
    user: str
    template: Template
    arrives: float
    bursts: Callable[[], Iterable[PlannedBurst]] = tuple
    """Returns the GPU work. Work that has not ended when the server stops is cut."""
    lasts: float = math.inf
    """Seconds from the placement until the server is stopped."""
    memory: int = 0
    """Bytes of GPU memory that the server uses on each GPU."""
    quota: str = ""
    """Account that is charged, see `quota.Account`; empty: none."""
    group: str = ""


@dataclass(eq=False)
class Running:
    """A server, while it waits for capacity and while it runs."""

    plan: ServerPlan
    work: Iterator[PlannedBurst]
    arrived: float
    lasts: float
    started: float = math.inf
    gpus: tuple[str, ...] = ()
    borrowed: int = 0
    tier: Tier = Tier.ACTIVE
    tier_since: float = 0.0
    units: int = 0
    """Effective units on each GPU."""
    holds: float = 0.0
    """GPUs that the session holds in its tier."""
    busy: bool = False
    busy_since: float = 0.0
    burst: PlannedBurst | None = None
    """The burst in progress, without arbiters."""
    burst_lasts: float = 0.0
    """Seconds of the burst in progress."""
    last_work: float | None = None
    used_at: float | None = None
    """End of the last work that counts as use of the share."""
    stopped: bool = False
    """The culler has stopped it."""
    yields: bool = False
    notice: Notice | None = None
    counted_to: float = 0.0
    worked: float = 0.0
    """Seconds with GPU work since the server's start."""
    serial: int = 0
    """Counts changes of the GPU work, so that an action planned before a change does nothing after it."""
    processes: list[VirtualProcess] = field(default_factory=list)
    unfinished: int = 0
    """GPUs on which the burst in progress has not ended."""
    tiers: list[tuple[float, int]] = field(default_factory=list)
    """(instant, effective units) of each change."""

    def __post_init__(self) -> None:
        share = self.plan.template.share
        assert share is not None, "a server without a GPU needs no plan"
        self.share = share

    def set_tier(self, tier: Tier, units: int, now: float) -> None:
        """Change the tier, with so many effective units on each GPU."""
        self.tier, self.units, self.tier_since = tier, units, now
        self.holds = sum(min(here, units) for here in self.share.each) / UNITS_PER_GPU
        self.tiers.append((now, units))

    def allocation(self) -> Allocation:
        """Return its allocation as the ledger counts it."""
        template = self.plan.template
        return Allocation(
            self.plan.name,
            self.gpus,
            self.share.units,
            self.borrowed,
            self.units,
            self.started,
            self.yields,
            user=self.plan.user,
            quota=self.plan.quota,
            template=template.name,
            neighbours=template.neighbours,
            last_units=self.share.last_units,
        )

    def observation(self) -> Observation:
        """Return what its agent reports for the idle policy."""
        return Observation(
            self.share,
            self.tier,
            self.tier_since,
            self.units,
            self.started,
            self.busy,
            last_gpu_activity=self.last_work,
            used_at=self.used_at,
            # the hub sees activity for as long as there is GPU work
            hub_last_activity=self.started if self.last_work is None else self.last_work,
            yields=self.yields,
            notice=self.notice,
        )

    def report(self, guaranteed: int) -> SessionReport:
        """Return the session as its agent reports it."""
        held = self.allocation()
        return SessionReport(
            id=self.plan.name,
            user=self.plan.user,
            template=self.plan.template.name,
            quota=self.plan.quota,
            gpus=self.gpus,
            share_units=held.share_units,
            last_units=held.last_units,
            borrowed_units=held.borrowed_units,
            tier=self.tier,
            tier_since=self.tier_since,
            effective_units=self.units,
            guaranteed_units=guaranteed,
            yields=self.yields,
            opened_at=self.started,
            gpu_busy=self.busy,
            last_gpu_activity=self.last_work,
            gpu_seconds=self.worked,
            notice=self.notice,
            neighbours=held.neighbours,
        )


class IdleStep(NamedTuple):
    """An idle action of a template."""

    after: float
    """Seconds since the last use of the GPU."""
    tier: Tier
    units: int


def idle_steps(template: Template, has_worked: bool = True) -> list[IdleStep]:
    """Return the idle actions on a session that stays idle, by asking the idle policy as the culler does."""
    share = template.share
    if share is None:
        return []
    steps: list[IdleStep] = []
    last = 0.0 if has_worked else None
    tier, units, since, now = Tier.ACTIVE, share.units, 0.0, 0.0
    notice: Notice | None = None
    while now < LONGEST_STEPS and tier is not Tier.STOPPED:
        seen = Observation(share, tier, since, units, 0.0, last_gpu_activity=last, hub_last_activity=0.0, notice=notice)
        decision = decide(template.idle, seen, now, only_if_needed=template.idle.when == "pressure")
        if decision.no_action is None:
            steps.append(IdleStep(now, decision.tier, decision.units))
            tier, units, since, notice = decision.tier, decision.units, now, None
            continue
        notice = None if decision.notice is None else notice_of(decision.notice, share)
        if decision.decide_again_at is None or decision.decide_again_at <= now:
            break
        now = decision.decide_again_at
    return steps
