"""The registry holds sessions with their records, sockets and processes; the sockets here only note what happens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.session_limit import ExclusiveMemory
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord, short_name
from gpushare_spawner.agent.session_socket import SESSION_CLOSED
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.tiers import Shares
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.share import MemoryLimit, Tier
from tests.agent.conftest import Eventually, request_for
from tests.agent.peers import FIRST, SECOND


class Endpoint:
    """A socket that nobody can connect to."""

    def __init__(self, events: list[str], name: str) -> None:
        self._events, self._name = events, name
        self.path = Path("/run/s/gpu")

    def close(self, code: int | None = None) -> None:
        self._events.append(f"close {self._name} {code}")

    def remove(self) -> None:
        self._events.append(f"remove {self._name}")


class Conversation:
    """Tells nobody."""

    def send_tier(self) -> None: ...

    def send_changed(self) -> None: ...


class World:
    """A registry over two GPUs, on a state folder that a second registry can take over."""

    def __init__(self, folder: Path) -> None:
        self.folder = StateFolder(folder)
        self.events: list[str] = []
        self.no_socket: Exception | None = None
        self.news = 0
        self.now = 1000.0
        self.stepped = 0.0
        self.begin()

    def begin(self) -> None:
        """A registry without sessions, as after a start of the agent."""
        gpus = {gpu.uuid: gpu for gpu in (FIRST, SECOND)}
        self.arbitrations = {uuid: GpuArbitration(gpu, ArbiterSettings()) for uuid, gpu in gpus.items()}
        self.shares = Shares(gpus.values(), 100, self.arbitrations)
        self.registry = SessionRegistry(
            {}, self.shares, self.folder, self,
            memory_left=lambda session, gpu, kind: (2**60, MemoryLimit.SESSION),
            exclusive_memory=ExclusiveMemory(lambda: self.now, lambda gpu: None),
            converse=lambda session: Conversation(),  # type: ignore[arg-type, return-value]
            clock=WallClock(lambda: self.now, lambda: self.now - self.stepped), changed=self._changed,
        )  # fmt: skip

    async def end(self) -> None:
        """The agent ends; the sessions stay on the disk."""
        await self.registry.close()
        for arbitration in self.arbitrations.values():
            arbitration.close()
        await self.registry.store.close()

    def listen(self, record: SessionRecord, listener: object) -> Endpoint:
        if self.no_socket is not None:
            raise self.no_socket
        self.events.append(f"listen {record.request.id}")
        return Endpoint(self.events, record.request.id)

    def record(self, name: str = "ada", **changes: Any) -> SessionRecord:
        return SessionRecord.opened(request_for(name, **changes), self.now)

    def on_disk(self) -> set[str]:
        return {path.stem for path in self.folder.records.folder.glob("*.json")}

    def _changed(self) -> None:
        self.news += 1


@pytest.fixture
async def world(short_folder: Path) -> AsyncIterator[World]:
    world = World(short_folder)
    yield world
    await world.end()
    world.folder.close()


async def test_added_session_is_on_the_disk_and_weighs_its_share(world: World) -> None:
    session = world.registry.add(world.record(share_units=40))
    await world.registry.store.flush()
    assert world.on_disk() == {short_name("ada")}
    assert (session.guaranteed_units, [*session.weights.values()]) == (40, [40])
    assert world.registry.sessions == {"ada": session}
    assert world.news > 0
    assert world.events == [], "it listens when it is told to"


async def test_unknown_gpu_changes_nothing(world: World) -> None:
    old = world.registry.add(world.record())
    with pytest.raises(KeyError):
        world.registry.add(world.record(gpus=("GPU-9",)))
    assert world.registry.sessions == {"ada": old}


async def test_newer_session_of_the_same_id_takes_the_place_of_the_older(world: World) -> None:
    old = world.registry.add(world.record(share_units=100))
    assert world.registry.listen(old) is None
    new = world.registry.add(world.record(share_units=100))
    assert world.registry.sessions == {"ada": new}
    assert new.guaranteed_units == 100, "the units of the older one are free again"
    assert world.events == ["listen ada", f"close ada {SESSION_CLOSED}", "remove ada"]


async def test_ended_session_leaves_nothing(world: World) -> None:
    session = world.registry.add(world.record())
    world.registry.listen(session)
    world.registry.end("ada", "closed")
    await world.registry.store.flush()
    assert (world.registry.sessions, world.on_disk()) == ({}, set())
    assert world.registry.add(world.record(share_units=100)).guaranteed_units == 100
    world.registry.end("unknown", "closed")


async def test_folders_stay_where_the_processes_go_on_as_another_session(world: World) -> None:
    world.registry.listen(world.registry.add(world.record()))
    world.registry.end("ada", "its pod is now known", keep_folders=True)
    assert world.events == ["listen ada", "close ada None"]


async def test_socket_that_cannot_be_made_is_a_reason_and_no_error(world: World) -> None:
    session = world.registry.add(world.record())
    world.no_socket = OSError(28, "No space left on device")
    assert "No space left" in (world.registry.listen(session) or "")
    world.registry.listen_again(session)
    assert session.socket is None
    assert "ada" in world.registry.sessions


async def test_pod_has_its_session_and_socket_at_once(world: World) -> None:
    record = world.record()
    record.pod = PodOwner(namespace="jupyter", name="ada", uid="1", devices={})
    session = world.registry.add_and_listen(record)
    assert session.socket is not None


async def test_session_ends_with_the_process_that_confirmed_it(world: World, eventually: Eventually) -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = processes.named(server.pid)
    assert process is not None
    world.registry.confirm(world.registry.add(world.record()), process)
    server.kill()
    await eventually(lambda: not world.registry.sessions)
    server.wait()


async def test_session_that_is_opened_again_is_active_and_has_no_process(world: World) -> None:
    session = world.registry.add(world.record())
    process = processes.named(os.getpid())
    assert process is not None
    world.registry.confirm(session, process)
    world.registry.tiers.change_tier(session, Tier.RELEASED, 0, "idle")
    world.now += 100
    world.registry.reopen(session, request_for())
    record = session.record
    assert (record.tier, record.effective_units, record.process, record.opened_at) == (Tier.ACTIVE, 25, None, 1100.0)


async def test_restart_restores_the_sessions_and_their_sockets(world: World) -> None:
    world.registry.tiers.change_tier(world.registry.add(world.record()), Tier.DOWNGRADED, 10, "idle")
    world.registry.add(world.record("ben", gpus=(SECOND.uuid,)))
    await world.end()
    world.begin()
    world.registry.restore()
    found = world.registry.sessions
    assert {name: one.record.effective_units for name, one in found.items()} == {"ada": 10, "ben": 25}
    assert sorted(world.events) == ["listen ada", "listen ben"]


async def test_session_whose_server_died_meanwhile_is_not_restored(world: World) -> None:
    session = world.registry.add(world.record())
    process = processes.named(os.getpid())
    assert process is not None
    # the pid of today with the start time of another process
    session.record.process = replace(process, started=process.started + 1)
    world.registry.save(session)
    world.registry.add(world.record("ben"))
    await world.end()
    world.begin()
    world.registry.restore()
    await world.registry.store.flush()
    assert set(world.registry.sessions) == {"ben"}
    assert world.on_disk() == {short_name("ben")}


async def test_session_that_cannot_be_restored_affects_no_other(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ada", "ben"):
        world.registry.add(world.record(name))
    await world.end()
    world.begin()
    enter = world.registry._enter

    def breaks(session: Any) -> None:
        enter(session)
        if session.id == "ada":
            raise RuntimeError("a fault")

    monkeypatch.setattr(world.registry, "_enter", breaks)
    world.registry.restore()
    assert set(world.registry.sessions) == {"ben"}
    assert "session ada cannot be restored" in caplog.text


async def test_session_of_a_gpu_that_is_gone_is_restored_without_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.registry.add(world.record(gpus=(FIRST.uuid, SECOND.uuid), share_units=100))
    await world.end()
    world.begin()
    del world.arbitrations[SECOND.uuid]
    world.registry.restore()
    assert world.registry.sessions["ada"].gpus == (FIRST,)
    assert "session ada has a share of a GPU that this machine no longer has" in caplog.text


async def test_closing_ends_no_session(world: World) -> None:
    session = world.registry.add(world.record())
    world.registry.listen(session)
    await world.registry.close()
    await world.registry.store.flush()
    assert world.events == ["listen ada", "close ada None"]
    assert world.on_disk() == {short_name("ada")}
    await asyncio.sleep(0)
