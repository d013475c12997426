"""How suspended processes come back to the GPU: there must be memory, then they are restored and unlocked.

What is said here holds for processes of sessions, and for those that outlive their session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.state.session_record import Suspension
from gpushare_spawner.agent.suspend.capability import reason_of
from gpushare_spawner.agent.suspend.course import CannotResume, Source
from gpushare_spawner.agent.suspend.driver_checkpoint import Answer, Checkpoints, Code, ProcessState
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
RESUME_AGAIN = 1.0
"""Seconds until processes that could not come back are tried again."""

Failed = dict[int, str]
"""Processes that the driver cannot bring back, by pid, with what it says."""


class ComingBack:
    """Brings the suspended processes of a session back."""

    def __init__(
        self, checkpoints: Checkpoints, source: Source, short_of_memory: Callable[[str, Gpu, int], None]
    ) -> None:
        """`short_of_memory` is told how many bytes are missing on a GPU for a session, by its id."""
        self._checkpoints = checkpoints
        self._source = source
        self._short_of_memory = short_of_memory

    async def all_or_none(self, session: str, gpu: Gpu, suspension: Suspension, failed: Failed) -> int:
        """Restore and unlock all processes. Returns their bytes on the GPU. Raises CannotResume where it is to be tried
        again; then all are suspended as before. A process that cannot be restored any more is added to `failed`."""
        sizes = zip(suspension.processes, suspension.sizes, strict=True)
        names = {name.pid: name for name in suspension.processes}
        left = {name.pid: size for name, size in sizes if processes.alive(name)}
        await self._wait_for_memory(session, gpu, sum(left.values()), SPARE * len(left))
        back: list[int] = []
        for pid, size in left.items():
            answer = await self._checkpoints.restore(pid, size)
            if answer.ok or (await self._checkpoints.state(pid)).state is ProcessState.LOCKED:
                back.append(pid)
            elif answer.code in (Code.OUT_OF_MEMORY, Code.NOT_PERMITTED, Code.NO_DRIVER, Code.HANGS, Code.NOT_READY):
                for other in back:
                    await self._checkpoints.checkpoint(other, left[other])
                raise CannotResume(reason_of(answer, f"process {pid} cannot be restored"))
            elif answer.code is not Code.INVALID_VALUE:
                _failed(session, pid, answer, failed)
        for pid in back:
            await self._unlock(session, names[pid], failed)
        return sum(left[pid] for pid in back)

    async def each(self, session: str, gpu: Gpu, suspension: Suspension, failed: Failed) -> None:
        """Make each process run, whatever state it is in."""
        for name, size in zip(suspension.processes, suspension.sizes, strict=True):
            await self.one(session, gpu, name, size, failed)

    async def one(self, session: str, gpu: Gpu, name: ProcessName, size: int, failed: Failed) -> None:
        """Make a process run, whatever state it is in. Waits until there is memory for it."""
        if not processes.alive(name):
            return
        answer = await self._checkpoints.state(name.pid)
        state = answer.state if answer.ok else ProcessState.FAILED
        if state is ProcessState.CHECKPOINTED:
            while processes.alive(name):
                try:
                    await self._wait_for_memory(session, gpu, size, SPARE)
                    break
                except CannotResume as error:
                    log.warning("process %d stays suspended for now: %s", name.pid, error)
                    await asyncio.sleep(RESUME_AGAIN)
            answer = await self._checkpoints.restore(name.pid, size)
            state = ProcessState.LOCKED if answer.ok else ProcessState.FAILED
        if state is ProcessState.LOCKED:
            await self._unlock(session, name, failed)
        elif state is ProcessState.FAILED and processes.alive(name):
            _failed(session, name.pid, answer, failed)

    async def _unlock(self, session: str, name: ProcessName, failed: Failed) -> None:
        answer = await self._checkpoints.unlock(name.pid)
        if not answer.ok:  # perhaps the worker was killed
            answer = await self._checkpoints.unlock(name.pid)
        if not answer.ok and answer.code is not Code.ILLEGAL_STATE and processes.alive(name):
            _failed(session, name.pid, answer, failed)

    async def _wait_for_memory(self, session: str, gpu: Gpu, needed: int, spare: int) -> None:
        """Wait until the driver shows so many free bytes, and some to spare where they can be had. Raises CannotResume
        where it does not."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            state = await asyncio.to_thread(self._source.memory, gpu)
            if state is None:
                raise CannotResume("the GPU does not answer its driver")
            free, waited = gpu.memory_bytes - state.memory_used_bytes, loop.time() - began
            lacking = needed + (spare if waited < SPARE_WITHIN else 0) - free
            if lacking <= 0:
                return
            if waited >= MEMORY_WITHIN:
                raise CannotResume(f"{memory(lacking)} more must be free on its GPU")
            self._short_of_memory(session, gpu, lacking)
            await asyncio.sleep(LOOK_EVERY)


def _failed(session: str, pid: int, answer: Answer, failed: Failed) -> None:
    failed[pid] = str(answer)
    log.error(
        "session %s: the driver cannot bring process %d back (%s); its GPU work waits until it is ended",
        session,
        pid,
        answer,
    )
