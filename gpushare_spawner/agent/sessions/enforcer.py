"""Stops processes that bypass the library and make their session exceed its memory limit.

The service decides by the template when a process is stopped. This module decides which process may be stopped, by the
kernel's and the driver's facts alone: a request, or a forged annotation, can name only processes of its own session.
sessions/attribution.py finds the processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.sessions.attribution import attributed, owners
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import cancel, set_within
from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.report import MAX_TROUBLE, BypassingProcess

log = logging.getLogger(__name__)

KILL_AFTER = 10.0
"""Seconds from SIGTERM to SIGKILL."""
_CAP_KILL = 5
"""Bit in include/uapi/linux/capability.h."""


def why_not(gpus: Iterable[Gpu]) -> str | None:
    """Return the reason why this agent cannot stop processes of sessions, as a clause; None if it can."""
    if not processes.sees_the_host() and not all(gpu.simulated for gpu in gpus):
        return "it is not in the host's pid namespace (hostPID), so it cannot tell which processes the driver means"
    rights = processes.effective_capabilities()
    if os.geteuid() == 0 and rights is not None and not rights >> _CAP_KILL & 1:
        return "it lacks the capability KILL"
    return None


class Enforcer:
    """Stops the processes that the service has named, while they may be stopped."""

    def __init__(self, sessions: Mapping[str, Session], gpus: Iterable[Gpu], changed: Callable[[], None]) -> None:
        """Store the node's sessions, which may change. `changed` is called when `trouble` changes."""
        self._sessions = sessions
        self._changed = changed
        self._unable = why_not(gpus)
        self._stopping: dict[ProcessName, asyncio.Task[None]] = {}
        self.trouble = self._unable
        """Why processes cannot be stopped, as a clause; None if they can."""

    async def close(self) -> None:
        """Leave the processes that are being stopped; the next agent continues."""
        await cancel(*self._stopping.values())

    def stop(self, session: Session, named: tuple[BypassingProcess, ...]) -> None:
        """Stop these processes of a session, now and whenever `check` finds that they may be stopped."""
        session.to_stop = named
        self.check(session)

    def check(self, session: Session) -> None:
        """Begin to stop the named processes that may be stopped. Without a notice to the user, none is named."""
        if not any(message.cause is MessageCause.BYPASS for message in session.record.messages):
            session.to_stop = ()
        named = {(process.pid, process.started) for process in session.to_stop}
        for process in session.exceeding:
            if (process.pid, process.started) in named and process not in self._stopping and self._unable is None:
                self._stopping[process] = asyncio.create_task(self._stop(session, process))

    async def _stop(self, session: Session, process: ProcessName) -> None:
        try:
            # from here on, no later process can get the signals, even if the kernel reuses the pid
            descriptor = os.pidfd_open(process.pid)
        except OSError as error:
            self._stopping.pop(process, None)
            if not isinstance(error, ProcessLookupError):
                self._set_trouble(f"the kernel refuses pidfd_open: {error.strerror}")
            return
        try:
            for number, seconds in ((signal.SIGTERM, KILL_AFTER), (signal.SIGKILL, 1.0)):
                if not await self._may_stop(session, process):
                    return
                signal.pidfd_send_signal(descriptor, number)
                log.warning("session %s: %s to process %d, which bypasses", session.id, number.name, process.pid)
                self._set_trouble(None)
                if await _ends(descriptor, seconds):
                    return
        except ProcessLookupError:
            pass
        except OSError as error:
            self._set_trouble(f"the kernel refuses a signal to process {process.pid}: {error.strerror}")
        finally:
            os.close(descriptor)
            self._stopping.pop(process, None)

    async def _may_stop(self, session: Session, process: ProcessName) -> bool:
        """Return whether a process is still the same one, of this session, and makes it exceed its limit."""
        if self._sessions.get(session.id) is not session or process not in session.exceeding:
            return False
        of_session = await asyncio.to_thread(attributed, (process.pid,), owners(self._sessions.values()), certain=True)
        return process.pid in of_session.get(session.id, ()) and processes.alive(process)

    def _set_trouble(self, trouble: str | None) -> None:
        trouble = trouble[:MAX_TROUBLE] if trouble is not None else None
        if trouble is not None and trouble != self.trouble:
            log.error("processes that bypass the library cannot be stopped: %s", trouble)
        if trouble != self.trouble:
            self.trouble = trouble
            self._changed()


async def _ends(descriptor: int, seconds: float) -> bool:
    """Wait until the process of a pidfd ends. Return whether it did within these seconds."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        return await set_within(ended, seconds)
    finally:
        loop.remove_reader(descriptor)
