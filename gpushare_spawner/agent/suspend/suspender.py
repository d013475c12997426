"""Suspends sessions for others, and resumes them when they have GPU work: the order of the steps, and what is done
where one fails.

The arbiter decides which session is suspended and when it comes back. What the processes are told: "Suspending a
process" in docs/reference/protocol.md. A failure leaves the session running and not suspendable, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Any, Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.bypassing import attributed, owners
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.agent.state.session_record import Suspension
from gpushare_spawner.agent.suspend.capability import Rights, reason_of, why_not
from gpushare_spawner.agent.suspend.driver_checkpoint import Answer, Checkpoints, Code, ProcessState
from gpushare_spawner.model.protocol.frames import Feature, Frame, Kind
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)

READY_WITHIN = 1.0
"""Seconds for SUSPEND_READY. A process answers within 0.1 s; the rest is for a machine under load."""
LOCK_WITHIN = 10.0
"""Seconds for the work that a process has submitted."""
MEMORY_WITHIN = 10.0
"""Seconds for which a resumption waits until the driver shows enough free memory."""
LOOK_EVERY = 0.05
"""Seconds between two looks at it."""
SPARE = 64 * 2**20
"""Bytes that have to be free for each process beyond what it had: where a restore finds too little, driver 580 never
restores the process (NVIDIA/cuda-checkpoint, issue 44)."""
SPARE_WITHIN = 2.0
"""Seconds for which a resumption waits for that. A session that nearly fills the GPU never finds it."""
UNKNOWN_CONTEXT = 512 * 2**20
"""Bytes of a context where the driver does not show the process's memory."""
SOON, LATER = 2.0, 60.0
"""Seconds until a session that could not be suspended is tried again: it was busy; another cause."""
LET_GO_AFTER = 5.0
"""Seconds for which processes may outlive their session before they are resumed: most are ended with it."""
RESUME_AGAIN = 1.0
"""The same for a session that could not be resumed."""

_numbers = count(1)


class Step(Enum):
    """Where a session is on its way from the GPU and back."""

    RUNNING = auto()
    ASKING = auto()
    LOCKING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()


class CannotSuspend(Exception):
    """The session goes on as it was; the message is the reason, in a sentence."""

    def __init__(self, reason: str, retry_in: float = LATER) -> None:
        super().__init__(reason)
        self.retry_in = retry_in


class CannotResume(Exception):
    """The session stays suspended for now."""


