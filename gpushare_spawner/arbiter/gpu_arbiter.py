"""Arbiter of one physical GPU: it grants, revokes and refuses leases. schedule.py chooses the clients.

docs/explanation/arbiter.md explains the rules. The agent sends the decisions: agent/gpus/arbitration.py.

Every method takes `now`, in seconds on any monotonic clock, and returns the resulting decisions in sending order.
Unknown clients and sessions raise KeyError. Stale, duplicate and late messages are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, count

from gpushare_spawner.arbiter import time_slices
from gpushare_spawner.arbiter.accounting import TOLERANCE, Charging
from gpushare_spawner.arbiter.anticipation import Anticipation, Expected
from gpushare_spawner.arbiter.memory import page_out_order
from gpushare_spawner.arbiter.nested_sets import NestedSets
from gpushare_spawner.arbiter.recent_use import Use, UseSpan
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.schedule import INSTANT, Schedule, Selection
from gpushare_spawner.arbiter.session import (
    ArbiterSettings,
    ArbitratedSession,
    Client,
    ClientId,
    Decision,
    LeaseGrant,
    Need,
    Pace,
    PageOut,
    Pin,
    Presence,
    Refuse,
    Revoke,
    RevokeReason,
    SessionView,
)
from gpushare_spawner.arbiter.suspensions import Suspensions
from gpushare_spawner.arbiter.time_slices import HandOffCost
from gpushare_spawner.model.report import Burst
from gpushare_spawner.model.share import UNITS_PER_GPU

NEVER_YET = float("-inf")
LONGEST_QUIET = 1.5
"""Seconds after IDLE at which a client must return its lease if its session owes time and the driver does not show its
use: it may still be computing. The library returns a lease after 1 s without work."""
PACE = 0.02
"""Seconds of GPU work that a client may queue while others compete.

The client continues for this long after a REVOKE. Less than a few milliseconds would leave the GPU idle between
kernels.
"""
PACE_ALONE = 0.1
"""Seconds of GPU work that a client may queue while other sessions have processes but no work.

A client has no limit once its session has been the only session for `UNPACED_AFTER`.
"""
UNPACED_AFTER = 1.0
"""Seconds without competition after which clients may queue more again."""
EXPECTED = 0.05
"""Seconds for which a held-back client keeps its place between the return of its lease and its next request."""
COMPUTING = 0.1
"""Fraction of a sample's interval from which a session counts as computing. Less can be the end of an earlier burst."""


