"""Random events of a cluster: the ledger that is kept is the one that would be made anew, never over-allocates, and
keeps the rules of templates for sessions on one GPU. No limit of the quotas that follow it is exceeded.

Beside `test_ledger_feed`, where anything is told, this is a cluster in which each fact is true for a while: a server
has a place because the ledger gave it one.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.quota import Quotas, ResourceAmounts
from gpushare_spawner.model.report import GpuReport, Report
from gpushare_spawner.model.share import NeighbourRules, Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.ledger import Ledger, NodeHold, cheapest_hold
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested, convert_borrowed
from gpushare_spawner.placement.request import Conditions, PlacementRequest, workload_of
from gpushare_spawner.placement.strategy import BestFit, Spread, StrandingAwareFgd
from gpushare_spawner.quota.order import admit, exceeded_amounts
from gpushare_spawner.spawner.queue.quotas import QueueQuotas, ServerWithoutGpu
from tests.placement.reports import gpu, ledger_of, report, request

NODES: dict[str, list[GpuReport]] = {
    "n1": [gpu("a", 0), gpu("b", 1)],
    "n2": [gpu("c", 0, capacity=150), gpu("d", 1, model="T4", capacity=40)],
    "n3": [gpu("e", 0, model="T4"), gpu("f", 1, model="T4"), gpu("twice", 2)],
    "n4": [gpu("twice", 0), gpu("g", 1)],
}
CAPACITY = {one.uuid: one.capacity_units for gpus in NODES.values() for one in gpus}
"""Of the GPU that two nodes report too."""
WORKLOAD = workload_of([(request(25, cpu=1000).demand, 3.0), (request(50, "A100", cpu=4000).demand, 2.0)])
STRATEGIES = (BestFit(), Spread(), StrandingAwareFgd(WORKLOAD))
REQUESTS = [
    PlacementRequest(share, cpu=cpu, memory=cpu, models=models, left_out=left_out, node=node)
    for share in (Share(10), Share(25), Share(60), Share(count=1), Share(count=2), Share(40, 2), Share(100, 2, 30))
    for cpu, models, left_out, node in (
        (0, None, frozenset[str](), ""),
        (1500, frozenset({"A100"}), frozenset[str](), ""),
        (800, frozenset({"T4", "A100"}), frozenset({"n2"}), ""),
        (0, None, frozenset[str](), "n3"),
    )
]
CONDITIONS = [
    Conditions(NeighbourRules(labels=("course",))),
    Conditions(NeighbourRules(labels=("course",)), near=frozenset({"course"})),
    Conditions(near=frozenset({"course", "none"})),
    Conditions(NeighbourRules(labels=("exam",), apart_from=("exam",))),
    Conditions(NeighbourRules(labels=("quiet",), apart_from=("course", "exam"))),
    Conditions(NeighbourRules(labels=("lone",), alone=True)),
    Conditions(NeighbourRules(alone=True), gpu="a"),
    Conditions(near=frozenset({"quiet"}), nodes=frozenset({"n1", "n3"})),
]
CONDITIONAL = [
    PlacementRequest(share, models=models, conditions=conditions)
    for conditions in CONDITIONS
    for share in (Share(10), Share(60), Share(count=2))
    for models in (None, frozenset({"A100"}))
]
"""Requests of templates with `placement`."""


QUOTAS = Quotas.model_validate(
    {
        "groups": {
            "science": {
                "guarantee": 2,
                "maximum": 2.5,
                "cpu": {"guarantee": 6, "maximum": 8},
                "servers": 4,
                "teams": {
                    "optics": {"guarantee": 1, "users": {"ada": {"guarantee": 0.5, "cpu": {"guarantee": 2}}}},
                    "physics": {"memory": {"maximum": "5Gi"}, "teams": {"theory": {"maximum": 0.6}, "lasers": {}}},
                },
            },
            "course": {"maximum": 0.6, "memory": {"guarantee": "2Gi"}, "per_user": {"servers": 2}},
        },
        "default": {"guarantee": 0.25, "cpu": {"maximum": 4}},
    }
)
ACCOUNTS = ["user:ada", *(f"group:{name}" for name in ("optics", "theory", "lasers", "course", "gone")), "default:eve"]


TEMPLATES = {
    cores: Template.model_validate(
        {
            "name": f"{cores}-cores",
            "display_name": "T",
            "resources": {"cpu": {"guarantee": cores}, "memory": {"guarantee": f"{cores}Gi"}},
        }
    )
    for cores in (0, 1, 3)
}
"""Servers with a GPU and servers without one count the CPU and memory of these."""


class Cluster:
    """What is true, what the hub was told of it, and the ledger that it keeps by that.

    A server is reserved, then its pod is seen, then the agent of its node reports it; its agent's reports come late,
    twice, and in another order.
    """

    def __init__(self, seed: int, requests: Sequence[PlacementRequest] = REQUESTS) -> None:
        self.requests = requests
        self.random = random.Random(seed)
        self.feed = LedgerFeed()
        self.clock = 0.0
        self.numbers = 0
        self.reserved: dict[str, Allocation] = {}
        self.pods: dict[str, Allocation] = {}
        self.up: set[str] = set()
        self.sent: dict[str, list[Report]] = {name: [] for name in NODES}
        """The reports of each node that can still come, the newest last."""
        self.told: dict[str, Report] = {}
        self.resources: dict[str, NodeResources] = {}
        self.holds: dict[str, NodeHold] = {}
        self.placed = self.refused = 0
        self.without_gpu: dict[str, ServerWithoutGpu] = {}
        self.quotas = self.quotas_of(self.feed.ledger)
        for name in NODES:
            self.a_node_comes(name)

    def quotas_of(self, ledger: Ledger) -> QueueQuotas:
        log, templates = logging.getLogger("hub"), [*TEMPLATES.values()]
        return QueueQuotas(
            ledger, log, lambda: QUOTAS, lambda: self.clock, templates=lambda: templates, without_gpu=self.without_gpu
        )

    def event(self) -> str:
        """Let one event happen; return its name."""
        events: list[tuple[float, Callable[[], None]]] = [
            (20, self.a_share_is_reserved),
            (10, self.a_pod_is_seen),
            (4, self.a_reservation_is_cancelled),
            (8, self.a_pod_goes),
            (10, self.a_tier_changes),
            (6, self.a_share_is_resized),
            (4, self.agents_convert_borrowed_units),
            (6, self.a_node_comes),
            (2, self.a_node_goes),
            (15, self.an_agent_reports),
            (10, self.an_old_report_comes),
            (6, self.a_node_has_resources),
            (4, self.a_spawn_claims),
            (4, self.a_hold_ends),
            (8, self.somebody_looks),
            (8, self.a_server_without_a_gpu_starts),
            (4, self.a_server_without_a_gpu_stops),
            (2, self.an_agent_restarts),
            (0.1, self.a_night_passes),
            (0.2, self.the_ledger_is_made_anew),
        ]
        (happens,) = self.random.choices([event for _, event in events], [weight for weight, _ in events])
        happens()
        return happens.__name__

    # -- events --

    def a_share_is_reserved(self) -> None:
        wanted, strategy = self.random.choice(self.requests), self.random.choice(STRATEGIES)
        quota, cores = self.random.choice(ACCOUNTS), self.random.choice([*TEMPLATES])
        place = self.feed.ledger.place(wanted, strategy)
        if place is None or not self._admits(quota, wanted.share.total_units, cores):
            return
        self._check_place(wanted.conditions, place)
        self.numbers += 1
        self.placed += 1
        name, units = f"s{self.numbers}", wanted.share.units
        uncounted = Requested(wanted.cpu, wanted.memory, 1)
        self.reserved[name] = Allocation(
            name,
            place.gpus,
            units,
            place.borrowed,
            units,
            self.clock,
            user="eve",
            quota=quota,
            template=TEMPLATES[cores].name,
            uncounted=uncounted,
            neighbours=wanted.conditions.neighbours,
            last_units=wanted.share.last_units,
        )
        self.feed.put(EntrySource.RESERVED, self.reserved[name])

    def a_pod_is_seen(self) -> None:
        name = self._one_of(self.reserved)
        if name:
            self.pods[name] = replace(self.reserved.pop(name), uncounted=Requested())
            self.feed.put(EntrySource.SEEN, self.pods[name])
            self.feed.drop(EntrySource.RESERVED, name)

    def a_reservation_is_cancelled(self) -> None:
        """By its user, or because it expired."""
        name = self._one_of(self.reserved)
        if name:
            del self.reserved[name]
            self.feed.drop(EntrySource.RESERVED, name)

    def a_pod_goes(self) -> None:
        name = self._one_of(self.pods)
        if name:
            del self.pods[name]
            self.feed.drop(EntrySource.SEEN, name)

    def a_tier_changes(self) -> None:
        name = self._one_of(self.pods)
        if name:
            pod = self.pods[name]
            units = self.random.choice([0, pod.share_units // 2, pod.share_units])
            changed = replace(pod.with_effective(units), yields=False)
            self.pods[name] = pod.yielding(units) if self.random.random() < 0.2 else changed
            self.feed.put(EntrySource.SEEN, self.pods[name])

    def agents_convert_borrowed_units(self) -> None:
        for name, later in convert_borrowed(CAPACITY, [*self.pods.values(), *self.reserved.values()]).items():
            if name in self.pods:
                self.pods[name] = later
                self.feed.put(EntrySource.SEEN, later)

    def a_share_is_resized(self) -> None:
        """To less, or to more where that is free and nothing is lent on its GPUs."""
        name = self._one_of(self.pods)
        if not name:
            return
        pod, ledger = self.pods[name], self.feed.ledger
        units = self.random.choice([5, 10, 25, 50, 100])
        last = pod.last_units if pod.last_units < units else 0
        resized = replace(pod, share_units=units, borrowed_units=0, effective_units=units, last_units=last)
        resized = replace(resized, borrowed_each=(), yields=False)
        for uuid in pod.gpus:
            more = resized.on(uuid).owned_units - pod.on(uuid).owned_units
            gpu_left = ledger.capacity.gpus[uuid].unowned if uuid in ledger.capacity.gpus else 0
            if more > max(0, gpu_left):
                return
        self.quotas.recount()
        usage, added = self.quotas.usage, ResourceAmounts(max(0, resized.total_units - pod.total_units))
        assert usage is not None
        if exceeded_amounts(usage, usage.accounts.find(pod.quota, pod.user), added) is None:
            self.pods[name] = resized
        self.feed.put(EntrySource.SEEN, self.pods[name])

    def a_node_comes(self, name: str = "") -> None:
        name = name or self.random.choice([*NODES])
        self.up.add(name)
        self._sends(name, NODES[name])
        self._comes(self.sent[name][-1])

    def a_node_goes(self) -> None:
        """Its report is too old, or its machine was taken away; its pods may be deleted later."""
        name = self._one_of(self.up)
        if name:
            self.up.discard(name)
            self.sent[name].clear()
            self.told.pop(name, None)
            self.feed.forget_node(name)

    def an_agent_restarts(self) -> None:
        """Its node has no report for a moment, then the same one."""
        name = self._one_of(self.told)
        if name:
            self.feed.forget_node(name)
            self.feed.report(self.told[name])

    def a_server_without_a_gpu_starts(self) -> None:
        quota, cores = self.random.choice(ACCOUNTS), self.random.choice([*TEMPLATES])
        if self._admits(quota, 0, cores):
            self.numbers += 1
            self.without_gpu[f"s{self.numbers}"] = ServerWithoutGpu("eve", quota, TEMPLATES[cores].name, self.clock)

    def a_server_without_a_gpu_stops(self) -> None:
        name = self._one_of(self.without_gpu)
        if name:
            del self.without_gpu[name]

    def _admits(self, quota: str, units: int, cores: int) -> bool:
        self.quotas.recount()
        usage, needs = self.quotas.usage, ResourceAmounts(units, 1000 * cores, cores * 2**30)
        assert usage is not None
        refused = admit(usage, usage.accounts.find(quota, "eve"), "eve", needs).refused
        self.refused += refused is not None
        return refused is None

    def an_agent_reports(self) -> None:
        """Sometimes with a GPU that is broken, cordoned, or has fallen off its bus."""
        name = self._one_of(self.up)
        if name:
            odd = self.random.choice(["", "", "", "healthy", "cordoned", "gone"])
            gpus = list(NODES[name])
            which = self.random.randrange(len(gpus))
            if odd == "gone":
                del gpus[which]
            elif odd:
                gpus[which] = gpus[which].model_copy(update={odd: odd == "cordoned"})
            self._sends(name, gpus)
            if self.random.random() < 0.7:
                self._comes(self.sent[name][-1])

    def an_old_report_comes(self) -> None:
        """Once more, or after a newer one."""
        name = self._one_of(self.up)
        if name:
            self._comes(self.random.choice(self.sent[name]))

    def a_node_has_resources(self) -> None:
        name, cpu = self.random.choice([*NODES]), self.random.choice([None, 0, 900, 5000, 50000])
        self.resources[name] = NodeResources(cpu, cpu, self.random.choice([None, 0, 3]))
        self.feed.resources(name, self.resources[name])

    def a_spawn_claims(self) -> None:
        name = self.random.choice(["w1", "w2"])
        hold = cheapest_hold(self.feed.ledger.capacity, self.random.choice(self.requests))
        if hold is not None:
            self.holds[name] = hold
            self.feed.hold(name, hold)

    def a_hold_ends(self) -> None:
        name = self._one_of(self.holds)
        if name:
            del self.holds[name]
            self.feed.hold(name, None)

    def somebody_looks(self) -> None:
        """Indexes come to be at different times, and know different changes."""
        wanted, strategy = self.random.choice(self.requests), self.random.choice(STRATEGIES)
        self.feed.ledger.place(wanted, strategy)
        self.feed.ledger.capacity.prepare(wanted.demand, strategy, 1)

    def a_night_passes(self) -> None:
        """Nobody looks, and so much changes that the changes before are forgotten; nodes come and go meanwhile."""
        self.a_node_goes()
        changes = self.feed.ledger.capacity.version
        name = next(iter(self.up - {"n1"}), "n1")
        while self.feed.ledger.capacity.version < changes + 1010:
            for cpu in (7, 8):
                self.resources[name] = NodeResources(cpu)
                self.feed.resources(name, self.resources[name])
            if name not in self.feed.ledger.capacity.nodes:
                return

    def the_ledger_is_made_anew(self) -> None:
        self.feed.make_anew()

    # -- what must hold --

    def check(self, everything: bool) -> None:
        """Compare with a ledger made anew: all that can be asked, or some of it."""
        kept, fresh = self.feed.ledger, ledger_of(self.told.values(), [*self.pods.values(), *self.reserved.values()])
        for node, resources in self.resources.items():
            fresh.put_resources(node, resources)
        for name, hold in self.holds.items():
            fresh.hold(name, hold)
        assert dict(kept.allocations) == dict(fresh.allocations)
        assert _figures(kept) == _figures(fresh)
        assert dict(kept.holds) == dict(fresh.holds)
        for wanted in self.requests if everything else [self.random.choice(self.requests)]:
            for strategy in STRATEGIES if everything else [self.random.choice(STRATEGIES)]:
                assert kept.place(wanted, strategy) == fresh.place(wanted, strategy)
            assert kept.why_unplaceable(wanted) == fresh.why_unplaceable(wanted)
            assert cheapest_hold(kept.capacity, wanted) == cheapest_hold(fresh.capacity, wanted)
        self._check_units()
        self._check_neighbours()
        self._check_quotas(fresh)

    def _check_quotas(self, fresh: Ledger) -> None:
        """What is counted is what would be counted anew, and no maximum of any level is exceeded."""
        anew = self.quotas_of(fresh)
        for quotas in (self.quotas, anew):
            quotas.bring_up_to_date(1000)
        excess, of_anew = self.quotas._excess([]), anew._excess([])
        for key in excess.keys() | of_anew.keys():
            assert excess.get(key, 0.0) == pytest.approx(of_anew.get(key, 0.0))
        kept, made = self.quotas.usage, anew.usage
        assert kept is not None
        assert made is not None
        assert kept._charges == made._charges
        assert kept.over_quota(with_groups=True) == made.over_quota(with_groups=True)
        for account in made.all_accounts():
            assert kept.used(account) == made.used(account)
            assert exceeded_amounts(kept, account, ResourceAmounts()) is None
            for used, most in zip(kept.used(account), account.quota.maxima, strict=True):
                assert most is None or used <= most
            assert account.quota.servers is None or kept.servers(account) <= account.quota.servers

    def _check_units(self) -> None:
        """No GPU has more owners than units, whatever was lost and found meanwhile."""
        owned = dict.fromkeys(CAPACITY, 0)
        for one in (*self.pods.values(), *self.reserved.values()):
            for uuid in one.gpus:
                owned[uuid] += one.on(uuid).owned_units
        over = {uuid: units for uuid, units in owned.items() if units > CAPACITY[uuid]}
        assert not over
        check_ledger(self.feed.ledger)

    def _check_place(self, conditions: Conditions, place: Placement) -> None:
        """The GPU and node are named ones, and a session to be near to is there if one runs."""
        running = [one for one in (*self.pods.values(), *self.reserved.values()) if conditions.near & _labels(one)]
        for uuid in place.gpus:
            assert conditions.name(uuid, place.node)
            assert not running or any(uuid in one.gpus for one in running)

    def _check_neighbours(self) -> None:
        """No session that is alone has a neighbour, and none is beside a session that it is apart from."""
        sessions = [*self.pods.values(), *self.reserved.values()]
        for one, other in itertools.permutations(sessions, 2):
            if not {*one.gpus}.isdisjoint(other.gpus):
                assert not one.neighbours.alone
                assert _labels(other).isdisjoint(one.neighbours.apart_from)

    def _one_of(self, names: Iterable[str]) -> str:
        found = sorted(names)
        return self.random.choice(found) if found else ""

    def _sends(self, name: str, gpus: list[GpuReport]) -> None:
        self.clock += 1.0
        self.sent[name] = [*self.sent[name][-4:], report(name, gpus, at=self.clock)]

    def _comes(self, sent: Report) -> None:
        known = self.told.get(sent.node)
        if known is None or sent.published_at >= known.published_at:
            self.told[sent.node] = sent
        self.feed.report(sent)


def _labels(allocation: Allocation) -> frozenset[str]:
    return frozenset(allocation.neighbours.labels)


def _figures(ledger: Ledger) -> dict[str, object]:
    return {
        name: (
            node.resources,
            [(one.uuid, one.index, one.offered, one.unowned, one.free, one.neighbours) for one in node.gpus],
        )
        for name, node in ledger.capacity.nodes.items()
    }


def run(seed: int, events: int, requests: Sequence[PlacementRequest] = REQUESTS, checked: float = 1.0) -> None:
    """Let events happen, and compare with a ledger made anew after this part of them: `checked` is a probability."""
    cluster = Cluster(seed, requests)
    for number in range(events):
        happened = cluster.event()
        if cluster.random.random() > checked:
            continue
        try:
            cluster.check(everything=number % 100 == 0)
        except Exception as error:
            error.add_note(f"seed {seed}, event {number}: {happened}")
            raise
    assert cluster.placed > events // 100
    assert cluster.refused, "the seed tests no refusal"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_ledger_is_right_after_each_of_thousands_of_random_events(seed: int) -> None:
    run(seed, 1500)


@pytest.mark.parametrize("seed", [3, 4])
def test_rules_for_sessions_on_one_gpu_hold_after_each_of_thousands_of_random_events(seed: int) -> None:
    run(seed, 1200, [*CONDITIONAL, *REQUESTS[:8]])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_ledger_is_right_after_each_of_a_hundred_thousand_random_events() -> None:
    """What differs stays different for some events: a comparison after every other one finds it in half the time."""
    for seed in range(100, 150):
        run(seed, 1300, checked=0.5)
        run(seed, 700, [*CONDITIONAL, *REQUESTS], checked=0.5)
