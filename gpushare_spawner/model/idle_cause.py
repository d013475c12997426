"""Why an idle action comes. A notice carries the cause, so that its text can say what keeps the share. Light: notebooks
import it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class IdleCause(StrEnum):
    """The rule that an idle action follows from."""

    IDLE = "idle"
    """The session was idle for as long as its template says. GPU work, or for a stop any activity, averts it."""
    MAX_AGE = "max-age"
    """The server has run for as long as servers may run here. Nothing averts it."""
    OTHER = "other"
    """A cause that only a newer version knows."""

    @classmethod
    def _missing_(cls, value: Any) -> IdleCause:
        return cls.OTHER

    @property
    def code(self) -> int:
        """The number that stands for the cause in the wire protocol."""
        return list(IdleCause).index(self)

    @classmethod
    def from_code(cls, code: int) -> IdleCause:
        """The inverse of `code`; OTHER for a number that this version does not know."""
        causes = list(cls)
        return causes[code] if 0 <= code < len(causes) else cls.OTHER
