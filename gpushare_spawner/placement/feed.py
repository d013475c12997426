"""Updates of one ledger from agents' reports, pods and reservations, and ledgers that simulate idle actions.

`LedgerFeed` updates the ledger by changes. `SupposedLedger` copies nodes to find the request that idle actions
with a notice help first. The ledger itself: ledger.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

from gpushare_spawner.model.report import Notice, Report
from gpushare_spawner.model.share import UNITS_PER_GPU, Tier
from gpushare_spawner.placement.ledger import Ledger, NodeHold
from gpushare_spawner.placement.node import Allocation, NodeResources
from gpushare_spawner.placement.obstacles import fits
from gpushare_spawner.placement.request import PlacementRequest


class EntrySource(IntEnum):
    """Source of a session's allocation. The first of several sources counts."""

    REPORTED = 0
    """An agent's report; of two nodes the first by name."""
    SEEN = 1
    """A pod's annotations."""
    RESERVED = 2
    """This hub's reservations in flight."""


_SOURCES: dict[EntrySource, tuple[EntrySource, str]] = {source: (source, "") for source in EntrySource}
"""Sources of entries that do not come from a node, by kind."""


class LedgerFeed:
    """One ledger with the sources of its entries.

    The cost of a change is proportional to its size. The ledger always equals a new one of the same reports and
    allocations. `follow` finds the changes by comparison if the caller cannot list them.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        """The ledger. Callers read it and place by it; only the feed changes it."""
        self.doubtful = False
        """An error occurred while the ledger changed: it may be inconsistent until `make_anew`."""
        self._reports: dict[str, Report] = {}
        self._entries: dict[str, dict[tuple[EntrySource, str], Allocation]] = {}
        self._sessions: dict[tuple[EntrySource, str], dict[str, Allocation]] = {}

    # -- changes --

    def report(self, report: Report) -> None:
        """Record a node's newest report. A report older than the current report is ignored."""
        current = self._reports.get(report.node)
        if report is current or (current is not None and report.published_at < current.published_at):
            return
        self._reports[report.node] = report
        if current is None or current.gpus != report.gpus:
            with self._changing():
                self.ledger.put_node(report.node, report.gpus)
        if current is None or current.sessions != report.sessions:
            allocations = (Allocation.of(session) for session in report.sessions)
            self._record((EntrySource.REPORTED, report.node), filter(None, allocations))

    def forget_node(self, node: str) -> None:
        """Remove a node's report, which is gone or too old."""
        if self._reports.pop(node, None) is not None:
            with self._changing():
                self.ledger.put_node(node, ())
            self._record((EntrySource.REPORTED, node), ())

    def reported(self, node: str) -> Report | None:
        """Return a node's current report; None if it has none."""
        return self._reports.get(node)

    def follow_reports(self, newest: Mapping[str, Report]) -> Iterator[tuple[str, Report | None]]:
        """Replace the current reports, by node. Yield each changed node with its report; None if the report is gone.

        A report that is the same object costs almost nothing.
        """
        for node in self._reports.keys() - newest.keys():
            self.forget_node(node)
            yield node, None
        for node, report in newest.items():
            current = self._reports.get(node)
            if current is report:
                continue
            if current is not None and report.published_at < current.published_at:
                self.forget_node(node)  # the agent's clock was set back, or its machine was replaced
            self.report(report)
            yield node, report

    def put(self, source: EntrySource, *allocations: Allocation) -> None:
        """Record the allocations of pods or reservations."""
        self._record(_SOURCES[source], allocations, all_of_it=False)

    def drop(self, source: EntrySource, session: str) -> None:
        """Remove the entry of the session's pod or reservation, if there is one."""
        entries = self._sessions.get(_SOURCES[source], {})
        if session in entries:
            del entries[session]
            self._apply(_SOURCES[source], {session: None})

    def resources(self, node: str, resources: NodeResources) -> None:
        """Set the free CPU, memory and pods of a node; see `Ledger.put_resources`."""
        with self._changing():
            self.ledger.put_resources(node, resources)

    def hold(self, name: str, hold: NodeHold | None) -> None:
        """Set or remove the hold of a waiting request; see `Ledger.hold`."""
        with self._changing():
            self.ledger.hold(name, hold)

    def is_reserved(self, session: str) -> bool:
        """Return whether a session is only a reservation: no report or pod is known."""
        return min(self._entries.get(session, _SOURCES.values()))[0] is EntrySource.RESERVED

    def sessions(self, source: EntrySource) -> list[str]:
        """Return the sessions with entries from pods or reservations (`put`)."""
        return list(self._sessions.get(_SOURCES[source], {}))

    # -- full updates --

    def follow(
        self, reports: Iterable[Report], seen: Iterable[Allocation] = (), reserved: Iterable[Allocation] = ()
    ) -> Ledger:
        """Update the ledger to these entries. Objects that are the same as before cost almost nothing.

        The newer of two reports of a node counts, and the first of two allocations of a session in one list. A report
        of a session replaces its reservation.
        """
        for _ in self.follow_reports(_newest_reports(reports)):
            pass
        self._record(_SOURCES[EntrySource.SEEN], seen)
        self._record(_SOURCES[EntrySource.RESERVED], reserved)
        return self.ledger

    def make_anew(self) -> None:
        """Rebuild the ledger from all current entries: see `Ledger.make_anew`."""
        self._entries = {}
        for source, entries in self._sessions.items():
            for session, allocation in entries.items():
                self._entries.setdefault(session, {})[source] = allocation
        counts = [sources[min(sources)] for sources in self._entries.values()]
        self.doubtful = True
        self.ledger.make_anew({node: report.gpus for node, report in self._reports.items()}, counts)
        self.doubtful = False

    def _record(
        self, source: tuple[EntrySource, str], allocations: Iterable[Allocation], all_of_it: bool = True
    ) -> None:
        """Record the entries of a source: all of them, or these in addition to the earlier entries."""
        entries: dict[str, Allocation] = {}
        for allocation in allocations:
            entries.setdefault(allocation.session, allocation)
        before = self._sessions.get(source, {})
        changed: dict[str, Allocation | None] = {
            session: allocation
            for session, allocation in entries.items()
            if (previous := before.get(session)) is not allocation and previous != allocation
        }
        if all_of_it:
            changed.update(dict.fromkeys(before.keys() - entries.keys()))
            self._sessions[source] = entries
        else:
            self._sessions.setdefault(source, {}).update(entries)
        self._apply(source, changed)

    def _apply(self, source: tuple[EntrySource, str], changed: dict[str, Allocation | None]) -> None:
        put, drop = [], []
        for session, allocation in changed.items():
            sources = self._entries.setdefault(session, {})
            if allocation is None:
                sources.pop(source, None)
            else:
                sources[source] = allocation
            if not sources:
                del self._entries[session]
                drop.append(session)
                continue
            counts = sources[min(sources)]
            if self.ledger.allocations.get(session) != counts:
                put.append(counts)
        with self._changing():
            self.ledger.change(put, drop)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.doubtful = True
            raise