class GpuArbiter:
    """Leases for one GPU. The module's docstring describes the conventions of all methods."""

    def __init__(
        self,
        vram_bytes: int,
        settings: ArbiterSettings = ArbiterSettings(),  # noqa: B008 (frozen)
        use_settled: Callable[[UseSpan], None] | None = None,
    ) -> None:
        """Create an arbiter without sessions. `use_settled` is called with all GPU use, seconds later."""
        if vram_bytes <= 0:
            raise ValueError(f"a GPU has more than {vram_bytes} bytes of memory")
        self._settings = settings
        self._roster = Roster(vram_bytes, settings)
        self._residency = self._roster.residency
        self._charging = Charging(self._roster, settings, use_settled)
        self._accounts = self._charging.accounts
        self._time_limits = self._accounts.time_limits
        self._cost = HandOffCost(settings)
        self._schedule = Schedule(self._roster, self._accounts, self._cost, settings)
        self._nested = NestedSets(self._accounts, settings)
        self._suspensions = Suspensions(self._roster, settings)
        self._anticipation = Anticipation(self._roster, self._suspensions, self._cost, settings)
        self._contended_at = float("-inf")
        self._shared_at = float("-inf")
        """Last time at which several sessions had processes."""
        self._leases = count(1)
        self._wakeup: float | None = None

    # -- sessions ----------------------------------------------------------------------------------------------------

    def add_session(
        self,
        session: str,
        weight: int,
        now: float,
        *,
        suspends: bool = False,
        suspended: bool = False,
        time_limit: int = UNITS_PER_GPU,
    ) -> list[Decision]:
        """Add a session with a share of `weight` units (0: released). Raises ValueError if it exists.

        `suspends`: the session's memory leaves the GPU only by suspension, all at once (`suspensions`).
        `suspended`: the session is suspended now. `time_limit`: see `set_time_limit`.
        """
        if session in self._roster.sessions:
            raise ValueError(f"session {session!r} is on this GPU already")
        _check("a weight", weight)
        self._advance(now)
        added = ArbitratedSession(
            session, weight, suspends=suspends, presence=Presence.SUSPENDED if suspended else Presence.ON_GPU
        )
        self._roster.sessions[session] = added
        self._accounts.add(session, added.weight)
        return self.set_time_limit(session, time_limit, now)

    def set_time_limit(self, session: str, units: int, now: float) -> list[Decision]:
        """Limit the session to so many units of 1 % of the GPU's time, also alone; `UNITS_PER_GPU`: no limit."""
        if not 0 < units <= UNITS_PER_GPU:
            raise ValueError(f"a limit of GPU time is from 1 to {UNITS_PER_GPU} units, not {units}")
        record = self._session(session, now)
        self._time_limits.set(session, units / UNITS_PER_GPU)
        record.at_limit = record.at_limit and session in self._time_limits
        return self._decide()

    def set_background(self, session: str, background: bool, now: float) -> list[Decision]:
        """Set whether the session works only in GPU time and memory that no other session uses."""
        record = self._session(session, now)
        self._time_limits.set_background(session, background)
        record.at_limit = record.at_limit and session in self._time_limits
        return self._decide()

    def set_weight(self, session: str, weight: int, now: float) -> list[Decision]:
        """Change the session's weight. 0 releases the session and revokes its leases.

        The pages of a released session stay on the GPU until another client needs the memory. A suspendable
        session is suspended as soon as it has no lease. A released session that requests a lease has weight 1
        until a weight is set.
        """
        _check("a weight", weight)
        record = self._session(session, now)
        record.assigned_weight = weight
        self._accounts.set_weight(session, record.weight)
        decisions: list[Decision] = []
        if weight == 0:
            for client in record.clients.values():
                if client.held:
                    decisions.append(self._revoke(client, RevokeReason.RELEASED, 0))
                elif not client.lease and not client.waiting:
                    client.parked = False  # a pause does not keep its place
        return decisions + self._decide()

    def remove_session(self, session: str, now: float) -> list[Decision]:
        """Remove a session and all its clients."""
        record = self._session(session, now)
        for client in list(record.clients.values()):
            self._anticipation.over(client, used=False)
            self._roster.forget(client)
        del self._roster.sessions[session]
        self._roster.recorders.pop(session, None)
        self._accounts.remove(session)
        self._nested.forget(session)
        self._cost.forget(session)
        return self._decide()

    # -- clients -----------------------------------------------------------------------------------------------------

    def connect(self, client: ClientId, session: str, now: float, *, pages_in_early: bool = False) -> list[Decision]:
        """Add a client: a process of the session. Raises ValueError if the client is connected already.

        `pages_in_early`: it obeys `PageIn`.
        """
        self._advance(now)
        self._roster.connect(client, session)
        self._roster.client(client).pages_in_early = pages_in_early
        return self._decide()

    def disconnect(self, client: ClientId, now: float, alive: bool = False) -> list[Decision]:
        """Remove a client that disconnected or crashed, together with its lease and memory.

        `alive`: its process continues. If it had a lease, it counts as computing until `process_ended` or for
        `revoke_timeout`: a disconnect does not end the work on the GPU.
        """
        record = self._client(client, now)
        if alive and record.lease:
            record.session.left_behind[client] = self._roster.now + self._settings.revoke_timeout
        self._learn_timeout(record)
        self._anticipation.over(record, used=False)
        self._roster.forget(record)
        return self._decide()

    def process_ended(self, client: ClientId, session: str, now: float) -> list[Decision]:
        """Record the end of a disconnected client's process. No effect for an unknown client."""
        record = self._roster.sessions.get(session)
        self._advance(now)
        if record is not None:
            record.left_behind.pop(client, None)
        return self._decide()

    def memory(self, client: ClientId, managed: int, plain: int, now: float, short: int = 0) -> list[Decision]:
        """Record the client's memory allocation in bytes: managed memory, and plain memory, which cannot leave the GPU.

        `short`: the part that the client does not have yet and for which calls wait.
        """
        record = self._client(client, now)
        self._roster.set_memory(record, managed, plain, short)
        return self._decide()

    def memory_counts(self, client: ClientId, managed: int, plain: int, now: float) -> list[Decision]:
        """Replace the bytes stated by the client. The stated shortage does not change."""
        return self.memory(client, managed, plain, now, self._roster.client(client).short)

    def device_memory(self, client: ClientId, amount: int | None, unstated: int, now: float) -> list[Decision]:
        """Record the driver's figure for the client's process on this GPU, in bytes: managed, plain and CUDA context.

        None if the driver does not show the process; its plain memory then counts only while it works. ``unstated``:
        bytes beyond the process's stated memory.
        """
        _check("an amount of memory", amount)
        _check("an amount of memory", unstated)
        record = self._client(client, now)
        self._roster.device_memory(record, amount, unstated)
        return self._decide()

    def working_set(self, client: ClientId, resident: int, now: float) -> list[Decision]:
        """Record the client's managed bytes that are now on the GPU: an upper bound from the driver.

        The largest figure, plus the bytes paged out at the time, counts as the working set. Without a figure the whole
        memory allocation counts. The whole allocation also counts for a client that helped to fill the GPU, until it
        has been observed working undisturbed.
        """
        _check("an amount of memory", resident)
        record = self._client(client, now)
        self._roster.working_set(record, resident)
        return self._decide()

    def request(self, client: ClientId, managed: int, plain: int, now: float, short: int = 0) -> list[Decision]:
        """Handle a client's request for a lease. A client with a lease receives the same grant again.

        If the session is suspendable, `plain` may include the next memory allocation: the driver has
        rejected `short` bytes of it for lack of memory. If these bytes do not fit next to memory that cannot leave the
        GPU (other than briefly), or do not fit within `MEMORY_TIMEOUT` and `LONGEST_MEMORY_WAIT`, the client gets the
        lease without them, or a refusal.
        """
        record = self._client(client, now)
        self._roster.set_memory(record, managed, plain, short, needed=True)
        decisions: list[Decision] = []
        if record.revoked is not None:
            record.again = True
        elif record.lease:
            self._roster.work_again(record)
            decisions.append(LeaseGrant(record.id, record.lease, 0.0, 0, record.pace))
        elif not record.waiting:
            self._roster.work_again(record)
            self._wait(record)
        return decisions + self._decide()

    def idle(
        self, client: ClientId, lease: int, busy_seconds: float, quiet_seconds: float, now: float
    ) -> list[Decision]:
        """Record the end of a burst by a client that keeps its lease. Busy and quiet time are in seconds."""
        record = self._client(client, now)
        if lease and lease == record.lease and record.quiet_since is None:
            quiet_seconds = min(max(0.0, quiet_seconds), self._roster.now - record.burst_since)
            self._roster.report_busy(record, busy_seconds)
            self._charging.burst_ended(record, quiet_seconds)
            self._roster.quiet(record, self._roster.now - quiet_seconds)
        return self._decide()

    def busy(self, client: ClientId, lease: int, now: float) -> list[Decision]:
        """Record that the client works again under its existing lease."""
        record = self._client(client, now)
        if lease and lease == record.lease and record.quiet_since is not None:
            self._roster.work_again(record)
        return self._decide()

    def release(self, client: ClientId, lease: int, busy_seconds: float, now: float) -> list[Decision]:
        """Record the return of the client's lease. The ordered page-out follows."""
        record = self._client(client, now)
        if lease and lease == record.lease:
            again, by_itself = record.again, record.revoked is None
            self._learn_timeout(record)
            self._roster.report_busy(record, busy_seconds)
            if record.bursting:
                self._charging.burst_ended(record)
            self._roster.released(record)
            record.expected_until = self._roster.now + EXPECTED
            if by_itself:
                self._suspensions.keep_on_gpu(record, self._schedule.pausing_until(record))
            if not any(other.lease for other in record.session.clients.values()):
                self._nested.drained(record.session.id)
            if again:
                self._wait(record)
        return self._decide()

    def paged_in(self, client: ClientId, amount: int, seconds: float, now: float) -> list[Decision]:
        """Record the page-in that the client reports: bytes and seconds.

        The report counts as the answer to the grant's prefetch order, limited to the grant's bytes and the time since.
        """
        record = self._client(client, now)
        answer = self._residency.paged_in(record, amount, seconds, self._roster.now)
        if answer is not None:
            self._cost.bandwidth_in.learn(record.session.id, answer.amount, answer.seconds)
        record.paging_until = self._roster.now
        return self._decide()

    def paged_out(self, client: ClientId, amount: int, seconds: float, now: float) -> list[Decision]:
        """Record the page-out that the client reports: bytes and seconds.

        The report counts as the answer to the oldest order, limited to the order's bytes and the time since.
        """
        record = self._client(client, now)
        answer = self._residency.paged_out(record, amount, seconds, self._roster.now)
        if answer is not None:
            self._cost.bandwidth_out.learn(record.session.id, answer.amount, answer.seconds)
        return self._decide()

    def expect(self, client: ClientId, expected: Expected, now: float) -> list[Decision]:
        """Expect a client to request a lease soon. Its pages come in before, or its suspended session is resumed.

        This takes only memory that is free or belongs to clients without a lease that do not wait, and is given up when
        another client with a lease needs it. A client that cannot page in early is ignored.
        """
        record = self._client(client, now)
        if (record.pages_in_early or record.session.suspends) and not record.lease and not record.waiting:
            self._anticipation.expect(record, expected)
        return self._decide()

    def expect_no_more(self, client: ClientId, now: float) -> list[Decision]:
        """End the expectation of a launch: it did not come. Its pages stay until another client needs the memory."""
        self._anticipation.over(self._client(client, now), used=False)
        return self._decide()

    # -- suspendable sessions ----------------------------------------------------------------------------------------

    def suspensions(self) -> list[str]:
        """Return the sessions with a suspension ordered since the last call.

        None of their clients has a lease or gets one until `suspended` or `not_suspended`. A `LeaseGrant` to a client
        of a suspended session first requires the session's resumption: the grant is valid after `resumed`, and void
        after `not_resumed`.
        """
        return self._suspensions.taken()

    def suspended(self, session: str, amount: int, seconds: float, now: float) -> list[Decision]:
        """Record an ordered suspension that freed the session's memory: `amount` bytes moved in `seconds`."""
        record = self._session(session, now)
        if record.presence is Presence.SUSPENDING:
            self._cost.suspend.learn(session, amount, seconds)
            self._roster.set_presence(record, Presence.SUSPENDED)
        return self._decide()

    def not_suspended(self, session: str, now: float) -> list[Decision]:
        """Record a failed suspension; the session stays on the GPU. `set_suspendable` prevents another order."""
        record = self._session(session, now)
        if record.presence is Presence.SUSPENDING:
            record.margin = 0
            self._roster.set_presence(record, Presence.ON_GPU)
        return self._decide()

    def set_suspendable(
        self, session: str, suspendable: bool, now: float, *, for_a_moment: bool = False
    ) -> list[Decision]:
        """Set whether the session can be suspended. If not, its memory cannot leave the GPU.

        `for_a_moment`: the session will be suspendable soon, so other sessions' clients that need its memory wait.
        Otherwise their calls immediately get the driver's error.
        """
        record = self._session(session, now)
        pinned = Pin.BRIEF if for_a_moment else Pin.LASTING
        self._roster.set_pin(record, Pin.NONE if suspendable else pinned)
        return self._decide()

    def resumed(self, session: str, amount: int, seconds: float, now: float) -> list[Decision]:
        """Record a resumption for a client's lease, or a suspension that did not happen.

        The move of `amount` bytes took `seconds`.
        """
        record = self._session(session, now)
        if record.presence in (Presence.RESUMING, Presence.SUSPENDED):
            self._cost.resume.learn(session, amount, seconds)
            record.margin = 0
            record.resumed_at = self._roster.now if record.resuming_early else record.resumed_at
            self._roster.set_presence(record, Presence.ON_GPU)
            for client in record.clients.values():
                client.paging_until = min(client.paging_until, self._roster.now)
        return self._decide()

    def short_of_memory(self, session: str, lacking: int, now: float) -> list[Decision]:
        """Order more page-outs: according to the driver, the session's resumption lacks `lacking` bytes on the GPU.

        The session may also be partly suspended and need its memory back.
        """
        _check("an amount of memory", lacking)
        record = self._session(session, now)
        if record.presence not in (Presence.RESUMING, Presence.SUSPENDING) or lacking <= record.margin:
            return self._decide()  # the bytes are already being freed
        more, record.margin = lacking - record.margin, lacking
        capacity = self._roster.vram_budget().for_managed
        need = more + max(0, self._residency.free(capacity))
        orders = self._page_outs(self._free_memory(need, [], [], self._roster.staying))
        return [*orders, *self._decide()]

    def not_resumed(self, session: str, retry_in: float, now: float) -> list[Decision]:
        """Record a failed resumption: the session's leases are void, and its clients wait again.

        The next attempt follows after at least `retry_in` seconds.
        """
        record = self._session(session, now)
        if record.presence is not Presence.RESUMING:
            return self._decide()
        record.retry_at = self._roster.now + retry_in
        self._roster.set_presence(record, Presence.SUSPENDED)
        for client in record.clients.values():
            if client.lease:
                self._roster.end_of_lease(client)
                client.parked = False
                self._wait(client)
            self._roster.turn_comes(client)
        return self._decide()

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """Advance the time. The call is required at `next_wakeup` and harmless at any other time."""
        self._advance(now)
        return self._decide()

    def next_wakeup(self) -> float | None:
        """Return the next instant at which the passage of time alone changes a decision; None if no timer is needed."""
        return self._wakeup

    # -- driver samples ---------------------------------------------------------------------------------------------

    @property
    def contended(self) -> bool:
        """Whether several sessions have work, or had work within the last `UNPACED_AFTER` seconds.

        The driver's samples matter only then.
        """
        return self._roster.now - self._contended_at < UNPACED_AFTER

    @property
    def measured(self) -> bool:
        """Whether the driver's samples matter: sessions compete, or one with a limit of GPU time has work."""
        return self.contended or any(name in self._time_limits for name in self._accounts.working)

    def delivered(self, since: float, until: float, busy: Mapping[str, float], now: float) -> list[Decision]:
        """Record a driver sample: the seconds for which each session's processes used the GPU in an interval.

        `busy` includes each session that the driver shows, with 0 for no time. A session that computes while all its
        clients report that they are quiet counts as working.
        """
        self._advance(now)
        until = min(until, self._roster.now)
        self._accounts.sample(since, until, busy)
        for name, seconds in self._charging.recent_use.sample(since, until, busy).items():
            if name in self._roster.sessions:
                self._roster.recorders[name].correct(seconds, self._accounts.demand(name))
        computing = [name for name, seconds in busy.items() if seconds > COMPUTING * (until - since)]
        if len(computing) > 1:
            self._contended_at = self._roster.now  # regardless of their reports
        for name in computing:
            self._roster.seen_at_work(name, since)
        return self._decide()

    def paces(self) -> list[Pace]:
        """Return the holders' limits on queued work that have changed since the last call."""
        pace = self._pace()
        changed = []
        for client in self._roster.leaseholders:
            own = PACE if client.session.id in self._time_limits else pace
            if client.held and client.pace != own:
                client.pace = own
                changed.append(Pace(client.id, client.lease, own))
        return changed

    @property
    def memory_poll_interval(self) -> float | None:
        """Seconds until `working_set` needs new figures; None if they are not urgent."""
        return self._roster.memory_poll_interval

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def waiting(self) -> tuple[str, ...]:
        """Return the sessions with a client that waits for others' leases to end, longest wait first."""
        waiting = [client for client in self._roster.waiting if not client.session.at_limit]
        by_request = sorted(waiting, key=lambda client: client.order)
        return tuple(dict.fromkeys(client.session.id for client in by_request))

    def holders(self) -> tuple[str, ...]:
        """Return the sessions with a lease, oldest lease first, including revoked leases that were not yet returned."""
        by_lease = sorted(self._roster.leaseholders, key=lambda client: client.lease)
        return tuple(dict.fromkeys(client.session.id for client in by_lease))

    def session_snapshot(self, session: str, now: float | None = None) -> SessionView:
        """Return the session's state at an instant; None: at the last event."""
        entitled, delivered = self._accounts.entitled(session), self._accounts.delivered(session)
        return self._roster.snapshot(session, now, max(0.0, entitled), max(0.0, delivered))

    def take_bursts(self, session: str, now: float) -> tuple[Burst, ...]:
        """Return the session's bursts that have ended since the last call. Their ends are on this arbiter's clock."""
        return self._roster.recorders[session].take(now)

    def recent_use(self, session: str, now: float) -> Use:
        """Return the session's GPU time in the last second."""
        return self._charging.recent_use.of(session, self._roster.now, now, self._charging.working)

    def unsettled_use(self, now: float) -> list[UseSpan]:
        """Return the use for which `use_settled` has not been called, earliest first."""
        return self._charging.recent_use.unsettled(self._roster.now, now, self._charging.working)

    def memory_of(self, client: ClientId) -> tuple[int, int]:
        """Return the client's allocated bytes that are not paged out, and those that are, according to the model."""
        return self._roster.memory_of(self._roster.client(client))

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _client(self, client: ClientId, now: float) -> Client:
        """Return the client of an event that occurs now. Advances the time."""
        record = self._roster.client(client)
        self._advance(now)
        return record

    def _session(self, session: str, now: float) -> ArbitratedSession:
        """Return the session of an event that occurs now. Advances the time."""
        record = self._roster.sessions[session]
        self._advance(now)
        return record

    def _advance(self, now: float) -> None:
        before = self._roster.now
        if now <= before:
            return
        self._roster.now = now
        if before > float("-inf"):
            if len(self._accounts.working) > 1:
                self._contended_at = now
            if self._shared:
                self._shared_at = now
            self._schedule.refill(now - before)
            self._roster.elapse(now - before)
            self._charging.advance(now - before, self._schedule.lengths.by_session, bool(self._schedule.left_out))

    def _decide(self) -> list[Decision]:
        for client in self._roster.leaseholders:
            if client.revoked is not None and self._roster.now + INSTANT >= client.revoke_deadline:
                client.overdue = True
        for client in self._roster.clients:
            if client.parked and not client.lease and not client.waiting:
                client.parked = self._roster.now + INSTANT < client.keeps_place_until
        if self._time_limits:
            time_slices = self._schedule.lengths if self._schedule.memory_short else None
            self._time_limits.update(self._roster.sessions, time_slices, self._roster.now)
        self._roster.weigh_needs()
        decisions: list[Decision] = list(self._refuse(self._roster.waited_too_long))
        self._schedule.plan()
        self._charging.update_working(self._schedule.lengths.by_session, self._schedule.memory_short)
        if len(self._accounts.working) > 1:
            self._contended_at = self._roster.now
        if self._shared:
            self._shared_at = self._roster.now
        self._schedule.pass_on_time_slice()
        decisions += self._apply(self._schedule.choose())
        if self._anticipation:
            decisions += self._anticipation.orders()
        # a suspended session without a grant cannot be resumed now
        decisions += self._refuse(lambda client: client.session.presence is Presence.SUSPENDED)
        self._wakeup = self._due()
        return decisions

    def _due(self) -> float | None:
        instants = [self._schedule.due(), self._nested.due]
        if self._time_limits:
            limited = (session for session in self._roster.sessions.values() if session.id in self._time_limits)
            instants.append(self._time_limits.due(limited, self._roster.now))
        instants += [
            session.retry_at for session in self._roster.sessions.values() if session.presence is Presence.SUSPENDED
        ]
        instants += [c.keeps_place_until for c in self._roster.clients if c.parked and not c.lease and not c.waiting]
        instants += map(self._roster.memory_due, self._roster.short)
        if any(client.pace for client in self._roster.leaseholders):
            if self.contended and len(self._accounts.working) < 2:
                instants.append(self._contended_at + UNPACED_AFTER)
            if not self._shared:
                instants.append(self._shared_at + UNPACED_AFTER)
        instants += [
            max(at, self._roster.now + self._settings.period)
            for at in map(self._longest_quiet, self._roster.leaseholders)
            if at is not None
        ]
        if any(client.parked for client in self._roster.clients):
            instants += [self._pause_over(client) for client in self._roster.leaseholders if client.held]
        if self._anticipation:
            instants += self._anticipation.due()
        instants += self._suspensions.due()
        later = [at for at in instants if at is not None and at > self._roster.now]
        return min(later, default=None)

    def _pace(self) -> float:
        """Return the limit on queued work: competing clients of a saturated GPU must be able to stop soon."""
        if self.contended and self._accounts.saturated:
            return PACE
        # with a delay: a neighbor that repeatedly connects and disconnects would otherwise change all paces each time
        shared = self._roster.now - self._shared_at < UNPACED_AFTER
        return PACE_ALONE if shared else 0.0

    @property
    def _shared(self) -> bool:
        return sum(bool(session.clients) for session in self._roster.sessions.values()) > 1

    def _pause_over(self, client: Client) -> float:
        """Return the end of the wait for a quiet holder while others are held back; else an instant in the past."""
        return NEVER_YET if client.quiet_since is None else client.quiet_since + self._nested.patience

    def _longest_quiet(self, client: Client) -> float | None:
        """Return the time until which a quiet holder's report is believed; None for other clients.

        Other clients work, have use that the driver shows, have no competing session, or give way because their memory
        is needed.
        """
        if not client.held or client.quiet_since is None or len(self._accounts.working) < 2 or self._schedule.left_out:
            return None
        return client.quiet_since + LONGEST_QUIET if self._charging.on_device(client) else None

    def _quiet_too_long(self, client: Client) -> bool:
        """Return whether a quiet holder must return its lease: it may still be computing, and its session owes time."""
        until = self._longest_quiet(client)
        owes = self._accounts.lag(client.session.id) < -TOLERANCE
        return until is not None and until <= self._roster.now + INSTANT and owes

    def _held_back(self, group: list[Client]) -> frozenset[str]:
        """Return the sessions in the group that must not run now, so that others in the group can."""
        processes: dict[str, int] = {}
        for client in group:
            paging = client.lease and self._roster.now < client.paging_until
            pausing = client.held and self._roster.now + INSTANT < self._pause_over(client)
            if (client.waiting or client.bursting or pausing) and not paging and not client.session.at_limit:
                processes[client.session.id] = processes.get(client.session.id, 0) + 1
        if not self._schedule.left_out or len(processes) < 2:
            return self._nested.held_back(self._roster.now, processes)
        budget = self._roster.vram_budget()
        exclusive = self._settings.exclusive
        waiters = {(c.footprint, c.session if exclusive else None): c for c in self._schedule.left_out}
        takers = {c.session.id for waiter in waiters.values() for c in budget.blockers(waiter, group)}
        return self._nested.held_back(self._roster.now, processes, frozenset(takers))

    def _apply(self, choice: Selection) -> list[Decision]:
        """Apply the selection: revoke leases, order page-outs, grant leases."""
        roster, budget = self._roster, self._roster.vram_budget()
        held_back = self._held_back(choice.group)
        if self._time_limits:
            held_back |= {client.session.id for client in choice.group if client.session.at_limit}
        for client in choice.group:
            self._roster.turn_comes(client)
        parking = [c for c in choice.group if c.session.id in held_back and (c.waiting or c.bursting)]
        incoming = [client for client in choice.group if client.waiting and client not in parking]
        chosen = set(choice.group)
        leaving = [client for client in roster.staying if client not in chosen]
        outgoing = [client for client in leaving if client.held]
        # a quiet lease can be charged, see `Charging.on_device`
        outgoing += [
            client
            for client in choice.group
            if self._quiet_too_long(client) or (client.session.at_limit and client.held and not client.bursting)
        ]
        # A suspendable session also makes way for others during a pause that is worth waiting for.
        pausing = {c for c in leaving if c.session.suspendable and self._schedule.pauses(c)}
        for client in leaving:
            client.displaced = client.displaced or (client in pausing and not client.held)
            client.parked = False
        crowded = bool(outgoing) or any(client not in chosen for client in roster.waiting)
        self._suspensions.order_for(choice.group)
        self._suspensions.order_released()
        need = min(budget.for_managed, sum(self._residency.missing(client, budget.for_managed) for client in incoming))
        if not need and any(client.session.suspendable for client in incoming):
            need = 1  # its next memory allocation counts as on the GPU
        doubted = [client for client in choice.group if client.held and client.doubted]
        if not incoming and roster.holder_grew:
            if self._residency.free(budget.for_managed) < 0:
                need = self._settings.page_out_step
            if outgoing:  # remaining clients are assumed to fill the memory that leaving clients free
                need = max(need, sum(self._residency.missing(client, budget.for_managed) for client in doubted))
                need = min(need, budget.for_managed)
        roster.holder_grew = False
        # Without need nothing is ordered, regardless of the model's bytes on the GPU: a client that cannot page out
        # would receive the order repeatedly.
        orders = self._free_memory(need, incoming, outgoing, choice.group) if need else []
        page_outs = self._page_outs(orders)
        amounts = {client: amount for client, amount in orders if not client.session.suspendable}
        if need and not incoming and outgoing:
            for client in doubted:
                self._residency.filled(client, budget.for_managed)

        decisions: list[Decision] = []
        for client in parking:
            client.parked = True
            if client.held:
                self._nested.stopped(client.session.id)
                decisions.append(self._revoke(client, RevokeReason.TIME_SLICE, 0))
        # Hand-offs between one session's clients are not overhead for other sessions.
        forced = {client.session for client in leaving if client in pausing or (client.held and client.bursting)}
        comers = {client.session for client in incoming}
        early = choice.reason is RevokeReason.GUARANTEE or self._schedule.bound > self._settings.overhead_bound
        for client in outgoing:
            quiet = client.quiet_since is not None
            works = not quiet or client in pausing
            client.displaced = client.displaced or (works and comers != {client.session})
            client.early = early
            decisions.append(
                self._revoke(client, RevokeReason.IDLE if quiet else choice.reason, amounts.get(client, 0))
            )
        outgoing_ids = {client.id for client in outgoing}
        decisions += [order for order in page_outs if order.client not in outgoing_ids]
        for client in incoming:
            client.forced_in = client.forced_in or bool(forced - {client.session})
            client.early = client.early or early
            others = [other for other in roster.clients if other.occupies_memory and other is not client]
            if (
                client.session.presence is not Presence.SUSPENDING
                and budget.fits([*others, client])
                and self._suspensions.can_come(client)
            ):
                decisions.append(self._grant(client, crowded))
        return decisions

    def _refuse(self, concerned: Callable[[Client], bool]) -> list[Refuse]:
        """Refuse memory that will not become free, to clients without a lease."""
        refused = [
            client
            for client in self._roster.short
            if client.waiting and client.session.need is Need.IMPOSSIBLE and concerned(client)
        ]
        for client in refused:
            self._roster.refuse_memory(client)
        return [Refuse(client.id) for client in refused]

    def _free_memory(
        self, need: int, incoming: list[Client], outgoing: list[Client], group: list[Client]
    ) -> list[tuple[Client, int]]:
        """Choose the page-outs that free `need` bytes: clients without a lease first."""
        now, capacity = self._roster.now, self._roster.vram_budget().for_managed
        bystanders = [
            client
            for client in self._roster.clients
            if not client.lease and client not in incoming and not client.session.suspendable
        ]
        # a suspendable session is represented by its most recently used client
        bystanders += [
            max(session.clients.values(), key=lambda client: client.last_used)
            for session in self._suspensions.candidates(group)
            if session.present
        ]
        bandwidth = self._cost.bandwidth_in.value
        order = page_out_order(bystanders, self._residency, capacity, bandwidth, now, self._settings)
        last = ((client, capacity) for client in outgoing if not client.session.suspendable)
        return self._residency.free_memory(need, capacity, chain(order, last), now)

    def _page_outs(self, orders: list[tuple[Client, int]]) -> list[PageOut]:
        """Apply the choice of `_free_memory`. Suspendable sessions are suspended."""
        for client, _ in orders:
            if client.session.suspendable:
                self._suspensions.order(client.session)
        return [PageOut(client.id, amount) for client, amount in orders if not client.session.suspendable]

    def _grant(self, client: Client, crowded: bool) -> LeaseGrant:
        """Grant a lease to the client that has its turn, with its prefetch, time slice and pace."""
        beside_others = bool(self._roster.staying)
        session, capacity = client.session, self._roster.vram_budget().for_managed
        suspendable = session.suspendable
        prefetch = 0 if suspendable else self._residency.prefetch(client, capacity)
        resuming = session.total if session.presence is Presence.SUSPENDED else 0
        if client.forced_in or client.displaced:
            missing = self._residency.missing(client, capacity)
            hand_off = (
                self._cost.suspend_and_resume(session.id, resuming) if suspendable else self._cost.overlapped(missing)
            )
            part = time_slices.part_of_gpu([client], self._roster.staying)
            self._schedule.credit(client.early).spend(part * hand_off)
        coming = prefetch + (0 if suspendable else self._residency.coming_in(client))
        client.paging_until = self._roster.now + (2 * self._cost.sequential(coming) if coming else 0.0)
        if resuming:
            session.resuming_until = self._roster.now + 2 * self._cost.suspend_and_resume(session.id, resuming)
        if resuming or session.presence is Presence.RESUMING:
            client.paging_until = session.resuming_until
        self._roster.granted(client, next(self._leases))
        self._schedule.granted(client, beside_others)
        time_slice = self._schedule.time_slice
        time_slice_seconds = (
            self._schedule.lengths.by_session[time_slice.head.id] if crowded and time_slice is not None else 0.0
        )
        client.pace = PACE if session.id in self._time_limits else self._pace()
        return LeaseGrant(client.id, client.lease, time_slice_seconds, prefetch, client.pace)

    def _revoke(self, client: Client, reason: RevokeReason, page_out: int) -> Revoke:
        client.revoked = reason
        works = client.quiet_since is None
        client.received_at_revoke = self._accounts.received(client.session.id) if works else None
        running = {other.session for other in self._roster.leaseholders if other.bursting}
        # it can give way only after its page-in is complete
        begins = max(self._roster.now, client.paging_until)
        deadline = begins + time_slices.revoke_timeout(client.session, len(running), self._settings)
        client.revoke_deadline = min(deadline, self._roster.now + self._settings.revoke_timeout)
        return Revoke(client.id, client.lease, page_out, reason)

    def _wait(self, client: Client) -> None:
        self._roster.wait(client, max(0.0, -self._accounts.lag(client.session.id)))

    def _learn_timeout(self, client: Client) -> None:
        """Learn how a session answers REVOKE, when a client leaves or returns its lease."""
        if client.revoked is not None and client.received_at_revoke is not None:
            received = self._accounts.received(client.session.id) - client.received_at_revoke
            time_slices.learn_revoke_timeout(client.session, received, self._settings)


def _check(name: str, amount: int | None) -> None:
    if amount is not None and amount < 0:
        raise ValueError(f"{name} must be at least 0, not {amount}")
