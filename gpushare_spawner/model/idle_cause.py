"""Why an idle action comes. A notice carries the cause, so that its text can say what keeps the share.

Imports no pydantic: the notebook server imports this module.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class IdleCause(StrEnum):
    """The rule that leads to an idle action."""

    IDLE = "idle"
    """The session was idle for the time in its template. GPU work, or for a stop any activity, prevents the action."""
    MAX_AGE = "max-age"
    """The server has run for the longest time allowed. Nothing prevents the action."""
    OTHER = "other"
    """A cause that only a newer version knows."""
    RECLAIM = "reclaim"
    """A spawn in quota waits for units of this session, which is over quota. GPU work does not prevent the action."""

    @classmethod
    def _missing_(cls, value: Any) -> IdleCause:
        return cls.OTHER

    @property
    def averted_by_work(self) -> bool:
        """Whether GPU work prevents the action, so that a notice of it is withdrawn when work begins."""
        return self not in (IdleCause.MAX_AGE, IdleCause.RECLAIM)

    @property
    def code(self) -> int:
        """The number that stands for the cause in the wire protocol."""
        return list(IdleCause).index(self)

    @classmethod
    def from_code(cls, code: int) -> IdleCause:
        """Return the cause of this code; OTHER for a number that this version does not know."""
        causes = list(cls)
        return causes[code] if 0 <= code < len(causes) else cls.OTHER
