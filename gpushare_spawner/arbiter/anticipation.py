"""Expected launches: which submitted cells will use the GPU, and page-ins before their first launch.

`CellHistory` learns from the cells of one session. `Anticipation` has the launches that are expected on one GPU; a
page-in for them takes memory that is free or that belongs to clients without a lease and without work.
docs/explanation/arbiter.md explains the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from gpushare_spawner.arbiter.memory import page_out_order, together
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import (
    CLEARLY_LONGER,
    ArbiterSettings,
    Client,
    Decision,
    PageIn,
    PageOut,
    Presence,
)
from gpushare_spawner.arbiter.suspensions import Suspensions
from gpushare_spawner.arbiter.time_slices import HandOffCost

LIKELY = 0.2
"""Probability of GPU work from which a cell's pages come in. A wrong guess costs little: pages of the least recently
used idle session, which probably returns much later."""
LIKELY_FOR_RESUMPTION = 0.8
"""The same for a suspended session: a resumption cannot be cut short, and others that need the memory wait for it."""
MEMORY = 0.7
"""Weight of the old estimates when a cell ends: after three different outcomes in a row the old ones count a third."""
HEAD_START = 10.0
"""Seconds before an expected launch from which its pages may come in: a page-in of 80 GB at 8 GB/s. Earlier they would
keep the memory from others for nothing."""
SHORTEST_PATIENCE = 10.0
"""Seconds for which a launch is expected, at least: imports take up to 5 s, and twice as long on a busy machine."""
MAX_KERNELS, MAX_TEXTS, MAX_QUEUED = 16, 256, 256
"""Remembered kernels of a session, texts and submitted cells of a kernel: of the cells the first, else the latest."""


@dataclass(frozen=True)
class Expected:
    """A launch that is expected. Instants are in seconds."""

    probability: float
    begins: float
    """Instant from which its pages may come in."""
    until: float
    """Instant after which it is no longer expected."""


@dataclass
class _Uses:
    """Outcomes of cells, the newest with the most weight."""

    cells: float = 0.0
    with_gpu: float = 0.0
    lead: float | None = None
    """Seconds from a cell's start to its first GPU work."""
    length: float | None = None
    """Seconds from a cell's start to its end."""

    def learn(self, lead: float | None, length: float) -> None:
        """Add a cell. `lead`: None if it did not use the GPU."""
        self.cells = MEMORY * self.cells + 1
        self.with_gpu = MEMORY * self.with_gpu + (lead is not None)
        self.length = _averaged(self.length, length)
        if lead is not None:
            self.lead = _averaged(self.lead, lead)


@dataclass
class _Cell:
    number: int
    text: int
    started: float | None = None
    used: float | None = None
    """Instant of its first GPU work."""


@dataclass
class _Kernel:
    process: int
    """Its pid; a restart changes it."""
    cells: deque[_Cell] = field(default_factory=deque)
    """Submitted cells that have not ended, in the order of submission."""
    all_cells: _Uses = field(default_factory=_Uses)
    texts: dict[int, _Uses] = field(default_factory=dict)
    """By the hash of the text, least recently run first."""

    def probability(self, text: int) -> float:
        """Return the probability that a cell with this text uses the GPU: before it has run, that of all cells."""
        usual = self.all_cells.with_gpu / self.all_cells.cells if self.all_cells.cells else 0.0
        own = self.texts.get(text, _Uses())
        return (own.with_gpu + usual) / (own.cells + 1)

    def lead(self, text: int) -> float:
        """Return the expected seconds from the start of a cell with this text to its first GPU work."""
        own = self.texts.get(text, _Uses()).lead
        return own if own is not None else self.all_cells.lead or 0.0

    def learn(self, cell: _Cell, started: float, now: float) -> None:
        """Learn from a cell that has ended."""
        own = self.texts.pop(cell.text, None) or _Uses()
        self.texts[cell.text] = own
        if len(self.texts) > MAX_TEXTS:
            del self.texts[next(iter(self.texts))]
        for uses in (own, self.all_cells):
            uses.learn(None if cell.used is None else max(0.0, cell.used - started), now - started)


