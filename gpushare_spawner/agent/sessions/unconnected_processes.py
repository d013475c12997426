"""Sessions of processes that compute on a GPU without a connection, so that their GPU time counts as their session's.

Attribution is that of bypassing.py: what the kernel says. It reads /proc, in the thread that asks the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from gpushare_spawner.agent.sessions.bypassing import attributed, owners
from gpushare_spawner.agent.sessions.session import Session

REMEMBERED = 1.0
"""Seconds for which an answer is kept: samples come five times a second, and pids are not given away again so soon."""


class UnconnectedProcesses:
    """Finds the sessions of processes. Each GPU has a thread that asks."""

    def __init__(self, sessions: Mapping[str, Session], clock: Callable[[], float] = time.monotonic) -> None:
        """`sessions` may change while this is used."""
        self._sessions = sessions
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[int, tuple[str | None, float]] = {}
        """By pid: session and the time of the answer. Replaced as a whole: a thread keeps what it has read."""

    def sessions_of(self, pids: Iterable[int]) -> dict[int, str]:
        """The session of each of these processes; processes without one are left out. Reads /proc."""
        now = self._clock()
        asked = tuple(pids)
        known = {pid: answer for pid, answer in self._known.items() if now - answer[1] < REMEMBERED}
        unknown = [pid for pid in asked if pid not in known]
        if unknown:
            found = attributed(unknown, owners(list(self._sessions.values())))
            known.update(dict.fromkeys(unknown, (None, now)))
            known.update({pid: (session, now) for session, its in found.items() for pid in its})
            with self._lock:  # what another thread has found meanwhile stays
                fresh = {pid: answer for pid, answer in self._known.items() if now - answer[1] < REMEMBERED}
                self._known = fresh | {pid: known[pid] for pid in unknown}
        return {pid: session for pid in asked if (session := known[pid][0]) is not None}
