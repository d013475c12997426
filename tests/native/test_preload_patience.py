"""What happens when an answer does not come: the long waits, with the library's clock running twenty times as fast."""

from __future__ import annotations

import itertools
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Kind
from tests.native.preload_agent import ScriptedAgent
from tests.present import present

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients", "tests.native.preload_stub"]


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(socket_path, gpus)
    yield agent
    agent.stop()


LAUNCH = """
d = Driver()
say("ready")
hear()
d.spin(0.001)
d.synchronize()
say("ran")
hear()
"""


def test_an_agent_that_hangs_does_not_hang_the_program(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], fast: dict[str, str]
) -> None:
    """30 s after the request the work runs; a grant that comes later is taken as one."""
    client = start(LAUNCH, **fast)
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    began = time.monotonic()
    assert client.hear() == "ran"
    assert time.monotonic() - began > 1.2
    peer.grant(gpus[0], 1)
    assert peer.expect(Kind.RELEASE).fields[0] == 1


def test_an_agent_that_renews_the_wait_is_waited_for(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], fast: dict[str, str]
) -> None:
    client = start(LAUNCH, **fast)
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    began = time.monotonic()
    for _ in range(5):  # every 10 s, for 50 s
        peer.grant(gpus[0], 0)
        peer.nothing(0.5)
    peer.grant(gpus[0], 7)
    assert client.hear() == "ran"
    assert time.monotonic() - began > 2.4
    client.say()
    assert "has not answered" not in client.end()


def test_work_that_waits_for_a_thread_at_the_gate(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], fast: dict[str, str]
) -> None:
    """A stream's work ends only after another thread has launched, and that one stands at the gate that a revoke has
    shut: after 5 s it is let through for a moment, and the revoke goes on."""
    client = start(
        """
        d = Driver()
        spin = d.kernel("spin")
        launched = threading.Event()
        waiting = c.CFUNCTYPE(None, c.c_void_p)(lambda _: launched.wait())
        first, second = d.stream(), d.stream()
        d.spin(0.001, first)
        d("cuLaunchHostFunc", first, waiting, None)
        say("waiting")
        hear()
        def work():
            d("cuCtxSetCurrent", d.context)
            d.launch(spin, c.c_uint64(1000), stream=second)
            launched.set()
        threading.Thread(target=work).start()
        d("cuStreamSynchronize", first)
        say("done")
        hear()
        """,
        **fast,
    )
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    client.hear()
    peer.revoke(gpus[0], 1)
    peer.nothing(0.1, skip=(Kind.MEMORY, Kind.IDLE, Kind.BUSY))
    client.say()
    assert peer.expect(Kind.RELEASE).fields[0] == 1
    assert client.hear() == "done"


def test_agent_that_returns_after_a_crash_loop_and_a_long_pause_is_found_within_a_second(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], socket_path: Path
) -> None:
    client = start("Driver(); hear()")
    for _ in range(8):
        agent.peer().close()
    agent.stop()
    for away in (1.7, 0.4, 0.9):
        time.sleep(away)
        agent = ScriptedAgent(socket_path, gpus)
        came = time.monotonic()
        agent.peer(timeout=5)
        assert time.monotonic() - came < 1.0
        agent.stop()
    client.say()
    client.end()


def test_process_without_an_agent_tries_four_times_a_second(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    agent = ScriptedAgent(socket_path, gpus, greets=False)
    client = start("Driver(); hear()")
    came = []
    for _ in range(10):
        agent.peer().close()
        came.append(time.monotonic())
    waits = sorted(late - early for early, late in itertools.pairwise(came[3:]))
    assert 0.15 < waits[len(waits) // 2] < 0.3, "the longest waits are 0.19 to 0.25 s"
    client.say()
    client.end()
    agent.stop()


def test_process_that_is_refused_asks_less_and_less_often(
    start: Start, agent: ScriptedAgent, fast: dict[str, str]
) -> None:
    """With the clock twenty times as fast: the first waits are 5 to 50 ms, the later ones up to 250 ms."""
    client = start("Driver(); hear()", **fast)
    came = []
    for _ in range(10):
        peer = agent.peer()
        came.append(time.monotonic())
        peer.send(Kind.ERROR, 3)
        assert peer.closed()
    assert came[3] - came[0] < 0.3
    assert came[9] - came[7] > 0.35
    client.say()
    client.end()


@pytest.mark.parametrize("pace", [None, 0.001], ids=["at the gate", "for the window of a pace"])
def test_interrupt_reaches_a_python_program_that_waits_to_launch(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], pace: float | None
) -> None:
    """KeyboardInterrupt within a second of SIGINT, though the lease is withheld; and the next launch waits again."""
    client = start("""
        import signal
        # Python leaves SIGINT ignored where it starts so, as under nohup
        signal.signal(signal.SIGINT, signal.default_int_handler)
        d = Driver()
        spin = d.kernel("spin")
        try:
            while True:
                d.launch(spin, c.c_uint64(3_000_000_000))
        except KeyboardInterrupt:
            say("interrupted")
        for _ in range(40):
            d.launch(spin, c.c_uint64(1000))
        say("ran")
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    if pace:
        peer.grant(gpus[0], 1, pace=pace)
    time.sleep(0.3)
    began = time.monotonic()
    client.process.send_signal(signal.SIGINT)
    assert client.hear() == "interrupted"
    assert time.monotonic() - began < 1.0
    if not pace:
        peer.nothing(0.5, skip=(Kind.MEMORY, Kind.REQUEST))
        assert not select.select([present(client.process.stdout)], [], [], 0)[0], "it runs without a lease from now on"
        peer.grant(gpus[0], 1)
        assert client.hear() == "ran"


def test_program_with_a_timer_does_not_pass_the_gate_at_each_tick(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start("""
        import signal
        d = Driver()
        spin = d.kernel("spin")
        launched = 0
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        threading.Thread(target=lambda: (hear(), say(launched), os._exit(0)), daemon=True).start()
        while True:
            d.launch(spin, c.c_uint64(1000))
            launched += 1
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    time.sleep(2.5)
    client.say()
    assert client.hear() <= 2 * 16, "one interruption at once, one a second later, the next after two more"
