"""Fixtures: programs on the simulated driver with libgpushare.so under them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.libraries import preload_library

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def preload() -> Path:
    """libgpushare.so."""
    return preload_library()


class Client:
    """A program under the library, and the lines it says."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        program = "from tests.native.preload_driver import *\nimport ctypes as c, os, sys, threading, time\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program + textwrap.dedent(code)],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended ({self.process.wait(10)}):\n{self.errors()}")
        return json.loads(line)

    def say(self, value: Any = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self, status: int = 0, timeout: float = 20.0) -> str:
        """The program ends by itself with this status; returns what it wrote to stderr."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            returned = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        errors = self.errors()
        assert returned == status, errors
        return errors


@pytest.fixture
def environment(preload: Path, simgpu_libraries: Path, tmp_path: Path) -> dict[str, str]:
    """Two simulated GPUs of 1 GiB, the library, and a session socket where nobody listens yet."""
    return os.environ | {
        "SIMGPU_STATE": str(tmp_path / "simgpu.state"),
        "SIMGPU_DEVICES": "2",
        "SIMGPU_MEMORY": "1GiB",
        "LD_LIBRARY_PATH": str(simgpu_libraries),
        "LD_PRELOAD": str(preload),
        "GPUSHARE_SOCKET": str(tmp_path / "session.sock"),
        "GPUSHARE_LOG": "info",
    }


Start = Callable[..., Client]


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start a program: its code, and environment variables to add (None takes one away)."""
    clients: list[Client] = []

    def starting(code: str, **more: str | None) -> Client:
        merged = environment | {name: value for name, value in more.items() if value is not None}
        for name in [name for name, value in more.items() if value is None]:
            merged.pop(name, None)
        client = Client(code, merged)
        clients.append(client)
        return client

    yield starting
    for client in clients:
        if client.process.poll() is None:
            client.process.kill()
            client.process.wait()
        for pipe in (client.process.stdin, client.process.stdout, client.process.stderr):
            if pipe:
                pipe.close()


@pytest.fixture
def gpus(start: Start) -> list[bytes]:
    """The UUIDs of the simulated GPUs, 16 raw bytes each."""
    client = start("say([Driver(i, enter=False).uuid().hex() for i in (0, 1)])", LD_PRELOAD=None)
    found = [bytes.fromhex(text) for text in client.hear()]
    client.end()
    return found


@pytest.fixture
def socket_path(environment: dict[str, str]) -> Path:
    return Path(environment["GPUSHARE_SOCKET"])
