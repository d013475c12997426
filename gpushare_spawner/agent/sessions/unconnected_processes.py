"""Sessions of processes that compute on a GPU without a connection, so that their GPU time counts as their session's.

Attribution is that of bypassing.py: what the kernel says. It reads /proc, in the thread that asks the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from gpushare_spawner.agent.sessions.bypassing import attributed, owners
from gpushare_spawner.agent.sessions.session import Session

REMEMBERED = 1.0
"""Seconds for which an answer is kept: samples come five times a second, and pids are not given away again so soon."""


class UnconnectedProcesses:
    """Finds the sessions of processes. For one thread at a time."""

    def __init__(self, sessions: Mapping[str, Session], clock: Callable[[], float] = time.monotonic) -> None:
        """`sessions` may change while this is used."""
        self._sessions = sessions
        self._clock = clock
        self._known: dict[int, tuple[str | None, float]] = {}
        """By pid: session and the time of the answer."""

    def sessions_of(self, pids: Iterable[int]) -> dict[int, str]:
        """The session of each of these processes; processes without one are left out. Reads /proc."""
        now = self._clock()
        self._known = {pid: known for pid, known in self._known.items() if now - known[1] < REMEMBERED}
        asked = tuple(pids)
        unknown = [pid for pid in asked if pid not in self._known]
        if unknown:
            found = attributed(unknown, owners(list(self._sessions.values())))
            self._known.update(dict.fromkeys(unknown, (None, now)))
            self._known.update({pid: (session, now) for session, its in found.items() for pid in its})
        return {pid: session for pid in asked if (session := self._known[pid][0]) is not None}
