"""What quotas deliver while groups compete: a simulation in virtual time, with the product's queue, ledger and rules.

``python -m benchmarks.quotas [--gpus 20] [--hours 12] [--seeds 1-10] [--shares 0.25] [--json]``

Three groups are guaranteed 50, 30 and 20 % of the GPUs. Their users start servers, keep them for an hour on average,
and come back after a pause. How many users a group has, so how much it asks for,
changes from phase to phase:

1. all groups ask for more than their guarantees,
2. the largest group asks for less, the others for more,
3. all groups ask for more again: the largest group takes back what it is guaranteed,
4. the two larger groups ask for less, the smallest for more.

At each instant a group is entitled to what it asks for up to its guarantee, and to its part of the rest by weight. It
receives the units that its sessions get while all work. A server for which no GPU has room beside the sessions in quota
asks for nothing. Units that no waiting server could use, because they are scattered, count for the groups that lack
units: nobody else has them.

- ``worst_error``: over all phases and groups, how far the GPU-hours that a group received are from those that it was
  entitled to, over the time in which more was asked for than there is. Bar: 0.02.
- ``worst_error_mixed``: the same for servers of a quarter, a half and a whole GPU. ``unused_mixed``: the part of all
  GPU-hours that no waiting server could use.
- ``idle_while_waiting``: GPU-seconds of shares that waited while they fitted on GPUs that are kept for no other spawn.
  Bar: 0.

- ``guarantee_s``: in another simulation (benchmarks/quota_reclaim.py), the time until a group has its guarantee of
  half of the GPUs where sessions over quota hold all of them; ``reclaim_idle`` and ``reclaim_active``: how many
  sessions made way that were idle, and that were not.
- ``disturbed_ratio``: users who lose units for a waiting spawn, by the least number that is possible. Bar: 1.05.

The service's rounds reclaim units for spawns, and exchange units between running sessions, with the default times.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.quota_reclaim import ROUND_SECONDS, Cluster, Machines, disturbed_ratio, waiting
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.request import workload_of
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.quota.entitlement import MINIMUM_RUN
from gpushare_spawner.quota.order import LimitExceeded
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import LoopBreaks, PlacementCheck, Placer, SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.quotas import QueueQuotas
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot, SpawnRequest

GUARANTEES = {"a": 0.5, "b": 0.3, "c": 0.2}
"""Parts of all GPUs."""
PHASES: tuple[Mapping[str, float], ...] = (
    {"a": 1.5, "b": 1.5, "c": 1.5},
    {"a": 0.4, "b": 2.0, "c": 2.5},
    {"a": 1.5, "b": 1.5, "c": 1.5},
    {"a": 0.6, "b": 0.6, "c": 4.0},
)
"""What the users of a group would use, in parts of its guarantee, if none waited."""
MIXED = (0.25, 0.5, 1.0)
"""GPUs of the servers of ``worst_error_mixed``."""
MEAN_SECONDS = 3600.0
"""For which a server is kept."""
PAUSE_SECONDS = 300.0
"""Until its user starts one again."""
HOUR = 3600.0
GIB = 2**30


@dataclass
class Phase:
    """GPU-seconds of one phase by group, over the time in which more was asked for than there is."""

    received: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GUARANTEES, 0.0))
    entitled: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GUARANTEES, 0.0))
    seconds: float = 0.0
    unused: float = 0.0
    """GPU-seconds of units that no waiting server could use."""

    @property
    def errors(self) -> dict[str, float]:
        """How far a group is from what it was entitled to, as a part of that."""
        return {
            group: abs(self.received[group] - entitled) / entitled
            for group, entitled in self.entitled.items()
            if entitled > 0
        }


def entitled(asked: Mapping[str, int], guarantees: Mapping[str, int], capacity: int) -> dict[str, float]:
    """Return the units that each group has a right to: its guarantee, and an equal part of what is left.

    No group gets more than it asks for; what one leaves is for the others.
    """
    given = {group: float(min(asked[group], guarantees[group])) for group in asked}
    if sum(given.values()) > capacity:
        return {group: units * capacity / sum(given.values()) for group, units in given.items()}
    left = capacity - sum(given.values())
    while left > 1e-9:
        short = [group for group in given if asked[group] - given[group] > 1e-9]
        if not short:
            break
        part = left / len(short)
        for group in short:
            more = min(part, asked[group] - given[group])
            given[group] += more
            left -= more
    return given


class Simulation:
    """One hub, its queue and its users. Runs inside an event loop, for the tickets' sake; no time passes there."""

    def __init__(self, gpus: int, hours: float, seed: int, shares: Sequence[float]) -> None:
        self.now = 0.0
        self.capacity = gpus * UNITS_PER_GPU
        self.idle_while_waiting = 0.0
        self.phases = [Phase() for _ in PHASES]
        self._length = hours * HOUR
        self._chance = random.Random(seed)
        self._guarantees = {group: round(part * self.capacity) for group, part in GUARANTEES.items()}
        quotas = Quotas.model_validate(
            {"groups": {group: {"guarantee": units / UNITS_PER_GPU} for group, units in self._guarantees.items()}}
        )
        self._templates = {
            fraction: Template.model_validate(
                {"name": f"t{round(fraction * 100)}", "display_name": "T", "gpu": {"fraction": fraction}}
            )
            for fraction in shares
        }
        self._machines = Machines(quotas, {one.name: one for one in self._templates.values()})
        self._feed = self._machines.feed
        inventory = GpuInventory()
        for node in range(gpus // 4):
            inventory.put(f"node-{node}", self._machines.add_node(f"node-{node}"))
        self._snapshot = GpuSnapshot(inventory)
        requests = [self._snapshot.request(template) for template in self._templates.values()]
        self._strategy = StrandingAwareFgd(workload_of((request.demand, 1.0) for request in requests))
        self._queue = SpawnQueue(10_000)
        self._quotas = QueueQuotas(self._feed.ledger, logging.getLogger("quotas"), lambda: quotas, lambda: self.now)
        self._events: list[tuple[float, int, str, str]] = []
        self._number = 0
        self._asked = dict.fromkeys(GUARANTEES, 0)
        self._servers: dict[str, tuple[str, int]] = {}
        self._rounds: set[float] = set()
        self._users = {group: self._population(group) for group in GUARANTEES}

    def _population(self, group: str) -> list[float]:
        """Shares of as many users as the busiest phase of the group needs."""
        most = max(phase[group] for phase in PHASES) * self._guarantees[group]
        shares: list[float] = []
        while sum(shares) * UNITS_PER_GPU < most:
            shares.append(self._chance.choice(list(self._templates)))
        return shares

    async def run(self) -> None:
        """Run all phases."""
        for group, shares in self._users.items():
            for user in range(len(shares)):
                self._later(self._chance.expovariate(1 / PAUSE_SECONDS), "comes", f"{group}:{user}")
        end = len(PHASES) * self._length
        while self._events and self._events[0][0] < end:
            at, _, what, who = heapq.heappop(self._events)
            self._pass_time(at)
            if what == "comes":
                self._comes(who)
            elif what == "ends":
                self._ends(who)
            else:
                self._service()
            await self._pass_over_the_queue()
            if what != "round":
                self._round_at(self.now)
        self._pass_time(end)

    @property
    def _phase(self) -> int:
        return min(len(PHASES) - 1, int(self.now / self._length))

    def _later(self, seconds: float, what: str, who: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, what, who))

    def _pass_time(self, until: float) -> None:
        """Count the time up to an event, phase by phase."""
        while self.now < until:
            change = (self._phase + 1) * self._length
            step = min(until, change) if self._phase + 1 < len(PHASES) else until
            seconds = step - self.now
            if sum(self._asked.values()) >= self.capacity:
                phase = self.phases[self._phase]
                phase.seconds += seconds
                received = dict.fromkeys(GUARANTEES, 0.0)
                for who, (group, _) in self._servers.items():
                    received[group] += self._feed.ledger.guaranteed(who)
                rights = entitled(self._usable(), self._guarantees, self.capacity)
                unused = self.capacity - sum(received.values())
                phase.unused += unused / UNITS_PER_GPU * seconds
                lacking = {group: max(0.0, rights[group] - units) for group, units in received.items()}
                for group, units in lacking.items():
                    received[group] += units * min(1.0, unused / max(1.0, sum(lacking.values())))
                for group in GUARANTEES:
                    phase.received[group] += received[group] / UNITS_PER_GPU * seconds
                    phase.entitled[group] += rights[group] / UNITS_PER_GPU * seconds
            self.idle_while_waiting += self._fitting_units() / UNITS_PER_GPU * seconds
            self.now = step

    def _usable(self) -> dict[str, int]:
        """Return what each group asks for, without servers for which no GPU has room beside the sessions in quota."""
        usage = self._quotas.usage
        left = dict.fromkeys(self._feed.ledger.capacity.gpus, UNITS_PER_GPU)
        for who, session in self._machines.sessions.items():
            if usage is not None and usage.in_quota(who):
                left[session.gpus[0]] -= session.share_units
        most, asked = max(left.values()), dict(self._asked)
        for ticket in self._queue:
            if ticket.request.share.units > most:
                asked[ticket.request.tenant.user.partition(":")[0]] -= ticket.request.share.units
        return asked

    def _comes(self, who: str) -> None:
        """A user starts a server, if the phase has use for that user; else comes again in the next phase."""
        group, _, number = who.partition(":")
        shares = self._users[group]
        active = PHASES[self._phase][group] * self._guarantees[group] / UNITS_PER_GPU
        if sum(shares[: int(number)]) >= active:
            next_phase = (self._phase + 1) * self._length - self.now
            self._later(next_phase + self._chance.expovariate(1 / PAUSE_SECONDS), "comes", who)
            return
        share = shares[int(number)]
        request = SpawnRequest(Tenant(who, quota=f"group:{group}"), self._templates[share])
        self._queue.join(request, self.now)
        self._asked[group] += round(share * UNITS_PER_GPU)

    def _ends(self, who: str) -> None:
        session, (group, units) = who, self._servers.pop(who)
        self._machines.close(session)
        self._asked[group] -= units
        self._later(self._chance.expovariate(1 / PAUSE_SECONDS), "comes", session)

    async def _pass_over_the_queue(self) -> None:
        """One pass, as `spawner.queue.reservations` makes it, over the first waiting spawns of each share."""
        self._quotas.bring_up_to_date(self.capacity)
        self._queue.arrange(self._quotas.order(self._queue))
        placer = Placer(self._check(), self._feed, self._queue, "the simulation")
        breaks = LoopBreaks()
        waits: set[Share] = set()
        for ticket in self._queue:
            # only the first spawn that waits for a share holds GPUs
            if ticket.request.share in waits:
                continue
            admission = self._quotas.admission(ticket.request.tenant, ticket.request.template)
            assert admission is not None
            assert not isinstance(admission.refused, LimitExceeded)
            placement = placer.place(ticket)
            if placement is not None:
                self._start(ticket, placement)
                self._quotas.admitted(admission)
            else:
                await placer.hold(ticket, breaks)
                waits.add(ticket.request.share)
        self._quotas.note_use()

    def _round_at(self, at: float) -> None:
        """Plan a round of the service, at a multiple of its interval."""
        at = (int(at / ROUND_SECONDS) + 1) * ROUND_SECONDS
        if at not in self._rounds:
            self._rounds.add(at)
            self._later(at - self.now, "round", "")

    def _service(self) -> None:
        self._rounds.discard(self.now)
        for at in self._machines.round(waiting(self._queue), self.now):
            self._round_at(at - 1)

    def _check(self) -> PlacementCheck:
        return PlacementCheck(self._snapshot, self._feed.ledger, self._strategy)

    def _start(self, ticket: Ticket, placement: Placement) -> None:
        request = ticket.request
        who, units = request.tenant.user, request.share.units
        (gpu,) = placement.gpus
        template = request.template
        self._machines.open(who, request.tenant.quota, gpu, template, self.now, True, placement.borrowed)
        self._queue.leave(ticket)
        group = who.partition(":")[0]
        self._servers[who] = (group, units)
        self._round_at(self.now + MINIMUM_RUN)
        self._later(self._chance.expovariate(1 / MEAN_SECONDS), "ends", who)

    def _fitting_units(self) -> int:
        """Units of the spawns that wait although a GPU has room for them."""
        waiting = {ticket.request.share: ticket.request for ticket in self._queue}
        fits = {
            share
            for share, request in waiting.items()
            if self._feed.ledger.place(request.placement_request(self._snapshot), self._strategy) is not None
        }
        return sum(ticket.request.share.units for ticket in self._queue if ticket.request.share in fits)


