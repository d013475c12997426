"""GPUs that are shared, or reserved, by notebook servers in virtual time; for `benchmarks.idleness`.

The ledger, the placement strategy, the arbiters, the idle policy and the choice of the sessions that a waiting spawn
needs are the product's. The GPUs are those of `gpushare_spawner.arbiter.replay`. Nothing else is modelled: neither the
start of a server nor CPU and host memory. Servers stay until the end of the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_spawner.arbiter.replay import VirtualClock, VirtualGpu, VirtualProcess
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.idle.policy import decide
from gpushare_spawner.idle.use import Observation, RecentUse
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.request import PlacementRequest, workload_of
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.service.culler.actions import notice_of
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.culler.pressure import candidates, needed
from gpushare_spawner.service.hub.client import HubServer

SETTINGS = CullerSettings()
GPUS_OF_NODE = 8
HOUR = 3600.0


@dataclass(frozen=True)
class Habits:
    """What the users of all sessions do. Each function draws from the session's own random numbers."""

    think: Callable[[random.Random], float]
    """Seconds between two cells."""
    work: Callable[[random.Random], float]
    """GPU seconds of a cell, alone on a whole GPU."""
    memory: Callable[[random.Random], int]
    """Bytes that a session's kernel uses."""


@dataclass(frozen=True)
class Sharing:
    """A way to offer GPUs to sessions."""

    template: Template
    """Its `idle` is the policy."""
    slices: int = 1
    """Parts into which each GPU is divided for good, in memory and speed; a session has a whole part."""


@dataclass
class _Session:
    kernel: VirtualProcess
    chance: random.Random
    arrived: float
    known: SessionReport | None = None
    """None: its server waits."""
    started: float = math.inf
    idle_since: float = 0.0
    lent_since: float = 0.0
    decided: int = 0
    """Counts decisions, so that a look that was planned for one is not taken after another."""

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def report(self) -> SessionReport:
        assert self.known is not None, "the server runs"
        return self.known

    def change(self, **update: object) -> None:
        """Change its agent's report."""
        self.known = self.report.model_copy(update=update)


@dataclass(frozen=True)
class Outcome:
    """What came of one run. GPU-hours are those of whole GPUs."""

    waits: tuple[float, ...]
    """Seconds that each server waited for capacity; one that still waits counts with its wait so far."""
    never: int
    """Servers that had none at the end."""
    delays: tuple[float, ...]
    """Seconds from the submission of each cell until its first kernel could run."""
    servers_per_gpu: float
    """That ran, on average over the run."""
    reserved: float
    """GPU-hours that the templates promised to servers while these ran."""
    delivered: float
    """GPU-hours for which cells ran."""
    idle: float
    """GPU-hours of `reserved` in which the session ran no cell."""
    recovered: float
    """GPU-hours of `idle` that other sessions could have: the share was downgraded or released."""


