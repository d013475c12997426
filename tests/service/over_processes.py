"""One session of ann over real processes: an agent on a simulated GPU, and a service beside a scripted hub."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.report import SessionReport
from tests.agent.agent_process import AgentProcess
from tests.copies import Copy, start_copy
from tests.present import present
from tests.service.fake_hub import TOKEN, FakeHub


class OverProcesses:
    """`folder` has a short path, and gets the logs."""

    def __init__(self, folder: Path, hub: FakeHub, template: str) -> None:
        """`template`: the text of the only template."""
        self.hub = hub
        self.agent = AgentProcess(folder, gpus=1)
        self.folder = folder
        (folder / "templates").mkdir()
        (folder / "templates" / "only.yaml").write_text(template)
        self._service: Copy | None = None

    async def start(self) -> None:
        """Start the agent."""
        await self.agent.start()

    async def open(self, request: Callable[[str], OpenRequest]) -> dict[str, str]:
        """Open the session, by its request for the GPU of that UUID; the environment of its server."""
        (gpu,) = (await self.agent.client.report()).gpus
        opened = await self.agent.client.open(request(gpu.uuid))
        await self.agent.client.confirm("ann", os.getpid())
        return opened.environment

    def start_service(self, *options: str) -> None:
        environment = {**os.environ, "JUPYTERHUB_API_URL": self.hub.url, "JUPYTERHUB_API_TOKEN": TOKEN}
        environment.pop("JUPYTERHUB_SERVICE_URL", None)
        arguments = [f"--templates-dir={self.folder}/templates", f"--control-socket={self.agent.client.socket}"]
        arguments += ["--history=false", *options]
        self._service = start_copy("service", arguments, environment, self.folder / "service.log")

    def kill_service(self) -> None:
        if self._service is not None:
            self._service.kill()
            self._service.wait()

    async def session(self) -> SessionReport:
        return present((await self.agent.client.report()).session("ann"))

    async def until(self, holds: Callable[[SessionReport], bool], seconds: float = 30) -> SessionReport:
        end = time.monotonic() + seconds
        while not holds(session := await self.session()):
            assert time.monotonic() < end, session
            await asyncio.sleep(0.02)
        return session

    def close(self) -> None:
        self.kill_service()
        self.agent.end(signal.SIGKILL)
