"""What is checked of each session every second or so: confirmation, socket, memory budget, use, record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpushare_spawner.agent.memory.node_memory import NodeMemory
from gpushare_spawner.agent.sessions.activity import Activity
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.removal import Discarded
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)


class SessionChecks:
    """Ends sessions that nobody confirmed, retries what failed, and keeps activity on disk."""

    def __init__(
        self,
        registry: SessionRegistry,
        memory: NodeMemory,
        discarded: Discarded,
        save_every: float,
        clock: Callable[[], float],
    ) -> None:
        """`save_every`: see RoundSettings. `clock` gives seconds since the epoch."""
        self._registry = registry
        self._memory = memory
        self._discarded = discarded
        self._save_every = save_every
        self._clock = clock
        self._draining: asyncio.Future[None] | None = None

    def check(self) -> None:
        """Check all sessions once. A fault of one session affects no other."""
        now = self._clock()
        for session in list(self._registry.sessions.values()):
            try:
                self._check_one(session, now)
            except Exception:
                log.exception("cannot check session %s; retrying", session.id)
        self._registry.watch.look()
        self._registry.store.retry()
        if not self._discarded.empty and (self._draining is None or self._draining.done()):
            self._draining = asyncio.get_running_loop().run_in_executor(None, self._discarded.drain)

    def _check_one(self, session: Session, now: float) -> None:
        if overdue(session, now):
            confirm_within = session.record.request.confirm_within
            self._registry.end(session.id, f"not confirmed within {confirm_within:g} s")
            return
        if session.record.yields_until is not None and now >= session.record.yields_until:
            self._registry.tiers.stop_yielding([session], "no spawn in quota came for the units that it gave up")
        if session.socket is None and self._registry.listen(session) is None:
            log.info("session %s: its socket was created", session.id)
        if session.memory is not None:
            session.memory.trim()
        if session.cuda and not session.budget_checked:
            session.budget_checked = True
            self._check_budget(session)
        if session.moved or session.record.gpu_busy or session.lent_units:
            self._registry.tiers.check_use(session)
            doing = self._registry.activity(session)
            if now >= session.saved_at + self._save_every and record_is_behind(session, doing):
                self._registry.save(session)
            # a burst goes on, or its end is to be written later
            session.moved = doing.busy or record_is_behind(session, doing)

    def _check_budget(self, session: Session) -> None:
        """Log a promise of the form that the server's memory limit does not allow."""
        shortage = self._memory.shortage(session)
        if shortage is None:
            return
        budget, guaranteed = (memory(amount) for amount in shortage)
        log.warning(
            "session %s: the memory limit of its server leaves %s for GPU memory that is paged out, and its share "
            "guarantees %s; allocations beyond that fail. Raise resources.memory.limit of template %s",
            session.id,
            budget,
            guaranteed,
            session.record.request.template,
        )


def overdue(session: Session, now: float) -> bool:
    """Return whether the session should have been confirmed by now (seconds since the epoch)."""
    record = session.record
    return record.owner is None and now > record.begun + record.request.confirm_within


def record_is_behind(session: Session, doing: Activity) -> bool:
    """Return whether the session's record differs from what the session does."""
    record = session.record
    return (doing.busy, doing.last, session.memory_hits) != (
        record.gpu_busy,
        record.last_gpu_activity,
        record.memory_hits,
    )