SESSIONS_AT_ONCE = 100
"""Sessions that are assigned to nodes in one step: less than 1 ms."""


class SupposedLedger:
    """Copies of nodes with simulated changes. The original ledger does not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[str, Ledger] = {}

    def happens(self, session: str, notice: Notice) -> str | None:
        """Simulate an idle action. Return the node of the freed units; None if it frees none."""
        name = self._ledger.node_of(session)
        if name is None:
            return None
        node = self._node(name)
        allocation = node.allocations.get(session)
        if allocation is None:
            return None
        if notice.tier is Tier.STOPPED:
            node.remove(session)
        elif notice.effective_units < allocation.effective_units:
            node.replace(allocation.with_effective(notice.effective_units))
        else:
            return None
        return name

    def yielding(self, units_left: Mapping[str, int], node: str) -> None:
        """Simulate that sessions give up all but so many units of each GPU. Others can then own these units."""
        ledger = self._node(node)
        ledger.change([ledger.allocations[session].yielding(units) for session, units in units_left.items()])

    def lending(self, units_left: Mapping[str, int], node: str) -> None:
        """Simulate that idle sessions keep only so many units of each of their GPUs and lend the rest."""
        ledger = self._node(node)
        ledger.change([ledger.allocations[session].with_effective(units) for session, units in units_left.items()])

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes with simulated changes."""
        return frozenset(self._nodes)

    def now(self, node: str) -> Ledger:
        """Return the ledger that has a node: the simulated one, or the original one if nothing has changed there."""
        return self._nodes.get(node, self._ledger)

    def place(self, name: str, request: PlacementRequest, node: str) -> NodeHold | None:
        """Simulate the placement of a request on one node, in place of this name's hold.

        Return the new hold; None if the request does not fit there.
        """
        if request.node not in ("", node) or node in request.left_out:
            return None
        ledger = self._node(node)
        hold = ledger.holds.get(name)
        ledger.hold(name, None)
        placement = None
        if fits(request.demand, ledger.capacity.nodes[node]):
            placement = ledger.place(replace(request, node=node))
        if placement is None:
            ledger.hold(name, hold)
            return None
        hold = NodeHold(node, placement.gpus, request.demand)
        ledger.hold(name, hold)
        return hold

    def _node(self, name: str) -> Ledger:
        if name not in self._nodes:
            self._nodes[name] = self._ledger.of_node(name)
        return self._nodes[name]


