"""A kernel that runs a cell is activity of the server where no agent reports it."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.notebook import extension
from gpushare_spawner.notebook.extension import ACTIVITY, keep_active_while_busy
from gpushare_spawner.notebook.session_client import KernelActivity

NOW = datetime(2026, 1, 1, tzinfo=UTC)


async def test_the_server_is_active_while_a_kernel_is_busy() -> None:
    states = [KernelActivity(0, 1), KernelActivity(1, 1), KernelActivity(0, 1)]
    times: dict[str, Any] = {}
    noted: list[Any] = []

    def read() -> KernelActivity:
        noted.append(times.get(ACTIVITY))
        if not states:
            raise asyncio.CancelledError
        return states.pop(0)

    with contextlib.suppress(asyncio.CancelledError):
        await keep_active_while_busy(read, times, lambda: NOW, 0.0)
    assert noted == [None, None, NOW, NOW]


@pytest.mark.parametrize(("layer", "started"), [("kai", True), ("", False)])
def test_it_runs_where_another_layer_gives_the_gpu(monkeypatch: pytest.MonkeyPatch, layer: str, started: bool) -> None:
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    monkeypatch.setenv("GPUSHARE_LAYER", layer)
    begun: list[Any] = []
    app = SimpleNamespace(settings={"base_url": "/"}, add_handlers=lambda host, handlers: None)
    loop = SimpleNamespace(add_callback=lambda *work: begun.append(work[0]))
    extension._load_jupyter_server_extension(
        SimpleNamespace(log=None, web_app=app, io_loop=loop, kernel_manager=SimpleNamespace())
    )
    assert (extension._start in begun) is started
