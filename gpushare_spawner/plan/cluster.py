"""Notebook servers on shared GPUs in virtual time, with the product's queue, quotas, placement, idle policy, arbiters.

`ServerPlan` says when a server is started and which GPU work it does; `PlannedCluster` runs the servers; `Outcome` is
the result. With `ArbiterSettings` each GPU has its arbiter, which delays GPU work; without, work begins at once,
which is many times faster.
Neither the start of a server nor CPU and host memory of nodes is modelled. `answers` searches for the number of GPUs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from gpushare_spawner.arbiter.replay import VirtualClock, VirtualGpu, VirtualProcess
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.idle.policy import Decision, decide
from gpushare_spawner.idle.use import RecentUse, use_rule
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, IdleCause, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.node import Allocation, convert_borrowed
from gpushare_spawner.placement.request import workload_of
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.plan.servers import IdleStep, PlannedBurst, Running, ServerPlan, idle_steps
from gpushare_spawner.service.culler.actions import notice_of
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.culler.pressure import NO_PRESSURE, Pressure, candidates, needed, pressure
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import LoopBreaks, PlacementCheck, Placer, SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.quotas import QueueQuotas
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot, SpawnRequest

HOUR = 3600.0
GPUS_OF_NODE = 8
BANDWIDTH = 25e9
"""Bytes per second between a GPU and its host, each way: PCIe 4.0 x16 as measured by `gpushare doctor --gpu`."""
ROUND_SECONDS = CullerSettings().cull_every
log = logging.getLogger(__name__)


class Lateness(NamedTuple):
    """Ends a run early, once it cannot meet a goal."""

    after: float
    """Seconds of a wait from which a spawn is late."""
    allowed: int
    """Spawns that may be late."""


@dataclass
class GroupUse:
    """GPU-hours of whole GPUs."""

    reserved: float = 0.0
    """Promised by the templates to servers while these ran."""
    held: float = 0.0
    """The part of `reserved` that idle actions had not taken."""
    delivered: float = 0.0
    """Of GPU work."""
    idle: float = 0.0
    """The part of `reserved` in which the session had no GPU work."""
    recovered: float = 0.0
    """The part of `idle` that others could have: the share was downgraded or released."""
    servers: int = 0
    waited: float = 0.0
    """Seconds that all its spawns together waited for capacity."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run. GPU-hours are those of whole GPUs."""

    waits: tuple[float, ...]
    """Seconds that each spawn waited for capacity; a spawn that still waits counts with its wait so far."""
    never: int
    """Spawns that had no capacity at the end."""
    refused: int
    """Spawns that a limit of a quota or template refused."""
    delays: tuple[float, ...]
    """Seconds from the submission of GPU work until it could run, of each burst; empty without arbiters."""
    use: GroupUse
    groups: Mapping[str, GroupUse]
    server_seconds: float
    held: Sequence[float] = ()
    """GPUs held in each hour, on average."""
    running: Sequence[float] = ()
    """Servers that ran in each hour, on average."""
    waiting: Sequence[float] = ()
    """Spawns that waited in each hour, on average."""
    gave_up: bool = False
    """The run ended early: more spawns than allowed had waited too long."""


class HourlyMean:
    """The mean of an amount in each hour, from its changes."""

    def __init__(self) -> None:
        self._areas = array("d")
        self._now = 0.0
        self._level = 0.0

    def change(self, now: float, by: float) -> None:
        """Change the amount at an instant that is not before the last one. Seconds."""
        self.advance(now)
        self._level += by

    def advance(self, now: float) -> None:
        """Count the amount up to an instant."""
        while self._now < now:
            hour = int(self._now / HOUR)
            while len(self._areas) <= hour:
                self._areas.append(0.0)
            until = min(now, (hour + 1) * HOUR)
            self._areas[hour] += self._level * (until - self._now)
            self._now = until

    def means(self, horizon: float) -> list[float]:
        """Return the means of all hours up to an instant."""
        self.advance(horizon)
        return [area / min(HOUR, max(1.0, horizon - hour * HOUR)) for hour, area in enumerate(self._areas)]