class CellHistory:
    """Cells of one session: which use the GPU, and how soon.

    What was learned of a kernel is forgotten when the kernel restarts. Unknown kernels and cells are ignored.
    """

    def __init__(self) -> None:
        self._kernels: dict[int, _Kernel] = {}

    def submitted(self, kernel: int, process: int, cell: int, text: int) -> None:
        """Record a submitted cell, once. `process`: the kernel's pid. `text`: the hash of the cell's text."""
        record = self._kernels.pop(kernel, None)
        if record is None or record.process != process:
            record = _Kernel(process)
        self._kernels[kernel] = record
        if len(self._kernels) > MAX_KERNELS:
            del self._kernels[next(iter(self._kernels))]
        # the first cell is the running cell: it stays, and cells beyond the limit are not recorded
        if len(record.cells) < MAX_QUEUED and not any(queued.number == cell for queued in record.cells):
            record.cells.append(_Cell(cell, text))

    def started(self, kernel: int, cell: int, now: float) -> None:
        """Record the start of a cell."""
        record = self._cell(kernel, cell)
        if record is not None and record.started is None:
            record.started = now

    def ended(self, kernel: int, cell: int, now: float) -> None:
        """Record the end of a cell, and learn from it if its start was recorded."""
        record = self._cell(kernel, cell)
        if record is not None:
            self._kernels[kernel].cells.remove(record)
            if record.started is not None:
                self._kernels[kernel].learn(record, record.started, now)

    def worked(self, processes: Collection[int], now: float) -> None:
        """Record that GPU work begins. `processes`: the pids of its process and that process's ancestors.

        It belongs to the earliest cell of the kernel that has not ended.
        """
        for kernel in self._kernels.values():
            if kernel.process in processes and kernel.cells and kernel.cells[0].used is None:
                kernel.cells[0].used = now

    def abandoned(self) -> None:
        """Forget the cells in progress: the notebook server that reports their end has disconnected."""
        for kernel in self._kernels.values():
            kernel.cells.clear()

    def busy(self, kernel: int) -> bool:
        """Return whether a submitted cell has not ended."""
        record = self._kernels.get(kernel)
        return record is not None and bool(record.cells)

    def expected(self, kernel: int, now: float) -> Expected | None:
        """Return the launch that the kernel's submitted cells lead to: that of the first likely cell.

        The cells before it count with their usual length; without one its start is awaited.
        """
        record = self._kernels.get(kernel)
        wait = 0.0
        for cell in record.cells if record is not None else ():
            assert record is not None
            elapsed = 0.0 if cell.started is None else now - cell.started
            probability = record.probability(cell.text)
            if cell.used is None and probability >= LIKELY:
                lead = record.lead(cell.text)
                begins = now + wait + max(0.0, lead - elapsed) - HEAD_START
                until = now + wait - elapsed + max(SHORTEST_PATIENCE, CLEARLY_LONGER * lead)
                return Expected(probability, begins, until) if now < until else None
            length = record.texts.get(cell.text, _Uses()).length
            if length is None:
                return None
            wait += max(0.0, length - elapsed)
        return None

    def _cell(self, kernel: int, number: int) -> _Cell | None:
        record = self._kernels.get(kernel)
        return None if record is None else next((cell for cell in record.cells if cell.number == number), None)


