"""A disk that refuses: each change is refused with the reason, or report and metrics say that it is not durable."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.metrics import ReportCollector
from gpushare_spawner.agent.session_records import RecordFolder, SessionRecord, Store
from gpushare_spawner.model import control
from gpushare_spawner.model.control import (
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    NoticeRequest,
    ResizeRequest,
    TierRequest,
)
from gpushare_spawner.model.controls import Cordon, Exemption, Keep, Message
from gpushare_spawner.model.share import IdleCause, Tier
from tests.agent.conftest import Agent, Eventually, request_for
from tests.agent.peers import FIRST

NOW = time.time()
REFUSED = "refused"
REPORTED = "reported"
REQUESTS: dict[str, tuple[Any, str]] = {
    "open": (request_for("bob"), REFUSED),
    "open again": (request_for("ada"), REFUSED),
    "confirm": (ConfirmRequest(id="ada", pid=os.getpid()), REPORTED),
    "close": (CloseRequest(id="ada"), REPORTED),
    "tier": (TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"), REPORTED),
    "resize": (ResizeRequest(id="ada", share_units=50), REPORTED),
    "notice": (
        NoticeRequest(id="ada", tier=Tier.RELEASED, at=NOW + 300, reason="idle", cause=IdleCause.IDLE),
        REPORTED,
    ),
    "controls": (
        ControlsRequest(id="ada", keep=Keep(until=NOW + 3600, since=NOW, by="ada"), exemption=Exemption(by="root")),
        REPORTED,
    ),
    "message": (MessageRequest(id="ada", message=Message(text="Hello.", by="root", at=NOW)), REPORTED),
    "cordon": (CordonRequest(gpu=FIRST.uuid, cordon=Cordon(gpu=FIRST.uuid, by="root", since=NOW)), REFUSED),
}
WRITE_NOTHING = {"report", "asked", "answer", "stop-processes"}

UNASKED: dict[str, Callable[[Agent], object]] = {
    "GPU work restores the share": lambda agent: agent.node.registry.tiers.work_begins(session(agent)),
    "the clock is set": lambda agent: agent.node.registry.clock_was_set(3600.0),
    "the server's process ends": lambda agent: agent.node.registry.end("ada", "its server's process has ended"),
    "units are no longer kept": lambda agent: agent.node.registry.tiers.stop_yielding([session(agent)], "nobody came"),
    "its activity is saved": lambda agent: agent.node.registry.save(session(agent)),
}
"""What the agent does by itself."""


def session(agent: Agent) -> Any:
    return agent.node.registry.sessions["ada"]


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def durable(agent: Agent) -> bool:
    """What the metrics say."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReportCollector(agent.node.report, names=False))
    return "gpushare_node_state_durable 1.0" in generate_latest(registry).decode()


def on_disk(agent: Agent) -> dict[str, SessionRecord]:
    """What an agent finds that starts after a kill."""
    return {one.request.id: one for one in agent.state.records.load()}


def in_memory(agent: Agent) -> dict[str, SessionRecord]:
    return {name: one.record for name, one in agent.node.registry.sessions.items()}


async def is_durable_again(agent: Agent, eventually: Eventually) -> None:
    await eventually(lambda: agent.node.report().state_trouble is None)
    assert durable(agent)
    assert on_disk(agent) == in_memory(agent)


@pytest.fixture
async def down(agent: Agent) -> Agent:
    """An agent with a session that is downgraded and on the disk."""
    await agent.node.requests.answer(request_for("ada"))
    await agent.node.requests.answer(TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason="idle"))
    assert on_disk(agent) == in_memory(agent)
    return agent


def test_each_request_is_tried_here() -> None:
    union = get_args(control.Request)[0]
    known = {one.model_fields["op"].default for one in get_args(union)}
    assert {one.op for one, _ in REQUESTS.values()} | WRITE_NOTHING == known


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_is_refused_with_the_reason_or_reported_as_not_durable(
    agent: Agent, name: str, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    request, expected = REQUESTS[name]
    await agent.node.requests.answer(request_for("ada"))
    before = agent.node.report()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        if expected is REFUSED:
            with pytest.raises(ControlRefused, match="No space left"):
                await agent.node.requests.answer(request)
            assert agent.node.report().cordons == before.cordons
            assert [one.id for one in agent.node.report().sessions if one.id == "bob"] == []
        else:
            await agent.node.requests.answer(request)
            assert "No space left" in str(agent.node.report().state_trouble)
            assert not durable(agent)
            assert name == "close" or on_disk(agent) != in_memory(agent), "it would be lost by a kill"
    await is_durable_again(agent, eventually)


@pytest.mark.parametrize("name", UNASKED)
async def test_what_the_agent_does_by_itself_is_reported_as_not_durable(
    down: Agent, name: str, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    told: list[str | None] = []
    down.node.changed = lambda: told.append(down.node.report().state_trouble)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        UNASKED[name](down)
        await down.node.registry.store.flush()
        assert "No space left" in str(down.node.report().state_trouble)
        assert not durable(down)
        assert any(told), "the report is published when that begins"
    await is_durable_again(down, eventually)
    assert told[-1] is None


@pytest.mark.parametrize("write", ["put", "remove", "put_left", "remove_left"])
async def test_each_way_to_write_says_that_the_disk_refuses(
    tmp_path: Path, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is written of sessions goes through these methods, so no caller can miss to say it."""
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public == {"put", "remove", "put_left", "remove_left", "flush", "missing", "retry", "close"}
    changes: list[str | None] = []
    store = Store(RecordFolder(tmp_path), lambda: changes.append(store.failure))
    record = SessionRecord.opened(request_for("ada"), NOW)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        getattr(store, write)("ada" if write == "remove" else record)
        await store.flush()
        assert "No space left" in str(store.failure)
        store.retry()
        await store.flush()
        assert "No space left" in str(store.failure), "not forgotten while it is tried again"
    store.retry()
    await store.flush()
    assert store.failure is None
    assert [bool(change) for change in changes] == [True, False]
    await store.close()


async def test_a_process_that_is_confirmed_on_a_full_disk_ends_its_session(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirmed session is not durable, and works all the same."""
    await agent.node.requests.answer(request_for("ada"))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        await agent.node.requests.answer(REQUESTS["confirm"][0])
        assert session(agent).record.process == processes.named(os.getpid())
