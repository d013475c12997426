"""Trouble that lasts: told when it begins and when it is over, however often it is met between."""

from __future__ import annotations

import logging


class Complaint:
    """`trouble` and `over` are sentences for the log; what went wrong follows the first after a colon."""

    def __init__(self, log: logging.Logger, trouble: str, over: str) -> None:
        self._log = log
        self._trouble = trouble
        self._over = over
        self._lasts = False

    def about(self, reason: object) -> None:
        """It is met, perhaps again."""
        if not self._lasts:
            self._log.warning("%s: %s", self._trouble, reason)
        self._lasts = True

    def settled(self) -> None:
        """It is not met now."""
        if self._lasts:
            self._log.info("%s", self._over)
        self._lasts = False
