"""What runs in a pod: real processes, or, where a test needs hundreds of pods, a listener that answers everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.ports import free_port

POD_MARK = "STANDIN_POD"
"""In the environment of every process of a pod, so that those that left its process group are found and ended too."""


@dataclass
class Launch:
    """How to start a container."""

    pod_uid: str
    container: str
    command: list[str]
    environment: dict[str, str]
    working_directory: str
    log: Path
    address: str


class Running(Protocol):
    """A container that was started."""

    async def wait(self) -> int:
        """Its exit code, 128 + the signal's number for one that a signal has ended."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Programs(Protocol):
    async def start(self, launch: Launch) -> Running:
        """Raises OSError for a command that cannot be run."""


class Processes:
    """Containers are processes on this machine; their output goes to the launch's log."""

    async def start(self, launch: Launch) -> Running:
        with launch.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                env={**launch.environment, POD_MARK: launch.pod_uid},
                cwd=launch.working_directory,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return _Process(process, launch.pod_uid)


@dataclass
class _Process:
    process: asyncio.subprocess.Process
    pod_uid: str

    async def wait(self) -> int:
        code = await self.process.wait()
        self._kill_all()
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def _kill_all(self) -> None:
        """End what the container's first process has left behind, as its cgroup would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        mark = f"{POD_MARK}={self.pod_uid}".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)


@dataclass
class Listeners:
    """Containers are listeners in this process: they answer every HTTP request with 200, on their pod's address.

    The port is the one in JUPYTERHUB_SERVICE_URL, or `port`. `container_seconds` is what a container takes until it
    runs, `start_seconds` what the server in it then takes until it listens.
    """

    port: int = field(default_factory=free_port)
    start_seconds: float = 0.0
    container_seconds: float = 0.0

    async def start(self, launch: Launch) -> Running:
        await asyncio.sleep(self.container_seconds)
        found = re.match(r"\w+://[^/]*:(\d+)", launch.environment.get("JUPYTERHUB_SERVICE_URL", ""))
        listener = _Listener(launch.address, int(found[1]) if found else self.port)
        if self.start_seconds:
            asyncio.get_running_loop().call_later(self.start_seconds, listener.listen)
        else:
            listener.listen()
        return listener


@dataclass
class _Listener:
    address: str
    port: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    code: int = 0
    _task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        if not self.ended.is_set():
            self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(_answer, self.address, self.port)
        async with server:
            await self.ended.wait()

    async def wait(self) -> int:
        await self.ended.wait()
        return self.code

    def terminate(self) -> None:
        self.ended.set()

    def kill(self) -> None:
        self.code = 128 + signal.SIGKILL
        self.ended.set()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        await reader.readuntil(b"\r\n\r\n")
        body = b"{}"
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-JupyterHub-Version: 6.0.0\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
        )
        await writer.drain()
    writer.close()
