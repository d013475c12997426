"""How long a group waits for its guarantee where sessions over quota hold all GPUs: a simulation in virtual time.

A part of ``python -m benchmarks.quotas``. Servers of a group without a guarantee hold all GPUs, a quarter each; three
of four are busy, and one node has no CPU left. Then the users of a group that is guaranteed half of the GPUs start
servers, all at once. The
queue, the choice of the sessions that make way and the policy are the product's, with the default times of `reclaim`.

`disturbed_ratio` compares the product's choice with all sets of sessions, in many small clusters.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from gpushare_spawner.idle.policy import Decision, decide
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import GpuReport, Notice, Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.node import Allocation, NodeResources
from gpushare_spawner.placement.request import workload_of
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.quota.entitlement import MINIMUM_RUN
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.culler.pressure import NO_PROGRESS, pressure
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import PlacementCheck, Placer, SpawnQueue
from gpushare_spawner.spawner.queue.quotas import QueueQuotas
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot, SpawnRequest

QUARTER = Template.model_validate(
    {"name": "quarter", "display_name": "Q", "gpu": {"fraction": 0.25}, "resources": {"cpu": {"guarantee": 1}}}
)
UNITS = 25
ROUND_SECONDS = CullerSettings().cull_every
PASS_SECONDS = 1.5
"""`Reservations.place_every`."""
ARRIVAL = 3600.0
"""Seconds after which the group in quota comes: the sessions over quota have been idle, or busy, for so long."""
LONGEST = 3600.0
WITHOUT_CPU = "node-0"
"""A node whose CPU is all in use: the units of its sessions would not help."""
GIB = 2**30
WANTED = {
    name: Template.model_validate({"name": name, "display_name": "W", "gpu": gpu})
    for name, gpu in {
        "tenth": {"fraction": 0.1},
        "quarter": {"fraction": 0.25},
        "half": {"fraction": 0.5},
        "whole": {"count": 1},
        "pair": {"count": 2},
    }.items()
}
"""What the waiting spawns of `disturbed_ratio` want."""
OWNERS = Quotas.model_validate({"groups": {"owners": {"guarantee": 9}, "guests": {}}})


def disturbed_ratio(cases: int = 300, seed: int = 1) -> float:
    """Return the users who lose units for a spawn, over all cases, by the least number that is possible.

    A case has three nodes of two GPUs, full of guests, of whom two in five work and some have two sessions. One node
    has no CPU. Of all sets of sessions count those that disturb the fewest users who work.
    """
    chance = random.Random(seed)
    disturbed = least = 0
    for _ in range(cases):
        reports = [_full_node(f"node-{number}", chance) for number in range(3)]
        template = WANTED[chance.choice(list(WANTED))]
        server = HubServer("owner", "", False, "spawn", ARRIVAL, None, template.name, quota="owners")
        able = tuple(chance.sample([report.node for report in reports], 2))
        progress = {("owner", ""): QueueProgress(queue_position=1, nodes=able)}
        found = pressure(OWNERS, reports, [server], WANTED, ARRIVAL, progress=progress).reclaimed
        users = {one.user for report in reports for one in report.sessions if one.id in found}
        disturbed += len(users)
        assert template.gpu is not None
        share = template.gpu.share
        least += min(_least(report, share.units, share.count) for report in reports if report.node in able)[1]
    return disturbed / least


def _full_node(node: str, chance: random.Random) -> Report:
    gpus = tuple(GpuReport(index=i, uuid=f"{node}-{i}", model="A100", memory_bytes=80 * GIB) for i in range(2))
    sessions: list[SessionReport] = []
    for gpu in gpus:
        left = UNITS_PER_GPU
        while left > 0:
            units = min(left, chance.choice([20, 25, 40, 50, 100]))
            left -= units
            name = f"{node}-{len(sessions)}"
            user = chance.choice(sessions).user if sessions and chance.random() < 0.2 else name
            sessions.append(
                SessionReport(
                    id=name,
                    user=user,
                    template="any",
                    quota="group:guests",
                    gpus=(gpu.uuid,),
                    share_units=units,
                    tier_since=0.0,
                    effective_units=units,
                    guaranteed_units=units,
                    opened_at=chance.uniform(0, ARRIVAL / 2),
                    gpu_busy=chance.random() < 0.4,
                )
            )
    return Report(node=node, published_at=ARRIVAL, gpus=gpus, sessions=tuple(sessions))


def _least(report: Report, units: int, count: int) -> tuple[int, int]:
    """Return the fewest users who work, and users, that a spawn can disturb on a full node: of all sets of sessions."""
    sets: list[Sequence[SessionReport]] = [()]
    for size in range(1, len(report.sessions) + 1):
        sets += combinations(report.sessions, size)
    found = []
    for some in sets:
        users = len({one.user for one in some if one.gpu_busy}), len({one.user for one in some})
        given = Counter[str]()
        for one in some:
            given[one.gpus[0]] += one.effective_units
        if sum(free >= units for free in given.values()) >= count:
            found.append(users)
    return min(found, default=(len(report.sessions) + 1, 0))


@dataclass
class Machines:
    """The agents of all nodes, and the service, at one instant. No session is ever idle unless it is opened so."""

    quotas: Quotas
    templates: Mapping[str, Template]
    feed: LedgerFeed = field(default_factory=LedgerFeed)
    sessions: dict[str, SessionReport] = field(default_factory=dict)
    nodes: dict[str, tuple[GpuReport, ...]] = field(default_factory=dict)
    on_decision: Callable[[SessionReport, Decision], None] = lambda session, decision: None

    def add_node(self, node: str) -> tuple[GpuReport, ...]:
        """Add a node with four GPUs, and return them."""
        cards = self.nodes[node] = tuple(
            GpuReport(index=i, uuid=f"GPU-{node}-{i}", model="A100", memory_bytes=80 * GIB) for i in range(4)
        )
        self.feed.report(Report(node=node, published_at=0.0, gpus=cards))
        return cards

    def open(self, name: str, quota: str, gpu: str, template: Template, at: float, busy: bool, borrowed: int) -> None:
        """Open a session with a share of one GPU. Where all units have owners, those that yield borrow again."""
        assert template.gpu is not None
        units = template.gpu.share.units
        self._put(
            SessionReport(
                id=name,
                user=name,
                template=template.name,
                quota=quota,
                gpus=(gpu,),
                share_units=units,
                borrowed_units=borrowed,
                tier_since=at,
                effective_units=units,
                guaranteed_units=units,
                opened_at=at,
                gpu_busy=busy,
            )
        )
        if not self.feed.ledger.unowned_units(gpu):
            for session in [one for one in self.sessions.values() if one.yields and gpu in one.gpus]:
                self._stop_yielding(session, at)

    def close(self, name: str) -> None:
        """End a session; borrowers on its GPU come to own its units."""
        del self.sessions[name]
        self.feed.drop(EntrySource.SEEN, name)
        self._settle()

    def round(
        self, pending: Sequence[HubServer], now: float, progress: Mapping[tuple[str, str], QueueProgress] = NO_PROGRESS
    ) -> list[float]:
        """Run one round of the service's culler. Return when others are due, other than after the next event."""
        found = pressure(self.quotas, self.reports(now), pending, self.templates, now, progress=progress)
        due: list[float] = []
        changed = now + ROUND_SECONDS, now + MINIMUM_RUN
        for session in list(self.sessions.values()):
            if session.id in found.free_again:
                self._stop_yielding(session, now)
                due += changed
                continue
            claim = found.reclaimed.get(session.id)
            if claim is None and session.notice is None:
                continue
            idle = self.templates[session.template].idle
            decision = decide(idle, Observation.of(session), now, reclaimed=claim)
            self.on_decision(session, decision)
            if decision.no_action is None:
                self._yields(session, decision.units, now)
                due += changed
            elif claim is not None and session.yields and claim.units > session.effective_units:
                self._yields(session, claim.units, now)
                due += changed
            else:
                coming = decision.notice
                notice = None
                if coming is not None:
                    notice = Notice(
                        tier=coming.tier, at=coming.at, reason="", effective_units=coming.units, cause=coming.cause
                    )
                    due.append(coming.at)
                self.sessions[session.id] = session.model_copy(update={"notice": notice})
        return due

    def reports(self, now: float) -> list[Report]:
        """Return the reports of all nodes."""
        on_node: dict[str, list[SessionReport]] = {node: [] for node in self.nodes}
        for session in self.sessions.values():
            units = self.feed.ledger.guaranteed(session.id)
            there = self.feed.ledger.node_of(session.id)
            assert there is not None
            on_node[there].append(session.model_copy(update={"guaranteed_units": units}))
        return [
            Report(node=node, published_at=now, gpus=cards, sessions=tuple(on_node[node]))
            for node, cards in self.nodes.items()
        ]

    def _yields(self, session: SessionReport, units: int, now: float) -> None:
        borrowed = max(session.borrowed_units, session.share_units - units)
        tier = Tier.DOWNGRADED if units else Tier.RELEASED
        changes = {"tier": tier, "effective_units": units, "borrowed_units": borrowed, "yields": True, "notice": None}
        self._put(session.model_copy(update={**changes, "tier_since": now}))

    def _stop_yielding(self, session: SessionReport, now: float) -> None:
        changes: dict[str, object] = {"yields": False}
        if session.gpu_busy:
            changes |= {"tier": Tier.ACTIVE, "tier_since": now, "effective_units": session.share_units}
        self._put(session.model_copy(update=changes))
        self._settle()

    def _settle(self) -> None:
        for name, later in self.feed.ledger.convert_borrowed().items():
            self._put(self.sessions[name].model_copy(update={"borrowed_units": later.borrowed_units}))

    def _put(self, session: SessionReport) -> None:
        self.sessions[session.id] = session
        allocation = Allocation.of(session)
        assert allocation is not None
        self.feed.put(EntrySource.SEEN, allocation)