def helpful_actions(
    ledger: Ledger, requests: Iterable[PlacementRequest], notices: Iterable[tuple[str, Notice]]
) -> Iterator[list[tuple[str, Notice]]]:
    """Yield the idle actions on nodes where one of the requests may fit after them, node by node, in small steps.

    ``notices``: the actions by their sessions. An empty list is a step without a match. Holds are ignored, so that a
    request's own hold does not block it. No node is copied. The ledger may change between two steps.
    """
    on_node: dict[str, list[tuple[str, Notice]]] = {}
    for number, (session, action) in enumerate(notices):
        node = ledger.node_of(session)
        if node is not None:
            on_node.setdefault(node, []).append((session, action))
        if number % SESSIONS_AT_ONCE == 0:
            yield []
    distinct = {(request.demand, request.left_out, request.node): request for request in requests}.values()
    for name, actions in on_node.items():
        yield actions if _may_fit(ledger, distinct, name, actions) else []


def first_to_fit(
    ledger: Ledger, request: PlacementRequest, helpful: Iterable[tuple[str, Notice]]
) -> Iterator[NodeHold | None]:
    """Yield the first GPUs that fit a request if idle actions with a notice happen; nothing if these do not help.

    Yield None before that for each action that does not help, so that the caller can work in steps. ``helpful``: the
    actions by their sessions, see `helpful_actions`.
    """
    supposed = SupposedLedger(ledger)
    for session, action in sorted(helpful, key=lambda entry: entry[1].at):
        there = supposed.happens(session, action)
        hold = supposed.place("", request, there) if there is not None else None
        yield hold
        if hold is not None:
            return


def _may_fit(
    ledger: Ledger, requests: Iterable[PlacementRequest], name: str, actions: Iterable[tuple[str, Notice]]
) -> bool:
    """Return whether a node without holds would have enough free units for one of the requests."""
    node = ledger.capacity.nodes.get(name)
    if node is None:
        return False
    free = {gpu.uuid: gpu.free for gpu in node.gpus}
    for session, action in actions:
        allocation = ledger.allocations.get(session)
        if allocation is not None:
            stops, alone = action.tier is Tier.STOPPED, allocation.neighbours.alone
            units_left = 0 if stops else action.effective_units
            _add(
                free,
                allocation.gpus,
                UNITS_PER_GPU if stops and alone else max(0, allocation.effective_units - units_left),
            )
    for hold in ledger.holds.values():
        if hold.node == name:
            _add(free, hold.gpus, hold.demand.units)
    return any(
        request.node in ("", name)
        and name not in request.left_out
        and request.share.count
        <= sum(
            free[gpu.uuid] >= request.share.least_units
            and request.demand.accepts(gpu.model)
            and gpu.can_have(request.demand.layer_on(gpu.model))
            for gpu in node.gpus
        )
        for request in requests
    )


def _add(free: dict[str, int], gpus: Iterable[str], units: int) -> None:
    for uuid in gpus:
        if uuid in free:
            free[uuid] += units


def _newest_reports(reports: Iterable[Report]) -> dict[str, Report]:
    """Return the newest report of each node; at equal instants the last in order."""
    newest: dict[str, Report] = {}
    for report in reports:
        current = newest.get(report.node)
        if current is None or report.published_at >= current.published_at:
            newest[report.node] = report
    return newest
