"""jupyterhub-idle-culler beside this service: its own program, with our hook, against a hub."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.service.idle_culler_hook import cull_arbiter
from tests.service.fake_hub import FakeHub

GPU = "name: quarter\ndisplay_name: 0.25 GPU\ngpu: {fraction: 0.25}\nidle: {stop_after: 1s}\n"
CPU = "name: cpu\ndisplay_name: CPU\nidle: {stop_after: 2h}\n"
DRY = "name: dry\ndisplay_name: CPU, not stopped yet\nidle: {stop_after: 1s, dry_run: true}\n"
KEPT = "name: kept\ndisplay_name: CPU without end\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    templates = tmp_path / "templates"
    templates.mkdir()
    for name, text in (("quarter", GPU), ("cpu", CPU), ("dry", DRY), ("kept", KEPT)):
        (templates / f"{name}.yaml").write_text(text)
    return templates


def culled(folder: Path, server: dict[str, Any], hours: float) -> bool:
    return cull_arbiter(folder)(inactive=timedelta(hours=hours), inactive_limit=3600, server=server)


@pytest.mark.parametrize(
    ("profile", "hours", "expected"),
    [
        ("quarter", 1000, False),
        ("cpu", 1.9, False),
        ("cpu", 2, True),
        ("dry", 1000, False),
        ("kept", 1000, False),
        ("gone", 1, True),
    ],
)
def test_each_template_has_its_own_time(folder: Path, profile: str, hours: float, expected: bool) -> None:
    assert culled(folder, {"user_options": {"profile": profile}}, hours) is expected


@pytest.mark.parametrize("server", [{}, {"user_options": None}, {"user_options": {}}, {"user_options": {"profile": 5}}])
def test_other_servers_have_the_cullers_own_time(folder: Path, server: dict[str, Any]) -> None:
    assert culled(folder, server, 1) is True
    assert culled(folder, server, 0.9) is False


def test_a_server_of_unknown_activity_is_not_culled(folder: Path) -> None:
    assert cull_arbiter(folder)(inactive=None, inactive_limit=0, server={}) is False


async def test_jupyterhub_idle_culler_itself_with_the_hook(folder: Path, tmp_path: Path, hub_server: FakeHub) -> None:
    ago = time.time() - 3 * 3600
    for user, profile in (("ann", "quarter"), ("bob", "cpu"), ("carl", "kept"), ("dora", "")):
        hub_server.add(user, last_activity=ago, started=ago, user_options={"profile": profile} if profile else {})
    config = tmp_path / "config.py"
    config.write_text(
        "from gpushare_spawner.service.idle_culler_hook import cull_arbiter\n"
        f"c.IdleCuller.cull_arbiter_hook = cull_arbiter({str(folder)!r})\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jupyterhub_idle_culler", f"--config={config}", f"--url={hub_server.url}",
        "--timeout=3600", cwd=tmp_path, env=os.environ | {"JUPYTERHUB_API_TOKEN": "service-token"},
    )  # fmt: skip
    try:
        for _ in range(300):
            await asyncio.sleep(0.1)
            if len(hub_server.deleted) >= 2:
                break
        await asyncio.sleep(0.5)
    finally:
        process.terminate()
        await process.wait()
    assert sorted(hub_server.deleted) == ["/users/bob/server", "/users/dora/server"]