async def simulate(gpus: int, hours: float, seed: int, shares: Sequence[float]) -> Simulation:
    """Run one simulation. ``shares``: GPUs that a server can have; as many users have the one as the other."""
    made = Simulation(gpus, hours, seed, shares)
    await made.run()
    return made


def _runs(gpus: int, hours: float, seeds: str, shares: Sequence[float]) -> dict[int, Simulation]:
    """Run the simulations of the seeds ``first-last``."""
    first, _, last = seeds.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    return {seed: asyncio.run(simulate(gpus, hours, seed, shares)) for seed in numbers}


def _unused(runs: Mapping[int, Simulation]) -> float:
    """Return the part of all GPU-hours that no waiting server could use."""
    phases = [(phase, run.capacity) for run in runs.values() for phase in run.phases]
    hours = sum(phase.seconds * capacity / UNITS_PER_GPU for phase, capacity in phases)
    return round(sum(phase.unused for phase, _ in phases) / hours, 4)


def _worst(runs: Mapping[int, Simulation]) -> float:
    return round(max(error for run in runs.values() for phase in run.phases for error in phase.errors.values()), 4)


async def reclaim_figures(gpus: int) -> dict[str, object]:
    """Return how long a group waits for its guarantee where sessions over quota hold all GPUs. Needs an event loop."""
    made = Cluster(gpus).run()
    assert not made.borrowed_units, "the group in quota must own its units"
    return {
        "guarantee_s": made.seconds,
        "reclaim_idle": made.idle_made_way,
        "reclaim_active": made.active_made_way,
        "disturbed_ratio": round(disturbed_ratio(), 4),
    }


