"""The ledger that is kept up to date by what changes is the one that would be made anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.placement.request import PlacementRequest, workload_of
from gpushare_spawner.placement.strategy import BestFit, Spread, StrandingAwareFgd
from tests.placement.reports import active, gpu, ledger_of, report, request

GPUS = {
    "n1": [gpu("a", 0), gpu("b", 1), gpu("shared", 2)],
    "n2": [gpu("c", 0, capacity=150), gpu("d", 1, model="T4", capacity=40), gpu("shared", 2)],
    "n3": [gpu("e", 0, model="T4"), gpu("f", 1, model="T4")],
}
UUIDS = sorted({one.uuid for gpus in GPUS.values() for one in gpus})
NAMES = st.sampled_from(["ada", "bob", "cyd", "dan", "eve"])
NODES = st.sampled_from(sorted(GPUS))
SHARES = st.sampled_from([Share(10), Share(25), Share(40), Share(100), Share(count=2)])

WORKLOAD = workload_of(
    [
        (request(25, cpu=1000).demand, 3.0),
        (request(50, "A100", cpu=4000).demand, 2.0),
        (request(count=2, cpu=500).demand, 1.0),
    ]
)
STRATEGIES = (BestFit(), Spread(), StrandingAwareFgd(WORKLOAD), StrandingAwareFgd())
REQUESTS = [
    PlacementRequest(share, cpu=cpu, memory=cpu, models=models, ineligible=ineligible, left_out=left_out, node=node)
    for share in (Share(10), Share(60), Share(count=1), Share(count=2))
    for cpu, models, ineligible, left_out, node in (
        (0, None, frozenset(), frozenset(), ""),
        (1500, frozenset({"A100"}), frozenset(), frozenset(), ""),
        (800, None, frozenset({"n1"}), frozenset(), ""),
        (800, None, frozenset(), frozenset({"n2"}), ""),
        (0, None, frozenset(), frozenset(), "n3"),
    )
]


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    """Any allocation, also one that does not fit, or lies on GPUs that no node reports."""
    share = draw(SHARES)
    gpus = draw(st.permutations(UUIDS))[: share.count]
    borrowed = draw(st.integers(0, share.units))
    return Allocation(
        session=draw(NAMES),
        gpus=tuple(gpus),
        share_units=share.units,
        borrowed_units=borrowed,
        effective_units=draw(st.integers(0, share.units)),
        opened_at=float(draw(st.integers(0, 3))),
        uncounted=draw(st.sampled_from([Requested(), Requested(cpu=700, memory=300, pods=1)])),
    )


class Feed(RuleBasedStateMachine):
    """Reports, pods and reservations come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = LedgerFeed()
        self.reports: dict[str, Report] = {}
        self.seen: dict[str, Allocation] = {}
        self.reserved: dict[str, Allocation] = {}
        self.resources: dict[str, NodeResources] = {}
        self.clock = 0.0

    @rule(node=NODES, held=st.lists(allocations(), max_size=3), sick=st.sampled_from([*UUIDS, ""]), gone=st.booleans())
    def reports_come(self, node: str, held: list[Allocation], sick: str, gone: bool) -> None:
        self.clock += 1.0
        gpus = [one.model_copy(update={"healthy": one.uuid != sick}) for one in GPUS[node]]
        told = report(node, gpus[1:] if gone else gpus, held, at=self.clock)
        self.reports[node] = told
        self.feed.report(told)
        self.feed.report(report(node, [], at=self.clock - 1.0))  # late: nothing happens

    @rule(node=NODES)
    def a_node_goes(self, node: str) -> None:
        self.reports.pop(node, None)
        self.feed.forget_node(node)

    @rule(allocation=allocations())
    def a_pod_is_seen(self, allocation: Allocation) -> None:
        self.seen[allocation.session] = allocation
        self.feed.put(EntrySource.SEEN, allocation)

    @rule(session=NAMES)
    def a_pod_goes(self, session: str) -> None:
        self.seen.pop(session, None)
        self.feed.drop(EntrySource.SEEN, session)

    @rule(allocation=allocations())
    def a_share_is_reserved(self, allocation: Allocation) -> None:
        self.reserved[allocation.session] = allocation
        self.feed.put(EntrySource.RESERVED, allocation)

    @rule(session=NAMES)
    def a_reservation_is_cancelled(self, session: str) -> None:
        self.reserved.pop(session, None)
        self.feed.drop(EntrySource.RESERVED, session)

    @rule(node=NODES, cpu=st.sampled_from([None, 0, 900, 5000]), pods=st.sampled_from([None, 0, 3]))
    def a_node_has_resources(self, node: str, cpu: int | None, pods: int | None) -> None:
        self.resources[node] = NodeResources(cpu, None if cpu is None else cpu * 2, pods)
        self.feed.ledger.put_resources(node, self.resources[node])

    @precondition(lambda self: self.reports)
    @rule(seen=st.lists(allocations(), max_size=3), reserved=st.lists(allocations(), max_size=2))
    def everything_is_told_anew(self, seen: list[Allocation], reserved: list[Allocation]) -> None:
        """Some of it by equal objects, and all of the reports in another order."""
        self.seen = {one.session: one for one in reversed(seen)}
        self.reserved = {one.session: one for one in reversed(reserved)}
        told = [Report.model_validate_json(one.model_dump_json()) for one in self.reports.values()]
        self.feed.follow(reversed(told), seen, reserved)

    @rule(request=st.sampled_from(REQUESTS), strategy=st.sampled_from(STRATEGIES))
    def something_is_asked_in_between(
        self, request: PlacementRequest, strategy: StrandingAwareFgd | BestFit | Spread
    ) -> None:
        """Indexes come to be at different times, and know different changes."""
        self.feed.ledger.place(request, strategy)
        self.feed.ledger.capacity.prepare(request.demand, strategy, 1)

    @invariant()
    def the_ledger_is_what_a_new_one_would_be(self) -> None:
        fresh = ledger_of(self.reports.values(), [*self.seen.values(), *self.reserved.values()])
        for node, resources in self.resources.items():
            fresh.put_resources(node, resources)
        kept = self.feed.ledger
        assert dict(kept.allocations) == dict(fresh.allocations)
        assert _figures(kept) == _figures(fresh)
        assert {session: kept.guaranteed(session) for session in kept.allocations} == {
            session: fresh.guaranteed(session) for session in fresh.allocations
        }
        for wanted in REQUESTS:
            assert kept.why_unplaceable(wanted) == fresh.why_unplaceable(wanted)
            for strategy in STRATEGIES:
                assert kept.place(wanted, strategy) == fresh.place(wanted, strategy)


