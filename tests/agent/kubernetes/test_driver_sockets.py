"""The sockets of a DRA driver come back, also where a try to make them fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.claims import plugin as driver_sockets
from gpushare_spawner.agent.kubernetes.claims.allocation import AllocatedDevice, ClaimKey
from gpushare_spawner.agent.kubernetes.claims.plugin import ClaimPlugin, DeviceHealth, DriverSockets
from gpushare_spawner.model.kubernetes.objects import DRIVER
from tests.agent.conftest import short_folder  # noqa: F401


async def _prepare(key: ClaimKey) -> tuple[AllocatedDevice, ...]:
    return ()


async def _unprepare(key: ClaimKey) -> None:
    return


@pytest.mark.parametrize("blocked", ["plugins", "plugins_registry"])
async def test_sockets_that_cannot_be_made_are_tried_again(
    short_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    blocked: str,
) -> None:
    monkeypatch.setattr(driver_sockets, "CHECK_EVERY", 0.05)
    plugin, health = ClaimPlugin(_prepare, _unprepare), DeviceHealth("node-a", dict)
    sockets = DriverSockets(plugin, health, short_folder, lambda: None)
    await sockets.start()
    both = short_folder / "plugins" / DRIVER / "dra.sock", short_folder / "plugins_registry" / f"{DRIVER}-reg.sock"
    try:
        # the kubelet's folder is gone for a moment, and something else stands in its place
        folder = both[blocked == "plugins_registry"].parent
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("")
        async with asyncio.timeout(5):
            while "cannot create the sockets" not in caplog.text:
                await asyncio.sleep(0.02)
        folder.unlink()
        async with asyncio.timeout(5):
            while not all(path.is_socket() for path in both):
                await asyncio.sleep(0.02)
    finally:
        await sockets.close()
