"""The pace of a lease: however far ahead a program launches, little is queued, nothing is lost, and the GPU is busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Kind
from tests.native.preload_agent import ScriptedAgent

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients", "tests.native.preload_stub"]

LAUNCHES = """
d = Driver()
spin = d.kernel("spin")
streams = [d.stream() for _ in range({streams})] if {streams} > 1 else [None]
def launches():
    d("cuCtxSetCurrent", d.context)
    for i in range({count} // {threads}):
        d.launch(spin, c.c_uint64(int({seconds} * 1e9)), stream=streams[i % len(streams)])
say("ready")
hear()
began = time.monotonic()
threads = [threading.Thread(target=launches) for _ in range({threads})]
for thread in threads: thread.start()
for thread in threads: thread.join()
d.synchronize()
say(time.monotonic() - began)
hear()
"""


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(socket_path, gpus, total=1 << 30)
    yield agent
    agent.stop()


def launches(seconds: float, count: int, streams: int = 1, threads: int = 1) -> str:
    return LAUNCHES.format(seconds=seconds, count=count, streams=streams, threads=threads)


@pytest.mark.parametrize(
    ("seconds", "streams", "threads", "bound"),
    [(0.020, 1, 1, 0.060), (0.020, 4, 2, 0.060), (0.001, 1, 1, 0.050), (0.001, 8, 2, 0.050)],
)
def test_launches_far_ahead_a_revoked_lease_is_released_within_its_pace(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], seconds: float, streams: int, threads: int, bound: float
) -> None:
    """400 launches of 20 ms were 8 s of work to wait for; now about the pace and the two kernels."""
    client = start(launches(seconds, 400 if seconds > 0.01 else 5000, streams, threads))
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1, pace=0.02)
    time.sleep(0.4)
    peer.revoke(gpus[0], 1)
    began = time.monotonic()
    release = peer.expect(Kind.RELEASE)
    drained = time.monotonic() - began
    assert release.fields[:1] == (1,)
    assert release.fields[2] == 1
    assert drained < bound + 0.1, "the queue was deeper than the pace"  # 0.1: a loaded machine
    peer.expect(Kind.REQUEST)


def test_pace_of_a_lease_that_is_held_bounds_what_is_launched_from_then_on(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start("""
        d = Driver()
        spin = d.kernel("spin")
        for burst in (20, 400):
            hear()
            for _ in range(burst):
                d.launch(spin, c.c_uint64(20_000_000))
            say(burst)
    """)
    peer = agent.peer()
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 3)
    assert client.hear() == 20  # 0.4 s of work is queued without a pace
    peer.grant(gpus[0], 3, pace=0.02)
    time.sleep(0.2)  # 400 launches take some milliseconds: the library must have read the grant before the first
    client.say()
    time.sleep(0.4)
    peer.revoke(gpus[0], 3)
    began = time.monotonic()
    peer.expect(Kind.RELEASE)
    assert time.monotonic() - began < 0.16
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 4)  # and without one the rest is queued at once
    assert client.hear() == 400


def test_pace_that_is_taken_away_lets_waiting_launches_through(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start("""
        d = Driver()
        spin = d.kernel("spin")
        began = time.monotonic()
        for _ in range(60):
            d.launch(spin, c.c_uint64(20_000_000))
        say(time.monotonic() - began)
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1, pace=0.01)
    time.sleep(0.2)
    peer.grant(gpus[0], 1, pace=0)
    assert 0.15 < client.hear() < 0.7, "60 launches of 20 ms"


@pytest.mark.parametrize(("seconds", "count"), [(0.0001, 4000), (0.020, 25)])
def test_paced_program_keeps_the_gpu_busy(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], seconds: float, count: int
) -> None:
    client = start(launches(seconds, count))
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1, pace=0.02)
    took = client.hear()
    assert took < seconds * count * 1.25 + 0.1  # the figure of a quiet machine is in docs/explanation/native.md


def test_pace_for_a_returned_lease_grants_no_lease(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """The agent's second GRANT crosses with RELEASE: it must not open the gate."""
    client = start("""
        d = Driver()
        d.spin(0.001)
        d.synchronize()
        hear()
        d.spin(0.001)
        say("ran")
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 8)
    assert peer.expect(Kind.RELEASE).fields[0] == 8
    peer.grant(gpus[0], 8, pace=0.02)
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 9, pace=0.02)
    assert client.hear() == "ran"


def test_paced_work_that_waits_for_a_later_launch_is_let_go_on(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], fast: dict[str, str]
) -> None:
    """Two launches fill the window behind a host function that waits for a third: it is let through after 5 s."""
    client = start(
        """
        d = Driver()
        spin = d.kernel("spin")
        launched = threading.Event()
        waiting = c.CFUNCTYPE(None, c.c_void_p)(lambda _: launched.wait())
        first, second = d.stream(), d.stream()
        d("cuLaunchHostFunc", first, waiting, None)
        for _ in range(4):
            d.launch(spin, c.c_uint64(1000), stream=first)
        d.launch(spin, c.c_uint64(1000), stream=second)
        launched.set()
        d("cuStreamSynchronize", first)
        say("done")
        hear()
        """,
        **fast,
    )
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1, pace=0.001)
    assert client.hear() == "done"


def test_launches_into_streams_that_are_destroyed_at_once_count_as_queued(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    start("""
        d = Driver()
        spin = d.kernel("spin")
        for _ in range(400):
            stream = d.stream()
            d.launch(spin, c.c_uint64(10_000_000), stream=stream)
            d("cuStreamDestroy_v2", stream)
        say("launched")
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1, pace=0.02)
    time.sleep(0.3)
    peer.revoke(gpus[0], 1)
    began = time.monotonic()
    peer.expect(Kind.RELEASE)
    assert time.monotonic() - began < 0.15
    peer.expect(Kind.REQUEST)


def test_captures_and_destroyed_streams_do_not_stop_a_paced_program(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    """Threads that capture in the strictest mode, and streams and contexts that come and go, while others launch."""
    client = start("""
        d = Driver()
        add, spin = d.kernel("add_u32"), d.kernel("spin")
        n = 1024
        at = d.alloc(4 * n)
        d.write(at, bytes(4 * n))
        going = True
        def launch():
            d("cuCtxSetCurrent", d.context)
            for _ in range(300):
                stream = d.stream()
                d.launch(spin, c.c_uint64(200_000), stream=stream)
                d("cuStreamDestroy_v2", stream)
        def capture():
            d("cuCtxSetCurrent", d.context)
            stream = d.stream()
            for _ in range(50):
                d("cuStreamBeginCapture_v2", stream, c.c_int(0))
                for _ in range(4):
                    d.launch(add, c.c_uint64(at), c.c_uint64(n), c.c_uint32(1), stream=stream)
                    time.sleep(0.001)
                graph, executable = c.c_void_p(), c.c_void_p()
                d("cuStreamEndCapture", stream, c.byref(graph))
                d("cuGraphInstantiateWithFlags", c.byref(executable), graph, c.c_uint64(0))
                d("cuGraphLaunch", executable, stream)
                d("cuStreamSynchronize", stream)
        threads = [threading.Thread(target=work) for work in (launch, launch, capture)]
        failures = []
        threading.excepthook = lambda failed: failures.append(str(failed.exc_value))
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        d.synchronize()
        say([failures, int.from_bytes(d.read(at, 4), "little")])
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1, pace=0.002)
    assert client.hear() == [[], 200]