def _figures(ledger: Ledger) -> dict[str, object]:
    return {
        name: (node.resources, [(one.uuid, one.index, one.healthy, one.unowned, one.free) for one in node.gpus])
        for name, node in ledger.capacity.nodes.items()
    }


Feed.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestFeed = pytest.mark.slow(Feed.TestCase)


def test_an_object_that_is_the_same_as_before_is_not_looked_into() -> None:
    feed = LedgerFeed()
    reports = [report("n", [gpu("a")], [active("s", "a", 30)])]
    seen = [active("t", "a", 20)]
    feed.follow(reports, seen)
    changes = feed.ledger.capacity._changes.end
    feed.follow(list(reports), list(seen))
    assert feed.ledger.capacity._changes.end == changes
    assert feed.ledger.free_units("a") == 50


def test_a_reservation_counts_until_its_pod_is_seen_and_again_when_the_pod_is_gone() -> None:
    feed = LedgerFeed()
    feed.report(report("n", [gpu("a")]))
    reservation = active("s", "a", 60)
    feed.put(EntrySource.RESERVED, reservation)
    feed.put(EntrySource.SEEN, replace(reservation, effective_units=10))
    assert feed.ledger.free_units("a") == 90
    feed.drop(EntrySource.SEEN, "s")
    assert feed.ledger.free_units("a") == 40
    feed.drop(EntrySource.RESERVED, "s")
    feed.drop(EntrySource.RESERVED, "s")
    assert feed.ledger.free_units("a") == 100


def test_of_two_nodes_that_report_a_session_the_first_by_name_counts() -> None:
    feed = LedgerFeed()
    feed.report(report("n2", [gpu("b")], [active("s", "b", 60)]))
    feed.report(report("n1", [gpu("a")], [active("s", "a", 30)]))
    assert (feed.ledger.free_units("a"), feed.ledger.free_units("b")) == (70, 100)
    feed.forget_node("n1")
    assert feed.ledger.free_units("b") == 40


def test_a_clock_that_was_set_back_does_not_keep_a_node_out_of_a_full_account() -> None:
    feed = LedgerFeed()
    feed.follow([report("n", [gpu("a")], [active("s", "a", 60)], at=100.0)])
    feed.follow([report("n", [gpu("a")], at=5.0)])
    assert feed.ledger.free_units("a") == 100


def test_only_nodes_that_have_changed_are_told_of_reports_that_are_followed() -> None:
    feed = LedgerFeed()
    first, second = report("n", [gpu("a")], at=100.0), report("m", [gpu("b")], at=100.0)
    assert dict(feed.follow_reports({"n": first, "m": second})) == {"n": first, "m": second}
    earlier = report("n", [gpu("a")], at=5.0)
    assert list(feed.follow_reports({"n": earlier, "m": second})) == [("n", earlier)], "the clock was set back"
    assert list(feed.follow_reports({"m": second})) == [("n", None)]
    assert (feed.reported("n"), feed.reported("m")) == (None, second)
