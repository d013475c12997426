"""How many messages are sent: to one user within a day, and to all within a minute. Time is an argument."""

from __future__ import annotations

from collections import deque

DAY, MINUTE = 86400.0, 60.0


class RateLimits:
    """The instants of the messages that were sent."""

    def __init__(self) -> None:
        self._all: deque[float] = deque()
        self._of_user: dict[str, deque[float]] = {}

    def user_may(self, user: str, per_day: int, now: float) -> bool:
        """Return whether a user may get one more message now."""
        sent = self._of_user.get(user)
        if sent is None:
            return True
        _forget(sent, now - DAY, now)
        if not sent:
            del self._of_user[user]
        return len(sent) < per_day

    def all_may(self, per_minute: int, now: float) -> bool:
        """Return whether one more message may be sent to anybody now."""
        _forget(self._all, now - MINUTE, now)
        return len(self._all) < per_minute

    def sent(self, user: str, now: float) -> None:
        """Take note of a message."""
        self._all.append(now)
        self._of_user.setdefault(user, deque()).append(now)


def _forget(instants: deque[float], before: float, now: float) -> None:
    """Leave out what is too old, and what lies in the future: the clock was set back since."""
    while instants and (instants[0] <= before or instants[0] > now):
        instants.popleft()
