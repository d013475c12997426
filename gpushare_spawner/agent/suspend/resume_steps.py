"""The steps of a resumption: wait for free memory, then restore and unlock the processes.

This serves processes of sessions, and those that outlive their session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.state.session_record import Suspension
from gpushare_spawner.agent.suspend.capability import reason_of
from gpushare_spawner.agent.suspend.driver_checkpoint import Answer, Checkpoints, Code, ProcessState
from gpushare_spawner.agent.suspend.suspend_progress import RESUME_AGAIN, CannotRestore, CannotResume, Source
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)

MEMORY_WITHIN = 10.0
"""Seconds for which a resumption waits until the driver shows enough free memory."""
LOOK_EVERY = 0.05
"""Seconds between two looks at it."""
SPARE = 64 * 2**20
"""Bytes that have to be free for each process beyond what it had: where a restore finds too little, driver 580 never
restores the process (NVIDIA/cuda-checkpoint, issue 44)."""
SPARE_WITHIN = 2.0
"""Seconds for which a resumption waits for that. A session that nearly fills the GPU never finds it."""
CALLS_AT_A_TIME = 8
"""Each is made in a process of its own."""
STEPS = 6
"""Steps in which a process comes back at most; two, where no other call about it was under way."""

Failed = dict[int, str]
"""Processes that the driver cannot restore, by pid, with what it says."""
_NOT_NOW = (
    Code.OUT_OF_MEMORY, Code.NOT_PERMITTED, Code.NO_DRIVER, Code.NO_WORKER, Code.HANGS, Code.NOT_READY, Code.STOPPED,
)  # fmt: skip
"""Answers to a restore after which it is tried again."""


class Others(Protocol):
    """The other sessions, which use the same GPUs."""

    def short_of_memory(self, session: str, gpu: Gpu, lacking: int) -> None:
        """So many bytes are missing on a GPU for a session (its id)."""

    def hold_memory(self, session: str, gpu: Gpu) -> AbstractAsyncContextManager[None]:
        """While this lasts no other session gets more memory on the GPU."""


class ResumeSteps:
    """Restores and unlocks suspended processes."""

    def __init__(self, checkpoints: Checkpoints, source: Source, others: Others) -> None:
        self._checkpoints = checkpoints
        self._source = source
        self._others = others
        self._restores: dict[str, asyncio.Lock] = {}
        """By GPU (UUID): two restores at a time would count on the same free memory."""

    async def all_or_none(self, session: str, gpu: Gpu, suspension: Suspension, failed: Failed) -> int:
        """Restore and unlock all processes. Returns their bytes on the GPU. Raises CannotResume where it is to be tried
        again; then all are suspended as before. A process that cannot be restored any more is added to `failed`."""
        sizes = zip(suspension.processes, suspension.sizes, strict=True)
        left = {name: size for name, size in sizes if processes.alive(name)}
        if stopped := next((name.pid for name in left if processes.stopped(name.pid)), None):
            raise CannotRestore(reason_of(Answer(Code.STOPPED), f"Process {stopped} cannot be restored"))
        back: list[ProcessName] = []
        if await self._free(gpu) < sum(left.values()):
            # the driver can have done a restore that was given up
            back = [name for name in left if await self._is_there(name)]
        away = {name: size for name, size in left.items() if name not in back}
        async with self._memory(session, gpu, sum(away.values()), SPARE * len(away)):
            for name, size in away.items():
                answer = await self._checkpoints.restore(name, size)
                if answer.ok or await self._is_there(name):
                    back.append(name)
                elif answer.code in _NOT_NOW:
                    for other in back:
                        await self._checkpoints.checkpoint(other, left[other])
                    raise CannotRestore(reason_of(answer, f"Process {name.pid} cannot be restored"))
                elif answer.code not in (Code.INVALID_VALUE, Code.ENDED):
                    _failed(session, name.pid, str(answer), failed)
        for name in back:
            if (await self._checkpoints.unlock(name)).ok:
                continue
            if (failure := await self.attempt(session, gpu, name, left[name])) is not None:
                _failed(session, name.pid, failure, failed)
        return sum(left[name] for name in back)

    async def each(self, session: str, gpu: Gpu, suspension: Suspension, failed: Failed) -> None:
        """Make each process run, whatever state it is in. Waits until there is memory for it. A process that cannot be
        brought back is added to `failed`."""
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
        """Make a process run, whatever state it is in. Returns what the driver says where it cannot; None: the process
        runs or has ended. Raises CannotResume where there is no memory for it.

        The driver is asked for the state before each step: a call of an agent that was killed can be under way still.
        """
        answer, looked = Answer(Code.UNKNOWN), False
        for _ in range(STEPS):
            if not processes.alive(name):
                return None
            answer = await self._checkpoints.state(name)
            if not answer.ok:
                if answer.code is not Code.UNKNOWN:  # else the worker was killed
                    break
            elif answer.state is ProcessState.FAILED:
                return answer.state.name
            elif answer.state is ProcessState.CHECKPOINTED:
                async with self._memory(session, gpu, size, SPARE):
                    answer = await self._checkpoints.restore(name, size)
                if not answer.ok and answer.code not in (Code.UNKNOWN, Code.ILLEGAL_STATE):
                    break
            elif answer.state is ProcessState.LOCKED or not looked:
                # of one that runs too: this waits for a lock that is under way
                looked = True
                answer = await self._checkpoints.unlock(name)
                if answer.ok:
                    return None
                if answer.code not in (Code.UNKNOWN, Code.ILLEGAL_STATE):
                    break
            else:
                return None
        return str(answer) if processes.alive(name) else None

    async def _is_there(self, name: ProcessName) -> bool:
        """Whether a process that was not restored has its memory on the GPU all the same."""
        answer = await self._checkpoints.state(name)
        return answer.ok and answer.state in (ProcessState.RUNNING, ProcessState.LOCKED)

    async def unlock(self, names: Iterable[ProcessName]) -> None:
        """Let processes that are only locked go on. Those that are checkpointed stay so.

        The call about one of them can wait for the end of its checkpoint, and the others do not wait for that.
        """
        at_a_time = asyncio.Semaphore(CALLS_AT_A_TIME)

        async def one(name: ProcessName) -> None:
            async with at_a_time:
                if processes.alive(name):
                    await self._checkpoints.unlock(name)

        await asyncio.gather(*map(one, names))

    @contextlib.asynccontextmanager
    async def _memory(self, session: str, gpu: Gpu, needed: int, spare: int) -> AsyncIterator[None]:
        """Wait until so many bytes are free, and keep them free while the body restores processes into them. Raises
        CannotResume where they are not."""
        while True:
            await self._wait_for_memory(session, gpu, needed, spare)
            async with (
                self._restores.setdefault(gpu.uuid, asyncio.Lock()),
                self._others.hold_memory(session, gpu),
            ):
                # others may have allocated meanwhile what they had been granted before
                if await self._free(gpu) >= needed:
                    yield
                    return

    async def _free(self, gpu: Gpu) -> int:
        """Return the free bytes of a GPU. Raises CannotResume where its driver does not answer."""
        state = await asyncio.to_thread(self._source.memory, gpu)
        if state is None:
            raise CannotResume("the GPU does not answer its driver")
        return gpu.memory_bytes - state.memory_used_bytes

    async def _wait_for_memory(self, session: str, gpu: Gpu, needed: int, spare: int) -> None:
        """Wait until the driver shows so many free bytes, and some to spare where they can be had. Raises CannotResume
        where it does not."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            free, waited = await self._free(gpu), loop.time() - began
            lacking = needed + (spare if waited < SPARE_WITHIN else 0) - free
            if lacking <= 0:
                return
            if waited >= MEMORY_WITHIN:
                raise CannotResume(f"{memory(lacking)} more must be free on its GPU")
            self._others.short_of_memory(session, gpu, lacking)
            await asyncio.sleep(LOOK_EVERY)


def _failed(session: str, pid: int, said: str, failed: Failed) -> None:
    failed[pid] = said
    log.error("session %s: the driver cannot restore process %d (%s); its GPU work waits", session, pid, said)
