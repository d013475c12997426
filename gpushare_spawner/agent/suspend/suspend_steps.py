"""The steps of a suspension: all processes of the session are asked, locked and checkpointed, in this order.

A step that fails raises CannotSuspend. Processes that are locked or checkpointed then stay so: resume_steps.py brings
them back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.sessions.bypassing import attributed, of_other_users, owners
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.agent.state.session_record import Suspension
from gpushare_spawner.agent.suspend.capability import reason_of
from gpushare_spawner.agent.suspend.driver_checkpoint import Checkpoints, Code
from gpushare_spawner.agent.suspend.suspend_progress import LATER, SOON, CannotSuspend, Source, Step, SuspendProgress
from gpushare_spawner.model.protocol.frames import Feature, Frame, Kind
from gpushare_spawner.wording.amounts import memory

READY_WITHIN = 1.0
"""Seconds for SUSPEND_READY. A process answers within 0.1 s; the rest is for a machine under load."""
LOCK_WITHIN = 10.0
"""Seconds for the work that all processes of a session have submitted."""
LEAST_TIME = 0.1
"""Seconds for a process that is locked when the others have used up that time: most have no work left."""
UNKNOWN_CONTEXT = 512 * 2**20
"""Bytes of a context where the driver does not show the process's memory."""

_numbers = count(1)


def next_number() -> int:
    """Return the number of a SUSPEND that has not been used."""
    return next(_numbers)


class SuspendSteps:
    """Suspends all processes of a session, or none."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        sessions: Mapping[str, Session],
        source: Source,
        lacks_host_memory: Callable[[Session, int], str | None],
        save: Callable[[Session], Awaitable[None]],
    ) -> None:
        """`lacks_host_memory`: why the budgets of host memory do not hold so many bytes of a session; None: they do.
        `save` writes a session's record to the disk. Raises OSError."""
        self._checkpoints = checkpoints
        self._sessions = sessions
        self._source = source
        self._lacks_host_memory = lacks_host_memory
        self._save = save

    async def leave(self, progress: SuspendProgress, memory_comes_free: Callable[[], None]) -> int:
        """Suspend all processes. Returns the bytes that are free now. Raises CannotSuspend. Calls `memory_comes_free`
        before the first process leaves the GPU."""
        session = progress.session
        progress.step, progress.number = Step.ASKING, next_number()
        await self._ask(progress)
        sizes = await self._sizes(progress)
        if (reason := self._lacks_host_memory(session, sum(sizes.values()))) is not None:
            raise CannotSuspend(reason)
        session.record.suspension = Suspension(processes=tuple(sizes), sizes=tuple(sizes.values()), complete=False)
        try:
            await self._save(session)
        except OSError as error:
            session.record.suspension = None
            raise CannotSuspend(f"The session's record cannot be written: {error.strerror or error}.") from None
        progress.step = Step.LOCKING
        loop = asyncio.get_running_loop()
        until = loop.time() + LOCK_WITHIN
        for name in sizes:
            answer = await self._checkpoints.lock(name, max(LEAST_TIME, until - loop.time()))
            if not answer.ok and processes.alive(name):
                if answer.code is Code.NOT_READY:
                    raise CannotSuspend(f"GPU work of process {name.pid} did not end in time.", SOON)
                again = SOON if answer.code is Code.STOPPED else LATER
                raise CannotSuspend(reason_of(answer, f"Process {name.pid} cannot be suspended"), again)
        progress.step = Step.SUSPENDING
        memory_comes_free()
        for name, size in sizes.items():
            answer = await self._checkpoints.checkpoint(name, size)
            if not answer.ok and processes.alive(name):
                raise CannotSuspend(reason_of(answer, f"Process {name.pid} cannot be suspended"))
        session.record.suspension = session.record.suspension.model_copy(update={"complete": True})
        with contextlib.suppress(OSError):  # written later; the log says why not now
            await self._save(session)
        return sum(sizes.values())

    def answered(self, progress: SuspendProgress, connection: Connection, frame: Frame) -> None:
        """Take a SUSPEND_READY that answers a SUSPEND."""
        if frame.fields[0] == progress.number and progress.step is Step.ASKING:
            progress.ready[connection] = frame
            progress.answered.set()

    async def _ask(self, progress: SuspendProgress) -> None:
        """Ask all processes to make no driver calls, and whether they can be suspended."""
        asked = set(progress.session.cuda)
        older = [one.peer.pid for one in asked if Feature.SUSPEND not in one.features]
        if older:
            raise CannotSuspend(f"Process {older[0]} runs without the engine suspend of the library.")
        if any(one.peer.process is None for one in asked):
            raise CannotSuspend("The agent does not see the session's processes: it is in another pid namespace.")
        progress.ready.clear()
        for connection in asked:
            connection.send(Kind.SUSPEND, progress.number)
        try:
            async with asyncio.timeout(READY_WITHIN):
                while (asked & progress.session.cuda) - progress.ready.keys():
                    progress.answered.clear()
                    await progress.answered.wait()
        except TimeoutError:
            silent = min(one.peer.pid for one in asked - progress.ready.keys())
            raise CannotSuspend(f"Process {silent} did not answer.", SOON) from None
        for connection, frame in progress.ready.items():
            _check_ready(connection.peer.pid, frame)

    async def _sizes(self, progress: SuspendProgress) -> dict[ProcessName, int]:
        """Return the bytes on the GPU of each process that has a CUDA context. Raises CannotSuspend where one of them
        is not the session's by what the kernel says: a connection alone makes no process a session's."""
        session = progress.session
        gpu = session.gpus[0]
        state = await asyncio.to_thread(self._source.memory, gpu)
        shown = state.processes if state is not None else {}
        connected = {one.peer.pid: other.id for other in self._sessions.values() for one in other.cuda}
        asked = {connection.peer.pid for connection in progress.ready}
        found = await asyncio.to_thread(
            attributed, asked | (shown.keys() - connected.keys()), owners(self._sessions.values()), connected
        )
        own = found.get(session.id, set())
        others = await asyncio.to_thread(of_other_users, asked, session)
        if foreign := min((asked - own) | others, default=None):
            raise CannotSuspend(f"Process {foreign} uses this session's socket and is not one of its server's.")
        if stranger := min(own - asked, default=None):
            raise CannotSuspend(f"Process {stranger} uses the GPU without the library, and can have managed memory.")
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
            known = shown[pid].memory_bytes if pid in shown else None
            size = plain + UNKNOWN_CONTEXT if known is None else known
            sizes[name] = min(gpu.memory_bytes, max(size, sizes.get(name, 0)))
        return {name: size for name, size in sizes.items() if name.pid not in progress.failed}


def _check_ready(pid: int, frame: Frame) -> None:
    """Raise CannotSuspend where a process says that it cannot be suspended."""
    _, managed, opened, exported, _, ready = frame.fields[:6]
    if managed:
        raise CannotSuspend(f"Process {pid} has {memory(managed)} of CUDA managed memory.")
    if opened or exported:
        raise CannotSuspend(f"Process {pid} shares GPU memory with another process.")
    if not ready:
        raise CannotSuspend(f"Process {pid} was in the middle of GPU work.", SOON)
