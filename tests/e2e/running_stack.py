"""A whole hub on free ports with simulated GPUs: every process real, each can be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.demo.machine import DemoFolder, Stack, free_ports, simulated_state
from gpushare_spawner.model.report import SessionReport
from tests.e2e.hub_api import Hub
from tests.notebook.jupyter import WITHOUT_PAGES

ROOT = Path(__file__).resolve().parent.parent.parent
TOKEN = "GPUSHARE_E2E_TOKEN"
"""The variable with the API token of the tests."""

NOISE = re.compile(r" 200 GET |xsrf cookie|404 GET /hub/health")

E2E_CONFIG = """
import os

from jupyterhub.services import service


class OftenChecked(service._ServiceSpawner):
    poll_interval = 2  # seconds, and no setting: a hub looks every 30 s whether its services run


service._ServiceSpawner = OftenChecked
c.JupyterHub.services.append({"name": "e2e", "api_token": os.environ["GPUSHARE_E2E_TOKEN"]})
c.JupyterHub.load_roles.append({
    "name": "e2e",
    "scopes": [
        "admin:users", "admin:servers", "access:servers", "list:services", "read:services",
        "access:services!service=gpushare", "custom:gpushare:read", "custom:gpushare:drain",
    ],
    "services": ["e2e"],
})
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}
"""
E2E_CONFIG += f"c.Spawner.args.append({WITHOUT_PAGES!r})\n"


class RunningStack:
    """Agent, hub, proxy, service and notebook servers of one test module."""

    def __init__(
        self, templates: Mapping[str, str], gpus: Mapping[str, str], settings: Mapping[str, str] | None = None
    ) -> None:
        """``templates``: file name -> YAML; ``gpus``: SIMGPU_ variables; ``settings``: more of them."""
        self.home = Path(tempfile.mkdtemp(prefix="gpushare-e2e-"))
        self.token = secrets.token_hex(16)
        folder = DemoFolder(self.home / "demo")
        folder.make()
        folder.write_nvidia_smi()
        config_files = self.home / "config.d"
        config_files.mkdir()
        for config_file in (ROOT / "jupyterhub_config.d").glob("*.py"):
            shutil.copy(config_file, config_files)
        (config_files / "95-e2e.py").write_text(E2E_CONFIG)
        folder.templates.mkdir()
        for name, text in templates.items():
            (folder.templates / name).write_text(text)
        port, *inner_ports = free_ports(4)
        self.stack = Stack(
            folder=folder, config_files=config_files, ip="127.0.0.1",
            port=port, inner_ports=inner_ports, simulated=True, cull_every=1,
            settings={**(settings or {}), TOKEN: self.token},
        )  # fmt: skip
        self._gpus = dict(gpus)
        self._agent: subprocess.Popen[bytes] | None = None
        self._hub: subprocess.Popen[bytes] | None = None
        self.hub = Hub(self.stack.url, self.token)
        self.agent = AgentClient(folder.control_socket)

    @property
    def folder(self) -> DemoFolder:
        """The stack's files."""
        return self.stack.folder

    def start(self) -> None:
        """Start everything and wait until the hub answers."""
        self.start_agent()
        self.start_hub()

    def start_agent(self) -> None:
        """Start the agent and wait for its socket."""
        command, environment = self.stack.agent()
        self._agent = self._start(command, {**environment, **self._gpus}, self.folder.agent_log)
        self._until(self.folder.control_socket.exists, 30, self._agent, self.folder.agent_log)

    def kill_agent(self) -> None:
        """SIGKILL, as an out-of-memory killer does it."""
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()
        self.folder.control_socket.unlink(missing_ok=True)

    def start_hub(self) -> None:
        """Start the hub (and with it its proxy and the service) and wait until it answers through the proxy."""
        command, environment = self.stack.hub()
        self._hub = self._start(command, environment, self.folder.hub_log)
        self._until(self._answers, 60, self._hub, self.folder.hub_log)

    def kill_hub(self) -> None:
        """SIGKILL to the hub alone; its proxy, its service and the notebook servers live on for now."""
        assert self._hub is not None
        self._hub.kill()
        self._hub.wait()

    def service_pid(self) -> int | None:
        """The process of the gpushare service."""
        return next(
            (pid for pid, words in self.processes().items() if "service" in words and "gpushare" in " ".join(words)),
            None,
        )

    def processes(self) -> dict[int, list[str]]:
        """Every living process of this stack, whoever started it: its command line. All name the stack's folder."""
        found = {}
        mark = str(self.home).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes()
                    if mark in line or mark in (entry / "environ").read_bytes():
                        found[int(entry.name)] = line.decode(errors="replace").rstrip("\0").split("\0")
        return {pid: words for pid, words in found.items() if words != [""]}

    def close(self) -> None:
        """End everything, politely first, and remove what was written."""
        for process in (self._hub, self._agent):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for process in (self._hub, self._agent):
            if process is not None:
                process.wait(5)
        simulated_state(self.folder.root).unlink(missing_ok=True)
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.folder.agent_state, ignore_errors=True)

    def logs(self) -> str:
        """The ends of the logs, for a failed test."""
        parts = []
        for log in (self.folder.agent_log, self.folder.hub_log):
            if log.exists():
                lines = log.read_text(errors="replace").splitlines()
                parts += [f"--- {log.name}", *[line for line in lines if not NOISE.search(line)][-80:]]
        return "\n".join(parts)

    def _start(self, command: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), opener.open(f"{self.stack.url}/hub/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    @staticmethod
    def _until(ready: Callable[[], bool], seconds: float, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert process.poll() is None, f"ended by itself:\n{log.read_text(errors='replace')[-4000:]}"
            assert time.monotonic() < deadline, (
                f"no answer after {seconds:.0f} s:\n{log.read_text(errors='replace')[-4000:]}"
            )
            time.sleep(0.1)


async def session_when(
    stack: RunningStack, user: str, so: Callable[[SessionReport], bool], within: float = 20.0
) -> SessionReport:
    """The user's session as soon as that is so of it."""
    deadline = time.monotonic() + within
    while True:
        session = (await stack.agent.report()).session(user)
        if session is not None and so(session):
            return session
        assert time.monotonic() < deadline, f"not so after {within:.0f} s: {session}"
        await asyncio.sleep(0.1)
