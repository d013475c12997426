"""A CUDA program in a session, under the library: it says lines of JSON, and hears them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

WORK = """
import os, sys, time
from tests.native.preload_driver import *
d = Driver()
if int(sys.argv[1]):
    d.alloc(int(sys.argv[1]) * MIB)
say(os.getpid())
while True:
    end, count = time.monotonic() + hear(), 0
    while time.monotonic() < end:
        # several, so that the GPU has work while this process waits for a core
        for _ in range(5):
            d.spin(0.01)
        d.synchronize()
        count += 5
    say([d.memory(), count])
"""


class Program:
    """It has allocated some memory, and launches kernels of 10 ms when it is told to."""

    def __init__(self, environment: dict[str, str], mib: int = 0) -> None:
        """``environment``: the session's; ``mib``: memory that it allocates."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(mib)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid: int = self.hear()

    def hear(self) -> Any:
        """The next thing that it says: after `spin` its free and total memory, and how many kernels it ran."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def spin(self, seconds: float) -> None:
        """Have it compute for so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()
