"""Inside the notebook server: sends the kernels' activity to the agent, and shows the user the share.

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
    """Return this notebook server's GPU share now, as the agent reports it.

    Raises nothing: if the share is unknown, ``problem`` has the reason.

    The call blocks for some milliseconds, at most ``timeout`` seconds. It works in a cell, with a running event loop.
    """
    # not at the top: the server extension is in this package and must import quickly
    from gpushare_spawner.notebook.client import ask

    return ask(timeout=timeout)
