"""Limits of sessions' GPU time: a session never gets more, also while no other session works.

The rule is a token bucket of GPU time. A session that has had its limit is held back until the excess is repaid and one
run is saved. A background session is held back while any other session has work. accounting.py charges the received
time; gpu_arbiter.py stops and starts the clients, and its `_decide` handles clients that keep a revoked lease, after
`revoke_timeout` of time_slices.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession
from gpushare_spawner.arbiter.time_slices import TimeSliceLengths

NONE = 1.0
"""Part of the GPU's time of a session without a limit."""
SOONEST = 0.002
"""Minimum seconds until a running session is checked again: a stop and a start cost about as much."""
CLEAR = 0.25
"""Seconds without work of other sessions after which a background session runs. Our choice: pauses between a program's
kernels are shorter, and those between a user's cells are longer."""
DUE = 1e-6
"""Seconds within which a limit counts as reached, and excess as repaid."""


@dataclass
class _Limit:
    part: float
    """Part of the GPU's time, above 0 and below 1."""
    run: float
    """GPU seconds to save for one run."""
    saved: float
    """The same; it follows a shorter run slowly, because time slices are short for moments."""
    excess: float
    """Received seconds beyond the limit; negative: the session can have so many more."""


class TimeLimits:
    """Received time of the sessions with a limit on one GPU. Times are in seconds."""

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._limits: dict[str, _Limit] = {}
        self._background: set[str] = set()
        self._clear_at = float("-inf")
        """When background sessions can run, if no other session works until then."""
        self._others_work = False

    def set_background(self, session: str, background: bool) -> None:
        """Set whether a session works only while no other session does."""
        (self._background.add if background else self._background.discard)(session)

    def set(self, session: str, part: float) -> None:
        """Set the limit as a part of the GPU's time; `NONE` removes it. Excess stays."""
        if part == self.part(session):
            return
        before = self._limits.pop(session, None)
        if part < NONE:
            saved = self._saved(part, self._settings.period * part)
            self._limits[session] = _Limit(part, saved, saved, before.excess if before is not None else -saved)

    def part(self, session: str) -> float:
        """Return the limit as a part of the GPU's time."""
        limit = self._limits.get(session) if self._limits else None
        return NONE if limit is None else limit.part

    def __bool__(self) -> bool:
        return bool(self._limits or self._background)

    def __contains__(self, session: str) -> bool:
        return session in self._limits or session in self._background

    def advance(self, elapsed: float, received: Mapping[str, float]) -> None:
        """Account for elapsed seconds. `received`: GPU seconds by session."""
        for session, limit in self._limits.items():
            limit.saved = max(limit.run, limit.saved - elapsed)
            most = 2 * limit.saved
            # a sample can refund a little more than unused time saves
            before = max(limit.excess, -most - self._settings.period * limit.part)
            after = before + received.get(session, 0.0) - limit.part * elapsed
            limit.excess = min(max(after, min(before, -most)), self._settings.max_debt)

    def correct(self, errors: Mapping[str, float]) -> None:
        """Add the seconds by which a driver sample exceeds the estimate of `advance`, by session."""
        for session, limit in self._limits.items():
            limit.excess += errors.get(session, 0.0)

    def update(
        self, sessions: Mapping[str, ArbitratedSession], time_slices: TimeSliceLengths | None, now: float
    ) -> None:
        """Set `at_limit` of the sessions, and begin the wait for others of the sessions that can run again.

        `time_slices`: None if all fit into the memory. A run must be worth its hand-off.
        """
        held_back = bool(self._background) and self._holds_background(sessions, now)
        for name in {**self._limits, **dict.fromkeys(self._background)}:
            session, limit = sessions[name], self._limits.get(name)
            at_limit = limit is not None and self._reached(session, limit, time_slices)
            at_limit = at_limit or (held_back and name in self._background)
            if session.at_limit and not at_limit:
                for client in session.clients.values():
                    client.waiting_since = max(client.waiting_since, now)
            session.at_limit = at_limit

    def _reached(self, session: ArbitratedSession, limit: _Limit, time_slices: TimeSliceLengths | None) -> bool:
        """Return whether a session has had its limit."""
        run = self._settings.period * limit.part
        if time_slices is not None:
            time_slice = time_slices.by_session.get(session.id, 0.0)
            run = max(run, min(time_slice, time_slices.round_seconds * limit.part))
        limit.run = self._saved(limit.part, run)
        limit.saved = max(limit.saved, limit.run)
        repaid = -limit.saved if session.at_limit else 0.0
        return limit.excess > repaid + DUE if session.at_limit else limit.excess >= repaid - DUE

    def _holds_background(self, sessions: Mapping[str, ArbitratedSession], now: float) -> bool:
        """Return whether background sessions are held back: another session works, or worked just now."""
        others = (session for name, session in sessions.items() if name not in self._background)
        self._others_work = any(
            client.bursting or (client.waiting and not session.at_limit)
            for session in others
            for client in session.clients.values()
        )
        if self._others_work:
            self._clear_at = now + CLEAR
        return now + DUE < self._clear_at

    def due(self, sessions: Iterable[ArbitratedSession], now: float) -> float | None:
        """Return the next instant at which one of these sessions reaches its limit, or can run again."""
        instants = []
        for session in sessions:
            limit = self._limits.get(session.id)
            if session.id in self._background and session.at_limit and not self._others_work:
                instants.append(self._clear_at)
            if limit is None:
                continue
            if session.at_limit:
                if any(client.waiting for client in session.clients.values()):
                    instants.append(now + max(0.0, limit.excess + limit.saved) / limit.part)
            elif any(client.lease for client in session.clients.values()):
                instants.append(now + max(SOONEST, -limit.excess / (1 - limit.part)))
        return min(instants, default=None)

    @staticmethod
    def _saved(part: float, run: float) -> float:
        return (1 - part) * run
