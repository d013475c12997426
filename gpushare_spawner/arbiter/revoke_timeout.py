"""How long the others wait for a session's answer to REVOKE, learned from its answers. Has no clock."""

from __future__ import annotations

from gpushare_spawner.arbiter.settings import ArbiterSettings

SHORTENED = 1 / 4
"""Factor after an ignored REVOKE: the first one leads from the usual time to the shortest."""
LENGTHENED = 2.0
"""Factor after an answer in time: a session that had one very long kernel has the usual time again after two."""


class RevokeTimeouts:
    """The time-out of each session. Only REVOKEs that met a process at work teach: to be quiet proves nothing."""

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._learned: dict[str, float] = {}
        """GPU seconds that a session may receive after REVOKE before the others are granted, by session."""

    def wall_seconds(self, session: str, running: int) -> float:
        """Seconds after which the others are granted, while `running` sessions share the GPU in even slices."""
        return self._of(session) * max(1, running)

    def learn(self, session: str, received: float) -> None:
        """The session answered a REVOKE, or left. `received`: GPU seconds that it received meanwhile.

        An answer in the usual time is obedience, also where the time-out was shorter: a kernel cannot be interrupted.
        """
        usual = self._settings.usual_revoke_timeout
        if received > usual:
            self._learned[session] = max(self._settings.shortest_revoke_timeout, self._of(session) * SHORTENED)
        elif session in self._learned:
            self._learned[session] = min(usual, self._of(session) * LENGTHENED)

    def forget(self, session: str) -> None:
        """The session is gone."""
        self._learned.pop(session, None)

    def _of(self, session: str) -> float:
        return self._learned.get(session, self._settings.usual_revoke_timeout)
