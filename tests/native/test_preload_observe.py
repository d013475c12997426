"""Engine `observe`: the library tells the agent of bursts, and changes nothing for the program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Feature, Kind
from tests.native.preload_agent import ScriptedAgent
from tests.native.test_preload_suspend import STEPS, said
from tests.present import present

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients"]
MIB = 1 << 20
ENGINE = {"GPUSHARE_ENGINE": "observe"}


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    """It would show 64 MiB as the GPU's memory."""
    agent = ScriptedAgent(socket_path, gpus, total=64 * MIB, welcome_features=Feature.OBSERVE | Feature.RESERVE)
    yield agent
    agent.stop()


def switches(pid: int) -> int:
    """How often the library's thread has gone to sleep."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "status").read_text()
        if status.startswith("Name:\tgpushare\n"):
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    raise AssertionError("the library's thread is missing")


def test_memory_is_as_without_the_library(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start("d = Driver(); say([d.total(), d.memory()])", LD_PRELOAD=None)
    without = client.hear()
    client.end()
    client = start(
        """
        d = Driver()
        say([d.total(), d.memory()])
        at = d.alloc(100 * MIB)
        say([d.attribute(IS_MANAGED, at), d.memory()])
        hear()
        """,
        **ENGINE,
    )
    peer = agent.peer()
    assert present(peer.hello).fields[3] == Feature.OBSERVE
    assert client.hear() == without
    managed, (free, total) = client.hear()
    assert (managed, total) == (0, without[1][1])
    assert free <= total - 100 * MIB
    memory = peer.expect(Kind.MEMORY, skip=())
    assert (memory.gpu, memory.fields[:2]) == (gpus[0], (0, 100 * MIB))


def test_bursts_are_told_without_a_lease_and_launches_do_not_wait(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start(STEPS, **ENGINE)
    peer = agent.peer()
    client.hear()
    said(client, "d.kernel('spin')")
    peer.nothing(0.05)
    for burst in (1, 2):
        began = time.monotonic()
        said(client, "d.spin(0.1); d.synchronize()")
        assert time.monotonic() - began < 1.0
        busy = peer.expect(Kind.BUSY, skip=(Kind.MEMORY,))
        assert (busy.gpu, busy.fields[0]) == (gpus[0], 0)
        idle = peer.expect(Kind.IDLE, skip=(Kind.MEMORY,))
        assert idle.fields[0] == 0
        assert 0.05e9 < idle.fields[1] < 2e9, "nanoseconds of work since WELCOME"
        assert idle.fields[2] < 0.1e9
        if burst == 1:
            peer.nothing(1.1)
            looked = switches(client.process.pid)
            peer.nothing(0.1)
            assert switches(client.process.pid) == looked, "it looks for launches on a quiet GPU"


def test_nothing_is_told_to_an_agent_without_the_feature(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    agent = ScriptedAgent(socket_path, gpus, welcome_features=Feature.RESERVE | Feature.PACE)
    client = start(STEPS, **ENGINE)
    peer = agent.peer()
    client.hear()
    said(client, "d.alloc(MIB); d.spin(0.01); d.synchronize()")
    peer.nothing(0.1, skip=())
    agent.stop()


def test_new_agent_hears_of_work_from_before(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    client = start(STEPS, **ENGINE)
    client.hear()
    said(client, "d.spin(0.6)")
    agent = ScriptedAgent(socket_path, gpus, welcome_features=Feature.OBSERVE)
    peer = agent.peer()
    peer.expect(Kind.BUSY, skip=(Kind.MEMORY,))
    peer.expect(Kind.IDLE, skip=(Kind.MEMORY,))
    agent.stop()


def test_a_grant_or_a_revoke_changes_nothing(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(STEPS, **ENGINE)
    peer = agent.peer()
    client.hear()
    peer.grant(gpus[0], 3)
    peer.revoke(gpus[0], 3)
    said(client, "d.spin(0.001); d.synchronize()")
    assert peer.expect(Kind.IDLE, skip=(Kind.MEMORY, Kind.BUSY)).fields[0] == 0