@dataclass
class Reclaimed:
    """What came of it."""

    seconds: float | None = None
    """Until the group had its guarantee; None: not within an hour."""
    idle_made_way: int = 0
    active_made_way: int = 0
    borrowed_units: int = 0
    """Of the group in quota; 0: it owns all that it has."""


class Cluster:
    """Hub, service and agents at one instant."""

    def __init__(self, gpus: int) -> None:
        guarantee = gpus / 2
        quotas = Quotas.model_validate({"groups": {"owners": {"guarantee": guarantee}, "guests": {}}})
        self.made = Reclaimed()
        self.machines = Machines(quotas, {QUARTER.name: QUARTER}, on_decision=self._decided)
        inventory = GpuInventory()
        for node in range(gpus // 4):
            cards = self.machines.add_node(f"node-{node}")
            inventory.put(f"node-{node}", cards)
            for number in range(4 * len(cards)):
                name, gpu = f"guest-{node}-{number}", cards[number // 4].uuid
                self.machines.open(name, "group:guests", gpu, QUARTER, 0.0, number % 4 != 0, 0)
            free = NodeResources.of_empty_node(0 if cards == self.machines.nodes.get(WITHOUT_CPU) else 10**6, None)
            self.machines.feed.ledger.put_resources(f"node-{node}", free)
        self.snapshot = GpuSnapshot(inventory)
        self.queue = SpawnQueue(10_000)
        self.now = ARRIVAL
        ledger, log = self.machines.feed.ledger, logging.getLogger("quotas")
        self.accounts = QueueQuotas(ledger, log, lambda: quotas, lambda: self.now)
        request = self.snapshot.request(QUARTER)
        self.strategy = StrandingAwareFgd(workload_of([(request.demand, 1.0)]))
        for number in range(round(guarantee * UNITS_PER_GPU) // UNITS):
            self.queue.join(SpawnRequest(Tenant(f"owner-{number}", quota="group:owners"), QUARTER), self.now)

    def run(self) -> Reclaimed:
        """Let rounds of the service and passes of the queue alternate until the queue is empty."""
        next_round = ARRIVAL
        while len(self.queue) and self.now < ARRIVAL + LONGEST:
            self._pass()
            if self.now >= next_round:
                pending = waiting(self.queue)
                able = tuple(name for name in self.machines.nodes if name != WITHOUT_CPU)
                progress = {(one.user, ""): QueueProgress(queue_position=1, nodes=able) for one in pending}
                self.machines.round(pending, self.now, progress)
                next_round = self.now + ROUND_SECONDS
            self.now += PASS_SECONDS
        if not len(self.queue):
            self.made.seconds = self.now - PASS_SECONDS - ARRIVAL
        self.made.borrowed_units = sum(
            one.borrowed_units for one in self.machines.sessions.values() if one.quota == "group:owners"
        )
        return self.made

    def _decided(self, session: SessionReport, decision: Decision) -> None:
        if decision.no_action is None:
            self.made.active_made_way += session.gpu_busy
            self.made.idle_made_way += not session.gpu_busy

    def _pass(self) -> None:
        """One pass over the queue, as `spawner.queue.reservations` makes it."""
        self.accounts.bring_up_to_date(len(self.snapshot.gpus) * UNITS_PER_GPU)
        self.queue.arrange(self.accounts.order(self.queue))
        check = PlacementCheck(self.snapshot, self.machines.feed.ledger, self.strategy)
        placer = Placer(check, self.machines.feed, self.queue, "the simulation")
        for ticket in list(self.queue):
            placement = placer.place(ticket)
            if placement is None:
                continue
            self.queue.leave(ticket)
            tenant, (gpu,) = ticket.request.tenant, placement.gpus
            self.machines.open(tenant.user, tenant.quota, gpu, QUARTER, self.now, True, placement.borrowed)


def waiting(queue: SpawnQueue) -> list[HubServer]:
    """Return the hub's pending servers."""
    return [
        HubServer(
            one.request.tenant.user, "", False, "spawn", one.joined, None, one.request.template.name,
            quota=one.request.tenant.quota.partition(":")[2],
        )
        for one in queue
    ]  # fmt: skip
