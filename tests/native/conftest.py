"""Fixtures of the native tests: the simulated driver, and programs that run on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.libraries import simulated_driver

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def simgpu_libraries() -> Path:
    """The folder of the simulated libcuda.so.1 and libnvidia-ml.so.1."""
    return simulated_driver()


class Program:
    """A running program on the simulated GPUs. It says lines of JSON, and is told lines of JSON."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> Any:
        """The next thing that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended:\n{self.finish(status=None)}")
        return json.loads(line)

    def say(self, value: Any = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """As by kill -9, and waited for."""
        self.process.kill()
        self.process.wait(10)

    def finish(self, status: int | None = 0) -> str:
        """Wait for its end; what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=60)
        assert status is None or self.process.returncode == status, errors
        return errors


Start = Callable[..., Program]
Run = Callable[..., Any]


@pytest.fixture
def simgpu_environment(simgpu_libraries: Path, tmp_path: Path) -> dict[str, str]:
    """A machine of its own for each test: one GPU of 1 GiB with fast transfers, so that tests are quick."""
    return os.environ | {
        "LD_LIBRARY_PATH": str(simgpu_libraries),
        "SIMGPU_STATE": str(tmp_path / "simgpu.state"),
        "SIMGPU_MEMORY": "1GiB",
    }


@pytest.fixture
def simulated(simgpu_environment: dict[str, str]) -> Iterator[Start]:
    """Start a program: its code, a command to run it by (such as unshare), and environment variables besides."""
    programs: list[Program] = []

    def start(code: str, wrapper: tuple[str, ...] = (), **more: str) -> Program:
        opening = "from tests.native.simgpu_program import *\n"
        command = (*wrapper, sys.executable, "-c", opening + textwrap.dedent(code))
        programs.append(Program(command, simgpu_environment | more))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.fixture
def said(simulated: Start) -> Run:
    """Run a program to its end; what it said first."""

    def run(code: str, **more: str) -> Any:
        program = simulated(code, **more)
        heard = program.hear()
        program.finish()
        return heard

    return run


@pytest.fixture(scope="session")
def pod() -> tuple[str, ...]:
    """A command that runs another in a pid namespace of its own, with its own /proc."""
    command = ("unshare", *(() if os.getuid() == 0 else ("--user", "--map-root-user")))
    command += ("--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespaces can be made here: neither root nor user namespaces")
    return command


def child_of(pid: int) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
