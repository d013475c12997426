"""A program of gpu_programs.py that runs, and the free memory of its GPU."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import pynvml

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.gpu_programs import PREAMBLE


class Program:
    """A program, with the library or without it. It ends with the context."""

    def __init__(self, code: str, size: int, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(size)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> Any:
        """Return the program's next message. Raises RuntimeError if the program ends instead."""
        line = self.output.readline()
        if not line:
            _, errors = self.process.communicate()
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"it ended with status {self.process.returncode}: {last}")
        return json.loads(line)

    def said_something(self) -> bool:
        return bool(select.select([self.output], [], [], 0)[0])

    def go_on(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()


def free_memory(gpu: Gpu) -> int:
    """Return the GPU's free memory in bytes, by NVML."""
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).free)
    finally:
        pynvml.nvmlShutdown()
