"""Counts a kernel that runs a cell as activity of the server, where no agent sees the session's work.

A cell that prints nothing for hours is no activity by itself: the hub would list the server as idle, and the idle
culler would stop a training run. Where there is an agent it reports the kernels: see `session_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any

from gpushare_spawner.notebook.kernels import KernelActivity

LOOK_SECONDS = 30.0
"""Seconds between two looks at the kernels. The hub is told of activity every 5 minutes (JupyterHub's
`SingleUserNotebookApp.hub_activity_interval`)."""
ACTIVITY = "gpushare_kernels"
"""The key in jupyter_server's setting `last_activity_times`, whose latest counts as the server's activity."""


async def keep_active_while_busy(
    read: Callable[[], KernelActivity],
    times: MutableMapping[str, Any],
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    every: float = LOOK_SECONDS,
) -> None:
    """Write into ``times`` when a kernel was busy last, until cancelled."""
    while True:
        with contextlib.suppress(Exception):  # an unknown kernel manager must not end this loop
            if read().busy:
                times[ACTIVITY] = clock()
        await asyncio.sleep(every)