class Source(Protocol):
    """The driver's figures: NVML."""

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Memory in use, and by which processes; None where the GPU does not answer. May block for milliseconds."""


@dataclass(eq=False)
class _Course:
    """One session of engine `suspend`."""

    session: Session
    step: Step = Step.RUNNING
    number: int = 0
    """Of the last SUSPEND."""
    ready: dict[Connection, Frame] = field(default_factory=dict)
    """Answers to it."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[int, str] = field(default_factory=dict)
    """Processes that the driver cannot bring back, by pid, with what it says."""
    task: asyncio.Task[None] | None = None
    retry: asyncio.TimerHandle | None = None
    look: asyncio.TimerHandle | None = None
    """When it is looked next whether the suspended processes have ended."""


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
    ) -> None:
        """`arbitrations` are by the GPU's UUID, `sessions` by their ids. `lacks_host_memory`: why the budgets of host
        memory do not hold so many bytes of a session; None: they do. `save` writes a session's record to the disk.
        `news` is called when a report has changed."""
        self._checkpoints = checkpoints
        self._arbitrations = arbitrations
        self._sessions = sessions
        self._source = source
        self._lacks_host_memory = lacks_host_memory
        self._save = save
        self._news = news
        self._loop = asyncio.get_running_loop()
        self._courses: dict[str, _Course] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[str | None] | None = None
        self._closed = False
        for arbitration in arbitrations.values():
            arbitration.suspend, arbitration.resume = self._suspend, self._resume

    async def close(self) -> None:
        """Stop between two steps or in one: the next agent goes on from the record."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [one.task for one in self._courses.values() if one.task is not None]
        tasks += [*self._leaving, *([self._probe] if self._probe is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for course in self._courses.values():
            _cancel_timers(course)

    # -- sessions and their processes ----------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session is there, perhaps from an earlier run of the agent. Its arbiter knows it already."""
        if not session.suspends:
            return
        course = self._courses[session.id] = _Course(session)
        if len(session.gpus) != 1:
            self._stays(course, "A session on several GPUs is not suspended.", None)
        elif session.record.suspension is not None:
            course.step, course.number = Step.SUSPENDED, next(_numbers)
            session.suspended = True
            self._begin(course, self._recover(course))
        else:
            self._begin(course, self._check_capability(course))

    def ended(self, session: Session) -> None:
        """The session is over. A process of it that lives on is brought back."""
        course = self._courses.pop(session.id, None)
        if course is None:
            return
        _cancel_timers(course)
        if course.task is not None:
            course.task.cancel()
        if session.record.suspension is not None and len(session.gpus) == 1 and not self._closed:
            task = self._loop.create_task(self._let_go(course, session.record.suspension))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _let_go(self, course: _Course, suspension: Suspension) -> None:
        """Bring back processes that outlive their session: nobody else would."""
        await asyncio.sleep(LET_GO_AFTER)
        for name, size in zip(suspension.processes, suspension.sizes, strict=True):
            if not self._gone(name):
                log.info("process %d outlives session %s, and is resumed", name.pid, course.session.id)
                await self._bring_back(course, name, size)

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

    def _forget_ended(self, course: _Course) -> None:
        """A session of which all suspended processes have ended is suspended no longer."""
        session = course.session
        suspension = session.record.suspension
        if course.step is not Step.SUSPENDED or suspension is None or session.id not in self._courses:
            return
        if not all(map(self._gone, suspension.processes)):
            if not session.cuda and course.look is None:  # its connections end before it does
                course.look = self._loop.call_later(LOOK_EVERY, self._look_again, course)
            return
        session.record.suspension, session.suspended = None, False
        self._tell_resumed(course)
        self._arbitration(session).resumed(session.id, 0, 0.0)
        self._begin(course, self._save(session))
        self._news()

    def _look_again(self, course: _Course) -> None:
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
        elif number == course.number and course.step is Step.ASKING:
            course.ready[connection] = frame
            course.answered.set()

    # -- what the arbiters order ---------------------------------------------------------------------------------------

    def _suspend(self, name: str) -> None:
        course = self._courses.get(name)
        if course is not None:
            self._begin(course, self._try_to_suspend(course))

    def _resume(self, name: str) -> None:
        course = self._courses.get(name)
        if course is not None:
            self._begin(course, self._try_to_resume(course))

    def _begin(self, course: _Course, work: Coroutine[Any, Any, None]) -> None:
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

    async def _try_to_suspend(self, course: _Course) -> None:
        session, began = course.session, self._loop.time()
        arbitration = self._arbitration(session)
        try:
            amount = await self._leave(course)
        except Exception as error:
            refusal = error if isinstance(error, CannotSuspend) else CannotSuspend(f"An error of the agent: {error!r}.")
            if refusal is not error:
                log.exception("session %s could not be suspended", session.id)
            await self._goes_on(course)
            self._stays(course, str(refusal), refusal.retry_in)
            arbitration.not_suspended(session.id)
            return
        course.step, session.suspended = Step.SUSPENDED, True
        session.not_suspendable = self._of_failed(course)
        log.info("session %s is suspended: %s in %.1f s", session.id, memory(amount), self._loop.time() - began)
        arbitration.suspended(session.id, amount, self._loop.time() - began)
        self._news()

    async def _leave(self, course: _Course) -> int:
        """Returns the bytes that are free now. Raises CannotSuspend."""
        session = course.session
        if (reason := await self._capability()) is not None:
            raise CannotSuspend(reason)
        course.step, course.number = Step.ASKING, next(_numbers)
        await self._ask(course)
        sizes = await self._sizes(course)
        if (reason := self._lacks_host_memory(session, sum(sizes.values()))) is not None:
            raise CannotSuspend(reason)
        names = {pid: name for pid in sizes if (name := processes.named(pid)) is not None}
        session.record.suspension = Suspension(
            processes=tuple(names.values()), sizes=tuple(sizes[pid] for pid in names), complete=False
        )
        try:
            await self._save(session)
        except OSError as error:
            session.record.suspension = None
            raise CannotSuspend(f"The session's record cannot be written: {error.strerror or error}.") from None
        course.step = Step.LOCKING
        for pid in names:
            answer = await self._checkpoints.lock(pid, LOCK_WITHIN)
            if not answer.ok and not self._gone(names[pid]):
                if answer.code is Code.NOT_READY:
                    raise CannotSuspend(f"GPU work of process {pid} did not end within {LOCK_WITHIN:g} s.", SOON)
                raise CannotSuspend(reason_of(answer, f"Process {pid} cannot be suspended"))
        course.step = Step.SUSPENDING
        for pid in names:
            answer = await self._checkpoints.checkpoint(pid, sizes[pid])
            if not answer.ok and not self._gone(names[pid]):
                raise CannotSuspend(reason_of(answer, f"Process {pid} cannot be suspended"))
        session.record.suspension = session.record.suspension.model_copy(update={"complete": True})
        await self._keep(session)
        return sum(sizes.values())

    async def _ask(self, course: _Course) -> None:
        """Ask all processes to make no driver calls, and whether they can be suspended."""
        asked = set(course.session.cuda)
        older = [one.peer.pid for one in asked if Feature.SUSPEND not in one.features]
        if older:
            raise CannotSuspend(f"Process {older[0]} runs without the engine suspend of the library.")
        if any(not one.peer.pid for one in asked):
            raise CannotSuspend("The agent does not see the session's processes: it is in another pid namespace.")
        course.ready.clear()
        for connection in asked:
            connection.send(Kind.SUSPEND, course.number)
        try:
            async with asyncio.timeout(READY_WITHIN):
                while (asked & course.session.cuda) - course.ready.keys():
                    course.answered.clear()
                    await course.answered.wait()
        except TimeoutError:
            silent = min(one.peer.pid for one in asked - course.ready.keys())
            raise CannotSuspend(f"Process {silent} did not answer.", SOON) from None
        for connection, frame in course.ready.items():
            _check_ready(connection.peer.pid, frame)

    async def _sizes(self, course: _Course) -> dict[int, int]:
        """Return the bytes on the GPU of each process that has a CUDA context, by pid."""
        session = course.session
        gpu = session.gpus[0]
        state = await asyncio.to_thread(self._source.memory, gpu)
        shown = state.processes if state is not None else {}
        connected = {one.peer.pid for other in self._sessions.values() for one in other.cuda}
        foreign = await asyncio.to_thread(attributed, shown.keys() - connected, owners(self._sessions.values()))
        if stranger := min(foreign.get(session.id, ()), default=None):
            raise CannotSuspend(f"Process {stranger} uses the GPU without the library, and can have managed memory.")
        sizes: dict[int, int] = {}
        for connection, frame in course.ready.items():
            pid, (contexts, plain) = connection.peer.pid, (frame.fields[4], frame.fields[6])
            if not contexts and pid not in shown:
                continue
            known = shown[pid].memory_bytes if pid in shown else None
            size = plain + UNKNOWN_CONTEXT if known is None else known
            sizes[pid] = min(gpu.memory_bytes, max(size, sizes.get(pid, 0)))
        return {pid: size for pid, size in sizes.items() if pid not in course.failed}

    async def _goes_on(self, course: _Course) -> None:
        """Bring back what was suspended already, and let all processes go on."""
        session, suspension = course.session, course.session.record.suspension
        if suspension is not None:
            for name, size in zip(suspension.processes, suspension.sizes, strict=True):
                await self._bring_back(course, name, size)
            session.record.suspension = None
            await self._keep(session)
        self._tell_resumed(course)

    async def _keep(self, session: Session) -> None:
        """Write the record, or go on: it is written later, and the log says why not now."""
        with contextlib.suppress(OSError):
            await self._save(session)

    async def _bring_back(self, course: _Course, name: processes.ProcessName, size: int) -> None:
        """Make a process run, whatever state it is in. Waits until there is memory for it."""
        if self._gone(name):
            return
        answer = await self._checkpoints.state(name.pid)
        state = answer.state if answer.ok else ProcessState.FAILED
        if state is ProcessState.CHECKPOINTED:
            while not self._gone(name):
                try:
                    await self._wait_for_memory(course.session, size, SPARE)
                    break
                except CannotResume as error:
                    log.warning("process %d stays suspended for now: %s", name.pid, error)
                    await asyncio.sleep(RESUME_AGAIN)
            answer = await self._checkpoints.restore(name.pid, size)
            state = ProcessState.LOCKED if answer.ok else ProcessState.FAILED
        if state is ProcessState.LOCKED:
            await self._unlock(course, name)
        elif state is ProcessState.FAILED and not self._gone(name):
            self._failed(course, name.pid, answer)

    async def _unlock(self, course: _Course, name: processes.ProcessName) -> None:
        answer = await self._checkpoints.unlock(name.pid)
        if not answer.ok:  # perhaps the worker was killed
            answer = await self._checkpoints.unlock(name.pid)
        if not answer.ok and answer.code is not Code.ILLEGAL_STATE and not self._gone(name):
            self._failed(course, name.pid, answer)

    # -- and back ------------------------------------------------------------------------------------------------------

    async def _try_to_resume(self, course: _Course) -> None:
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
            arbitration.not_resumed(session.id, RESUME_AGAIN)
            return
        seconds = self._loop.time() - began
        log.info("session %s is resumed: %s in %.1f s", session.id, memory(amount), seconds)
        self._is_back(course)
        arbitration.resumed(session.id, amount, seconds)
        self._news()

    async def _come_back(self, course: _Course) -> int:
        """Returns the bytes on the GPU. Raises CannotResume where it is to be tried again."""
        session, suspension = course.session, course.session.record.suspension
        if suspension is None:
            return 0
        sizes = zip(suspension.processes, suspension.sizes, strict=True)
        names = {name.pid: name for name in suspension.processes}
        left = {name.pid: size for name, size in sizes if not self._gone(name)}
        await self._wait_for_memory(session, sum(left.values()), SPARE * len(left))
        back: list[int] = []
        for pid, size in left.items():
            answer = await self._checkpoints.restore(pid, size)
            if answer.ok or (await self._checkpoints.state(pid)).state is ProcessState.LOCKED:
                back.append(pid)
            elif answer.code in (Code.OUT_OF_MEMORY, Code.NOT_PERMITTED, Code.NO_DRIVER, Code.HANGS, Code.NOT_READY):
                for other in back:  # all or nothing
                    await self._checkpoints.checkpoint(other, left[other])
                raise CannotResume(reason_of(answer, f"process {pid} cannot be restored"))
            elif answer.code is not Code.INVALID_VALUE:
                self._failed(course, pid, answer)
        for pid in back:
            await self._unlock(course, names[pid])
        session.record.suspension = None
        await self._keep(session)
        return sum(left[pid] for pid in back)

    async def _wait_for_memory(self, session: Session, needed: int, spare: int) -> None:
        """Wait until the driver shows so many free bytes, and some to spare where they can be had. Raises CannotResume
        where it does not."""
        gpu, began = session.gpus[0], self._loop.time()
        while True:
            state = await asyncio.to_thread(self._source.memory, gpu)
            if state is None:
                raise CannotResume("the GPU does not answer its driver")
            free, waited = gpu.memory_bytes - state.memory_used_bytes, self._loop.time() - began
            lacking = needed + (spare if waited < SPARE_WITHIN else 0) - free
            if lacking <= 0:
                return
            if waited >= MEMORY_WITHIN:
                raise CannotResume(f"{memory(lacking)} more must be free on its GPU")
            if session.id in self._courses:
                self._arbitration(session).short_of_memory(session.id, lacking)
            await asyncio.sleep(LOOK_EVERY)

    async def _recover(self, course: _Course) -> None:
        """Find how far an earlier run of the agent came. A session of which all processes are suspended stays so."""
        session, suspension = course.session, course.session.record.suspension
        assert suspension is not None
        states = [await self._checkpoints.state(name.pid) for name in suspension.processes if not self._gone(name)]
        if states and all(one.ok and one.state is ProcessState.CHECKPOINTED for one in states):
            log.info("session %s is suspended since before the agent started", session.id)
            session.record.suspension = suspension.model_copy(update={"complete": True})
            return
        for name, size in zip(suspension.processes, suspension.sizes, strict=True):
            await self._bring_back(course, name, size)
        session.record.suspension = None
        await self._keep(session)
        self._is_back(course)
        self._arbitration(session).resumed(session.id, 0, 0.0)
        self._news()

    def _is_back(self, course: _Course) -> None:
        course.session.suspended = False
        self._tell_resumed(course)
        if course.failed:
            self._stays(course, self._of_failed(course) or "", LATER)

    def _tell_resumed(self, course: _Course) -> None:
        course.step = Step.RUNNING
        for connection in course.session.cuda:
            if Feature.SUSPEND in connection.features:
                connection.send(Kind.RESUMED, course.number)

    # -- what is possible ----------------------------------------------------------------------------------------------

    async def _check_capability(self, course: _Course) -> None:
        if (reason := await self._capability()) is not None:
            self._stays(course, reason, LATER)

    async def _capability(self) -> str | None:
        """Return why the driver cannot suspend processes, or the agent must not; None: it can. Asked once where it
        can."""
        if self._probe is None or (self._probe.done() and (self._probe.cancelled() or self._probe.result())):
            self._probe = self._loop.create_task(why_not(self._checkpoints, Rights.read()))
        return await asyncio.shield(self._probe)

    def _stays(self, course: _Course, reason: str, retry_in: float | None) -> None:
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

    def _may_try_again(self, course: _Course) -> None:
        course.retry = None
        if course.session.id in self._courses and self._courses[course.session.id] is course:
            self._arbitration(course.session).set_suspendable(course.session.id, True)

    def _failed(self, course: _Course, pid: int, answer: Answer) -> None:
        course.failed[pid] = str(answer)
        log.error(
            "session %s: the driver cannot bring process %d back (%s); its GPU work waits until it is ended",
            course.session.id,
            pid,
            answer,
        )

    def _of_failed(self, course: _Course) -> str | None:
        alive = [pid for pid in course.failed if processes.exists(pid)]
        if not alive:
            return None
        return f"The driver cannot bring process {alive[0]} back ({course.failed[alive[0]]}): restart its kernel."

    def _arbitration(self, session: Session) -> GpuArbitration:
        return self._arbitrations[session.gpus[0].uuid]

    @staticmethod
    def _gone(name: processes.ProcessName) -> bool:
        return not processes.alive(name)


def _cancel_timers(course: _Course) -> None:
    for timer in (course.retry, course.look):
        if timer is not None:
            timer.cancel()


def _check_ready(pid: int, frame: Frame) -> None:
    """Raise CannotSuspend where a process says that it cannot be suspended."""
    _, managed, opened, exported, _, ready = frame.fields[:6]
    if managed:
        raise CannotSuspend(f"Process {pid} has {memory(managed)} of CUDA managed memory.")
    if opened or exported:
        raise CannotSuspend(f"Process {pid} shares GPU memory with another process.")
    if not ready:
        raise CannotSuspend(f"Process {pid} was in the middle of GPU work.", SOON)
