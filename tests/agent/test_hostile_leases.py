"""Sessions that do not answer, die or come and go with a lease or a reservation: the others are served."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import Feature, Kind, Role
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, GIB, Peer

TEN_TIMES_FASTER = ArbiterSettings(
    revoke_timeout=1.0, usual_revoke_timeout=0.4, shortest_revoke_timeout=0.1, overhead_bound=0.25,
    interactive_overhead_bound=0.25, hand_off_credit=0.0, bandwidth_guess=80e9,
)  # fmt: skip
"""The shipped time-outs divided by ten, so that six seconds stand for a minute."""


async def always_wants_a_lease(peer: Peer, keeps: float) -> None:
    """Ask for a lease again and again, and keep each one for `keeps` seconds after REVOKE."""
    for burst in itertools.count(1):
        peer.send(Kind.REQUEST, int(8.1 * GIB), 0, burst, gpu=FIRST.uuid)
        grant = await peer.until(Kind.GRANT, timeout=10)
        await peer.until(Kind.REVOKE, timeout=10)
        await asyncio.sleep(keeps)
        peer.send(Kind.RELEASE, grant.fields[0], 0, 1, gpu=FIRST.uuid)


async def test_a_session_that_ignores_revoke_delays_its_neighbour_little_and_receives_its_part(
    short_folder: Path,
) -> None:
    agent = Agent(short_folder)
    await agent.start(arbiter=TEN_TIMES_FASTER)
    try:
        eve, bob = await agent.peer(agent.open("eve")), await agent.peer(agent.open("bob"))
        working = [asyncio.create_task(always_wants_a_lease(*one)) for one in ((eve, 0.8), (bob, 0.0))]
        await asyncio.wait(working, timeout=8.0)
        for one in working:
            assert one.cancel(), one.exception()
        report = {one.id: one.delivered for one in agent.node.report().sessions}
    finally:
        for peer in agent.peers:
            peer.close()
        await agent.stop()
    assert report["bob"].waits > 3
    assert report["bob"].wait_p50_seconds < 0.4
    whole = sum(one.delivered_seconds for one in report.values())
    assert 100 * report["eve"].delivered_seconds / whole < 54


async def test_a_process_that_is_killed_with_its_reservation_unanswered_leaves_no_memory_behind(
    agent: Agent, eventually: Eventually
) -> None:
    """The process reserves the whole limit of its session and is killed at once."""
    path = agent.open("eve", memory_limit="8GiB")
    program = textwrap.dedent(f"""
        import os, signal, socket
        from gpushare_spawner.model.frames import Feature, Frame, Kind, Role, gpu_bytes
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect({path!r})
        peer.send(Frame(Kind.HELLO, (Role.CUDA, os.getpid(), 100, Feature.RESERVE)).pack())
        peer.send(Frame(Kind.RESERVE, ({8 * GIB}, 0, {8 * GIB}, 1, 1), gpu_bytes({FIRST.uuid!r})).pack())
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for _ in range(3):
        killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False)
        assert killed.returncode == -9
    await eventually(lambda: agent.node.report().session("eve").processes == 0)  # type: ignore[union-attr]
    honest = Peer(path)
    agent.peers.append(honest)
    await honest.connect(Role.CUDA, Feature.RESERVE)
    honest.send(Kind.RESERVE, 8 * GIB, 0, 8 * GIB, 7, 1, gpu=FIRST.uuid)
    answer = await honest.until(Kind.RESERVED)
    assert answer.fields[:3] == (8 * GIB, 0, 7)


async def test_release_and_restore_in_turn_gain_no_position(agent: Agent) -> None:
    """Eve is released and restores itself by its next request, over and over, while Bob waits for its turn."""
    eve, bob = await agent.peer(agent.open("eve")), await agent.peer(agent.open("bob"))
    eve.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    first = (await eve.until(Kind.GRANT)).fields[0]
    bob.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    agent.node.registry.tiers.change_tier(agent.node.sessions["eve"], Tier.RELEASED, 0, "test")
    assert (await eve.until(Kind.REVOKE)).fields[0] == first
    eve.send(Kind.REQUEST, 12 * GIB, 0, 2, gpu=FIRST.uuid)
    eve.send(Kind.RELEASE, first, 0, 1, gpu=FIRST.uuid)
    assert (await bob.until(Kind.GRANT)).fields[0] != 0
    for burst in range(3, 23):
        agent.node.registry.tiers.change_tier(agent.node.sessions["eve"], Tier.RELEASED, 0, "test")
        eve.send(Kind.REQUEST, 12 * GIB, 0, burst, gpu=FIRST.uuid)
    await bob.quiet(0.5)
    assert "bob" in agent.node.arbitrations[FIRST.uuid]._arbiter.holders()


async def test_a_storm_of_processes_that_connect_and_vanish_delays_no_neighbour(agent: Agent) -> None:
    """Two thousand connections of one session, each with HELLO, REQUEST and half a frame, closed at once."""
    path, bob = agent.open("eve"), await agent.peer(agent.open("bob"))
    storm = textwrap.dedent(f"""
        import os, socket
        from gpushare_spawner.model.frames import Frame, Kind, Role, gpu_bytes
        for number in range(2000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.setblocking(False)
                try:
                    peer.connect({path!r})
                    peer.send(Frame(Kind.HELLO, (Role.CUDA, os.getpid(), 100)).pack())
                    peer.send(Frame(Kind.REQUEST, (1000, 0, 1), gpu_bytes({FIRST.uuid!r})).pack())
                    peer.send(Frame(Kind.REQUEST, (1000, 0, 1), gpu_bytes({FIRST.uuid!r})).pack()[:64])
                except OSError:
                    pass
    """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", storm)
    try:
        slowest = 0.0
        for burst in range(1, 41):
            began = asyncio.get_running_loop().time()
            bob.send(Kind.REQUEST, 1000, 0, burst, gpu=FIRST.uuid)
            grant = await bob.until(Kind.GRANT)
            slowest = max(slowest, asyncio.get_running_loop().time() - began)
            bob.send(Kind.RELEASE, grant.fields[0], 0, 0, gpu=FIRST.uuid)
            await asyncio.sleep(0.02)
    finally:
        await process.wait()
    assert slowest < 0.5


async def test_twenty_connections_that_state_tebibytes_within_a_limit_of_one_gibibyte_take_no_turns(
    agent: Agent,
) -> None:
    """Bob's 12 GiB of 16 fit beside all that eve may have: he works from his first request on, and is not revoked."""
    path, bob = agent.open("eve", memory_limit="1GiB"), await agent.peer(agent.open("bob"))
    for number in range(20):
        eve = Peer(path)
        agent.peers.append(eve)
        await eve.connect(Role.CUDA, Feature.RESERVE if number % 2 else 0)
        eve.send(Kind.RESERVE, 2**41, 2**41, 0, 0, gpu=FIRST.uuid)
        eve.send(Kind.MEMORY, 2**41, 2**41 * (number % 3), gpu=FIRST.uuid)
        eve.send(Kind.REQUEST, 2**41, 2**41 * (number % 3), 1, gpu=FIRST.uuid)
    bob.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    assert (await bob.until(Kind.GRANT, timeout=2)).fields[0] != 0
    await bob.quiet(0.5)
    stated = agent.node.arbitrations[FIRST.uuid].snapshot("eve").memory_bytes
    assert stated <= GIB, "what counts of all connections together"