def main() -> None:
    """Simulate, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=20, help="GPUs, four on each node")
    parser.add_argument("--hours", type=float, default=12.0, help="length of a phase")
    parser.add_argument("--seeds", default="1-10", help="first and last seed")
    parser.add_argument("--shares", default="0.25", help="shares of the servers, separated by commas")
    parser.add_argument("--mixed-seeds", default="1-10", help="first and last seed of worst_error_mixed; empty: none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    shares = [float(share) for share in options.shares.split(",")]
    runs = _runs(options.gpus, options.hours, options.seeds, shares)
    idle = sum(run.idle_while_waiting for run in runs.values())
    figures: dict[str, object] = {
        "gpus": options.gpus,
        "hours": options.hours,
        "shares": shares,
        "seeds": list(runs),
        "worst_error": _worst(runs),
    }
    if options.mixed_seeds:
        mixed = _runs(options.gpus, options.hours, options.mixed_seeds, MIXED)
        figures |= {"unused_mixed": _unused(mixed)}
        figures["worst_error_mixed"] = _worst(mixed)
    figures["idle_while_waiting"] = round(idle, 3)
    figures |= asyncio.run(reclaim_figures(options.gpus))
    if options.json:
        print(json.dumps(figures))
        return
    for seed, run in runs.items():
        for number, phase in enumerate(run.phases, start=1):
            hours = {group: (phase.received[group] / HOUR, phase.entitled[group] / HOUR) for group in GUARANTEES}
            said = ", ".join(f"{group} {got:.1f} of {due:.1f}" for group, (got, due) in hours.items())
            print(f"seed {seed}, phase {number}: {phase.seconds / HOUR:.1f} h of contention; GPU-hours {said}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
