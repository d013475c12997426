"""Keeps over real processes: an agent on simulated GPUs, a service, and a notebook server's side of the session socket.

Killed at each step: the service between ask and answer, the agent and the service while the share is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.frames import AskKind, Kind, Role
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.history.store import BURST, HistoryFailed, HistoryStore
from gpushare_spawner.wording import actions as words
from tests.agent.peers import Peer
from tests.present import present
from tests.service.fake_hub import FakeHub
from tests.service.over_processes import OverProcesses

RELEASE_AFTER = 2.0
"""Seconds after the opening: 5 times the template's, because the session never works."""
TEMPLATE = f"""
name: quarter
display_name: 0.25 GPU
gpu: {{fraction: 0.25}}
idle: {{release_after: {RELEASE_AFTER / 5}s, warn_before: 1s, min_use: 0, keep: {{longest: 1h, per_day: 16}}}}
"""


class Stage(OverProcesses):
    """With peers on the session's socket."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        super().__init__(folder, hub, TEMPLATE)
        self.peers: list[Peer] = []
        self.socket = ""

    async def start(self) -> None:
        self.serve()
        await super().start()
        environment = await self.open(
            lambda gpu: OpenRequest(
                id="ann", user="ann", uid=os.getuid(), template="quarter", gpus=(gpu,), share_units=25
            )
        )
        self.socket = environment["GPUSHARE_SOCKET"]

    def serve(self) -> None:
        self.start_service("--cull-every=1s")

    async def observer(self) -> Peer:
        peer = Peer(self.socket)
        self.peers.append(peer)
        await peer.connect(Role.NOTEBOOK)
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        super().close()


@pytest.fixture
async def stage(hub_server: FakeHub) -> AsyncIterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    hub_server.add("ann")
    stage = Stage(folder, hub_server)
    await stage.start()
    yield stage
    stage.close()
    shutil.rmtree(folder, ignore_errors=True)


async def answered(peer: Peer, kind: AskKind, value: int = 0) -> tuple[bool, str, float]:
    """Ask; whether it was done, what was said, and the seconds until then."""
    number, began = secrets.randbits(31) + 1, time.monotonic()
    peer.send(Kind.ASK, number, kind, value)
    while (answer := await peer.answer(timeout=30)).number != number:
        pass
    return answer.done, answer.text, time.monotonic() - began


async def test_a_kept_share_outlives_its_times_the_service_and_the_agent(stage: Stage) -> None:
    peer = await stage.observer()
    # the service may still be starting: the first answer says that it runs
    assert (await answered(peer, AskKind.END_KEEP))[:2] == (True, words.NO_KEEP)
    done, text, seconds = await answered(peer, AskKind.KEEP, 60)
    assert (done, text) == (True, "The GPU share is kept for 1 min.")
    assert seconds < 2
    kept = (await stage.session()).keep
    assert kept is not None

    stage.kill_service()
    stage.serve()
    stage.agent.end(signal.SIGKILL)
    await stage.agent.start()
    began = time.monotonic()
    peer = await stage.observer()
    # killed between ask and answer: the next service answers, and nothing happens twice
    stage.kill_service()
    asked = asyncio.create_task(answered(peer, AskKind.KEEP, 120))
    await stage.until(lambda session: len(session.asks) == 1)
    stage.serve()
    done, text, _ = await asked
    assert (done, text) == (True, "The GPU share is kept for 2 min.")
    session = await stage.session()
    assert len(session.keeps) == 2
    assert present(session.keep).until > kept.until

    await asyncio.sleep(max(0.0, RELEASE_AFTER + 1.5 - (time.monotonic() - began)))
    # a notice from before the keep is withdrawn, and the share is still held
    session = await stage.until(lambda session: session.notice is None)
    assert session.tier is Tier.ACTIVE
    assert (await answered(peer, AskKind.END_KEEP))[:2] == (True, words.KEEP_ENDED)
    await stage.until(lambda session: session.tier is Tier.RELEASED)

    # a process that asks for as much and as often as it can: the service goes on to answer
    hostile, number, end = await stage.observer(), 0, time.monotonic() + 1
    while number < 10_000 and time.monotonic() < end:
        try:
            hostile.send(Kind.ASK, number + 1, AskKind.KEEP, 10**18)
            number += 1
        except BlockingIOError:
            await asyncio.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            break  # it left what it was sent unread
    assert number > 100
    await stage.until(lambda session: not session.asks)
    done, text, seconds = await answered(await stage.observer(), AskKind.RELEASE)
    assert (done, text) in ((False, words.TOO_MANY_REQUESTS), (True, words.RELEASED_ALREADY))
    assert seconds < 2
    assert (await stage.session()).keep is None
    for kind in AskKind:
        if kind.reads:
            done, text, _ = await answered(await stage.observer(), kind)
            assert text != words.TOO_MANY_REQUESTS, f"{kind.name} is no action"
            assert done or kind is AskKind.SHARES, text  # the only template has no other share


async def test_burst_of_a_process_reaches_the_history(stage: Stage) -> None:
    """From the session's socket through the agent's report to the service's database."""
    history = f"sqlite:///{stage.folder}/history.sqlite"
    stage.kill_service()
    stage.start_service(f"--history={history}")
    (gpu,) = (await stage.agent.client.report()).gpus
    program = Peer(stage.socket)
    stage.peers.append(program)
    await program.connect(Role.CUDA)
    program.send(Kind.REQUEST, 2**20, 0, 1, gpu=gpu.uuid)
    lease = (await program.until(Kind.GRANT)).fields[0]
    await asyncio.sleep(0.5)
    program.send(Kind.RELEASE, lease, 500_000_000, 0, gpu=gpu.uuid)
    store = HistoryStore(history)
    stored: Sequence[Any] = ()
    end = time.monotonic() + 60
    while not stored and time.monotonic() < end:
        await asyncio.sleep(2.0)
        # the question writes all that was counted
        done, text, _ = await answered(await stage.observer(), AskKind.ADVICE)
        assert (done, text) == (True, "null")
        with contextlib.suppress(HistoryFailed):
            stored = store.read(lambda connection: connection.execute(select(BURST)).all())
    store.close()
    (burst,) = stored
    assert 0.5 <= burst.seconds < 5
    assert burst.gpu_seconds == pytest.approx(burst.seconds, abs=0.2)
    assert (burst.memory_bytes, burst.units) == (2**20, 25)
