"""The steps of a suspension and a resumption.

Suspension: all of the session's processes receive SUSPEND, then are locked, then checkpointed. A failed step raises
CannotSuspend. Processes that are locked or checkpointed then stay in that state until `ResumeSteps`, which
`suspender.Suspender._suspension_failed` starts, restores and unlocks them.

Resumption: wait for free memory, then restore and unlock the processes. `ResumeSteps` resumes sessions' processes.
`LeftoverProcesses` uses it for suspended processes that outlive their session or could not be resumed with it. Each of
these has a record on disk until it runs or has ended, so that the next agent can continue. `resume_all` resumes them
while no agent runs (``gpushare agent resume``): no arbiter then pages out other sessions, so a process stays suspended
if its GPU has too little free memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_records import RecordFolder, SessionRecord, Store, Suspension
from gpushare_spawner.agent.sessions.attribution import attributed, of_other_users, owners
from gpushare_spawner.agent.suspend.checkpoints import CheckpointResult, Code, DriverCheckpoints, ProcessState
from gpushare_spawner.agent.suspend.progress import (
    LATER,
    RESUME_AGAIN,
    SOON,
    CannotRestore,
    CannotResume,
    CannotSuspend,
    Step,
    SuspendParts,
    SuspendProgress,
    reason_of,
)
from gpushare_spawner.background import cancel
from gpushare_spawner.clocks import BackOff
from gpushare_spawner.model.frames import Feature, Frame, Kind
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)


READY_WITHIN = 1.0
"""Seconds to wait for SUSPEND_READY. A process answers within 0.5 s; the rest is for a machine under load."""
LOCK_WITHIN = 10.0
"""Seconds to wait for the submitted work of all of a session's processes."""
LEAST_TIME = 0.1
"""Seconds for a process that is locked after the others have used up `LOCK_WITHIN`: most have no work left."""
UNKNOWN_CONTEXT = 512 * 2**20
"""Assumed bytes of a context if the driver does not show the process's memory."""

numbers = count(1)
"""Sequence numbers of SUSPEND frames."""


