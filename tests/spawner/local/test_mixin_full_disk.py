"""The disk of the hub's database is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import RunningHub, until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system of 2 MiB to fill")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system of 2 MiB can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use up all space, to the last byte."""
    hog = folder / "hog"
    with open(hog, "wb", buffering=0) as file:
        for size in (65536, 512, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return hog


async def test_no_notebook_dies_and_nothing_stays_reserved(small_disk: Path, make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"db_url": f"sqlite:///{small_disk}/hub.sqlite"})
    )
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    running = await hub.started("ada")
    await hub.add_user("bob")
    await hub.add_user("cyd")

    hog = fill(small_disk)
    refused = await hub.api("POST", "users/bob/server", {"profile": "half-gpu"})
    assert refused.code >= 500
    await until(lambda: set(agent.sessions) == {"ada"})
    assert not len(hub.reservations.queue)
    assert await running.poll() is None
    assert agent.sessions["ada"].confirmed

    hog.unlink()
    answers = [(await hub.api("POST", "users/cyd/server", {"profile": "half-gpu"})).code for _ in range(2)]
    assert 201 in answers
    assert set(agent.sessions) == {"ada", "cyd"}
    assert running.ready
    assert (await hub.stop_server("ada")).code == 204
    await until(lambda: set(agent.sessions) == {"cyd"})
