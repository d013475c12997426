"""The part inside the notebook server: sends the kernels' activity to the agent, and shows the share to the user.

``status()`` returns the GPU share to a notebook cell or a script::

    >>> from gpushare_spawner.notebook import status
    >>> print(status())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare_spawner.notebook.client import ReadableStatus

__all__ = ["status"]


def status(timeout: float = 2.0) -> ReadableStatus:
    """Return this notebook server's current GPU share, as reported by the agent.

    Raises nothing. If the share is unknown, ``problem`` has the reason.

    The call blocks for a few milliseconds, at most ``timeout`` seconds. It works in a cell, where an event loop runs.
    """
    # not at the top: the server extension is in this package and must import quickly
    from gpushare_spawner.notebook.client import ask

    return ask(timeout=timeout)
