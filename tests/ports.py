"""Ports for servers of tests that run at the same time."""

from __future__ import annotations

import os
from itertools import count

from gpushare_spawner.demo.ports import why_not

FIRST, FOR_EACH_WORKER = 20_000, 1000
"""Below the ports that Linux gives to outgoing connections (32768 and up): one of those could take a port between the
choice and its use."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_next = count(FIRST + _worker % 12 * FOR_EACH_WORKER)


def free_port() -> int:
    """Return a port of 127.0.0.1 that no other worker chooses."""
    return next(port for port in _next if why_not("127.0.0.1", port) is None)
