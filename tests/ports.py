"""Ports for servers of tests that run at the same time."""

from __future__ import annotations

import os
from itertools import count

from gpushare_spawner.demo.machine import why_not

FIRST, LAST = 20_000, 32_000
"""Below the ports that Linux gives to outgoing connections (32768 and up): one of those could take a port between the
choice and its use."""

_steps = count(os.getpid() * 101)
"""Processes that run tests at the same time begin far from each other."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses."""
    ports = (FIRST + step % (LAST - FIRST) for step in _steps)
    return next(port for port in ports if why_not("127.0.0.1", port) is None)