@dataclass
class Cluster:
    """GPUs, their sessions and the service."""

    gpus: int
    memory: int
    """Bytes, of one GPU."""
    bandwidth: float
    """Bytes per second between a GPU and the host, each way."""
    sharing: Sharing
    habits: Habits
    settings: ArbiterSettings
    seed: int
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        slices = self.sharing.slices
        cards = [
            GpuReport(index=number % GPUS_OF_NODE, uuid=f"GPU-{number:03}", model="A100", memory_bytes=self.memory)
            for number in range(self.gpus * slices)
        ]
        self._nodes = {
            f"node-{first // GPUS_OF_NODE:02}": tuple(cards[first : first + GPUS_OF_NODE])
            for first in range(0, len(cards), GPUS_OF_NODE)
        }
        self._node_of = {card.uuid: node for node, on_node in self._nodes.items() for card in on_node}
        self._ledger = Ledger()
        for node, on_node in self._nodes.items():
            self._ledger.put_node(node, on_node)
        self._devices = {
            card.uuid: VirtualGpu(self.clock, self.memory // slices, self.bandwidth, self.settings) for card in cards
        }
        share = self.sharing.template.share
        assert share is not None, "a share of one GPU"
        self._units = share.units
        self._request = PlacementRequest(share, template=self.sharing.template.name)
        self._strategy = StrandingAwareFgd(workload_of([(self._request.demand, 1.0)]))
        self._sessions: list[_Session] = []
        self._running: dict[str, _Session] = {}
        self._queue: list[_Session] = []
        self._changed: dict[str, _Session] = {}
        """Sessions on which the service has not decided since they changed."""
        self._needed: Mapping[str, int] = {}
        self._weights: dict[str, int] = {}
        self._idle = 0.0
        self._recovered = 0.0

    def run(self, arrivals: Sequence[float], horizon: float) -> Outcome:
        """Let users start servers at these instants, and the time go by."""
        for number, arrived in enumerate(arrivals):
            name = f"session-{number:03}"
            chance = random.Random(f"{self.seed}-{number}")
            kernel = VirtualProcess(name, self.habits.memory(chance))
            session = _Session(kernel, chance, arrived)
            self._sessions.append(session)
            self.clock.at(arrived, lambda session=session: self._arrive(session))  # type: ignore[misc]
        self.clock.after(SETTINGS.cull_every, self._round)
        self.clock.run(horizon)
        return self._outcome(horizon)

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _arrive(self, session: _Session) -> None:
        self._queue.append(session)
        self._place()

    def _place(self) -> None:
        """Start the servers for which there is capacity, in order."""
        while self._queue:
            placement = self._ledger.place(self._request, self._strategy)
            if placement is None:
                return
            self._start(self._queue.pop(0), placement.gpus[0], placement.borrowed)

    def _start(self, session: _Session, uuid: str, borrowed: int) -> None:
        now, kernel = self.clock.now, session.kernel
        session.known = SessionReport(
            id=session.name,
            user=session.name,
            template=self.sharing.template.name,
            gpus=(uuid,),
            share_units=self._units,
            borrowed_units=borrowed,
            tier_since=now,
            effective_units=self._units,
            guaranteed_units=self._units,
            opened_at=now,
        )
        session.started = session.idle_since = session.lent_since = now
        self._running[session.name] = session
        self._enter(session.report)
        self._devices[uuid].session(session.name, self._units)
        self._devices[uuid].connect(kernel)
        kernel.done = lambda: self._pause(session)
        self._reweigh(uuid)
        self._think(session)

    def _enter(self, report: SessionReport) -> None:
        allocation = Allocation.of(report)
        assert allocation is not None, "the session has a share"
        self._ledger.change([allocation])

    # -- users -------------------------------------------------------------------------------------------------------

    def _think(self, session: _Session) -> None:
        self._changed[session.name] = session
        self.clock.after(self.habits.think(session.chance), lambda: self._work(session))

    def _work(self, session: _Session) -> None:
        """A user runs a cell. The agent withdraws the notice and restores the share at once."""
        self._account(session)
        self._change_tier(session, Tier.ACTIVE, self._units)
        session.change(gpu_busy=True, notice=None)
        seconds = self.habits.work(session.chance) * self.sharing.slices
        self._devices[session.report.gpus[0]].submit(session.kernel, seconds)

    def _pause(self, session: _Session) -> None:
        now = self.clock.now
        session.idle_since = session.lent_since = now
        session.change(gpu_busy=False, last_gpu_activity=now)
        self._think(session)

    # -- the agents --------------------------------------------------------------------------------------------------

    def _change_tier(self, session: _Session, tier: Tier, units: int) -> None:
        report = session.report
        if tier is report.tier:
            return
        session.change(tier=tier, tier_since=self.clock.now, effective_units=units)
        self._enter(session.report)
        self._reweigh(report.gpus[0])

    def _reweigh(self, uuid: str) -> None:
        """Tell the arbiter what sessions are guaranteed on a GPU now."""
        for name in self._devices[uuid].processes:
            lends = self._ledger.allocations[name].effective_units == 0
            weight = 0 if lends else max(1, self._ledger.guaranteed(name))
            if weight != self._weights.get(name):
                self._weights[name] = weight
                self._devices[uuid].weigh(name, weight)

    def _account(self, session: _Session) -> None:
        """Count the idle time of a session up to now, and what it lent."""
        now = self.clock.now
        if not session.report.gpu_busy:
            self._idle += self._units * (now - session.idle_since)
            self._recovered += (self._units - session.report.effective_units) * (now - session.lent_since)
            session.idle_since = session.lent_since = now

    # -- the service -------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """One round of the culler: on the sessions that have changed, and those that a waiting spawn needs now."""
        before, self._needed = self._needed, self._needed_now()
        for name in before.keys() | self._needed.keys():
            if before.get(name) != self._needed.get(name):
                self._changed[name] = self._running[name]
        changed, self._changed = self._changed, {}
        for session in changed.values():
            self._decide(session)
        self.clock.after(SETTINGS.cull_every, self._round)

    def _needed_now(self) -> Mapping[str, int]:
        template = self.sharing.template
        if not self._queue or template.idle.when != "pressure":
            return {}
        templates, now = {template.name: template}, self.clock.now
        on_node: dict[str, list[SessionReport]] = {node: [] for node in self._nodes}
        for session in self._running.values():
            on_node[self._node_of[session.report.gpus[0]]].append(session.report)
        reports = [
            Report(node=node, published_at=now, gpus=self._nodes[node], sessions=tuple(sessions))
            for node, sessions in on_node.items()
        ]
        pending = [HubServer(one.name, "", False, "spawn", one.arrived, None, template.name) for one in self._queue]
        return needed(candidates(reports, templates, now, RecentUse()), reports, pending, templates)

    def _decide(self, session: _Session) -> None:
        idle = self.sharing.template.idle
        decision = decide(
            idle,
            Observation.of(session.report),
            self.clock.now,
            waits_for_need=idle.when == "pressure",
            units_left=self._needed.get(session.name),
        )
        session.decided += 1
        if decision.no_action is None:
            self._account(session)
            self._change_tier(session, decision.tier, decision.units)
            session.change(notice=None)
            self._changed[session.name] = session
            self._place()
            return
        session.change(notice=None if decision.notice is None else notice_of(decision.notice, session.report.share))
        if decision.decide_again_at is not None:
            number = session.decided
            self.clock.at(
                decision.decide_again_at, lambda: self._decide(session) if session.decided == number else None
            )

    # -- figures -----------------------------------------------------------------------------------------------------

    def _outcome(self, horizon: float) -> Outcome:
        for one in self._running.values():
            self._account(one)
        kernels = [one.kernel for one in self._sessions]
        delays = [delay for kernel in kernels for _, delay in kernel.delays]
        delays += [horizon - kernel.submitted for kernel in kernels if kernel.wants and not kernel.started]
        started = [one for one in self._sessions if one.known is not None]
        seconds = sum(horizon - one.started for one in started)
        whole = UNITS_PER_GPU * self.sharing.slices * HOUR
        return Outcome(
            waits=tuple(min(one.started, horizon) - one.arrived for one in self._sessions),
            never=len(self._sessions) - len(started),
            delays=tuple(delays),
            servers_per_gpu=seconds / horizon / self.gpus,
            reserved=seconds * self._units / whole,
            delivered=sum(kernel.gpu_seconds for kernel in kernels) / self.sharing.slices / HOUR,
            idle=self._idle / whole,
            recovered=self._recovered / whole,
        )
