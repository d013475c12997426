"""Loggers without repetition: they log a lasting problem when it begins and ends, and each distinct sentence once."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

MOST_SENTENCES = 1000
"""Number of sentences that `EachOnce` remembers. It forgets all of them before it records the next one."""


class LogOnce:
    """Logs one problem in one part. Each problem needs its own object."""

    def __init__(
        self, log: logging.Logger, trouble: str, over: str, lasts: float = 0.0, each_reason: bool = False
    ) -> None:
        """Set the sentences for the log, `trouble` and `over`. A colon and the reason follow `trouble`.

        `lasts`: seconds without the problem after which it is over, for a problem that recurs many times a second.
        `each_reason`: whether the problem is logged again when its reason changes. Not for reasons that differ every
        time, for example by a process ID.
        """
        self._log = log
        self._trouble = trouble
        self._over = over
        self._lasts = False
        self._quiet_for, self._occurred_at = lasts, 0.0
        self._each_reason, self._reason = each_reason, ""

    def about(self, reason: object) -> None:
        """Report that the problem occurred, possibly again."""
        text = str(reason)
        if not self._lasts or (self._each_reason and text != self._reason):
            self._log.warning("%s: %s", self._trouble, text)
        self._lasts, self._reason = True, text
        self._occurred_at = time.monotonic()

    def resolved(self) -> None:
        """Report that the problem is currently absent."""
        if not self._lasts or time.monotonic() < self._occurred_at + self._quiet_for:
            return
        self._log.info("%s", self._over)
        self._lasts = False


class EachOnce:
    """Logs a sentence as a warning the first time, for a check that reports the same fault repeatedly."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[str] = set()

    def about(self, sentence: str) -> None:
        """Log the sentence unless it was logged before."""
        if sentence in self._logged:
            return
        if len(self._logged) >= MOST_SENTENCES:
            self._logged.clear()
        self._logged.add(sentence)
        self._log.warning("%s", sentence)


@contextlib.contextmanager
def log_failure(log: logging.Logger, item: str) -> Iterator[None]:
    """Log an exception in the processing of one item, so that the caller continues with the next item."""
    try:
        yield
    except Exception:
        log.exception("cannot process %s; retrying", item)
