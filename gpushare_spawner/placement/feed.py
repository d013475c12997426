"""Keeps one ledger in step with what agents, pods and the hub say, by what changes.

What would be free on some nodes if announced idle actions happened, and whom that would fit first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

from gpushare_spawner.model.report import Notice, Report
from gpushare_spawner.model.share import Tier
from gpushare_spawner.placement.capacity import fits
from gpushare_spawner.placement.claim import NodeHold
from gpushare_spawner.placement.ledger import Ledger, newest_reports
from gpushare_spawner.placement.node import Allocation, NodeResources
from gpushare_spawner.placement.request import PlacementRequest


class EntrySource(IntEnum):
    """Who says that a session has an allocation. Of several the first counts."""

    REPORTED = 0
    """An agent's report; of two nodes the first by name."""
    SEEN = 1
    """A pod's annotations."""
    RESERVED = 2
    """This hub's reservations in flight."""


_SAID: dict[EntrySource, tuple[EntrySource, str]] = {source: (source, "") for source in EntrySource}
"""Who speaks where it is no node: one object for all that it says."""


class LedgerFeed:
    """One ledger, and who said what that is in it.

    Each change costs what it concerns. The ledger is always what `Ledger.of` would make of the same reports and
    allocations. `follow` finds the changes by comparison where nobody can tell them.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        """Read it and place by it; only the feed changes it."""
        self.doubtful = False
        """An error came while the ledger was changed or read: it may contradict itself until it is made anew."""
        self._reports: dict[str, Report] = {}
        self._said: dict[str, dict[tuple[EntrySource, str], Allocation]] = {}
        self._sessions: dict[tuple[EntrySource, str], dict[str, Allocation]] = {}

    # -- told what has changed --

    def report(self, report: Report) -> None:
        """A node's newest report. One that is older than the known one is ignored."""
        known = self._reports.get(report.node)
        if report is known or (known is not None and report.published_at < known.published_at):
            return
        self._reports[report.node] = report
        if known is None or known.gpus != report.gpus:
            with self._changing():
                self.ledger.put_node(report.node, report.gpus)
        if known is None or known.sessions != report.sessions:
            found = (Allocation.of(session) for session in report.sessions)
            self._say((EntrySource.REPORTED, report.node), filter(None, found))

    def forget_node(self, node: str) -> None:
        """A node's report is gone, or too old to be believed."""
        if self._reports.pop(node, None) is not None:
            with self._changing():
                self.ledger.drop_node(node)
            self._say((EntrySource.REPORTED, node), ())

    def reported(self, node: str) -> Report | None:
        """Return a node's report that counts; None where there is none."""
        return self._reports.get(node)

    def follow_reports(self, newest: Mapping[str, Report]) -> Iterator[tuple[str, Report | None]]:
        """Take these reports, by their nodes, instead of the known ones; yield each node that has changed.

        With its report, or None where it has none any more. A report that is the same object costs next to nothing.
        """
        for node in self._reports.keys() - newest.keys():
            self.forget_node(node)
            yield node, None
        for node, report in newest.items():
            known = self._reports.get(node)
            if known is report:
                continue
            if known is not None and report.published_at < known.published_at:
                self.forget_node(node)  # the agent's clock was set back, or its machine was replaced
            self.report(report)
            yield node, report

    def put(self, source: EntrySource, allocation: Allocation) -> None:
        """A pod or a reservation has this allocation now."""
        self._say(_SAID[source], [allocation], all_of_it=False)

    def drop(self, source: EntrySource, session: str) -> None:
        """The session's pod or reservation is gone; nothing happens where there was none."""
        said = self._sessions.get(_SAID[source], {})
        if session in said:
            del said[session]
            self._apply(_SAID[source], {session: None})

    def resources(self, node: str, resources: NodeResources) -> None:
        """What is free on a node of CPU, memory and pods; see `Ledger.put_resources`."""
        with self._changing():
            self.ledger.put_resources(node, resources)

    def claim(self, name: str, claim: NodeHold | None) -> None:
        """A request that waits claims GPUs, or nothing any more; see `Ledger.claim`."""
        with self._changing():
            self.ledger.claim(name, claim)

    def sessions(self, source: EntrySource) -> list[str]:
        """Return the sessions of which pods or reservations (`put`) say that they have an allocation."""
        return list(self._sessions.get(_SAID[source], {}))

    # -- told everything --

    def follow(
        self, reports: Iterable[Report], seen: Iterable[Allocation] = (), reserved: Iterable[Allocation] = ()
    ) -> Ledger:
        """Make the ledger what `Ledger.of` makes of all this; objects that are the same as before cost next to nothing.

        Of two allocations of a session in one list the first counts.
        """
        for _ in self.follow_reports(newest_reports(reports)):
            pass
        self._say(_SAID[EntrySource.SEEN], seen)
        self._say(_SAID[EntrySource.RESERVED], reserved)
        return self.ledger

    def make_anew(self) -> None:
        """Count everything anew that was said, and is not taken back: see `Ledger.make_anew`."""
        self._said = {}
        for speaker, said in self._sessions.items():
            for session, allocation in said.items():
                self._said.setdefault(session, {})[speaker] = allocation
        counts = [speakers[min(speakers)] for speakers in self._said.values()]
        self.doubtful = True
        self.ledger.make_anew({node: report.gpus for node, report in self._reports.items()}, counts)
        self.doubtful = False

    def _say(self, speaker: tuple[EntrySource, str], allocations: Iterable[Allocation], all_of_it: bool = True) -> None:
        """Take down what a speaker says: all that it has to say, or these allocations beside what it said before."""
        said: dict[str, Allocation] = {}
        for allocation in allocations:
            said.setdefault(allocation.session, allocation)
        before = self._sessions.get(speaker, {})
        changed: dict[str, Allocation | None] = {
            session: allocation
            for session, allocation in said.items()
            if (known := before.get(session)) is not allocation and known != allocation
        }
        if all_of_it:
            changed.update(dict.fromkeys(before.keys() - said.keys()))
            self._sessions[speaker] = said
        else:
            self._sessions.setdefault(speaker, {}).update(said)
        self._apply(speaker, changed)

    def _apply(self, speaker: tuple[EntrySource, str], changed: dict[str, Allocation | None]) -> None:
        put, drop = [], []
        for session, allocation in changed.items():
            speakers = self._said.setdefault(session, {})
            if allocation is None:
                speakers.pop(speaker, None)
            else:
                speakers[speaker] = allocation
            if not speakers:
                del self._said[session]
                drop.append(session)
                continue
            counts = speakers[min(speakers)]
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
"""Sessions whose nodes are found in one piece: less than 1 ms."""


