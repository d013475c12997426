"""Changes of sessions' tiers and shares.

`Tiers` lowers a tier on the service's request and restores it as soon as GPU work counts as use of the share. Shorter
work runs immediately, on the units that the tier has lent. `Tiers` also changes a session's units and memory while its
processes run. The check for free units and the change are one step: the event loop runs nothing in between.
The hub's placement reads the change in the report.

`Shares` tracks each session's guaranteed units on this machine's GPUs and its weight in the arbiters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.idle.use import UseCount
from gpushare_spawner.model.control import ControlRefused, NoticeRequest, ResizeRequest, TierRequest
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import GpuReport, Notice, shared_fields
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, Tier, UseRule, units_on, voids_idle_action
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import guaranteed_units

log = logging.getLogger(__name__)


class Shares:
    """The ledger of this machine, in sync with its sessions."""

    def __init__(self, gpus: Iterable[Gpu], capacity_units: int, arbitrations: Mapping[str, GpuArbitration]) -> None:
        """Create an empty ledger.

        `capacity_units`: the maximum units of 1 % that may be guaranteed on each GPU.
        """
        self.capacity_units = capacity_units
        self.arbitrations = arbitrations
        self._sessions: dict[str, Session] = {}
        # an unhealthy GPU's sessions remain in the ledger
        self._ledger = Ledger()
        self._restoring = self._recount_due = False
        self.set_gpus(gpus)

    def set_gpus(self, gpus: Iterable[Gpu]) -> None:
        """Set this machine's GPUs, including MIG instances."""
        reports = [
            GpuReport(**shared_fields(gpu, GpuReport), capacity_units=gpu.capacity(self.capacity_units)) for gpu in gpus
        ]
        self._ledger.put_node("this", reports)

    def check_free_units(self, gpu: Gpu, share_units: int, borrowed_units: int) -> None:
        """Check that a new session fits: the units it will own have no owner, and the share is free now.

        Raises ControlRefused (`no-capacity`).
        """
        owned = share_units - borrowed_units
        free, unowned = self._ledger.free_units(gpu.uuid), self._ledger.unowned_units(gpu.uuid)
        if share_units > free or owned > unowned:
            raise ControlRefused(
                "no-capacity",
                f"{gpu.label} ({gpu.uuid}) has {free} free units now, and {unowned} units without an "
                f"owner; the share needs {share_units}, {borrowed_units} of them borrowed",
            )

    def most_more(self, session: Session, gpu: Gpu) -> int:
        """Return the units by which a session's share on one of its GPUs can grow now."""
        record = session.record
        # An idle session lends the units beyond its tier. It can own more units, but not borrow more.
        idle = record.effective_units != record.request.share_units
        return self._ledger.unowned_units(gpu.uuid) if idle else self._ledger.free_units(gpu.uuid)

    def borrowed_after(self, session: Session, share: Share) -> list[int]:
        """Return the units that a session borrows on each of its GPUs if its share there changes.

        Additional units must be free now, as for a new session; for an idle session, they must have no owner.
        Raises ControlRefused (`no-capacity`).
        """
        before, borrowed = session.allocation(), []
        for gpu in session.gpus:
            here, units = before.on(gpu.uuid), units_on(gpu.uuid, before.gpus, share.units, share.last_units)
            free, unowned = self._ledger.free_units(gpu.uuid), self._ledger.unowned_units(gpu.uuid)
            more = units - here.share_units
            if more > 0 and more > self.most_more(session, gpu):
                raise ControlRefused(
                    "no-capacity",
                    f"GPU {gpu.index} ({gpu.uuid}) has {free} free units now, and {unowned} units without "
                    f"an owner; the share of {units} units needs {more} more",
                )
            borrowed.append(max(0, here.borrowed_units + min(0, more), units - here.owned_units - unowned))
        return borrowed

    def own_what_is_unowned(self, session: Session) -> int:
        """Let a new session borrow the units of its GPUs that already have an owner. Return their number.

        Units that were reserved for it may have returned to their owner because its server started too late. The
        session becomes their owner when the current owner ends.
        """
        allocation = session.allocation()
        before = [allocation.on(gpu.uuid) for gpu in session.gpus]
        lacking = [
            max(0, here.owned_units - self._ledger.unowned_units(gpu.uuid))
            for gpu, here in zip(session.gpus, before, strict=True)
        ]
        if any(lacking):
            session.borrow(
                allocation.borrowing([here.borrowed_units + more for here, more in zip(before, lacking, strict=True)])
            )
        return sum(lacking)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Leave borrowed units borrowed in this context: a session that is added later can own them."""
        self._restoring = True
        try:
            yield
        finally:
            self._restoring = False

    def recount_restored(self) -> list[Session]:
        """Recompute all sessions if some were restored. Return those with changed borrowed or guaranteed units."""
        sessions = list(self._sessions.values()) if self._recount_due else []
        self._recount_due = False
        return list({changed.id: changed for session in sessions for changed in self._recount(session)}.values())

    def enter(self, session: Session) -> list[Session]:
        """Add a session to the ledger and the arbiters. Returns the sessions with changed units."""
        self._sessions[session.id] = session
        self._ledger.add(session.allocation())
        self._set_guaranteed(session)
        for gpu in session.gpus:
            weight = session.weights[gpu.uuid] = self._weight(session, session.guaranteed.get(gpu.uuid, 0))
            if session.observed:
                self.arbitrations[gpu.uuid].add_observed_session(session.id)
                continue
            suspended = session.record.suspension is not None
            self.arbitrations[gpu.uuid].add_session(
                session.id, weight, session.suspends, suspended, session.time_limit_units
            )
            if session.record.background:
                self.arbitrations[gpu.uuid].set_background(session.id, True)
        return self._recount(session)

    def change(self, session: Session) -> list[Session]:
        """Apply a change of tier or share. Returns the sessions with changed borrowed or guaranteed units."""
        self._ledger.replace(session.allocation())
        for gpu in session.gpus:
            self.arbitrations[gpu.uuid].set_time_limit(session.id, session.time_limit_units)
            self.arbitrations[gpu.uuid].set_background(session.id, session.record.background)
        return self._recount(session)

    def work_on_lent_units(self, session: Session, works: bool) -> None:
        """Give a downgraded or released session the weight of its share, or its own weight again.

        Only weights change. Its units stay lent, so that another session can be placed on them meanwhile.
        """
        session.works_on_lent_units = works
        self._set_weights(self._beside(session))

    def leave(self, session: Session) -> list[Session]:
        """Remove a session; a borrower of its units can become their owner. Returns the sessions that changed."""
        del self._sessions[session.id]
        self._ledger.remove(session.id)
        for gpu in session.gpus:
            self.arbitrations[gpu.uuid].remove_session(session.id)
        return self._recount(session)

    def yielding_in_vain(self, gpus: Iterable[Gpu]) -> list[Session]:
        """Return the sessions on these GPUs that reserve units for spawns in quota although all units have an owner."""
        owned = {gpu.uuid for gpu in gpus if not self._ledger.unowned_units(gpu.uuid)}
        return [
            session
            for session in self._sessions.values()
            if session.record.yields_until is not None
            and not session.record.background
            and any(gpu.uuid in owned for gpu in session.gpus)
        ]

    def _recount(self, cause: Session) -> list[Session]:
        changed: dict[str, Session] = {}
        self._recount_due |= self._restoring
        for name, allocation in ({} if self._restoring else self._ledger.convert_borrowed()).items():
            self._sessions[name].borrow(allocation)
            changed[name] = self._sessions[name]
        concerned = {session.id: session for session in self._beside(cause)} | changed
        for session in concerned.values():
            if self._set_guaranteed(session):
                changed[session.id] = session
        self._set_weights(concerned.values())
        return list(changed.values())

    def _beside(self, cause: Session) -> list[Session]:
        """Return the sessions on the GPUs of a session, including itself unless it has ended."""
        uuids = {gpu.uuid for gpu in cause.gpus}
        return [
            session
            for session in self._sessions.values()
            if session is cause or not uuids.isdisjoint(gpu.uuid for gpu in session.gpus)
        ]

    def _set_weights(self, sessions: Iterable[Session]) -> None:
        """Set the weights of changed sessions in the arbiters; lent units in use count as active."""
        weights = [(session, session.guaranteed) for session in sessions]
        if any(session.works_on_lent_units for session in self._sessions.values()):
            on_gpu: dict[str, Mapping[str, int]] = {}

            def if_active(name: str) -> Mapping[str, int]:
                gpus = [gpu for gpu in self._sessions[name].gpus if gpu.uuid in self._ledger.capacity.gpus]
                for gpu in gpus:
                    if gpu.uuid not in on_gpu:
                        on_gpu[gpu.uuid] = self._guaranteed_if_active(gpu)
                return {gpu.uuid: on_gpu[gpu.uuid][name] for gpu in gpus}

            weights = [(session, self._guaranteed(session, if_active)) for session, _ in weights]
        changes = [
            (self._weight(session, guaranteed.get(gpu.uuid, 0)), session.id, gpu.uuid)
            for session, guaranteed in weights
            for gpu in session.gpus
        ]
        # Decreases come first, because they free the units for the others.
        for weight, name, uuid in sorted(changes):
            if weight != self._sessions[name].weights.get(uuid):
                self._sessions[name].weights[uuid] = weight
                self.arbitrations[uuid].set_weight(name, weight)

    def _weight(self, session: Session, units: int) -> int:
        return max(units, 1) if session.record.effective_units or session.works_on_lent_units else 0

    def _guaranteed_if_active(self, gpu: Gpu) -> Mapping[str, int]:
        """Return the guaranteed units of each session on a GPU; sessions on lent units count as active."""
        held = [
            session.allocation(session.works_on_lent_units).on(gpu.uuid)
            for session in self._sessions.values()
            if gpu in session.gpus
        ]
        return guaranteed_units(self._ledger.capacity.gpus[gpu.uuid].capacity, held)

    def _set_guaranteed(self, session: Session) -> bool:
        """Update the session's guaranteed units. Return whether they have changed."""
        before = session.guaranteed
        session.guaranteed = self._guaranteed(session, self._ledger.guaranteed_on)
        session.guaranteed_units = session.allocation().least_of(session.guaranteed)
        return before != session.guaranteed

    def _guaranteed(self, session: Session, units_of: Callable[[str], Mapping[str, int]]) -> Mapping[str, int]:
        """Return the session's units on each GPU while all others work, within its user's limit on one GPU."""
        if session.record.gpus_unknown:
            return dict.fromkeys(session.record.request.gpus, session.record.effective_units)  # another layer decides
        guaranteed = units_of(session.id)
        bound = session.record.request.user_units
        if bound is None:
            return guaranteed
        together = {gpu: self._of_user(session, gpu, units_of) for gpu in guaranteed}
        return {
            gpu: units if together[gpu] <= bound else units * bound // together[gpu]
            for gpu, units in guaranteed.items()
        }

    def _of_user(self, session: Session, gpu: str, units_of: Callable[[str], Mapping[str, int]]) -> int:
        """Add up the units of a session's user and quota on a GPU."""
        owner = (session.record.request.user, session.record.request.quota)
        return sum(
            units_of(other.id).get(gpu, 0)
            for other in self._sessions.values()
            if gpu in other.record.request.gpus and (other.record.request.user, other.record.request.quota) == owner
        )


