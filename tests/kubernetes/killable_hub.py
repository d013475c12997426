"""A real hub in a process of its own, to be killed at any moment and started again within a second."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_asyncio.config.kube_config
from sqlalchemy.orm import configure_mappers
from tornado.httpclient import HTTPClientError

from tests.e2e.hub_api import Hub
from tests.spawner.running_hub import TOKEN

from .sharing_hub import SharingHub

HUB_LOG = "hub.log"
"""In the folder of the database; all hubs of a test write into it."""
# a process that has imported everything, of which each hub is a copy: that is most of what a hub's start takes
configure_mappers()
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class HubSettings:
    """The same for all hubs of a test: each goes on where the one before it was killed."""

    folder: str
    """With the database."""
    templates: str
    namespace: str
    kubeconfig: str
    address: str
    """Of the hub's own, on the loopback interface: pods say by it which hub made them."""
    port: int


class KillableHub:
    """One process."""

    def __init__(self, settings: HubSettings) -> None:
        self.api = Hub(f"http://{settings.address}:{settings.port}", TOKEN)
        self.log = Path(settings.folder) / HUB_LOG
        self._process = _PROCESSES.Process(target=_run, args=(asdict(settings), str(self.log)), daemon=True)

    async def start(self, within: float = 60.0) -> None:
        """Until it answers; then it has looked at the servers that were there before it."""
        self._process.start()
        end = asyncio.get_running_loop().time() + within
        while True:
            try:
                await self.api.call("GET", "/hub/api/", timeout=5)
                return
            except (OSError, HTTPClientError):
                assert self._process.is_alive(), f"the hub has ended by itself\n{self.log.read_text()[-6000:]}"
                assert asyncio.get_running_loop().time() < end, f"no answer\n{self.log.read_text()[-6000:]}"
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, now."""
        if self._process.pid is not None:
            self._process.kill()

    async def gone(self) -> None:
        """After `kill`."""
        await asyncio.to_thread(self._process.join)
        assert self._process.exitcode == -signal.SIGKILL
        self._process.close()


def _run(said: dict[str, Any], log: str) -> None:
    with open(log, "ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    gc.freeze()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    settings = HubSettings(**said)
    kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION = settings.kubeconfig
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)
    asyncio.run(_serve(settings))


async def _serve(settings: HubSettings) -> None:
    def configure(config: Any) -> None:
        config.JupyterHub.hub_ip = settings.address
        config.JupyterHub.hub_port = settings.port
        config.JupyterHub.log_level = "INFO"
        # answers come when servers are ready, or gone
        config.JupyterHub.tornado_settings = {"slow_spawn_timeout": 90, "slow_stop_timeout": 90}
        config.Spawner.start_timeout = 60
        config.Spawner.http_timeout = 60
        config.GPUShareSpawner.queue_timeout = 60

    where = SimpleNamespace(namespace=settings.namespace)
    async with SharingHub(Path(settings.folder), Path(settings.templates), where, configure):  # type: ignore[arg-type]
        await asyncio.Event().wait()
