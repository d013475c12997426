"""Guaranteed units of each session on this machine's GPUs, and its weight in the arbiters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.protocol.control import ControlRefused, Failure
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.placement import Allocation, Ledger, guaranteed_units


class Shares:
    """The ledger of this machine, kept in step with its sessions."""

    def __init__(self, gpus: Iterable[Gpu], capacity_units: int, arbitrations: Mapping[str, GpuArbitration]) -> None:
        """`capacity_units`: what may be guaranteed on each GPU, in units of 1 %."""
        self.capacity_units = capacity_units
        self._arbitrations = arbitrations
        self._sessions: dict[str, Session] = {}
        # health is not the ledger's matter here: a sick GPU keeps its sessions
        self._ledger = Ledger()
        self.set_gpus(gpus)

    def set_gpus(self, gpus: Iterable[Gpu]) -> None:
        """Set the GPUs of this machine, MIG instances among them."""
        self._ledger.put_node(
            "this",
            [
                GpuReport(
                    index=gpu.index,
                    uuid=gpu.uuid,
                    model=gpu.model,
                    memory_bytes=gpu.memory_bytes,
                    capacity_units=gpu.capacity(self.capacity_units),
                    mig=gpu.mig,
                )
                for gpu in gpus
            ],
        )

    def check_free_units(self, gpu: Gpu, share_units: int, borrowed_units: int) -> None:
        """Check that a new session fits: the units that it is to own have no owner, and the share is free now.

        Raises ControlRefused (`no-capacity`).
        """
        owned = share_units - borrowed_units
        free, unowned = self._ledger.free_units(gpu.uuid), self._ledger.unowned_units(gpu.uuid)
        if share_units > free or owned > unowned:
            raise ControlRefused(
                Failure(
                    code="no-capacity",
                    message=f"{gpu.label} ({gpu.uuid}) has {free} free units now, and {unowned} units without an "
                    f"owner; the share needs {share_units}, {borrowed_units} of them borrowed",
                )
            )

    def most_more(self, session: Session, gpu: Gpu) -> int:
        """Return by how many units a session's share on one of its GPUs can grow now."""
        record = session.record
        # what an idle session has beside what its tier leaves it is lent: it can own more, and not borrow more
        idle = record.effective_units != record.request.share_units
        return self._ledger.unowned_units(gpu.uuid) if idle else self._ledger.free_units(gpu.uuid)

    def borrowed_after(self, session: Session, units: int) -> int:
        """Return what a session borrows if its share changes to so many units on each of its GPUs.

        Units more must be free now, as those of a new session; an idle session's must have no owner. Raises
        ControlRefused (`no-capacity`).
        """
        record = session.record
        more = units - record.request.share_units
        if more <= 0:
            return max(0, record.borrowed_units + more)
        lent = 0
        for gpu in session.gpus:
            free, unowned = self._ledger.free_units(gpu.uuid), self._ledger.unowned_units(gpu.uuid)
            if more > self.most_more(session, gpu):
                raise ControlRefused(
                    Failure(
                        code="no-capacity",
                        message=f"GPU {gpu.index} ({gpu.uuid}) has {free} free units now, and {unowned} units without "
                        f"an owner; the share of {units} units needs {more} more",
                    )
                )
            lent = max(lent, more - unowned)
        return record.borrowed_units + lent

    def own_what_is_unowned(self, session: Session) -> int:
        """Have a new session borrow what others own already, on the fullest of its GPUs; return those units.

        Units that were kept for it can have gone back to their owner: its server started too late. It comes to own them
        when their owner is gone.
        """
        record = session.record
        owned = record.request.share_units - record.borrowed_units
        lacking = max([0, *(owned - self._ledger.unowned_units(gpu.uuid) for gpu in session.gpus)])
        record.borrowed_units += lacking
        return lacking

    def enter(self, session: Session) -> list[Session]:
        """A session comes, in the ledger and in the arbiters. Returns the sessions that hold something else now."""
        self._sessions[session.id] = session
        self._ledger.add(_allocation(session))
        session.guaranteed_units = self._guaranteed(session, self._ledger.guaranteed)
        session.weight = self._weight(session, session.guaranteed_units)
        for gpu in session.gpus:
            if session.observed:
                self._arbitrations[gpu.uuid].observe(session.id)
                continue
            away = session.record.suspension is not None
            self._arbitrations[gpu.uuid].add_session(session.id, session.weight, whole=session.suspends, away=away)
        return self._recount(session)

    def change(self, session: Session) -> list[Session]:
        """Its tier changed. Returns the sessions whose borrowed or guaranteed units changed with it."""
        self._ledger.replace(_allocation(session))
        return self._recount(session)

    def work_on_lent_units(self, session: Session, works: bool) -> None:
        """Have a session that is downgraded or released weigh what it would weigh if it were active, or no longer.

        Only weights change: its units stay lent, so that another session can be placed on them meanwhile.
        """
        session.lent_units = works
        self._set_weights(self._beside(session))

    def leave(self, session: Session) -> list[Session]:
        """A session goes; whoever borrowed of it may come to own that. Returns the sessions that changed."""
        del self._sessions[session.id]
        self._ledger.remove(session.id)
        for gpu in session.gpus:
            self._arbitrations[gpu.uuid].remove_session(session.id)
        return self._recount(session)

    def yielding_in_vain(self, gpus: Iterable[Gpu]) -> list[Session]:
        """Return the sessions on these GPUs that keep units for spawns in quota while all units there have an owner."""
        owned = {gpu.uuid for gpu in gpus if not self._ledger.unowned_units(gpu.uuid)}
        return [
            session
            for session in self._sessions.values()
            if session.record.yields_until is not None and any(gpu.uuid in owned for gpu in session.gpus)
        ]

    def _recount(self, cause: Session) -> list[Session]:
        changed: dict[str, Session] = {}
        for name, borrowed in self._ledger.settle().items():
            self._sessions[name].record.borrowed_units = borrowed
            changed[name] = self._sessions[name]
        concerned = {session.id: session for session in self._beside(cause)} | changed
        for session in concerned.values():
            guaranteed = self._guaranteed(session, self._ledger.guaranteed)
            if guaranteed != session.guaranteed_units:
                session.guaranteed_units = guaranteed
                changed[session.id] = session
        self._set_weights(concerned.values())
        return list(changed.values())

    def _beside(self, cause: Session) -> list[Session]:
        """Return the sessions on the GPUs of a session, itself among them unless it has ended."""
        uuids = {gpu.uuid for gpu in cause.gpus}
        return [
            session
            for session in self._sessions.values()
            if session is cause or not uuids.isdisjoint(gpu.uuid for gpu in session.gpus)
        ]

    def _set_weights(self, sessions: Iterable[Session]) -> None:
        """Tell the arbiters the weights of sessions that changed; sessions that work on lent units count as active."""
        weights = [(session, session.guaranteed_units) for session in sessions]
        if any(session.lent_units for session in self._sessions.values()):
            on_gpu: dict[str, Mapping[str, int]] = {}

            def if_active(name: str) -> int:
                gpus = [gpu for gpu in self._sessions[name].gpus if gpu.uuid in self._ledger.capacity.gpus]
                for gpu in gpus:
                    if gpu.uuid not in on_gpu:
                        on_gpu[gpu.uuid] = self._guaranteed_if_active(gpu)
                return min((on_gpu[gpu.uuid][name] for gpu in gpus), default=0)

            weights = [(session, self._guaranteed(session, if_active)) for session, _ in weights]
        # who gets less first: then what it loses is there for the others
        for session, units in sorted(weights, key=lambda weighed: weighed[1]):
            weight = self._weight(session, units)
            if weight != session.weight:
                session.weight = weight
                for gpu in session.gpus:
                    self._arbitrations[gpu.uuid].set_weight(session.id, weight)

    def _weight(self, session: Session, units: int) -> int:
        return max(units, 1) if session.record.effective_units or session.lent_units else 0

    def _guaranteed_if_active(self, gpu: Gpu) -> Mapping[str, int]:
        """Return what each session on a GPU is guaranteed while those that work on lent units count as active."""
        held = [_allocation(session, session.lent_units) for session in self._sessions.values() if gpu in session.gpus]
        return guaranteed_units(self._ledger.capacity.gpus[gpu.uuid].capacity, held)

    def _guaranteed(self, session: Session, units_of: Callable[[str], int]) -> int:
        """What the session has while all others work, within what its user may have on one GPU."""
        if session.record.gpus_unknown:
            return session.record.effective_units  # its layer's matter
        units = units_of(session.id)
        bound = session.record.request.user_units
        if bound is None:
            return units
        # the same on each of its GPUs, so the fullest one counts
        together = max((self._of_user(session, gpu, units_of) for gpu in session.gpus), default=0)
        return units if together <= bound else units * bound // together

    def _of_user(self, session: Session, gpu: Gpu, units_of: Callable[[str], int]) -> int:
        """Add up the units of a session's user and quota on a GPU."""
        whose = (session.record.request.user, session.record.request.quota)
        return sum(
            units_of(other.id)
            for other in self._sessions.values()
            if gpu in other.gpus and (other.record.request.user, other.record.request.quota) == whose
        )


def _allocation(session: Session, active: bool = False) -> Allocation:
    """Return what a session holds; `active`: what it would hold if it were active."""
    record = session.record
    return Allocation(
        session=session.id,
        gpus=record.request.gpus,
        share_units=record.request.share_units,
        borrowed_units=record.borrowed_units,
        effective_units=record.request.share_units if active else record.effective_units,
        opened_at=record.begun,
        yields=record.yields_until is not None,
        layer=record.request.layer,
    )
