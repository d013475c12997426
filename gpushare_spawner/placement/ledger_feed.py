"""Keeps one ledger in step with what agents, pods and the hub say, by what changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

from gpushare_spawner.model.report import Report
from gpushare_spawner.placement.allocation import Allocation
from gpushare_spawner.placement.claim import Claim
from gpushare_spawner.placement.ledger import Ledger, newest_reports
from gpushare_spawner.placement.node_resources import NodeResources


class Source(IntEnum):
    """Who says that a session has an allocation. Of several the first counts."""

    REPORTED = 0
    """An agent's report; of two nodes the first by name."""
    SEEN = 1
    """A pod's annotations."""
    RESERVED = 2
    """This hub's reservations in flight."""


_SAID: dict[Source, tuple[Source, str]] = {source: (source, "") for source in Source}
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
        self._said: dict[str, dict[tuple[Source, str], Allocation]] = {}
        self._sessions: dict[tuple[Source, str], dict[str, Allocation]] = {}

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
            self._say((Source.REPORTED, report.node), filter(None, found))

    def forget_node(self, node: str) -> None:
        """A node's report is gone, or too old to be believed."""
        if self._reports.pop(node, None) is not None:
            with self._changing():
                self.ledger.drop_node(node)
            self._say((Source.REPORTED, node), ())

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

    def put(self, source: Source, allocation: Allocation) -> None:
        """A pod or a reservation has this allocation now."""
        self._say(_SAID[source], [allocation], all_of_it=False)

    def drop(self, source: Source, session: str) -> None:
        """The session's pod or reservation is gone; nothing happens where there was none."""
        said = self._sessions.get(_SAID[source], {})
        if session in said:
            del said[session]
            self._apply(_SAID[source], {session: None})

    def resources(self, node: str, resources: NodeResources) -> None:
        """What is free on a node of CPU, memory and pods; see `Ledger.put_resources`."""
        with self._changing():
            self.ledger.put_resources(node, resources)

    def claim(self, name: str, claim: Claim | None) -> None:
        """A request that waits claims GPUs, or nothing any more; see `Ledger.claim`."""
        with self._changing():
            self.ledger.claim(name, claim)

    def sessions(self, source: Source) -> list[str]:
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
        self._say(_SAID[Source.SEEN], seen)
        self._say(_SAID[Source.RESERVED], reserved)
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

    def _say(self, speaker: tuple[Source, str], allocations: Iterable[Allocation], all_of_it: bool = True) -> None:
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

    def _apply(self, speaker: tuple[Source, str], changed: dict[str, Allocation | None]) -> None:
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
