"""A GPU in virtual time with sessions of engine `suspend`: what the agent and the driver do with them.

Memory is allocated when a process has its first lease, as the library does it where the driver has none left. What is
on the GPU at each instant is checked: a session that is being suspended is there until the end of the suspension, and
one that is being resumed from the beginning of the resumption on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import Decision, LeaseGrant
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu

VRAM = 16 * GIB
READY_WITHIN, SOON, LATER = 1.0, 2.0, 60.0
"""Seconds, as in the agent: for the answer to SUSPEND; until the next try after no answer; after another cause."""


class SuspendingGpu(VirtualGpu):
    """A suspension, and a resumption, takes bytes over bandwidth and a fixed time."""

    def __init__(
        self, arbiter: GpuArbiter, bandwidth: float = 12e9, fixed: float = 0.05, context: int = 0, vram: int = VRAM
    ) -> None:
        """`context`: bytes that each process takes beside its allocations."""
        super().__init__(arbiter, bandwidth)
        self.fixed, self.context, self.vram = fixed, context, vram
        self.whole: set[str] = set()
        self.away: set[str] = set()
        """Suspended, or being resumed."""
        self.coming: set[str] = set()
        self.moves = 0
        """Suspensions that ended well."""
        self.moving_seconds = 0.0
        """Time with at least one suspension or resumption under way."""
        self.refuses: dict[str, Callable[[], tuple[float, float] | None]] = {}
        """By session: seconds until a suspension fails, and until the next try; None: it does not fail."""
        self._moving = 0
        self._allocated: dict[str, int] = {}
        """Bytes on the GPU or in the copy on the host, by process."""
        self._held_back: dict[str, list[Decision]] = {}
        self.out_of_memory: list[tuple[float, str]] = []
        """Processes that were granted and found too little memory for their allocation."""

    def session(self, name: str, weight: int, whole: bool = True) -> None:
        if whole:
            self.whole.add(name)
        self._apply(self.arbiter.add_session(name, weight, self.now, suspends=whole))

    def start(self, job: Job) -> Job:
        if job.session not in self.whole:
            return super().start(job)
        self.jobs[job.name] = job
        self._allocated[job.name] = 0
        self._apply(self.arbiter.connect(job.name, job.session, self.now))
        self._next_phase(job)
        return job

    def crash(self, name: str) -> None:
        session = self.jobs[name].session
        self._allocated.pop(name, None)
        if not any(job.session == session for job in self.jobs.values() if job.name != name):
            for known in (self.away, self.coming):
                known.discard(session)
            self._held_back.pop(session, None)
        super().crash(name)

    def end(self, session: str) -> None:
        """The session is over, with all its processes."""
        for name in [name for name, job in self.jobs.items() if job.session == session]:
            self.crash(name)
        self._apply(self.arbiter.remove_session(session, self.now))

    def size(self, session: str) -> int:
        """Bytes of the session, on the GPU or not."""
        jobs = [job for job in self.jobs.values() if job.session == session]
        return sum(self._allocated[job.name] + self.context for job in jobs if self._allocated.get(job.name))

    @property
    def on_gpu(self) -> int:
        """Bytes of sessions of engine `suspend` that are on the GPU."""
        return sum(self.size(name) for name in self.whole - (self.away - self.coming))

    # -- moves -------------------------------------------------------------------------------------------------------

    def _pass(self, until: float) -> None:
        if self._moving:
            self.moving_seconds += max(0.0, until - self.now)
        super()._pass(until)

    def _move(self, session: str, done: Callable[[float], None], seconds: float | None = None) -> None:
        took = self.fixed + self.size(session) / self.bandwidth if seconds is None else seconds
        self._moving += 1

        def ended() -> None:
            self._moving -= 1
            done(took)

        self.after(took, ended)

    def _apply(self, decisions: Iterable[Decision]) -> None:
        resuming = []
        for decision in decisions:
            job = self.jobs.get(str(decision.client))
            if job is None:
                continue
            if job.session not in self.away:
                super()._apply([decision])
                continue
            if job.session not in self._held_back:
                resuming.append(job.session)
            self._held_back.setdefault(job.session, []).append(decision)
        super()._apply([])
        for session in resuming:
            self._resume(session)
        for session in self.arbiter.suspensions():
            self._suspend(session)

    def _suspend(self, session: str) -> None:
        assert session in self.whole - self.away
        assert not any(job.lease for job in self.jobs.values() if job.session == session), "suspended under a lease"
        refusal = self.refuses[session]() if session in self.refuses else None
        if refusal is None:
            self._move(session, lambda took: self._left(session, took))
        else:
            self._move(session, lambda took: self._stays(session, refusal[1]), refusal[0])

    def _left(self, session: str, took: float) -> None:
        if any(job.session == session for job in self.jobs.values()):
            self.away.add(session)
            self.moves += 1
        self._apply(self.arbiter.suspended(session, self.size(session), took, self.now))

    def _stays(self, session: str, retry_in: float) -> None:
        self._apply(self.arbiter.set_suspendable(session, False, self.now))
        self._apply(self.arbiter.not_suspended(session, self.now))
        self.after(retry_in, lambda: self._apply(self.arbiter.set_suspendable(session, True, self.now)))

    def _resume(self, session: str) -> None:
        assert self.on_gpu + self.size(session) <= self.vram, "memory was promised twice"
        self.coming.add(session)
        self._move(session, lambda took: self._came(session, took))

    def _came(self, session: str, took: float) -> None:
        if session not in self.coming:
            return  # its processes have ended
        self.away.discard(session)
        self.coming.discard(session)
        held_back = self._held_back.pop(session, [])
        self._apply([*held_back, *self.arbiter.resumed(session, self.size(session), took, self.now)])

    # -- allocations -------------------------------------------------------------------------------------------------

    def _granted(self, job: Job, grant: LeaseGrant) -> None:
        if job.session in self.whole and self._allocated.get(job.name) != job.plain:
            free = self.vram - self.on_gpu - (0 if self._allocated[job.name] else self.context)
            if job.plain - self._allocated[job.name] > free:
                self.out_of_memory.append((self.now, job.name))
            else:
                self._allocated[job.name] = job.plain
            super()._granted(job, grant)
            stated = self._allocated[job.name]
            self._apply(self.arbiter.memory(job.name, 0, stated, self.now))
            self._apply(self.arbiter.device_memory(job.name, stated + self.context, 0, self.now))
            return
        super()._granted(job, grant)
