"""Reservations of shares, and the loop that places queued spawns: the common part for a machine and a cluster.

`queue` counts positions and chooses places.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from gpushare_spawner.idle.policy import effective_idle
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.quota import ResourceAmounts
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.placement.capacity import Rating
from gpushare_spawner.placement.departures import Departures
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.ledger import rating_steps
from gpushare_spawner.placement.node import Allocation, Requested
from gpushare_spawner.placement.request import Demand
from gpushare_spawner.placement.strategy import BestFit, Strategy
from gpushare_spawner.quota.order import PREPAID_SECONDS, LimitExceeded
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.queue.availability import AvailabilityNow, UnknownNow, WaitEstimates
from gpushare_spawner.spawner.queue.queue import (
    NODES_AT_ONCE,
    LoopBreaks,
    PlacementCheck,
    Placer,
    Reservation,
    SpawnQueue,
    Ticket,
    WaitInterval,
)
from gpushare_spawner.spawner.queue.quotas import QueueQuotas, QuotaHistory, ServerWithoutGpu
from gpushare_spawner.spawner.queue.snapshot import ExpectedWorkload, GpuSnapshot, SpawnRequest, guaranteed_resources
from gpushare_spawner.templates.folder import Policy
from gpushare_spawner.wording import spawn_failures
from gpushare_spawner.wording.amounts import duration
from gpushare_spawner.wording.service import exceeded, over_quota_waits

Reserved = TypeVar("Reserved", bound=Reservation)

MAKE_ANEW_SECONDS = 60.0
"""Minimum time between two rebuilds of the ledger. Our value: an error that a rebuild does not fix would cost the hub
of a large cluster a second each time.
"""


class Reservations(ABC, Generic[Reserved]):
    """The shares that this hub process has reserved, and the queue of spawns that wait for a share.

    One object serves all spawners of a hub that use the same GPUs. ``nodes_are_added``: a spawn that no current node
    can take waits for a new node. ``policy`` returns the admin's templates and quotas in force. ``quota_usage_file``:
    the file of use over quota and of lengths of sessions, None if there is no file.
    """

    place_every = 1.5
    """Seconds between two passes over the queue while spawns wait; while no spawn waits, the agent is not polled. Our
    value: a place that becomes free is taken soon, and the agent is polled about once a second.
    """
    patience = 20.0
    """Seconds that a spawn waits while the GPUs are unavailable: the agent or the cluster's API does not answer, or no
    agent has published a report within two minutes. Our value: users should not notice a restart of the agent or the
    API server.
    """

    where: ClassVar[str]
    """The location of the GPUs, as text for people: "this machine"."""
    unavailable: ClassVar[str]
    """The text to show while the GPUs are unavailable, without a period."""
    unreachable: ClassVar[tuple[type[Exception], ...]]
    """Errors that `snapshot` and `_reserve_on` raise while the GPUs are unavailable."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        feed: LedgerFeed | None = None,
        strategy: Strategy | None = None,
        queue_length: int = 50,
        nodes_are_added: bool = False,
        policy: Callable[[], Policy] = Policy,
        quota_usage_file: Path | None = None,
        without_gpu: dict[str, ServerWithoutGpu] | None = None,
    ) -> None:
        self.log = log
        self.without_gpu = without_gpu if without_gpu is not None else {}
        """The hub's servers without a GPU, by session id; they count in quotas."""
        self.feed = feed or LedgerFeed()
        """The ledger of all reported shares and of those in flight; `snapshot` updates it."""
        self.strategy = strategy or BestFit()
        self.policy = policy
        self._departures = Departures(self.feed.ledger, self._requested, self.feed.is_reserved, self._idle)
        self._idle_actions: tuple[Policy, dict[str, Idle | None]] = (Policy(), {})
        """A policy, and the idle actions of its templates."""
        self.quotas = QueueQuotas(
            self.feed.ledger,
            log,
            lambda: policy().quotas,
            history=QuotaHistory(quota_usage_file, log, self._departures.lengths),
            templates=lambda: policy().templates,
            without_gpu=self.without_gpu,
        )
        """The use of each account, and the resulting order in the queue."""
        self._expected = ExpectedWorkload(lambda: policy().templates)
        self.queue = SpawnQueue(queue_length)
        self.nodes_are_added = nodes_are_added
        self.started_at = time.time()
        self._estimates = WaitEstimates()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._placing: asyncio.Task[None] | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._unavailable_since: float | None = None
        self._made_anew = -math.inf
        self._has_placed = False
        """Whether a full pass over the queue has been made; afterwards, indexes of the cluster's nodes exist."""

    # -- implemented for one machine and for a cluster --

    @abstractmethod
    async def snapshot(self, max_age: float = 0.0) -> GpuSnapshot:
        """Update `feed`, and return the other data on the GPUs. Raises one of `unreachable`.

        Data that are at most ``max_age`` seconds old are reused.
        """

    @abstractmethod
    async def _reserve_on(self, ticket: Ticket, placement: Placement, snapshot: GpuSnapshot) -> Allocation | None:
        """Reserve the place, complete the ticket and return the allocation.

        Returns None if the place is no longer free; the caller then takes a new snapshot. Raises one of `unreachable`;
        then nothing is reserved.
        """

    @abstractmethod
    def give_back(self, reservation: Reserved) -> None:
        """Cancel a reservation that its spawn does not need any more."""

    async def _remove_obstacles(self, snapshot: GpuSnapshot) -> GpuSnapshot:
        """Remove obstacles to queued spawns. Return a snapshot taken afterwards."""
        return snapshot

    def _delay(self, ticket: Ticket) -> str:
        """Return why this spawn cannot be placed yet, regardless of free capacity; empty if it can."""
        return ""

    def counted(self, share: Share) -> Share:
        """Return the share as the ledger must count it if GPUs are allocated in coarser steps than 1 %."""
        return share

    # -- from a request to a reservation --

    async def reserve(
        self, request: SpawnRequest, patience: float, joined: Callable[[Ticket], None] | None = None
    ) -> Reserved:
        """Return a reservation, immediately or after a wait of at most ``patience`` seconds.

        ``joined`` is called with the ticket, to show the position in the queue. Raises SpawnRefused if there is no
        place, or none in time. After an error or a cancelled wait nothing stays reserved.
        """
        ticket = self.queue.join(request, time.monotonic())
        ticket.ends = time.monotonic() + patience
        result: asyncio.Future[Any] = ticket.result
        try:
            if joined is not None:
                joined(ticket)
            self.place_soon()
            await asyncio.wait({result}, timeout=patience)
            if not result.done():
                # a hub with hundreds of simultaneous spawns may not have considered it yet, regardless of free capacity
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ticket.considered.wait(), patience)
            if not result.done():
                waited = duration(time.monotonic() - ticket.joined)
                message = spawn_failures.waited_too_long(request.share, waited, ticket.hint)
                raise SpawnRefused(message, reason="no-capacity", status=503, retry_after=60)
            reservation: Reserved = result.result()
            return reservation
        except BaseException:
            if result.done() and not result.cancelled() and result.exception() is None:
                self.give_back(result.result())
            raise
        finally:
            self.queue.leave(ticket)
            self.feed.hold(ticket.hold_name, None)
            ticket.changed.set()
            self.place_soon()

    # -- one pass over the queue --

    def place_soon(self) -> None:
        """Start a pass over the queue now."""
        self._wake.set()
        if len(self.queue) and (self._placing is None or self._placing.done()):
            self._placing = self.in_background(self._place_while_spawns_wait())

    async def _place_while_spawns_wait(self) -> None:
        while len(self.queue):
            self._wake.clear()
            try:
                # A bug must not stop all spawns. The next pass may succeed, and every wait is bounded.
                with self._logging_errors():
                    async with self._lock:
                        await self._place()
                    self._unavailable_since = None
            except self.unreachable as error:
                self._gpus_unavailable(error)
            if len(self.queue):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self.place_every)

    def placement_failed(self, error: Exception) -> bool:
        """Log an error in placement, and rebuild the ledger. Return whether it was rebuilt.

        After any error the ledger may be inconsistent, and each later read could fail. It is rebuilt at most once in
        `MAKE_ANEW_SECONDS`. Errors in between are not logged again, and the first read after that time rebuilds the
        ledger.
        """
        self.feed.doubtful = True
        if time.monotonic() < self._made_anew + MAKE_ANEW_SECONDS:
            self.log.debug("Another error in placement: %r", error)
            return False
        self.log.error("Error in placement; rebuilding the ledger of all allocations", exc_info=error)
        return self._make_anew()

    def _make_anew(self) -> bool:
        self._made_anew = time.monotonic()
        try:
            self.feed.make_anew()
        except Exception:
            self.log.exception("Cannot rebuild the ledger")
            return False
        return True

    async def _place(self) -> None:
        """Place each queued spawn that fits, on a fresh snapshot."""
        snapshot = await self._remove_obstacles(await self.snapshot())
        check = self._check(snapshot)
        placer = Placer(check, self.feed, self.queue, self.where)
        self._count_quotas(snapshot)
        self.queue.arrange(self.quotas.order(self.queue))
        breaks = LoopBreaks(lasting=not self._has_placed)
        for ticket in self.queue:
            await breaks.pause_if_due()
            if ticket not in self.queue or ticket.result.done():
                continue
            try:
                if snapshot.native(ticket.request.template) and not self._is_delayed(ticket):
                    with self._logging_errors():
                        await breaks.through(check.preparing(ticket.request.placement_request(snapshot)))
                if ticket in self.queue and not await self._place_ticket(ticket, placer, snapshot, breaks):
                    # The agent or cluster counts differently. The next pass uses its new data.
                    break
            except self.unreachable:
                raise
            except Exception:
                # a spawn that cannot be placed must not block later spawns
                self.log.exception("Placing %s failed", ticket.request.session)
                ticket.refuse(SpawnRefused(spawn_failures.PLACING_FAILED, reason="error", status=500))
        self.quotas.note_use()
        await self._publish_positions(check, breaks)
        self._has_placed = True

    def _count_quotas(self, snapshot: GpuSnapshot) -> None:
        """Update the quotas, and keep sampling them while any account is over quota."""
        self.quotas.bring_up_to_date(snapshot.capacity_units)
        if self.quotas.usage is not None and (self._sampling is None or self._sampling.done()):
            self._sampling = self.in_background(self._sample_quotas())

    async def _sample_quotas(self) -> None:
        """Sample while no spawn waits, so that ended sessions over quota no longer count."""
        while True:
            await asyncio.sleep(PREPAID_SECONDS)
            if not self.quotas.anything_over_quota:
                return
            with contextlib.suppress(*self.unreachable), self._logging_errors():
                async with self._lock:
                    snapshot = await self.snapshot()
                    self.quotas.bring_up_to_date(snapshot.capacity_units)

    def _is_delayed(self, ticket: Ticket) -> bool:
        """Record why a spawn cannot be placed yet, regardless of free capacity. Return whether there is a reason."""
        delay = self._delay(ticket)
        if delay:
            ticket.says(ticket.ahead or 0, delay)
            ticket.considered.set()
        return bool(delay)

    async def _place_ticket(self, ticket: Ticket, placer: Placer, snapshot: GpuSnapshot, breaks: LoopBreaks) -> bool:
        """Place one spawn if it fits. Return False if the snapshot has turned out to be wrong."""
        if self._is_delayed(ticket):
            return True
        request = ticket.request
        admission = self.quotas.admission(request.tenant, request.template)
        if admission is not None and admission.refused is not None:
            ticket.refuse(_refusal(admission.refused, admission.needs))
            return True
        placement = self._find_place(ticket, placer)
        if placement is None:
            if request.template.rank == 0:
                ticket.hint = f"{ticket.hint} {spawn_failures.LOW_PRIORITY}"
            if admission is not None and not admission.in_quota:
                ticket.hint = f"{ticket.hint} {over_quota_waits(admission)}"
            ticket.considered.set()
            with self._logging_errors():
                await placer.hold(ticket, breaks)
            return True
        allocation = await self._reserve_on(ticket, placement, snapshot)
        ticket.considered.set()
        if allocation is None:
            return False
        placer.gave(allocation)
        if admission is not None:
            self.quotas.admitted(admission)
        self._expected.spawned(ticket.request.template.name, time.monotonic())
        self._estimates.placed(ticket, snapshot, time.monotonic())
        return True

    def _find_place(self, ticket: Ticket, placer: Placer) -> Placement | None:
        """Return a place for a spawn, as `Placer.place` does. After an error, try once more with a rebuilt ledger."""
        try:
            return placer.place(ticket)
        except Exception as error:
            if not self.placement_failed(error):
                raise
            return placer.place(ticket)

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Catch and log errors in placement, so that they end only the enclosed code."""
        try:
            yield
        except self.unreachable:
            raise
        except Exception as error:
            self.placement_failed(error)

    async def _publish_positions(self, check: PlacementCheck, breaks: LoopBreaks) -> None:
        """Publish the position, the estimate and the templates that would start now to each waiting spawn."""
        waiting = [ticket for ticket in self.queue if not ticket.result.done()]
        if not waiting:
            return
        now = time.monotonic()
        waits: Mapping[Ticket, WaitInterval] = {}
        with self._logging_errors():
            waits = await self._estimates.intervals(check, self.queue, now, time.time(), breaks)
        available = AvailabilityNow(check, self.queue, self.where, failed=self.placement_failed)
        for ticket in waiting:
            with self._logging_errors():
                await breaks.through(available.preparing(ticket.alternatives))
            await breaks.pause_if_due()
            startable = available.startable(ticket.alternatives, ticket.hold_name)
            ticket.publish(now, waits.get(ticket), startable, available.suitable_gpus(ticket.request.template))

    def _why_nothing_is_placed(self, error: Exception) -> str:
        """Return the sentence that queued spawns show while the GPUs are unavailable."""
        return f"{self.unavailable}; trying again."

    def _gpus_unavailable(self, error: Exception) -> None:
        now = time.monotonic()
        if self._unavailable_since is None:
            self._unavailable_since = now
            self.log.warning("%s: %s", self.unavailable, error)
        for ticket in self.queue:
            ticket.says(ticket.ahead or 0, self._why_nothing_is_placed(error))
            ticket.publish(now)
            if now - max(ticket.joined, self._unavailable_since) >= self.patience:
                message = spawn_failures.cannot_place(self.unavailable)
                described = f"{self.unavailable}: {error}"
                ticket.refuse(
                    SpawnRefused(message, reason="agent-unavailable", status=503, retry_after=60, log_message=described)
                )

    # -- free capacity --

    async def availability_now(
        self,
        max_age: float = 0.0,
        ineligible: Callable[[Template], frozenset[str]] = lambda _: frozenset(),
        tenant: Tenant | None = None,
    ) -> AvailabilityNow | UnknownNow:
        """Return the availability of templates now; `UnknownNow` after an error in placement.

        Raises one of `unreachable`. ``ineligible`` returns the nodes that cannot run a server of a template, regardless
        of free capacity. ``tenant``: the server's user; None: any user.
        """
        with self._logging_errors():
            snapshot = await self.snapshot(max_age)
            self._count_quotas(snapshot)
            available = AvailabilityNow(
                self._check(snapshot),
                self.queue,
                self.where,
                ineligible,
                tenant or Tenant(""),
                failed=self.placement_failed,
            )
            await LoopBreaks().through(available.preparing(map(available.request, self._expected.offered())))
            return available
        return UnknownNow()

    async def admit_without_gpu(self, tenant: Tenant, template: Template) -> None:
        """Raise SpawnRefused if a server without a GPU exceeds a limit of its account.

        The caller adds the server to `without_gpu` at once, so that two simultaneous spawns see each other. While the
        GPUs are unavailable, servers with a GPU count as in the last snapshot.
        """
        try:
            with self._logging_errors():
                self._count_quotas(await self.snapshot(max_age=self.place_every))
        except self.unreachable as error:
            self.log.warning("%s: %s", self.unavailable, error)
        self.without_gpu.pop(tenant.session, None)
        self.quotas.recount()
        admission = self.quotas.admission(tenant, template)
        if admission is not None and admission.refused is not None:
            raise _refusal(admission.refused, admission.needs)

    async def node_without_gpu(self, demand: Demand) -> str:
        """Return the node that the strategy chooses for a server without a GPU; empty if the scheduler decides.

        The scheduler decides while the GPUs are unavailable, if no node is free, and with a strategy without ratings.
        """
        try:
            check = self._check(await self.snapshot(max_age=self.place_every))
            strategy, capacity = check.strategy, check.ledger.capacity
            if isinstance(strategy, Rating):
                closed = {node.name for node in capacity.nodes.values() if all(gpu.cordoned for gpu in node.gpus)}
                demand = replace(demand, ineligible=demand.ineligible | closed)
                await LoopBreaks().through(rating_steps(capacity, demand, strategy, NODES_AT_ONCE))
                best = capacity.best(demand, strategy)
                return best.node if best is not None else ""
        except self.unreachable as error:
            self.log.warning(
                "A server without a GPU is placed by the cluster's scheduler: %s: %s", self.unavailable, error
            )
        except Exception as error:
            self.placement_failed(error)
        return ""

    def _check(self, snapshot: GpuSnapshot) -> PlacementCheck:
        if self.feed.doubtful and time.monotonic() >= self._made_anew + MAKE_ANEW_SECONDS:
            self._make_anew()
        before, self.strategy = self.strategy, self._expected.strategy(self.strategy, snapshot, time.monotonic())
        if before is not self.strategy:
            # the strategy's ratings take time proportional to the size of the cluster
            forgetting = self.feed.ledger.capacity.forgetting(before)
            next(forgetting, None)
            self.in_background(LoopBreaks().through(forgetting))
        now, departures = time.time(), self._departures
        departures.follow(now)
        return PlacementCheck(
            snapshot,
            self.feed.ledger,
            self.strategy,
            self.counted,
            self.nodes_are_added,
            departures,
            now,
            time.monotonic(),
        )

    def _requested(self, name: str) -> Requested:
        """Return what servers of a template request; nothing for a template that is gone."""
        template = self.policy().get(name)
        return guaranteed_resources(template) if template is not None else Requested()

    def _idle(self, name: str) -> Idle | None:
        """Return the idle actions of a template's sessions, the latest of those that a user's groups can cause."""
        policy = self.policy()
        if self._idle_actions[0] is not policy:
            self._idle_actions = (policy, {})
        actions = self._idle_actions[1]
        if name not in actions:
            template = policy.get(name)
            carried_out = template is not None and not template.idle.dry_run
            rules = policy.idle or IdlePolicy()
            actions[name] = (
                effective_idle(template, rules, groups=None) if template is not None and carried_out else None
            )
        return actions[name]

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine to completion, independent of its caller."""
        task = asyncio.ensure_future(work)
        # the event loop keeps only weak references to tasks
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _refusal(refused: LimitExceeded, needs: ResourceAmounts) -> SpawnRefused:
    return SpawnRefused(exceeded(refused, needs), reason="quota", status=409)
