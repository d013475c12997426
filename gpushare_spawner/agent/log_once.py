"""Trouble that lasts: told when it begins and when it is over, however often it is met between."""

from __future__ import annotations

import logging
import time


class Complaint:
    """`trouble` and `over` are sentences for the log; what went wrong follows the first after a colon."""

    def __init__(self, log: logging.Logger, trouble: str, over: str, lasts: float = 0.0) -> None:
        """`lasts`: seconds without it until it is over, for trouble that comes and goes many times a second."""
        self._log = log
        self._trouble = trouble
        self._over = over
        self._lasts = False
        self._for, self._met_at = lasts, 0.0

    def about(self, reason: object) -> None:
        """It is met, perhaps again."""
        if not self._lasts:
            self._log.warning("%s: %s", self._trouble, reason)
        self._lasts = True
        self._met_at = time.monotonic()

    def settled(self) -> None:
        """It is not met now."""
        if not self._lasts or time.monotonic() < self._met_at + self._for:
            return
        self._log.info("%s", self._over)
        self._lasts = False
