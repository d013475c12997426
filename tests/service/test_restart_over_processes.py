"""A restart over processes: a service that was killed between stop and start of a server is followed by another one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from gpushare_spawner.service.history.store import BegunRestart, HistoryStore
from tests.service.fake_hub import TOKEN, FakeHub

NEW = {"profile": "half", "quota": "ml"}


async def test_the_next_service_starts_the_server_with_the_new_options(hub_server: FakeHub, tmp_path: Path) -> None:
    hub_server.add("ann", None)  # the killed service has stopped the server
    url = f"sqlite:///{tmp_path}/history.sqlite"
    store = HistoryStore(url)
    store.upgrade()
    store.begin_restart(
        BegunRestart(time.time() - 5, "ann", "", "n1", "", "quarter", "half", "ann", NEW, {"profile": "quarter"})
    )
    environment = {**os.environ, "JUPYTERHUB_API_URL": hub_server.url, "JUPYTERHUB_API_TOKEN": TOKEN}
    environment.pop("JUPYTERHUB_SERVICE_URL", None)
    command = [
        sys.executable, "-m", "gpushare_spawner.cli", "service", f"--templates-dir={tmp_path}",
        f"--control-socket={tmp_path}/no-agent.sock", f"--history={url}",
    ]  # fmt: skip
    with (tmp_path / "service.log").open("wb") as log:
        service = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    try:
        async with asyncio.timeout(30):
            while not (hub_server.users["ann"]["servers"] and not store.begun_restarts()):
                assert service.poll() is None, (tmp_path / "service.log").read_text()
                await asyncio.sleep(0.05)
    finally:
        service.kill()
        service.wait()
        store.close()
    assert hub_server.users["ann"]["servers"][""]["user_options"] == NEW