class PlannedCluster:
    """GPUs, the queue of a hub, and its service. `memory`: bytes of each GPU; `arbiter`: None for no arbiters."""

    def __init__(
        self,
        gpus: int,
        memory: int,
        templates: Iterable[Template],
        quotas: Quotas | None = None,
        arbiter: ArbiterSettings | None = None,
        idle_actions: bool = True,
        round_seconds: float = ROUND_SECONDS,
        slows: bool = True,
    ) -> None:
        """Create the cluster. `slows`: whether bursts slow each other without arbiters.

        They must not if their times were measured beside each other.
        """
        self.clock = VirtualClock()
        self.templates = {template.name: template for template in templates}
        self.quotas = quotas
        self.gpus = gpus
        self._idle_actions = idle_actions
        self._round_seconds = round_seconds
        self.nodes = _nodes(gpus, memory)
        uuids = [card.uuid for on_node in self.nodes.values() for card in on_node]
        self._feed, inventory = LedgerFeed(), GpuInventory()
        for node, on_node in self.nodes.items():
            self._feed.report(Report(node=node, published_at=0.0, gpus=on_node))
            inventory.put(node, on_node)
        self._ledger = self._feed.ledger
        self._snapshot = GpuSnapshot(inventory)
        self._devices: dict[str, VirtualGpu] = {}
        if arbiter is not None:
            self._devices = {uuid: VirtualGpu(self.clock, memory, BANDWIDTH, arbiter) for uuid in uuids}
        demands = [self._snapshot.request(template).demand for template in self.templates.values()]
        self._strategy = StrandingAwareFgd(workload_of((demand, 1.0) for demand in demands))
        self._steps: dict[tuple[str, bool], list[IdleStep]] = {}
        self._least_use = {name: use_rule(template.idle).min_use for name, template in self.templates.items()}
        self._under_pressure = any(template.idle.when == "pressure" for template in self.templates.values())
        ranks = {template.rank for template in self.templates.values()}
        self._has_order = quotas is not None or len(ranks) > 1
        """Whether spawns can be served in another order than they came."""
        self._slows = slows
        self._load = dict.fromkeys(uuids, 0.0)
        """Demand of the bursts on each GPU, without arbiters."""
        self._weights: dict[str, int] = {}
        self._queue = SpawnQueue(10**9)
        self._accounts = QueueQuotas(
            self._ledger, log, lambda: quotas, lambda: self.clock.now, templates=lambda: tuple(self.templates.values())
        )
        self.running: dict[str, Running] = {}
        self._waiting: dict[int, Running] = {}
        """Servers that wait, by the identity of their tickets."""
        self._changed: dict[str, Allocation] = {}
        """Allocations that the ledger does not have yet."""
        self._round_at = math.inf
        self.servers: list[Running] = []
        self._waits: list[float] = []
        self._delays: list[float] = []
        self._per_user: Counter[tuple[str, str]] = Counter()
        """Servers that wait or run, by user and template."""
        self._refused = 0
        self._use: defaultdict[str, GroupUse] = defaultdict(GroupUse)
        self._server_seconds = 0.0
        self._held, self._count, self._in_queue = HourlyMean(), HourlyMean(), HourlyMean()
        self._lateness: Lateness | None = None
        self._late = 0
        self.gave_up = False

    def run(self, plans: Iterable[ServerPlan], horizon: float, lateness: Lateness | None = None) -> Outcome:
        """Let the servers come, and the time go by until `horizon` (seconds), or until too many spawns are late."""
        self._lateness = lateness
        for plan in plans:
            self.clock.at(plan.arrives, partial(self._arrive_first, plan))
        asyncio.run(self._run(horizon))
        return self._outcome(horizon)

    async def _run(self, horizon: float) -> None:
        # tickets need an event loop; no time passes in it
        self.clock.run(horizon)

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _arrive_first(self, plan: ServerPlan) -> None:
        server = Running(plan, iter(plan.bursts()), plan.arrives, plan.lasts)
        self.servers.append(server)
        self._use[plan.group].servers += 1
        self._arrive(server)

    def _arrive(self, server: Running) -> None:
        if self.gave_up:
            return
        plan, now = server.plan, self.clock.now
        server.arrived = now
        per_user = plan.template.limits.per_user
        if per_user is not None and self._per_user[plan.user, plan.template.name] >= per_user:
            self._refused += 1
            return
        self._per_user[plan.user, plan.template.name] += 1
        tenant = Tenant(plan.user, plan.name, quota=plan.quota)
        ticket = self._queue.join(SpawnRequest(tenant, plan.template), now)
        self._waiting[id(ticket)] = server
        self._in_queue.change(now, 1)
        self._pass()

    def _pass(self) -> None:
        """One pass over the queue, as `spawner.queue.reservations` makes it."""
        if not len(self._queue) or self.gave_up:
            return
        if self._too_late():
            self.gave_up = True
            return
        self._flush()
        if self.quotas is not None:
            self._accounts.bring_up_to_date(self.gpus * UNITS_PER_GPU)
        if len(self._queue) > 1 and self._has_order:
            self._queue.arrange(self._accounts.order(self._queue))
        now = self.clock.now
        check = PlacementCheck(self._snapshot, self._ledger, self._strategy, now=now, monotonic=now)
        placer, breaks = Placer(check, self._feed, self._queue, "the plan"), LoopBreaks(math.inf)
        in_vain: set[str] = set()
        # a hold is for spawns of other templates: those of one template come first as they arrived
        holds = len({ticket.request.template.name for ticket in self._queue}) > 1
        for ticket in self._queue:
            # of the spawns that wait for a template only the first one holds GPUs
            if ticket.request.template.name not in in_vain and not self._place(ticket, placer, check):
                in_vain.add(ticket.request.template.name)
                if holds:
                    _run_now(placer.hold(ticket, breaks))
        if self.quotas is not None:
            self._accounts.note_use()
        if len(self._queue) and self._needs_rounds:
            self._plan_round(now)

    def _too_late(self) -> bool:
        if self._lateness is None or self._late + len(self._queue) <= self._lateness.allowed:
            return False
        since = self.clock.now - self._lateness.after
        return self._late + sum(ticket.joined < since for ticket in self._queue) > self._lateness.allowed

    def _place(self, ticket: Ticket, placer: Placer, check: PlacementCheck) -> bool:
        """Place a spawn or refuse it. Return whether it has left the queue."""
        request = ticket.request
        admission = self._accounts.admission(request.tenant, request.template) if self.quotas is not None else None
        if admission is not None and admission.refused is not None:
            self._refuse(self._leave_queue(ticket))
            return True
        if ticket.ahead is not None and self._ledger.place(check.request_of(ticket), self._strategy) is None:
            return False  # the same answer as below, without the reason as a sentence for its user
        placement = placer.place(ticket)
        if placement is None and not ticket.result.done():
            return False
        server = self._leave_queue(ticket)
        if placement is None:
            self._refuse(server)
            return True
        self._start(server, placement)
        if admission is not None:
            self._accounts.admitted(admission)
        return True

    def _leave_queue(self, ticket: Ticket) -> Running:
        self._queue.leave(ticket)
        self._feed.hold(ticket.hold_name, None)
        self._in_queue.change(self.clock.now, -1)
        return self._waiting.pop(id(ticket))

    def _refuse(self, server: Running) -> None:
        self._refused += 1
        self._per_user[server.plan.user, server.plan.template.name] -= 1

    def _start(self, server: Running, placement: Placement) -> None:
        now, name = self.clock.now, server.plan.name
        self._waits.append(now - server.arrived)
        self._use[server.plan.group].waited += now - server.arrived
        if self._lateness is not None and now - server.arrived > self._lateness.after:
            self._late += 1
        server.started = server.counted_to = now
        server.gpus, server.borrowed = placement.gpus, placement.borrowed
        server.set_tier(Tier.ACTIVE, server.share.units, now)
        server.notice, server.yields, server.stopped = None, False, False
        server.last_work = server.used_at = None
        server.worked = 0.0
        server.serial += 1
        self.running[name] = server
        self._feed.put(EntrySource.SEEN, server.allocation())
        self._held.change(now, server.holds)
        self._count.change(now, 1)
        server.processes = []
        for uuid in server.gpus if self._devices else ():
            device = self._devices[uuid]
            device.session(name, server.share.units)
            process = VirtualProcess(name, server.plan.memory, done=partial(self._device_done, server))
            device.connect(process)
            server.processes.append(process)
        self._reweigh(server.gpus)
        if math.isfinite(server.lasts):
            self.clock.after(server.lasts, partial(self._stop, server, server.serial, now))
        self._next_burst(server)

    def _stop(self, server: Running, serial: int, started: float) -> None:
        """Stop a server that has lasted as long as planned."""
        if server.started == started and self.running.get(server.plan.name) is server:
            self._end(server)

    def _end(self, server: Running) -> None:
        now, name = self.clock.now, server.plan.name
        self._count_use(server)
        self._held.change(now, -server.holds)
        self._count.change(now, -1)
        self._server_seconds += now - server.started
        server.tiers.append((now, -1))
        server.busy = False
        server.serial += 1
        self._per_user[server.plan.user, server.plan.template.name] -= 1
        del self.running[name]
        self._changed.pop(name, None)
        self._weights.pop(name, None)
        self._count_work(server)
        for uuid in server.gpus if self._devices else ():
            self._devices[uuid].leave(name)
        gpus = server.gpus
        self._feed.drop(EntrySource.SEEN, name)
        self._convert_borrowed(gpus)
        self._reweigh(gpus)
        self._pass()

    def _count_work(self, server: Running) -> None:
        """Count the work of a server that ends, and its start delays."""
        self._count_burst(server)
        for process, uuid in zip(server.processes, server.gpus, strict=bool(self._devices)):
            self._devices[uuid].settle()
            self._use[server.plan.group].delivered += process.gpu_seconds / HOUR
            self._delays += [delay for _, delay in process.delays]
            if process.wants and not process.started:
                self._delays.append(self.clock.now - process.submitted)

    def _count_burst(self, server: Running) -> None:
        """Count a burst that ends, or its part up to now."""
        burst, server.burst = server.burst, None
        if burst is not None:
            part = min(1.0, (self.clock.now - server.busy_since) / server.burst_lasts)
            for uuid in server.gpus:
                self._load[uuid] -= burst.demand
            use = self._use[server.plan.group]
            use.delivered += part * burst.gpu_seconds * len(server.gpus) / HOUR
            use.idle += part * server.share.fraction * burst.quiet / HOUR

    def _convert_borrowed(self, gpus: Iterable[str]) -> None:
        """Turn borrowed units without an owner into owned ones, as the agent does."""
        here = {name for uuid in gpus for name in self._ledger.sessions_on(uuid)}
        if not any(self.running[name].borrowed for name in here):
            return
        self._flush()
        concerned = [self._ledger.allocations[name] for name in here]
        capacities = {uuid: UNITS_PER_GPU for allocation in concerned for uuid in allocation.gpus}
        if len(capacities) > len(set(gpus)):
            concerned = list(self._ledger.allocations.values())
            capacities = dict.fromkeys(self._ledger.capacity.gpus, UNITS_PER_GPU)
        for name, allocation in convert_borrowed(capacities, concerned).items():
            self.running[name].borrowed = max(here.borrowed_units for here in allocation.each)
            self._enter(self.running[name])

    def _enter(self, server: Running) -> None:
        """Tell the ledger a session's units, at the latest before it is read."""
        self._changed[server.plan.name] = server.allocation()
        if self._devices:
            self._flush()

    def _flush(self) -> None:
        if self._changed:
            self._feed.put(EntrySource.SEEN, *self._changed.values())
            self._changed.clear()

    # -- users -------------------------------------------------------------------------------------------------------

    def _next_burst(self, server: Running) -> None:
        """Plan the session's next burst, and the idle actions until then."""
        burst = next(server.work, None)
        serial = server.serial
        if burst is not None:
            self.clock.after(burst.pause, partial(self._work, server, serial, burst))
        self._plan_idle_actions(server, burst.pause if burst is not None else math.inf)

    def _work(self, server: Running, serial: int, burst: PlannedBurst) -> None:
        if self.running.get(server.plan.name) is not server:
            # the culler had stopped the server: the user starts it again for the rest of its time
            if server.stopped and serial == server.serial - 1 and server.lasts > 0:
                server.work = _first(burst._replace(pause=0.0), server.work)
                self._arrive(server)
            return
        self._count_use(server)
        server.busy, server.busy_since, server.notice = True, self.clock.now, None
        server.serial += 1
        least, serial = self._least_use[server.plan.template.name], server.serial
        if server.tier is not Tier.ACTIVE:
            if self._devices:
                self.clock.after(least, partial(self._restore, server, serial))
            elif burst.gpu_seconds / burst.demand >= least:
                self._restore(server, serial)
        if not self._devices:
            server.burst, server.burst_lasts = burst, burst.gpu_seconds / burst.demand * self._slower(server, burst)
            self.clock.after(server.burst_lasts, partial(self._done, server, serial))
            return
        server.unfinished = len(server.processes)
        for process, uuid in zip(server.processes, server.gpus, strict=True):
            self._devices[uuid].submit(process, burst.gpu_seconds, burst.demand)

    def _slower(self, server: Running, burst: PlannedBurst) -> float:
        """Return how many times as long a burst lasts beside those that run now, and count it among them.

        Without arbiters bursts that need more than the GPU together get equal parts of what they need, and those in
        progress are not slowed down by one that comes: on average each burst comes later as often as sooner.
        """
        for uuid in server.gpus:
            self._load[uuid] += burst.demand
        if not self._slows:
            return 1.0
        return max(1.0, *(self._load[uuid] for uuid in server.gpus))

    def _device_done(self, server: Running) -> None:
        server.unfinished -= 1
        if not server.unfinished:
            self._done(server, server.serial)

    def _done(self, server: Running, serial: int) -> None:
        """End a burst."""
        if server.serial != serial or self.running.get(server.plan.name) is not server:
            return
        self._count_use(server)
        self._count_burst(server)
        now = self.clock.now
        server.busy = False
        server.last_work = now
        if now - server.busy_since >= self._least_use[server.plan.template.name]:
            server.used_at = now
        server.serial += 1
        self._next_burst(server)

    # -- tiers -------------------------------------------------------------------------------------------------------

    def _plan_idle_actions(self, server: Running, pause: float) -> None:
        if not self._idle_actions:
            return
        worked = server.last_work is not None
        key = server.plan.template.name, worked
        if key not in self._steps:
            self._steps[key] = idle_steps(server.plan.template, worked)
        since = server.used_at if server.used_at is not None else server.started
        for step in self._steps[key]:
            if since + step.after >= self.clock.now + pause:
                break
            self.clock.at(since + step.after, partial(self._idle_action, server, server.serial, step))

    def _idle_action(self, server: Running, serial: int, step: IdleStep) -> None:
        if server.serial != serial or self.running.get(server.plan.name) is not server:
            return
        if step.tier is Tier.STOPPED:
            server.lasts -= self.clock.now - server.started
            server.stopped = True
            self._end(server)
        elif step.units < server.units or step.tier is Tier.RELEASED:
            self._change_tier(server, step.tier, step.units)
            self._pass()

    def _restore(self, server: Running, serial: int) -> None:
        """Restore the share of a session that works, as its agent does."""
        if server.serial == serial and self.running.get(server.plan.name) is server and not server.yields:
            self._change_tier(server, Tier.ACTIVE, server.share.units)

    def _change_tier(self, server: Running, tier: Tier, units: int) -> None:
        if (tier, units) == (server.tier, server.units):
            return
        self._count_use(server)
        before = server.holds
        server.set_tier(tier, units, self.clock.now)
        self._held.change(self.clock.now, server.holds - before)
        self._enter(server)
        self._reweigh(server.gpus)

    def _reweigh(self, gpus: Iterable[str]) -> None:
        """Tell the arbiters what the sessions of these GPUs are guaranteed now."""
        if not self._devices:
            return
        for uuid in gpus:
            for name in list(self._devices[uuid].processes):
                lends = self._ledger.allocations[name].effective_units == 0
                weight = 0 if lends else max(1, self._ledger.guaranteed(name))
                key = f"{uuid} {name}"
                if weight != self._weights.get(key):
                    self._weights[key] = weight
                    self._devices[uuid].weigh(name, weight)

    def _count_use(self, server: Running) -> None:
        """Count a session's GPU-hours up to now."""
        hours = (self.clock.now - server.counted_to) / HOUR
        server.counted_to = self.clock.now
        reserved, held = server.share.fraction * hours, server.holds * hours
        use = self._use[server.plan.group]
        use.reserved += reserved
        use.held += held
        if server.busy:
            server.worked += hours * HOUR
        else:
            use.idle += reserved
            use.recovered += reserved - held

    # -- the service, while spawns wait ------------------------------------------------------------------------------

    @property
    def _needs_rounds(self) -> bool:
        reclaims = self.quotas is not None and self.quotas.reclaim.enabled
        return self._idle_actions and (self._under_pressure or reclaims)

    def _plan_round(self, at: float) -> None:
        """Plan a round of the culler at a multiple of its interval after this instant."""
        at = (math.floor(at / self._round_seconds) + 1) * self._round_seconds
        if at < self._round_at:
            self._round_at = at
            self.clock.at(at, partial(self._round, at))

    def _round(self, at: float) -> None:
        """One round of the culler: units that waiting spawns need."""
        if at != self._round_at:
            return
        self._round_at = math.inf
        self._flush()
        needs = self._pressure()
        for name in needs.free_again & self.running.keys():
            self._stop_yielding(self.running[name])
        for name in needs.reclaimed.keys() | needs.needed.keys() | self._noticed():
            if name in self.running:
                self._decide(self.running[name], needs)
        self._pass()
        if len(self._queue) or any(server.yields for server in self.running.values()):
            self._plan_round(self.clock.now)

    def _noticed(self) -> set[str]:
        return {name for name, server in self.running.items() if server.notice is not None}

    def _pressure(self) -> Pressure:
        reports, now = self.reports(), self.clock.now
        pending = [
            HubServer(
                ticket.request.tenant.user, ticket.request.tenant.server, False, "spawn", ticket.joined, None,
                ticket.request.template.name, quota=ticket.request.tenant.quota.partition(":")[2],
            )
            for ticket in self._queue
        ]  # fmt: skip
        needs = NO_PRESSURE
        if self.quotas is not None and self.quotas.reclaim.enabled:
            needs = pressure(self.quotas, reports, pending, self.templates, now)
        if self._under_pressure and pending:
            idle = candidates(reports, self.templates, now, RecentUse())
            needs = Pressure(
                needs.reclaimed, needs.free_again, needs.kept_on, needed(idle, reports, pending, self.templates)
            )
        return needs

    def reports(self) -> list[Report]:
        """Return the reports of all agents."""
        on_node: dict[str, list[SessionReport]] = {node: [] for node in self.nodes}
        for name, server in self.running.items():
            self._count_use(server)
            node = self._ledger.node_of(name)
            assert node is not None
            on_node[node].append(server.report(self._ledger.guaranteed(name)))
        return [
            Report(node=node, published_at=self.clock.now, gpus=cards, sessions=tuple(on_node[node]))
            for node, cards in self.nodes.items()
        ]

    def _decide(self, server: Running, needs: Pressure) -> None:
        template, name, now = server.plan.template, server.plan.name, self.clock.now
        claim = needs.reclaimed.get(name)
        waits = template.idle.when == "pressure"
        decision: Decision = decide(
            template.idle,
            server.observation(),
            now,
            reclaimed=claim,
            only_if_needed=waits,
            units_left=needs.needed.get(name) if waits else None,
        )
        if decision.no_action is None and decision.tier is not Tier.STOPPED:
            reclaims = decision.upcoming is not None and decision.upcoming.cause is IdleCause.RECLAIM
            if reclaims and claim is not None:
                server.yields = True
                server.borrowed = max(server.borrowed, server.share.units - decision.units)
            server.notice = None
            self._change_tier(server, decision.tier, decision.units)
        else:
            server.notice = None if decision.notice is None else notice_of(decision.notice, server.share)

    def _stop_yielding(self, server: Running) -> None:
        server.yields = False
        if server.busy:
            self._change_tier(server, Tier.ACTIVE, server.share.units)
        self._enter(server)
        self._flush()
        self._convert_borrowed(server.gpus)

    # -- figures -----------------------------------------------------------------------------------------------------

    def _outcome(self, horizon: float) -> Outcome:
        for server in self.running.values():
            self._count_use(server)
            self._count_work(server)
            self._server_seconds += horizon - server.started
        waiting = [horizon - server.arrived for server in self._waiting.values()]
        for server in self._waiting.values():
            self._use[server.plan.group].waited += horizon - server.arrived
        total = GroupUse()
        for use in self._use.values():
            for name, value in vars(use).items():
                setattr(total, name, getattr(total, name) + value)
        return Outcome(
            waits=tuple(self._waits + waiting),
            never=len(waiting),
            refused=self._refused,
            delays=tuple(self._delays),
            use=total,
            groups=dict(self._use),
            server_seconds=self._server_seconds,
            held=self._held.means(horizon),
            running=self._count.means(horizon),
            waiting=self._in_queue.means(horizon),
            gave_up=self.gave_up,
        )


def _nodes(gpus: int, memory: int) -> dict[str, tuple[GpuReport, ...]]:
    """Return so many GPUs, on nodes of `GPUS_OF_NODE`."""
    cards = [
        GpuReport(index=number % GPUS_OF_NODE, uuid=f"GPU-{number:04}", model="GPU", memory_bytes=memory)
        for number in range(gpus)
    ]
    return {
        f"node-{first // GPUS_OF_NODE:03}": tuple(cards[first : first + GPUS_OF_NODE])
        for first in range(0, gpus, GPUS_OF_NODE)
    }


def _run_now(work: Coroutine[None, None, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine waits")


def _first(burst: PlannedBurst, others: Iterator[PlannedBurst]) -> Iterator[PlannedBurst]:
    yield burst
    yield from others
