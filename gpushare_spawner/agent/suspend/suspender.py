"""Suspends sessions for others, and resumes them when they have GPU work: what the arbiters order, what processes and
timers say, and how a session goes on where a step fails.

The arbiter decides which session is suspended and when it comes back. The steps themselves are in leaving.py and
coming_back.py. What the processes are told: "Suspending a process" in docs/reference/protocol.md. A failure leaves the
session running and not suspendable, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from itertools import chain
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.memory.memory_holds import MemoryHolds
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.agent.state.session_record import SessionRecord, Suspension
from gpushare_spawner.agent.suspend.capability import Rights, why_not
from gpushare_spawner.agent.suspend.coming_back import LOOK_EVERY, ComingBack
from gpushare_spawner.agent.suspend.course import (
    LATER,
    RESUME_AGAIN,
    CannotRestore,
    CannotResume,
    CannotSuspend,
    Course,
    Source,
    Step,
)
from gpushare_spawner.agent.suspend.driver_checkpoint import Checkpoints, ProcessState
from gpushare_spawner.agent.suspend.leaving import Leaving, next_number
from gpushare_spawner.agent.suspend.left_behind import AGAIN_AFTER, LET_GO_AFTER, LeftBehind, LeftRecords
from gpushare_spawner.agent.suspend.neighbours import Neighbours
from gpushare_spawner.model.protocol.frames import Feature, Frame, Kind
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)

UNLOCK_WITHIN = 5.0
"""Seconds in which processes that are only locked are unlocked when the agent stops."""


class Suspender:
    """Carries out what the arbiters order for sessions of engine `suspend`."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        arbitrations: Mapping[str, GpuArbitration],
        sessions: Mapping[str, Session],
        source: Source,
        lacks_host_memory: Callable[[Session, int], str | None],
        save: Callable[[Session], Coroutine[Any, Any, None]],
        news: Callable[[], None],
        left_records: LeftRecords,
        holds: MemoryHolds,
    ) -> None:
        """`arbitrations` are by the GPU's UUID, `sessions` by their ids. `lacks_host_memory`: why the budgets of host
        memory do not hold so many bytes of a session; None: they do. `save` writes a session's record to the disk.
        `news` is called when a report has changed. `left_records` keeps records of processes that outlive their
        session. `holds`: who holds the free memory of GPUs."""
        self._checkpoints = checkpoints
        self._arbitrations = arbitrations
        self._save = save
        self._left_records = left_records
        self._news = news
        self._loop = asyncio.get_running_loop()
        self._courses: dict[str, Course] = {}
        self._leaving = Leaving(checkpoints, sessions, source, lacks_host_memory, save)
        self._neighbours = Neighbours(arbitrations, sessions, holds)
        self._coming_back = ComingBack(checkpoints, source, self._neighbours)
        self._left = LeftBehind(self._coming_back, left_records, self._told_of_left)
        self._probe: asyncio.Task[str | None] | None = None
        self._closed = False
        for arbitration in arbitrations.values():
            arbitration.suspend, arbitration.resume = self._suspend, self._resume

    async def close(self) -> None:
        """Stop between two steps or in one. Processes that are only locked go on; those that are checkpointed stay so,
        and the next agent goes on from the records."""
        self._closed = True
        under_way = [one for one in self._courses.values() if one.task is not None and not one.task.done()]
        tasks: list[asyncio.Task[Any]] = [one.task for one in under_way if one.task is not None]
        tasks += [self._probe] if self._probe is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for course in self._courses.values():
            course.cancel_timers()
        records = [one.session.record for one in under_way] + await self._left.close()
        suspended = [one.suspension.processes for one in records if one.suspension is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNLOCK_WITHIN):
                await self._coming_back.unlock(chain.from_iterable(suspended))

    # -- sessions and their processes ----------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session is there, perhaps from an earlier run of the agent. Its arbiter knows it already."""
        if not session.suspends:
            return
        course = self._courses[session.id] = Course(session)
        if len(session.gpus) != 1:
            self._stays(course, "A session on several GPUs is not suspended.", None)
        elif session.record.suspension is not None:
            course.step, course.number = Step.SUSPENDED, next_number()
            session.suspended = True
            self._begin(course, self._recover(course))
        else:
            self._begin(course, self._check_capability(course))

    def ended(self, session: Session) -> None:
        """The session is over. A process of it that lives on is brought back."""
        course = self._courses.pop(session.id, None)
        if course is None:
            return
        course.cancel_timers()
        if course.task is not None:
            course.task.cancel()
        if session.record.suspension is not None and len(session.gpus) == 1:
            self._left.take(session.record, session.gpus[0], LET_GO_AFTER)

    def left_behind(self, record: SessionRecord, gpu: Gpu) -> None:
        """A record from an earlier run of the agent is of processes that were left suspended."""
        session = self._courses.get(record.request.id)
        theirs = session.session.record.suspension if session is not None else None
        if theirs is not None and record.suspension is not None and theirs.processes == record.suspension.processes:
            self._left_records.remove_left(record)  # it did not end after all
        else:
            self._left.take(record, gpu, 0.0)

    def _told_of_left(self, session: str, pid: int, failure: str | None) -> None:
        """Whether the driver can bring a process back that was left suspended."""
        course = self._courses.get(session)
        if course is None or (failure is None and pid not in course.failed):
            return
        if failure is not None:
            course.failed[pid] = failure
            self._stays(course, course.of_failed() or "", LATER)
        else:
            del course.failed[pid]
            if course.retry is not None:
                course.retry.cancel()
            self._may_try_again(course)

    def joined(self, session: Session, connection: Connection) -> None:
        """A CUDA process has said HELLO. While its session is suspended it must ask before it calls the driver."""
        course = self._courses.get(session.id)
        if course is not None and course.step is not Step.RUNNING and Feature.SUSPEND in connection.features:
            connection.send(Kind.SUSPEND, course.number)

    def left(self, session: Session, connection: Connection) -> None:
        """A CUDA process has disconnected."""
        course = self._courses.get(session.id)
        if course is not None:
            course.ready.pop(connection, None)
            course.answered.set()
            self._forget_ended(course)

    def _forget_ended(self, course: Course) -> None:
        """A session of which all suspended processes have ended is suspended no longer."""
        session = course.session
        suspension = session.record.suspension
        if course.step is not Step.SUSPENDED or suspension is None or session.id not in self._courses:
            return
        if any(map(processes.alive, suspension.processes)):
            if not session.cuda and course.look is None:  # its connections end before it does
                course.look = self._loop.call_later(LOOK_EVERY, self._look_again, course)
            return
        session.record.suspension, session.suspended = None, False
        self._tell_resumed(course)
        self._arbitration(session).resumed(session.id, 0, 0.0)
        self._begin(course, self._save(session))
        self._news()

    def _look_again(self, course: Course) -> None:
        course.look = None
        self._forget_ended(course)

    def ready(self, session: Session, connection: Connection, frame: Frame) -> None:
        """SUSPEND_READY of a CUDA process. With the number 0 it asks whether it is suspended: its connection had
        ended."""
        course = self._courses.get(session.id)
        number = frame.fields[0]
        if course is None or (number == 0 and course.step is Step.RUNNING):
            connection.send(Kind.RESUMED, number)
        elif number == 0:
            connection.send(Kind.SUSPEND, course.number)
        else:
            self._leaving.answered(course, connection, frame)

    # -- what the arbiters order ---------------------------------------------------------------------------------------

    def _suspend(self, name: str) -> None:
        course = self._courses.get(name)
        if course is not None:
            self._begin(course, self._try_to_suspend(course))

    def _resume(self, name: str) -> None:
        course = self._courses.get(name)
        if course is not None:
            self._begin(course, self._try_to_resume(course))

    def _begin(self, course: Course, work: Coroutine[Any, Any, None]) -> None:
        """Do it after what is under way for the session; nothing once the agent stops, while clients still leave."""
        if self._closed:
            work.close()
            return
        before = course.task

        async def run() -> None:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            try:
                await work
            except Exception:
                log.exception("session %s: an error of the agent; its state on the GPU is unknown", course.session.id)

        course.task = self._loop.create_task(run())
        course.task.add_done_callback(lambda task: work.close())  # it may have been cancelled before the work began

    # -- from the GPU --------------------------------------------------------------------------------------------------

    async def _try_to_suspend(self, course: Course) -> None:
        # what processes free stays theirs until all have left: they may have to come back
        with contextlib.ExitStack() as held:
            await self._suspend_now(
                course,
                lambda: held.enter_context(self._neighbours.held_off(course.session.id, course.session.gpus[0])),
            )

    async def _suspend_now(self, course: Course, memory_comes_free: Callable[[], None]) -> None:
        session, began = course.session, self._loop.time()
        arbitration = self._arbitration(session)
        try:
            if (reason := await self._capability()) is not None:
                raise CannotSuspend(reason)
            amount = await self._leaving.leave(course, memory_comes_free)
        except Exception as error:
            refusal = error if isinstance(error, CannotSuspend) else CannotSuspend(f"An error of the agent: {error!r}.")
            if refusal is not error:
                log.exception("session %s could not be suspended", session.id)
            await self._goes_on(course)
            busy = refusal.retry_in < LATER
            pause = course.busy.next(self._loop.time()) if busy else refusal.retry_in
            self._stays(course, course.of_failed() or str(refusal), pause)
            arbitration.not_suspended(session.id)
            return
        course.step, session.suspended = Step.SUSPENDED, True
        course.busy.succeeded()
        session.not_suspendable = course.of_failed()
        log.info("session %s is suspended: %s in %.1f s", session.id, memory(amount), self._loop.time() - began)
        arbitration.suspended(session.id, amount, self._loop.time() - began)
        self._news()
        self._forget_ended(course)  # processes that left meanwhile were not looked at

    async def _goes_on(self, course: Course) -> None:
        """Bring back what was suspended already, and let all processes go on."""
        session, suspension = course.session, course.session.record.suspension
        if suspension is not None:
            await self._coming_back.each(session.id, session.gpus[0], suspension, course.failed)
            session.record.suspension = None
            await self._keep(session)
            self._leave_failed(course, suspension)
        self._tell_resumed(course)

    def _leave_failed(self, course: Course, suspension: Suspension) -> None:
        """Processes that did not come back are tried again by themselves."""
        both = zip(suspension.processes, suspension.sizes, strict=True)
        left = {name: size for name, size in both if name.pid in course.failed and processes.alive(name)}
        if left:
            update = {"processes": tuple(left), "sizes": tuple(left.values()), "complete": False}
            record = course.session.record.model_copy(update={"suspension": suspension.model_copy(update=update)})
            self._left.take(record, course.session.gpus[0], AGAIN_AFTER)

    async def _keep(self, session: Session) -> None:
        """Write the record, or go on: it is written later, and the log says why not now."""
        with contextlib.suppress(OSError):
            await self._save(session)

    # -- and back ------------------------------------------------------------------------------------------------------

    async def _try_to_resume(self, course: Course) -> None:
        session, began = course.session, self._loop.time()
        arbitration = self._arbitration(session)
        if course.step is Step.RUNNING:
            arbitration.resumed(session.id, 0, 0.0)  # it was recovered meanwhile
            return
        course.step = Step.RESUMING
        try:
            amount = await self._come_back(course)
        except Exception as error:
            if isinstance(error, CannotResume):
                log.warning("session %s stays suspended for now: %s", session.id, error)
            else:
                log.exception("session %s could not be resumed", session.id)
            course.step = Step.SUSPENDED
            if isinstance(error, CannotRestore):
                session.not_suspendable = str(error)
                self._news()
            refused = isinstance(error, CannotRestore)
            pause = course.refused.next(self._loop.time()) if refused else RESUME_AGAIN
            arbitration.not_resumed(session.id, pause)
            return
        course.refused.succeeded()
        seconds = self._loop.time() - began
        log.info("session %s is resumed: %s in %.1f s", session.id, memory(amount), seconds)
        self._is_back(course)
        arbitration.resumed(session.id, amount, seconds)
        self._news()

    async def _come_back(self, course: Course) -> int:
        """Returns the bytes on the GPU. Raises CannotResume where it is to be tried again."""
        session, suspension = course.session, course.session.record.suspension
        if suspension is None:
            return 0
        amount = await self._coming_back.all_or_none(session.id, session.gpus[0], suspension, course.failed)
        session.record.suspension = None
        await self._keep(session)
        self._leave_failed(course, suspension)
        return amount

    async def _recover(self, course: Course) -> None:
        """Find how far an earlier run of the agent came. A session of which all processes are suspended stays so."""
        session, suspension = course.session, course.session.record.suspension
        assert suspension is not None
        states = [await self._checkpoints.state(name.pid) for name in suspension.processes if processes.alive(name)]
        if states and all(one.ok and one.state is ProcessState.CHECKPOINTED for one in states):
            log.info("session %s is suspended since before the agent started", session.id)
            session.record.suspension = suspension.model_copy(update={"complete": True})
            return
        await self._coming_back.each(session.id, session.gpus[0], suspension, course.failed)
        session.record.suspension = None
        await self._keep(session)
        self._leave_failed(course, suspension)
        self._is_back(course)
        self._arbitration(session).resumed(session.id, 0, 0.0)
        self._news()

    def _is_back(self, course: Course) -> None:
        course.session.suspended = False
        self._tell_resumed(course)
        if (reason := course.of_failed()) is not None:
            self._stays(course, reason, LATER)
        elif course.retry is None:
            course.session.not_suspendable = None

    def _tell_resumed(self, course: Course) -> None:
        course.step = Step.RUNNING
        for connection in course.session.cuda:
            if Feature.SUSPEND in connection.features:
                connection.send(Kind.RESUMED, course.number)

    # -- what is possible ----------------------------------------------------------------------------------------------

    async def _check_capability(self, course: Course) -> None:
        if (reason := await self._capability()) is not None:
            self._stays(course, reason, LATER)

    async def _capability(self) -> str | None:
        """Return why the driver cannot suspend processes, or the agent must not; None: it can. Asked once where it
        can."""
        if self._probe is None or (self._probe.done() and (self._probe.cancelled() or self._probe.result())):
            self._probe = self._loop.create_task(why_not(self._checkpoints, Rights.read()))
        return await asyncio.shield(self._probe)

    def _stays(self, course: Course, reason: str, retry_in: float | None) -> None:
        """The session cannot be suspended now, and so its memory cannot leave the GPU. None: never."""
        session = course.session
        if session.not_suspendable != reason:
            log.warning("session %s is not suspendable: %s", session.id, reason)
        session.not_suspendable = reason
        for gpu in session.gpus:
            self._arbitrations[gpu.uuid].set_suspendable(session.id, False)
        if course.retry is not None:
            course.retry.cancel()
        course.retry = None if retry_in is None else self._loop.call_later(retry_in, self._may_try_again, course)
        self._news()

    def _may_try_again(self, course: Course) -> None:
        course.retry = None
        if self._courses.get(course.session.id) is course:
            self._begin(course, self._look_again_at(course))

    async def _look_again_at(self, course: Course) -> None:
        """The pause is over: the session can be suspended again, unless the reason still holds."""
        reason = course.of_failed() or await self._capability()
        if reason is not None:
            self._stays(course, reason, LATER)
        elif course.retry is None:
            course.session.not_suspendable = None
            self._arbitration(course.session).set_suspendable(course.session.id, True)
            self._news()

    def _arbitration(self, session: Session) -> GpuArbitration:
        return self._arbitrations[session.gpus[0].uuid]
