"""How long before a step its user is told."""

from __future__ import annotations


def fair_notice(warn_before: float, wait: float) -> float:
    """Seconds of notice for a step that follows ``wait`` seconds after the one before it (or after the last work).

    It is ``warn_before`` where that fits. Where the wait is shorter, half of the wait: the user is told neither at the
    very moment at which the work ends, nor when the step is already there.
    """
    return warn_before if warn_before <= wait else wait / 2
