"""Suspended processes without a session: they outlive it, or could not be resumed with it.

Each has a record on the disk until it runs or has ended, so that the next agent goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.state.session_record import SessionRecord
from gpushare_spawner.agent.suspend.resume_steps import ResumeSteps
from gpushare_spawner.agent.suspend.suspend_progress import BackOff, CannotResume

log = logging.getLogger(__name__)

LET_GO_AFTER = 5.0
"""Seconds for which processes may outlive their session before they are resumed: most are ended with it."""
AGAIN_AFTER = 2.0
"""Seconds until a process that could not be resumed is tried again; twice as long after each further failure."""


class LeftoverRecords(Protocol):
    """The records on the disk."""

    def put_left(self, record: SessionRecord) -> None:
        """Keep a record of processes that are left behind, soon."""

    def remove_left(self, record: SessionRecord) -> None:
        """Forget it soon."""


class LeftoverProcesses:
    """Resumes such processes, one after another for each session."""

    def __init__(
        self, resume_steps: ResumeSteps, records: LeftoverRecords, told: Callable[[str, int, str | None], None]
    ) -> None:
        """`told`: of a session (its id), the driver cannot bring a process (pid) back, with what it says; None: the
        process runs again or has ended."""
        self._resume_steps = resume_steps
        self._records = records
        self._told = told
        self._tasks: dict[asyncio.Task[None], SessionRecord] = {}
        self._closed = False

    def take(self, record: SessionRecord, gpu: Gpu, after: float) -> None:
        """Bring the suspended processes of a record back, in so many seconds at the earliest. Nothing changes for those
        that are on their way already."""
        assert record.suspension is not None
        if any(one.suspension == record.suspension for one in self._tasks.values()):
            return
        self._records.put_left(record)
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._bring_back(record, gpu, after))
        self._tasks[task] = record
        task.add_done_callback(self._ended)

    async def close(self) -> list[SessionRecord]:
        """Stop. Returns the records of those that were on their way."""
        self._closed = True
        left = dict(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return list(left.values())

    def _ended(self, task: asyncio.Task[None]) -> None:
        record = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "processes of session %s stay suspended: an error of the agent", record.request.id, exc_info=error
            )

    async def _bring_back(self, record: SessionRecord, gpu: Gpu, after: float) -> None:
        suspension, session, pauses = record.suspension, record.request.id, BackOff(AGAIN_AFTER)
        assert suspension is not None
        left = dict(zip(suspension.processes, suspension.sizes, strict=True))
        said: dict[int, str] = {}
        await asyncio.sleep(after)
        while left:
            for name, size in list(left.items()):
                lives = processes.alive(name)
                try:
                    failure = await self._resume_steps.attempt(session, gpu, name, size)
                    self._told(session, name.pid, failure)
                except CannotResume as error:
                    failure = str(error)
                if failure is None:
                    del left[name]
                    if lives:
                        log.info("process %d, which session %s left suspended, is resumed", name.pid, session)
                elif said.get(name.pid) != failure:
                    said[name.pid] = failure
                    log.error("process %d of session %s stays suspended for now: %s", name.pid, session, failure)
            if left:
                await asyncio.sleep(pauses.next(asyncio.get_running_loop().time()))
        self._records.remove_left(record)
