"""Sees at once when a session's notebook server is gone, however it died."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName


class ProcessWatch:
    """Watches one process for each session, by pidfd where the kernel has it; `look` is for where it has not."""

    def __init__(self, gone: Callable[[str], None]) -> None:
        """`gone` is called with the session's id, on the event loop, once."""
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, tuple[ProcessName, int | None]] = {}

    def begin(self, session: str, process: ProcessName) -> None:
        """Watch this process for the session, instead of any other."""
        self.end(session)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            pidfd = None
        self._watched[session] = (process, pidfd)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._died, session)
        # opened after the name was taken: the pid may have been given away in between
        if not processes.alive(process):
            self._loop.call_soon(self._died, session)

    def end(self, session: str) -> None:
        """Watch nothing for this session."""
        _process, pidfd = self._watched.pop(session, (None, None))
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def look(self) -> None:
        """Look again at the processes that have no pidfd."""
        for session, (process, pidfd) in list(self._watched.items()):
            if pidfd is None and not processes.alive(process):
                self._died(session)

    def close(self) -> None:
        """Watch nothing any more."""
        for session in list(self._watched):
            self.end(session)

    def _died(self, session: str) -> None:
        if session in self._watched:
            self.end(session)
            self._gone(session)