class Anticipation:
    """Launches that are expected on one GPU. Amounts are in bytes, instants in seconds."""

    def __init__(self, roster: Roster, suspensions: Suspensions, cost: HandOffCost, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._suspensions = suspensions
        self._cost = cost
        self._settings = settings
        self._expected: dict[Client, Expected] = {}
        self._moved: set[Client] = set()
        """Clients whose memory was ordered to come in."""

    def __bool__(self) -> bool:
        return bool(self._expected)

    def expect(self, client: Client, expected: Expected) -> None:
        """Expect a launch of a client; it replaces an earlier expectation."""
        self._expected[client] = expected

    def over(self, client: Client, used: bool) -> None:
        """End the expectation. `used`: the launch has come. Counts memory that came in for it."""
        client.anticipated = False
        self._expected.pop(client, None)
        if client in self._moved:
            self._moved.discard(client)
            if used:
                client.session.guesses_used += 1
            else:
                client.session.guesses_unused += 1

    def orders(self) -> list[Decision]:
        """Return the orders by which memory comes in for launches that are expected now."""
        decisions: list[Decision] = []
        for client in self._update():
            decisions += self._resume(client) if client.session.suspendable else self._page_in(client)
        return decisions

    def _update(self) -> list[Client]:
        """End what is expected no longer. Return the clients without a lease whose pages may come in now."""
        now = self._roster.now
        for client, expected in list(self._expected.items()):
            if client.waiting or client.lease:
                self.over(client, used=True)
            elif now >= expected.until:
                self.over(client, used=False)
        due = [client for client, expected in self._expected.items() if now >= expected.begins]
        for client in due:
            client.anticipated = True  # its pages on the GPU stay
        return [client for client in due if not client.parked and not client.session.at_limit]

    def due(self) -> list[float]:
        """Return the instants at which the passage of time alone begins or ends an expectation."""
        return [at for expected in self._expected.values() for at in (expected.begins, expected.until)]

    def _page_in(self, client: Client) -> list[Decision]:
        """Order a page-in, and the page-outs of idle clients that it needs."""
        residency, capacity = self._roster.residency, self._roster.vram_budget().for_managed
        amount = self._fits(client)
        if amount < self._settings.measured_from:
            return []
        orders = residency.free_memory(amount, capacity, self._idle_order(client), self._roster.now)
        amount = min(amount, residency.free(capacity))
        decisions: list[Decision] = [PageOut(idle.id, size) for idle, size in orders]
        if amount > 0:
            self._moved.add(client)
            residency.order_in(client, amount, self._roster.now)
            decisions.append(PageIn(client.id, amount))
        return decisions

    def _resume(self, client: Client) -> list[Decision]:
        """Order the resumption of a suspended session, into free memory only."""
        session, budget, roster = client.session, self._roster.vram_budget(), self._roster
        possible = session.presence is Presence.SUSPENDED and not roster.stuck(session)
        if not possible or self._expected[client].probability < LIKELY_FOR_RESUMPTION:
            return []
        if not budget.fits([*self._kept(client), client]) or not self._suspensions.can_come(client):
            return []
        if roster.residency.free(budget.for_managed) < min(session.total, budget.for_managed):
            return []
        session.resuming_until = roster.now + 2 * self._cost.suspend_and_resume(session.id, session.total)
        roster.set_presence(session, Presence.RESUMING)
        session.resuming_early = True
        self._moved.add(client)
        return [PageIn(client.id, session.total)]

    def _idle_order(self, client: Client) -> Iterator[tuple[Client, int]]:
        """Yield the order of page-outs for the client: no client with work, and none whose launch is expected."""
        kept = {client, *self._kept(client)}
        idle = [other for other in self._roster.clients if other not in kept and not other.session.suspendable]
        capacity, bandwidth = self._roster.vram_budget().for_managed, self._cost.bandwidth_in.value
        return page_out_order(idle, self._roster.residency, capacity, bandwidth, self._roster.now, self._settings)

    def _kept(self, client: Client) -> list[Client]:
        """Return the other clients whose memory a page-in for the client must not take."""
        return [
            other for other in self._roster.clients if other is not client and (other.wants_memory or other.anticipated)
        ]

    def _fits(self, client: Client) -> int:
        """Return the client's bytes on the host that fit next to the clients with work, at least 0."""
        capacity, residency = self._roster.vram_budget().for_managed, self._roster.residency
        left = capacity - together(self._kept(client)) - residency.of(client) - client.unconfirmed
        return max(0, min(residency.prefetch(client, capacity), left))


def _averaged(before: float | None, now: float) -> float:
    return now if before is None else MEMORY * before + (1 - MEMORY) * now