LENT_FOR = 10.0
"""Seconds without GPU work after which a session no longer works on lent units.

Our choice: users run several cells in a row, and each change of weights costs the arbiters a decision.
"""


class Tiers:
    """Changes the tier or the share of a session and notifies its processes."""

    def __init__(
        self,
        shares: Shares,
        activity: Callable[[Session], Activity],
        save: Callable[[Session], None],
        clock: Callable[[], float],
    ) -> None:
        """Store the callbacks. `save` writes a session's record; `clock` returns seconds since the epoch."""
        self._shares = shares
        self._activity = activity
        self._save = save
        self._clock = clock

    def apply_request(self, session: Session, request: TierRequest) -> None:
        """Apply the service's decision on one machine (on Kubernetes: `follow_tier`). Raises ControlRefused.

        `busy`: the session worked after the service's last report. `bad-request`: the units do not match the tier.
        """
        share = session.record.request.share_units
        right = {Tier.ACTIVE: share, Tier.RELEASED: 0}.get(request.tier)
        if request.effective_units > share or right not in (None, request.effective_units):
            raise ControlRefused(
                "bad-request",
                f"effective_units: {request.effective_units} does not match tier {request.tier} "
                f"of a share of {share} units",
            )
        now = self._activity(session)
        if voids_idle_action(now.busy, now.last, now.gpu_seconds, request.if_idle_since, request.if_gpu_seconds):
            raise ControlRefused("busy", f"session {session.id} has worked on the GPU in the meantime")
        self.change_tier(
            session,
            request.tier,
            request.effective_units,
            request.reason,
            request.yields_until,
            request.use,
            request.background,
        )

    def work_begins(self, session: Session) -> None:
        """Give a downgraded or released session its share's weight before the arbiter gets the lease request.

        If all work counts as use, restore the share and withdraw the notice, with three exceptions: a share whose units
        are reserved for spawns in quota; a notice that work does not avert; and the notice of a pod that the agent only
        observes, which the service withdraws.
        """
        if _use_rule(session) is None:
            self._used(session)
        elif (
            session.record.tier is not Tier.ACTIVE
            and not session.works_on_lent_units
            and session.record.yields_until is None
        ):
            self._shares.work_on_lent_units(session, works=True)

    def check_use(self, session: Session) -> None:
        """Restore the share, or withdraw the notice, if the session's GPU work counts as use by now."""
        rule = _use_rule(session)
        if rule is None:
            session.use_count = None
            return
        now, doing = self._clock(), self._activity(session)
        if session.use_count is None:
            session.use_count = UseCount(now, doing.gpu_seconds)
        if session.use_count.add(now, doing.gpu_seconds, doing.busy, rule):
            self._used(session)
        elif session.works_on_lent_units and not doing.busy and now - (doing.last or 0.0) >= LENT_FOR:
            self._shares.work_on_lent_units(session, works=False)

    def _used(self, session: Session) -> None:
        record = session.record
        if record.tier is not Tier.ACTIVE and record.yields_until is None:
            self.change_tier(session, Tier.ACTIVE, record.request.share_units, "it has GPU work again")
        elif record.notice is not None and record.notice.averted_by_work and not record.gpus_unknown:
            self.withdraw_notice(session)
            self._save(session)

    def notify(self, session: Session, request: NoticeRequest) -> None:
        """Show the user a notice, or withdraw it, at the service's request."""
        self._set_notice(session, request.notice)
        self._save(session)

    def withdraw_notice(self, session: Session) -> None:
        """Withdraw the notice on the agent's own decision.

        On Kubernetes, the pod's annotations contain the notice until they are patched.
        """
        if session.record.pod is not None and session.record.notice is not None:
            session.record.pod.averted = session.record.notice
        self._set_notice(session, None)

    def stop_yielding(self, sessions: Iterable[Session], reason: str) -> None:
        """Stop reserving units for spawns in quota.

        A working session gets its share back to the extent that the units are free.
        """
        for session in list(sessions):
            record = session.record
            active = record.tier is Tier.ACTIVE or self._activity(session).busy
            tier, units = (Tier.ACTIVE, record.request.share_units) if active else (record.tier, record.effective_units)
            self.change_tier(session, tier, units, reason, use=record.use)

    def change_tier(
        self,
        session: Session,
        tier: Tier,
        units: int,
        reason: str,
        yields_until: float | None = None,
        use: UseRule | None = None,
        background: bool = False,
    ) -> None:
        """Set a session's tier, and update the borrowed and guaranteed units of all sessions on its GPUs.

        `yields_until`, `use`, `background`: see `TierRequest`.
        """
        record, doing = session.record, self._activity(session)
        record.yields_until, record.background = yields_until, background and yields_until is not None
        record.use = None if tier is Tier.ACTIVE else use
        session.works_on_lent_units = record.use is not None and doing.busy and yields_until is None
        if tier is not record.tier:
            session.use_count = UseCount(self._clock(), doing.gpu_seconds)
        if yields_until is not None:
            session.borrow(session.allocation().yielding(units))
        if (record.tier, record.effective_units) != (tier, units):
            share = record.request.share_units
            log.info("session %s: %s -> %s, %d of %d units: %s", session.id, record.tier, tier, units, share, reason)
            record.tier, record.effective_units, record.tier_since = tier, units, self._clock()
        restored = tier is Tier.ACTIVE and (record.notice is None or record.notice.averted_by_work)
        if record.notice is not None and (restored or record.notice.tier.depth <= tier.depth):
            self.withdraw_notice(session)
        self._share_changed(session)

    def resize(self, session: Session, request: ResizeRequest) -> None:
        """Change the share; the memory limit of all its processes changes immediately. Raises ControlRefused.

        A downgraded or released session keeps its tier. A smaller share loses its borrowed units first; a
        larger share borrows only units that idle sessions lend.
        """
        record = session.record
        before, units = record.request, request.share_units
        limit = before.memory_limit if request.memory_limit is None else request.memory_limit
        if (units, request.last_units, limit) == (before.share_units, before.last_units, before.memory_limit):
            return
        share = self._checked_share(session, request, limit)
        borrowed = self._shares.borrowed_after(session, share)
        effective = units if record.tier is Tier.ACTIVE else min(record.effective_units, units)
        tier = Tier.ACTIVE if effective == units else record.tier
        log.info("session %s: share %s -> %s: %s", session.id, before.share, share, request.reason)
        changed = {"share_units": units, "last_units": request.last_units, "memory_limit": limit}
        record.request = before.model_copy(update=changed)
        record.borrowed_units, record.borrowed_each, record.effective_units = 0, (), effective
        session.borrow(session.allocation().borrowing(borrowed))
        if tier is not record.tier:
            record.tier, record.tier_since = tier, self._clock()
        if record.notice is not None and record.notice.effective_units >= units:
            self.withdraw_notice(session)
        # Any other notice stays, because a change of the share does not count as use.
        self._share_changed(session)
        session.budget_checked = False
        if session.memory is not None:
            session.memory.set_limits(session.memory_limits)
        if session.conversation is not None:
            session.conversation.send_memory()

    def largest_share(self, session: Session) -> int:
        """Return the largest share that a session can have now, in units; 0 if its share cannot be changed.

        The service decides which shares the user may have.
        """
        record = session.record
        if session.observed or not session.gpus or record.yields_until is not None:
            return 0
        units = record.request.share_units
        each = (
            record.request.on(gpu.uuid, units) + max(0, self._shares.most_more(session, gpu)) for gpu in session.gpus
        )
        return min([UNITS_PER_GPU, *each])

    def _checked_share(self, session: Session, request: ResizeRequest, limit: str) -> Share:
        try:
            share = Share(request.share_units, len(session.record.request.gpus), request.last_units)
            for gpu in session.gpus:
                if resolve_bytes(limit, gpu.memory_bytes) <= 0:
                    raise ValueError(f"memory_limit: {limit} leaves no memory")
        except ValueError as error:
            raise ControlRefused("bad-request", str(error)) from None
        if session.record.yields_until is not None:
            raise ControlRefused(
                "no-capacity",
                f"session {session.id} gives up units for spawns in quota, and its share cannot change now",
            )
        return share

    def _share_changed(self, session: Session) -> None:
        others = self._shares.change(session)
        self.changed([session, *(other for other in others if other is not session)])

    def changed(self, sessions: Iterable[Session]) -> None:
        """Save sessions with changed units, and notify their processes."""
        for session in sessions:
            if session.conversation is not None:
                session.conversation.send_tier()
            self._save(session)

    def _set_notice(self, session: Session, notice: Notice | None) -> None:
        if notice is not None and session.record.notice is None and session.record.tier is Tier.ACTIVE:
            doing = self._activity(session)
            session.use_count = UseCount(self._clock(), doing.gpu_seconds)
        session.record.notice = notice
        if session.conversation is not None:
            session.conversation.send_changed()


def _use_rule(session: Session) -> UseRule | None:
    """Return the rule for GPU work that restores the share or withdraws the notice; None: all work does so."""
    record = session.record
    if record.tier is not Tier.ACTIVE:
        return record.use
    return record.notice.use if record.notice is not None else None
