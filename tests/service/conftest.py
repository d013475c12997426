from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from gpushare_spawner.idle.keep import KeepRule
from gpushare_spawner.model.template import KeepLimits, Template
from gpushare_spawner.service.culler.decisions import CullerSettings, CullerState, SessionDecision, decide_sessions
from gpushare_spawner.service.hub.client import Hub, HubUser
from tests.service.fake_agent import FakeAgent, fake_agent
from tests.service.fake_hub import TOKEN, DirectHub, FakeHub

MINUTE = 60.0
HOUR = 3600.0


class Clock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def agent(tmp_path: Path, clock: Clock) -> AsyncIterator[FakeAgent]:
    async with fake_agent(tmp_path / "control.sock", clock) as running:
        yield running


@pytest.fixture
async def hub_server() -> AsyncIterator[FakeHub]:
    running = FakeHub()
    yield running
    await running.close()


@pytest.fixture
async def hub(hub_server: FakeHub) -> AsyncIterator[Hub]:
    client = Hub(hub_server.url, TOKEN, backoff=0.01, request_timeout=0.5, attempts=4)
    yield client
    client.close()


@pytest.fixture
def direct_hub(hub_server: FakeHub) -> Iterator[Hub]:
    """`hub`, for tests of hundreds of rounds: `hub = direct_hub` in a module."""
    client = DirectHub(hub_server)
    yield client
    client.close()


def with_keeps(templates: Mapping[str, Template], rule: KeepRule) -> dict[str, Template]:
    """The templates with these limits of keeps."""
    keep = {"keep": KeepLimits(**asdict(rule))}
    return {
        name: template.model_copy(update={"idle": template.idle.model_copy(update=keep)})
        for name, template in templates.items()
    }


def deciding(
    hub: Sequence[HubUser] | None = None, state: CullerState | None = None
) -> Callable[..., list[SessionDecision]]:
    """Decisions without a culler."""
    return lambda snapshots, templates, now: decide_sessions(snapshots, hub, templates, now, CullerSettings(), state)


@pytest.fixture
def templates() -> dict[str, Template]:
    idle = {
        "downgrade_after": "15m",
        "downgrade_to": 0.1,
        "release_after": "45m",
        "stop_after": "8h",
        "warn_before": "5m",
    }
    return {
        "quarter": Template(name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25}, idle=idle),
        "cpu": Template(name="cpu", display_name="CPU only", idle={"stop_after": "2h"}),
    }
