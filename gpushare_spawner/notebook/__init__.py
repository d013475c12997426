"""Inside the notebook server: tells the agent about kernels, and the user about the share.

``status()`` tells a notebook cell or a script what it has of the GPU::

    >>> from gpushare_spawner.notebook import status
    >>> print(status())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare_spawner.notebook.readable_status import ReadableStatus

__all__ = ["status"]


def status(timeout: float = 2.0) -> ReadableStatus:
    """Return this notebook server's GPU share now, as the agent reports it.

    Raises nothing: ``problem`` says what is wrong.

    A plain blocking call of some milliseconds, at most ``timeout`` seconds; it may be used in a cell, beside a
    running event loop.
    """
    # not at the top: the server extension lives in this package and must be quick to import
    from gpushare_spawner.notebook.ask import ask

    return ask(timeout=timeout)
