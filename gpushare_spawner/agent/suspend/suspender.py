"""Suspends sessions for others, and resumes them when they have GPU work.

The arbiter decides which session is suspended and when it is resumed. This module handles the arbiters' orders, the
frames of processes, timers, and failures. steps.py contains the steps themselves. For the frames to the processes, see
"Suspending a process" in docs/reference/protocol.md. After a failure the session keeps running and is marked as not
suspendable, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import chain
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.session_records import SessionRecord, Suspension
from gpushare_spawner.agent.session_socket import Connection
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.suspend.checkpoints import ProcessState
from gpushare_spawner.agent.suspend.progress import (
    LATER,
    MOMENT,
    RESUME_AGAIN,
    CannotRestore,
    CannotResume,
    CannotSuspend,
    Step,
    SuspendParts,
    SuspendProgress,
    may_attach,
    why_not,
)
from gpushare_spawner.agent.suspend.steps import (
    AGAIN_AFTER,
    CHECK_EVERY,
    LET_GO_AFTER,
    LeftoverProcesses,
    ResumeSteps,
    SuspendSteps,
    numbers,
)
from gpushare_spawner.background import cancel
from gpushare_spawner.model.frames import Feature, Frame, Kind
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)

UNLOCK_WITHIN = 5.0
"""Seconds for unlocking processes that are only locked when the agent stops."""


class Suspender:
    """Carries out the arbiters' orders for sessions of engine `suspend`."""

    def __init__(self, parts: SuspendParts) -> None:
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._progress: dict[str, SuspendProgress] = {}
        self._suspend_steps = SuspendSteps(parts)
        self._resume_steps = ResumeSteps(parts.checkpoints, parts.source, parts)
        self._left = LeftoverProcesses(self._resume_steps, parts.records, self._record_left_failure)
        self._probe: asyncio.Task[str | None] | None = None
        self._closed = False
        for arbitration in parts.arbitrations.values():
            arbitration.suspend = partial(self._order, self._try_to_suspend)
            arbitration.resume = partial(self._order, self._try_to_resume)

    async def close(self) -> None:
        """Stop between two steps or during a step. Processes that are only locked are unlocked.

        Checkpointed processes remain checkpointed; the next agent continues from the records.
        """
        self._closed = True
        under_way = [
            progress for progress in self._progress.values() if progress.task is not None and not progress.task.done()
        ]
        await cancel(self._probe, *(progress.task for progress in under_way))
        for progress in self._progress.values():
            progress.cancel_timers()
        records = [progress.session.record for progress in under_way] + await self._left.close()
        suspended = [record.suspension.processes for record in records if record.suspension is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNLOCK_WITHIN):
                await self._resume_steps.unlock(chain.from_iterable(suspended))

    # -- sessions and their processes ----------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """Add a session, possibly from an earlier run of the agent. Its arbiter already contains it."""
        if not session.suspends:
            return
        progress = self._progress[session.id] = SuspendProgress(session)
        if len(session.gpus) != 1:
            self._stays(progress, "A session on several GPUs cannot be suspended.", None)
        elif session.record.suspension is not None:
            progress.step, progress.number = Step.SUSPENDED, next(numbers)
            session.suspended = True
            self._begin(progress, self._recover(progress))
        else:
            self._begin(progress, self._check_capability(progress))

    def ended(self, session: Session) -> None:
        """Handle the end of a session. Its remaining processes are resumed."""
        progress = self._progress.pop(session.id, None)
        if progress is None:
            return
        progress.cancel_timers()
        if progress.task is not None:
            progress.task.cancel()
        if session.record.suspension is not None and len(session.gpus) == 1:
            self._left.take(session.record, session.gpus[0], LET_GO_AFTER)

    def resume_leftover(self, record: SessionRecord, gpu: Gpu) -> None:
        """Resume the suspended processes of a record from an earlier run of the agent."""
        session = self._progress.get(record.request.id)
        theirs = session.session.record.suspension if session is not None else None
        if theirs is not None and record.suspension is not None and theirs.processes == record.suspension.processes:
            self._parts.records.remove_left(record)  # the session's processes have not ended
        else:
            self._left.take(record, gpu, 0.0)

    def _record_left_failure(self, session: str, pid: int, failure: str | None) -> None:
        """Record whether the driver can resume a leftover process."""
        progress = self._progress.get(session)
        if progress is None or (failure is None and pid not in progress.failed):
            return
        if failure is not None:
            progress.failed[pid] = failure
            self._stays(progress, progress.of_failed() or "", LATER)
        else:
            del progress.failed[pid]
            if progress.retry is not None:
                progress.retry.cancel()
            self._may_try_again(progress)

    def joined(self, session: Session, connection: Connection) -> None:
        """Handle the HELLO of a CUDA process.

        While its session is suspended, the process must request resumption before it calls the driver.
        """
        progress = self._progress.get(session.id)
        if progress is not None and progress.step is not Step.RUNNING and Feature.SUSPEND in connection.features:
            connection.send(Kind.SUSPEND, progress.number)

    def left(self, session: Session, connection: Connection) -> None:
        """Handle the end of a CUDA process's connection."""
        progress = self._progress.get(session.id)
        if progress is not None:
            progress.ready.pop(connection, None)
            progress.answered.set()
            self._forget_ended(progress)

    def _forget_ended(self, progress: SuspendProgress) -> None:
        """End a session's suspension once all its suspended processes have ended."""
        session = progress.session
        suspension = session.record.suspension
        if progress.step is not Step.SUSPENDED or suspension is None or session.id not in self._progress:
            return
        if any(map(processes.alive, suspension.processes)):
            if not session.cuda and progress.check is None:  # a process's connections end before the process
                progress.check = self._loop.call_later(CHECK_EVERY, self._check_again, progress)
            return
        session.record.suspension, session.suspended = None, False
        self._send_resumed(progress)
        self._arbitration(session).resumed(session.id, 0, 0.0)
        self._begin(progress, self._parts.save(session))
        self._parts.news()

    def _check_again(self, progress: SuspendProgress) -> None:
        progress.check = None
        self._forget_ended(progress)

    def ready(self, session: Session, connection: Connection, frame: Frame) -> None:
        """Handle SUSPEND_READY of a CUDA process.

        With number 0, a process that had lost its connection asks whether it is suspended.
        """
        progress = self._progress.get(session.id)
        number = frame.fields[0]
        if progress is None or (number == 0 and progress.step is Step.RUNNING):
            connection.send(Kind.RESUMED, number)
        elif number == 0:
            connection.send(Kind.SUSPEND, progress.number)
        elif number == progress.number and progress.step is Step.ASKING:
            progress.ready[connection] = frame
            progress.answered.set()

    # -- the arbiters' orders ------------------------------------------------------------------------------------------

    def _order(self, work: Callable[[SuspendProgress], Coroutine[Any, Any, None]], name: str) -> None:
        progress = self._progress.get(name)
        if progress is not None:
            self._begin(progress, work(progress))

    def _begin(self, progress: SuspendProgress, work: Coroutine[Any, Any, None]) -> None:
        """Schedule the work after the session's current task, unless the agent is stopping."""
        if self._closed:
            work.close()
            return
        before = progress.task

        async def run() -> None:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            try:
                await work
            except Exception:
                log.exception("session %s: internal error; its state on the GPU is unknown", progress.session.id)

        progress.task = self._loop.create_task(run())
        # the task may be cancelled before the work begins
        progress.task.add_done_callback(lambda task: work.close())

    # -- suspension ----------------------------------------------------------------------------------------------------

    async def _try_to_suspend(self, progress: SuspendProgress) -> None:
        session, began = progress.session, self._loop.time()
        arbitration = self._arbitration(session)
        with contextlib.ExitStack() as stack:
            try:
                if (reason := await self._capability()) is not None:
                    raise CannotSuspend(reason)
                amount = await self._suspend_steps.leave(progress, stack)
            except Exception as error:
                await self._suspension_failed(progress, error)
                return
            progress.step, session.suspended = Step.SUSPENDED, True
            progress.busy.succeeded()
            session.not_suspendable = progress.of_failed()
            log.info("session %s is suspended: %s in %.1f s", session.id, memory(amount), self._loop.time() - began)
            arbitration.suspended(session.id, amount, self._loop.time() - began)
            self._parts.news()
            self._forget_ended(progress)  # processes may have ended meanwhile without a check

    async def _suspension_failed(self, progress: SuspendProgress, error: Exception) -> None:
        """Restore the session's processes, and schedule the next attempt."""
        session = progress.session
        refusal = error if isinstance(error, CannotSuspend) else CannotSuspend(f"The agent failed: {error!r}.")
        if refusal is not error:
            log.error("session %s could not be suspended", session.id, exc_info=error)
        if (suspension := session.record.suspension) is not None:
            await self._resume_steps.resume_each(session.id, session.gpus[0], suspension, progress.failed)
            await self._end_suspension(progress, suspension)
        self._send_resumed(progress)
        busy = refusal.retry_in < LATER
        pause = progress.busy.next(self._loop.time()) if busy else refusal.retry_in
        failed = progress.of_failed()
        self._stays(progress, failed or str(refusal), pause, busy and failed is None and pause <= MOMENT)
        self._arbitration(session).not_suspended(session.id)

    async def _end_suspension(self, progress: SuspendProgress, suspension: Suspension) -> None:
        """Record that the session's processes run, and schedule retries for processes that were not restored."""
        progress.session.record.suspension = None
        with contextlib.suppress(OSError):  # written later; the log contains the reason
            await self._parts.save(progress.session)
        both = zip(suspension.processes, suspension.sizes, strict=True)
        left = {name: size for name, size in both if name.pid in progress.failed and processes.alive(name)}
        if left:
            update = {"processes": tuple(left), "sizes": tuple(left.values()), "complete": False}
            record = progress.session.record.model_copy(update={"suspension": suspension.model_copy(update=update)})
            self._left.take(record, progress.session.gpus[0], AGAIN_AFTER)

    # -- resumption ----------------------------------------------------------------------------------------------------

    async def _try_to_resume(self, progress: SuspendProgress) -> None:
        session, began = progress.session, self._loop.time()
        arbitration = self._arbitration(session)
        if progress.step is Step.RUNNING:
            arbitration.resumed(session.id, 0, 0.0)  # the session was recovered meanwhile
            return
        progress.step = Step.RESUMING
        amount, suspension = 0, session.record.suspension
        try:
            if suspension is not None:
                gpu = session.gpus[0]
                amount = await self._resume_steps.all_or_none(session.id, gpu, suspension, progress.failed)
                await self._end_suspension(progress, suspension)
        except Exception as error:
            if isinstance(error, CannotResume):
                log.warning("session %s stays suspended for now: %s", session.id, error)
            else:
                log.exception("session %s could not be resumed", session.id)
            progress.step, pause = Step.SUSPENDED, RESUME_AGAIN
            if isinstance(error, CannotRestore):
                session.not_suspendable = str(error)
                self._parts.news()
                pause = progress.refused.next(self._loop.time())
            arbitration.not_resumed(session.id, pause)
            return
        progress.refused.succeeded()
        seconds = self._loop.time() - began
        log.info("session %s is resumed: %s in %.1f s", session.id, memory(amount), seconds)
        self._is_back(progress)
        arbitration.resumed(session.id, amount, seconds)
        self._parts.news()

    async def _recover(self, progress: SuspendProgress) -> None:
        """Determine how far an earlier run of the agent progressed.

        A fully suspended session stays suspended.
        """
        session, suspension = progress.session, progress.session.record.suspension
        assert suspension is not None
        states = [await self._parts.checkpoints.state(name) for name in suspension.processes if processes.alive(name)]
        if states and all(state.ok and state.state is ProcessState.CHECKPOINTED for state in states):
            log.info("session %s has been suspended since before the agent started", session.id)
            session.record.suspension = suspension.model_copy(update={"complete": True})
            return
        await self._resume_steps.resume_each(session.id, session.gpus[0], suspension, progress.failed)
        await self._end_suspension(progress, suspension)
        self._is_back(progress)
        self._arbitration(session).resumed(session.id, 0, 0.0)
        self._parts.news()

    def _is_back(self, progress: SuspendProgress) -> None:
        progress.session.suspended = False
        self._send_resumed(progress)
        if (reason := progress.of_failed()) is not None:
            self._stays(progress, reason, LATER)
        elif progress.retry is None:
            progress.session.not_suspendable = None

    def _send_resumed(self, progress: SuspendProgress) -> None:
        progress.step = Step.RUNNING
        for connection in progress.session.cuda:
            if Feature.SUSPEND in connection.features:
                connection.send(Kind.RESUMED, progress.number)

    # -- capability ----------------------------------------------------------------------------------------------------

    async def _check_capability(self, progress: SuspendProgress) -> None:
        if (reason := await self._capability()) is not None:
            self._stays(progress, reason, LATER)

    async def _capability(self) -> str | None:
        """Return why the driver cannot suspend processes, or the agent must not; None if it can.

        A positive answer is cached.
        """
        if self._probe is None or (self._probe.done() and (self._probe.cancelled() or self._probe.result())):
            self._probe = self._loop.create_task(why_not(self._parts.checkpoints, may_attach()))
        return await asyncio.shield(self._probe)

    def _stays(
        self, progress: SuspendProgress, reason: str, retry_in: float | None, for_a_moment: bool = False
    ) -> None:
        """Mark the session as not suspendable for now, so that its memory stays on the GPU.

        `retry_in` None: never retry. `for_a_moment`: other sessions that need the memory wait for it.
        """
        session = progress.session
        if session.not_suspendable != reason:
            log.warning("session %s is not suspendable: %s", session.id, reason)
        session.not_suspendable = reason
        for gpu in session.gpus:
            self._parts.arbitrations[gpu.uuid].set_suspendable(session.id, False, for_a_moment)
        if progress.retry is not None:
            progress.retry.cancel()
        progress.retry = None if retry_in is None else self._loop.call_later(retry_in, self._may_try_again, progress)
        self._parts.news()

    def _may_try_again(self, progress: SuspendProgress) -> None:
        progress.retry = None
        if self._progress.get(progress.session.id) is progress:
            self._begin(progress, self._end_pause(progress))

    async def _end_pause(self, progress: SuspendProgress) -> None:
        """Mark the session as suspendable again after the pause, unless the reason still applies."""
        reason = progress.of_failed() or await self._capability()
        if reason is not None:
            self._stays(progress, reason, LATER)
        elif progress.retry is None:
            progress.session.not_suspendable = None
            self._arbitration(progress.session).set_suspendable(progress.session.id, True)
            self._parts.news()

    def _arbitration(self, session: Session) -> GpuArbitration:
        return self._parts.arbitrations[session.gpus[0].uuid]