class SupposedLedger:
    """Copies of the nodes for which something is supposed. The ledger that they are copied from does not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[str, Ledger] = {}

    def happens(self, session: str, announced: Notice) -> str | None:
        """Count the units that an idle action frees; return their node, None where it frees none."""
        name = self._ledger.node_of(session)
        if name is None:
            return None
        node = self._node(name)
        allocation = node.allocations.get(session)
        if allocation is None:
            return None
        if announced.tier is Tier.STOPPED:
            node.remove(session)
        elif announced.effective_units < allocation.effective_units:
            node.replace(allocation.with_effective(announced.effective_units))
        else:
            return None
        return name

    def yielding(self, kept: Mapping[str, int], node: str) -> None:
        """Count that sessions give up all but so many units of each of their GPUs, which others can then own."""
        ledger = self._node(node)
        ledger.change([ledger.allocations[session].yielding(units) for session, units in kept.items()])

    def lending(self, kept: Mapping[str, int], node: str) -> None:
        """Count that idle sessions keep only so many units of each of their GPUs, and lend the others."""
        ledger = self._node(node)
        ledger.change([ledger.allocations[session].with_effective(units) for session, units in kept.items()])

    def copy_of(self, node: str) -> SupposedLedger:
        """Return a ledger of one node, as it is supposed to be, to suppose more there."""
        return SupposedLedger(self._node(node))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes for which something is supposed."""
        return frozenset(self._nodes)

    def place(self, name: str, request: PlacementRequest, node: str) -> NodeHold | None:
        """Count a request as placed on one node, instead of what this name claims.

        Return where; None where it does not fit there.
        """
        if request.node not in ("", node) or node in request.left_out:
            return None
        ledger = self._node(node)
        claim = ledger.claims.get(name)
        ledger.claim(name, None)
        placement = None
        if fits(request.demand, ledger.capacity.nodes[node]):
            placement = ledger.place(replace(request, node=node))
        if placement is None:
            ledger.claim(name, claim)
            return None
        found = NodeHold.of(request, node, placement.gpus)
        ledger.claim(name, found)
        return found

    def _node(self, name: str) -> Ledger:
        if name not in self._nodes:
            self._nodes[name] = self._ledger.of_node(name)
        return self._nodes[name]


def helpful_actions(
    ledger: Ledger, requests: Iterable[PlacementRequest], announced: Iterable[tuple[str, Notice]]
) -> Iterator[list[tuple[str, Notice]]]:
    """Yield the idle actions on nodes where one of the requests may fit after them, node by node; in small pieces.

    ``announced``: the actions by their sessions. An empty list is a piece of work that found none. Claims are not
    looked at: a request does not meet its own. This is counted without a copy of the node. Between two pieces the
    ledger may change.
    """
    on_node: dict[str, list[tuple[str, Notice]]] = {}
    for number, (session, action) in enumerate(announced):
        node = ledger.node_of(session)
        if node is not None:
            on_node.setdefault(node, []).append((session, action))
        if number % SESSIONS_AT_ONCE == 0:
            yield []
    asked = {(request.demand, request.left_out, request.node): request for request in requests}.values()
    for name, actions in on_node.items():
        yield actions if _may_fit(ledger, asked, name, actions) else []


def first_to_fit(
    ledger: Ledger, request: PlacementRequest, helpful: Iterable[tuple[str, Notice]]
) -> Iterator[NodeHold | None]:
    """Yield the GPUs that fit a request first if announced idle actions happen; nothing where these do not help it.

    Before that None for each action that does not help: the work can be done in pieces. ``helpful``: the actions by
    their sessions, see `helpful_actions`.
    """
    supposed = SupposedLedger(ledger)
    for session, action in sorted(helpful, key=lambda known: known[1].at):
        there = supposed.happens(session, action)
        claim = supposed.place("", request, there) if there is not None else None
        yield claim
        if claim is not None:
            return


def _may_fit(
    ledger: Ledger, requests: Iterable[PlacementRequest], name: str, actions: Iterable[tuple[str, Notice]]
) -> bool:
    """Whether enough units would be free on a node for one of the requests if nothing were claimed there."""
    node = ledger.capacity.nodes.get(name)
    if node is None:
        return False
    free = {gpu.uuid: gpu.free for gpu in node.gpus}
    for session, action in actions:
        allocation = ledger.allocations.get(session)
        if allocation is not None:
            kept = 0 if action.tier is Tier.STOPPED else action.effective_units
            _add(free, allocation.gpus, max(0, allocation.effective_units - kept))
    for claim in ledger.claims.values():
        if claim.node == name:
            _add(free, claim.gpus, claim.units)
    return any(
        request.node in ("", name)
        and name not in request.left_out
        and request.share.count
        <= sum(
            free[gpu.uuid] >= request.share.units
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
