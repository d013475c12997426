"""Logs a lasting problem once when it begins and once when it ends; and different sentences once each."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

MOST_SENTENCES = 1000
"""Sentences that `EachOnce` remembers; then it forgets them all."""


class LogOnce:
    """Logs one problem of one part. Not for different problems: each has an object of its own."""

    def __init__(self, log: logging.Logger, trouble: str, over: str, lasts: float = 0.0) -> None:
        """`trouble` and `over` are sentences for the log; the reason follows `trouble` after a colon.

        `lasts`: seconds without the problem until it is over, for one that comes and goes many times a second.
        """
        self._log = log
        self._trouble = trouble
        self._over = over
        self._lasts = False
        self._for, self._met_at = lasts, 0.0

    def about(self, reason: object) -> None:
        """Report that the problem occurred, perhaps again."""
        if not self._lasts:
            self._log.warning("%s: %s", self._trouble, reason)
        self._lasts = True
        self._met_at = time.monotonic()

    def settled(self) -> None:
        """Report that the problem does not occur now."""
        if not self._lasts or time.monotonic() < self._met_at + self._for:
            return
        self._log.info("%s", self._over)
        self._lasts = False


class EachOnce:
    """Logs a sentence as a warning the first time, where the same check finds the same fault again and again."""

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
def one_by_one(log: logging.Logger, what: str) -> Iterator[None]:
    """Log what goes wrong with one of many things, so that the others are processed all the same."""
    try:
        yield
    except Exception:
        log.exception("cannot process %s; retrying", what)