class SuspendSteps:
    """Suspends either all processes of a session or none."""

    def __init__(self, parts: SuspendParts) -> None:
        self._parts = parts

    async def leave(self, progress: SuspendProgress, stack: contextlib.ExitStack) -> int:
        """Suspend all processes. Returns the bytes that are free now. Raises CannotSuspend.

        Reserves the memory that processes free for the session until `stack` is closed, because they may need to be
        restored.
        """
        session = progress.session
        progress.step, progress.number = Step.ASKING, next(numbers)
        await self._ask(progress)
        sizes = await self._sizes(progress)
        if (reason := self._parts.lacks_host_memory(session, sum(sizes.values()))) is not None:
            raise CannotSuspend(reason)
        session.record.suspension = Suspension(processes=tuple(sizes), sizes=tuple(sizes.values()), complete=False)
        try:
            await self._parts.save(session)
        except OSError as error:
            session.record.suspension = None
            raise CannotSuspend(f"The session's record cannot be written: {error.strerror or error}.") from None
        progress.step = Step.LOCKING
        loop = asyncio.get_running_loop()
        until = loop.time() + LOCK_WITHIN
        for name in sizes:
            answer = await self._parts.checkpoints.lock(name, max(LEAST_TIME, until - loop.time()))
            if not answer.ok and processes.alive(name):
                if answer.code is Code.NOT_READY:
                    raise CannotSuspend(f"GPU work of process {name.pid} did not end in time.", SOON)
                again = SOON if answer.code is Code.STOPPED else LATER
                raise CannotSuspend(reason_of(answer, f"Process {name.pid} cannot be suspended"), again)
        progress.step = Step.SUSPENDING
        stack.enter_context(self._parts.exclusive_memory.exclusive(session.gpus[0].uuid, session.id))
        for name, size in sizes.items():
            answer = await self._parts.checkpoints.checkpoint(name, size)
            if not answer.ok and processes.alive(name):
                raise CannotSuspend(reason_of(answer, f"Process {name.pid} cannot be suspended"))
        session.record.suspension = session.record.suspension.model_copy(update={"complete": True})
        with contextlib.suppress(OSError):  # written later; the log has the reason
            await self._parts.save(session)
        return sum(sizes.values())

    async def _ask(self, progress: SuspendProgress) -> None:
        """Send SUSPEND: all processes stop making driver calls and answer whether they can be suspended."""
        recipients = set(progress.session.cuda)
        older = [connection.peer.pid for connection in recipients if Feature.SUSPEND not in connection.features]
        if older:
            raise CannotSuspend(f"Process {older[0]} runs without the library's engine suspend.")
        if any(connection.peer.process is None for connection in recipients):
            raise CannotSuspend("The session's processes are not visible to the agent: it is in another pid namespace.")
        progress.ready.clear()
        for connection in recipients:
            connection.send(Kind.SUSPEND, progress.number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WITHIN):
                while (recipients & progress.session.cuda) - progress.ready.keys():
                    progress.answered.clear()
                    await progress.answered.wait()
        # on a machine under load the time can end together with the last answer
        silent = [connection.peer.pid for connection in (recipients & progress.session.cuda) - progress.ready.keys()]
        if silent:
            raise CannotSuspend(f"Process {min(silent)} did not answer.", SOON)
        for connection, frame in progress.ready.items():
            _check_ready(connection.peer.pid, frame)

    async def _sizes(self, progress: SuspendProgress) -> dict[ProcessName, int]:
        """Return the bytes on the GPU of each process that has a CUDA context.

        Raises CannotSuspend if the kernel does not show a process as the session's: a connection alone does
        not make a process part of a session.
        """
        session = progress.session
        gpu = session.gpus[0]
        state = await asyncio.to_thread(self._parts.source.memory, gpu)
        shown = state.processes if state is not None else {}
        connected = {
            connection.peer.pid: other.id for other in self._parts.sessions.values() for connection in other.cuda
        }
        pids = {connection.peer.pid for connection in progress.ready}
        by_session = await asyncio.to_thread(
            attributed, pids | (shown.keys() - connected.keys()), owners(self._parts.sessions.values()), connected
        )
        own = by_session.get(session.id, set())
        others = await asyncio.to_thread(of_other_users, pids, session)
        if foreign := min((pids - own) | others, default=None):
            raise CannotSuspend(f"Process {foreign} uses this session's socket but does not belong to its server.")
        if stranger := min(own - pids, default=None):
            # SOON: after a restart of the agent the libraries connect again within moments, one after another
            raise CannotSuspend(
                f"Process {stranger} uses the GPU without the library, and may have managed memory.", SOON
            )
        if stuck := sorted(progress.failed.keys() & shown.keys()):
            raise CannotSuspend(
                progress.of_failed() or f"Process {stuck[0]} has ended, and its memory is still in use."
            )
        sizes: dict[ProcessName, int] = {}
        for connection, frame in progress.ready.items():
            pid, (contexts, plain) = connection.peer.pid, (frame.fields[4], frame.fields[6])
            name = connection.peer.process
            if name is None or (not contexts and pid not in shown):
                continue
            reported = shown.get(pid)
            size = plain + UNKNOWN_CONTEXT if reported is None else reported
            sizes[name] = min(gpu.memory_bytes, max(size, sizes.get(name, 0)))
        return {name: size for name, size in sizes.items() if name.pid not in progress.failed}


def _check_ready(pid: int, frame: Frame) -> None:
    """Raise CannotSuspend if a process answers that it cannot be suspended."""
    _, managed, opened, exported, _, ready = frame.fields[:6]
    if managed:
        raise CannotSuspend(f"Process {pid} has {memory(managed)} of CUDA managed memory.")
    if opened or exported:
        raise CannotSuspend(f"Process {pid} shares GPU memory with another process.")
    if not ready:
        raise CannotSuspend(f"Process {pid} was in the middle of GPU work.", SOON)


