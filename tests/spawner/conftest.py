from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from .fake_agent import FakeAgent
from .running_hub import RunningHub

TEMPLATES = {
    "cpu-only": "display_name: CPU only\ndescription: No GPU.\ndefault: true\n",
    "quarter-gpu": "display_name: 0.25 GPU\ngpu: {fraction: 0.25}\n"
    "idle: {downgrade_after: 15m, downgrade_to: 0.10, release_after: 45m, stop_after: 8h}\n",
    "half-gpu": "display_name: 0.50 GPU\ngpu: {fraction: 0.5}\n",
    "whole-gpu": "display_name: 1 GPU\ngpu: {count: 1}\nlimits: {per_user: 1}\n",
    "three-gpus": "display_name: 3 GPUs\ngpu: {count: 3}\n",
    "a100": "display_name: A100\ngpu: {fraction: 0.25, models: ['*A100*']}\n",
    "course": "display_name: Course\ngpu: {fraction: 0.1}\naccess: {groups: [ml-course], users: [tom]}\n",
}


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A folder of templates; a test may add to it."""
    folder = tmp_path / "templates"
    folder.mkdir()
    for name, text in TEMPLATES.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}")
    return folder


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[FakeAgent]:
    async with FakeAgent(tmp_path / "control.sock") as agent:
        yield agent
        assert not agent.violations


@pytest.fixture
async def make_hub(tmp_path: Path, templates: Path, agent: FakeAgent) -> AsyncIterator[Callable[..., Any]]:
    """Starts hubs; a second call is a hub on the same database."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(configure: Callable[[Any], None] = lambda config: None) -> RunningHub:
            return await stack.enter_async_context(RunningHub(tmp_path, templates, agent.socket, configure))

        yield make


@pytest.fixture
async def hub(make_hub: Callable[..., Any]) -> RunningHub:
    """A hub with the templates above and a fake agent of two empty GPUs."""
    found: RunningHub = await make_hub()
    return found