MEMORY_WITHIN = 10.0
"""Seconds for which a resumption waits until the driver shows enough free memory."""
CHECK_EVERY = 0.05
"""Seconds between two checks of the free memory."""
SPARE = 64 * 2**20
"""Bytes that must be free for each process in addition to its former memory.

After a restore with too little memory, driver 580 never restores the process (NVIDIA/cuda-checkpoint, issue 44).
"""
SPARE_WITHIN = 2.0
"""Seconds for which a resumption waits for the spare bytes. A session that nearly fills the GPU never gets them."""
CALLS_AT_A_TIME = 8
"""Maximum number of concurrent calls, each in its own process."""
STEPS = 6
"""Maximum number of steps in a resumption; two if no other call for the process was running."""

Failed = dict[int, str]
"""Processes that the driver cannot restore, by pid, with the reason."""
_NOT_NOW = (
    Code.OUT_OF_MEMORY, Code.NOT_PERMITTED, Code.NO_DRIVER, Code.NO_WORKER, Code.HANGS, Code.NOT_READY, Code.STOPPED,
)  # fmt: skip
"""Answers to a restore that lead to another attempt."""


class ResumeSteps:
    """Restores and unlocks suspended processes."""

    def __init__(self, checkpoints: DriverCheckpoints, source: GpuSource, parts: SuspendParts | None = None) -> None:
        """Store the driver. `parts` is None if no agent runs: then no other session gives up memory."""
        self._checkpoints = checkpoints
        self._source = source
        self._parts = parts
        self._restores: dict[str, asyncio.Lock] = {}
        """Locks by GPU UUID: two concurrent restores would count on the same free memory."""

    async def all_or_none(self, session: str, gpu: Gpu, suspension: Suspension, failed: Failed) -> int:
        """Restore and unlock all processes. Returns their bytes on the GPU.

        Raises CannotResume if another attempt can succeed; all processes are then suspended as before. A process that
        can no longer be restored is added to `failed`.
        """
        sizes = zip(suspension.processes, suspension.sizes, strict=True)
        left = {name: size for name, size in sizes if processes.alive(name)}
        if stopped := next((name.pid for name in left if processes.stopped(name.pid)), None):
            raise CannotRestore(reason_of(CheckpointResult(Code.STOPPED), f"Process {stopped} cannot be restored"))
        restored: list[ProcessName] = []
        if await self._free(gpu) < sum(left.values()):
            # the driver can have completed a restore after its timeout
            restored = [name for name in left if await self._is_there(name)]
        still_suspended = {name: size for name, size in left.items() if name not in restored}
        async with self._memory(session, gpu, sum(still_suspended.values()), SPARE * len(still_suspended)):
            for name, size in still_suspended.items():
                answer = await self._checkpoints.restore(name, size)
                if answer.ok or await self._is_there(name):
                    restored.append(name)
                elif answer.code in _NOT_NOW:
                    for restored_name in restored:
                        await self._checkpoints.checkpoint(restored_name, left[restored_name])
                    raise CannotRestore(reason_of(answer, f"Process {name.pid} cannot be restored"))
                elif answer.code not in (Code.INVALID_VALUE, Code.ENDED):
                    _failed(session, name.pid, str(answer), failed)
        for name in restored:
            if (await self._checkpoints.unlock(name)).ok:
                continue
            if (failure := await self.attempt(session, gpu, name, left[name])) is not None:
                _failed(session, name.pid, failure, failed)
        return sum(left[name] for name in restored)

    async def resume_each(self, session: str, gpu: Gpu, suspension: Suspension, failed: Failed) -> None:
        """Make each process run, from any state. Waits until there is enough memory for it.

        A process that cannot be restored is added to `failed`.
        """
        for name, size in zip(suspension.processes, suspension.sizes, strict=True):
            while True:
                try:
                    failure = await self.attempt(session, gpu, name, size)
                    break
                except CannotResume as error:
                    log.warning("process %d stays suspended for now: %s", name.pid, error)
                    await asyncio.sleep(RESUME_AGAIN)
            if failure is not None:
                _failed(session, name.pid, failure, failed)

    async def attempt(self, session: str, gpu: Gpu, name: ProcessName, size: int) -> str | None:
        """Make a process run, from any state. Returns the driver's reason if it cannot.

        None if the process runs or has ended. Raises CannotResume if there is not enough memory for it. Each step
        begins with a query of the state: a call by an agent that was killed can still be running.
        """
        answer, queried = CheckpointResult(Code.UNKNOWN), False
        for _ in range(STEPS):
            if not processes.alive(name):
                return None
            answer = await self._checkpoints.state(name)
            if not answer.ok:
                if answer.code is not Code.UNKNOWN:  # otherwise the worker was killed
                    break
            elif answer.state is ProcessState.FAILED:
                return answer.state.name
            elif answer.state is ProcessState.CHECKPOINTED:
                async with self._memory(session, gpu, size, SPARE):
                    answer = await self._checkpoints.restore(name, size)
                if not answer.ok and answer.code not in (Code.UNKNOWN, Code.ILLEGAL_STATE):
                    break
            elif answer.state is ProcessState.LOCKED or not queried:
                # also for a running process: the call waits for a lock in progress
                queried = True
                answer = await self._checkpoints.unlock(name)
                if answer.ok:
                    return None
                if answer.code not in (Code.UNKNOWN, Code.ILLEGAL_STATE):
                    break
            else:
                return None
        return str(answer) if processes.alive(name) else None

    async def _is_there(self, name: ProcessName) -> bool:
        """Return whether a process's memory is on the GPU even though its restore failed."""
        answer = await self._checkpoints.state(name)
        return answer.ok and answer.state in (ProcessState.RUNNING, ProcessState.LOCKED)

    async def unlock(self, names: Iterable[ProcessName]) -> None:
        """Unlock processes that are only locked. Checkpointed processes do not change.

        The call for a process can wait for the end of its checkpoint; the other calls do not wait for it.
        """
        at_a_time = asyncio.Semaphore(CALLS_AT_A_TIME)

        async def unlock_process(name: ProcessName) -> None:
            async with at_a_time:
                if processes.alive(name):
                    await self._checkpoints.unlock(name)

        await asyncio.gather(*map(unlock_process, names))

    @contextlib.asynccontextmanager
    async def _memory(self, session: str, gpu: Gpu, needed: int, spare: int) -> AsyncIterator[None]:
        """Wait until `needed` bytes are free, and keep them free while the body restores processes there.

        Raises CannotResume if too few are free.
        """
        while True:
            await self._wait_for_memory(session, gpu, needed, spare)
            exclusive = (
                self._parts.use_exclusively(session, gpu) if self._parts is not None else contextlib.nullcontext()
            )
            async with self._restores.setdefault(gpu.uuid, asyncio.Lock()), exclusive:
                # others may have made use of earlier grants meanwhile
                if await self._free(gpu) >= needed:
                    yield
                    return

    async def _free(self, gpu: Gpu) -> int:
        """Return the free bytes of a GPU. Raises CannotResume if its driver does not answer."""
        state = await asyncio.to_thread(self._source.memory, gpu)
        if state is None:
            raise CannotResume("the GPU does not answer its driver")
        return gpu.memory_bytes - state.memory_used_bytes

    async def _wait_for_memory(self, session: str, gpu: Gpu, needed: int, spare: int) -> None:
        """Wait until the driver shows the needed free bytes, and the spare bytes if possible.

        Raises CannotResume after the timeout.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            free, waited = await self._free(gpu), loop.time() - began
            lacking = needed + (spare if waited < SPARE_WITHIN else 0) - free
            if lacking <= 0:
                return
            if waited >= MEMORY_WITHIN:
                raise CannotResume(f"{memory(lacking)} more must be free on its GPU")
            if self._parts is not None:
                self._parts.short_of_memory(session, gpu, lacking)
            await asyncio.sleep(CHECK_EVERY)


def _failed(session: str, pid: int, reason: str, failed: Failed) -> None:
    failed[pid] = reason
    log.error("session %s: the driver cannot restore process %d (%s); its GPU work waits", session, pid, reason)


LET_GO_AFTER = 5.0
"""Seconds for which processes may outlive their session before they are resumed: most end with the session."""
AGAIN_AFTER = 2.0
"""Seconds until the next attempt to resume a process; doubled after each further failure."""


class LeftoverProcesses:
    """Resumes leftover processes, one at a time per session."""

    def __init__(
        self, resume_steps: ResumeSteps, records: Store, report: Callable[[str, int, str | None], None]
    ) -> None:
        """Start without processes.

        `report` is called with a session ID, a process's pid, and the driver's reason why the process cannot be
        restored; None if the process runs again or has ended.
        """
        self._resume_steps = resume_steps
        self._records = records
        self._report = report
        self._tasks: dict[asyncio.Task[None], SessionRecord] = {}
        self._closed = False

    def take(self, record: SessionRecord, gpu: Gpu, after: float) -> None:
        """Resume the suspended processes of a record after at least `after` seconds.

        Has no effect on processes with a resumption in progress.
        """
        assert record.suspension is not None
        if any(leftover.suspension == record.suspension for leftover in self._tasks.values()):
            return
        self._records.put_left(record)
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._bring_back(record, gpu, after))
        self._tasks[task] = record
        task.add_done_callback(self._ended)

    async def close(self) -> list[SessionRecord]:
        """Stop. Returns the records of unfinished resumptions."""
        self._closed = True
        left = dict(self._tasks)
        await cancel(*left)
        return list(left.values())

    def _ended(self, task: asyncio.Task[None]) -> None:
        record = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("processes of session %s stay suspended: internal error", record.request.id, exc_info=error)

    async def _bring_back(self, record: SessionRecord, gpu: Gpu, after: float) -> None:
        suspension, session, pauses = record.suspension, record.request.id, BackOff(AGAIN_AFTER, LATER)
        assert suspension is not None
        left = dict(zip(suspension.processes, suspension.sizes, strict=True))
        reported: dict[int, str] = {}
        await asyncio.sleep(after)
        while left:
            for name, size in list(left.items()):
                lives = processes.alive(name)
                try:
                    failure = await self._resume_steps.attempt(session, gpu, name, size)
                    self._report(session, name.pid, failure)
                except CannotResume as error:
                    failure = str(error)
                if failure is None:
                    del left[name]
                    if lives:
                        log.info("process %d, which session %s left suspended, is resumed", name.pid, session)
                elif reported.get(name.pid) != failure:
                    reported[name.pid] = failure
                    log.error("process %d of session %s stays suspended for now: %s", name.pid, session, failure)
            if left:
                await asyncio.sleep(pauses.next(asyncio.get_running_loop().time()))
        self._records.remove_left(record)


async def resume_all(
    records: RecordFolder,
    gpus: Iterable[Gpu],
    source: GpuSource,
    checkpoints: DriverCheckpoints,
    say: Callable[[str], None],
) -> bool:
    """Restore and unlock all suspended processes in the records. Returns whether certainly none is left suspended.

    `say` gets a sentence about each process. Raises OSError if a record cannot be written.
    """
    resume_steps = ResumeSteps(checkpoints, source)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    complete = True
    for record in records.load():
        if await _resume_record(record, by_uuid, resume_steps, say):
            record.suspension = None
            records.replace(record)
        else:
            complete = complete and record.suspension is None
    for record in records.left():
        if await _resume_record(record, by_uuid, resume_steps, say):
            records.forget_left(record)
        else:
            complete = False
    for path in records.unreadable():
        say(f"The record {path} cannot be read: processes of its session may be suspended. Remove it if none is.")
        complete = False
    return complete


async def _resume_record(
    record: SessionRecord, gpus: dict[str, Gpu], resume_steps: ResumeSteps, say: Callable[[str], None]
) -> bool:
    """Return whether there were suspended processes and all now run or have ended."""
    session, suspension = record.request.id, record.suspension
    if suspension is None:
        return False
    gpu = gpus.get(next(iter(record.request.gpus), ""))
    all_run = True
    for name, size in zip(suspension.processes, suspension.sizes, strict=True):
        if not processes.alive(name):
            continue
        trouble: str | None = "its GPU is missing"
        if gpu is not None:
            try:
                trouble = await resume_steps.attempt(session, gpu, name, size)
            except CannotResume as error:
                trouble = str(error)
        all_run = all_run and trouble is None
        state = "runs again" if trouble is None else f"stays suspended: {trouble}"
        say(f"Process {name.pid} of session {session} {state}.")
    return all_run
