"""Peers that send nonsense, too much, or nothing, or die: others must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare_spawner.agent import session_socket
from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.session_socket import MALFORMED, NOT_ALLOWED
from gpushare_spawner.clocks import Budget
from gpushare_spawner.model.frames import FRAME_BYTES, Frame, Kind, Role, gpu_bytes
from gpushare_spawner.model.report import Report
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, GIB, SECOND, Peer

GPU = gpu_bytes(FIRST.uuid)
NUMBERS = st.one_of(st.integers(0, 3), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
FRAMES = st.builds(
    lambda kind, fields, gpu: Frame(kind, tuple(fields), gpu).pack(),
    st.sampled_from(Kind),
    st.lists(NUMBERS, min_size=12, max_size=12),
    st.sampled_from([GPU, GPU, GPU, gpu_bytes(SECOND.uuid), bytes(16)]),
)
FOR_ARBITER = st.builds(
    lambda kind, fields: Frame(kind, tuple(fields), GPU).pack(),
    st.sampled_from([Kind.REQUEST, Kind.RELEASE, Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.PAGED_IN, Kind.PAGED_OUT]),
    st.lists(NUMBERS, min_size=12, max_size=12),
)
PACKETS = st.one_of(FRAMES, st.binary(min_size=1, max_size=200), st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES))

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def in_a_loop(agent_folder: Path, conversation: object) -> None:
    """hypothesis and asynchronous fixtures do not mix: each example has its own loop and agent."""

    async def run() -> None:
        agent = Agent(agent_folder)
        await agent.start()
        try:
            await conversation(agent)  # type: ignore[operator]
        finally:
            for peer in agent.peers:
                peer.close()
            for session in agent.node.report().sessions:
                agent.node.registry.end(session.id, "the example is over")
            await agent.stop()

    asyncio.run(run())


async def still_well(agent: Agent, bystander: Peer) -> None:
    """Another session is served: with at most a turn's wait, whatever the nonsense said about memory."""
    bystander.send(Kind.REQUEST, 1000, 0, 1, gpu=FIRST.uuid)
    grant = await bystander.until(Kind.GRANT, timeout=15)
    assert grant.fields[0] != 0
    agent.node.report()


WHOSE = (
    "id", "user", "server", "template", "quota", "gpus", "layer", "share_units", "opened_at", "confirmed", "keep",
    "keeps", "exemption", "messages",
)  # fmt: skip
"""What the service on this machine takes from a report as the hub's own word, see `service.agents.MachineAgent`."""


def identities(report: Report) -> list[tuple[object, ...]]:
    return [tuple(getattr(session, name) for name in WHOSE) for session in report.sessions]


@quick
@given(packets=st.lists(PACKETS, max_size=12), hello=st.sampled_from([None, *Role]))
def test_random_packets(short_folder: Path, packets: list[bytes], hello: Role | None) -> None:
    async def conversation(agent: Agent) -> None:
        path = agent.open("eve")
        bystander = await agent.peer(agent.open("bob"))
        opened = identities(agent.node.report())
        peer = await agent.peer(path, hello)
        for packet in packets:
            try:
                peer.send_raw(packet)
            except OSError:
                break  # the agent has ended it
        peer.socket.close()
        await still_well(agent, bystander)
        report = agent.node.report()
        assert identities(report) == opened
        # within the bounds of a report, whatever a session states
        assert Report.model_validate_json(report.model_dump_json()) == report

    in_a_loop(short_folder, conversation)


@quick
@given(packets=st.lists(FOR_ARBITER, max_size=30))
def test_well_formed_nonsense_for_the_arbiter(
    short_folder: Path, packets: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()

    async def conversation(agent: Agent) -> None:
        peer = await agent.peer(agent.open("eve"))
        bystander = await agent.peer(agent.open("bob"))
        for packet in packets:
            peer.send_raw(packet)
        peer.send(Kind.MEMORY, 0, 0, gpu=FIRST.uuid)
        await asyncio.sleep(0.01)
        assert agent.node.report().session("eve").processes == 1  # type: ignore[union-attr]
        peer.socket.close()
        await still_well(agent, bystander)

    in_a_loop(short_folder, conversation)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_peer_that_says_nothing_is_closed(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_socket, "HELLO_WITHIN", 0.05)
    peer = await agent.peer(agent.open(), None)
    assert await peer.ended() == MALFORMED


async def test_connections_are_limited(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_socket, "MAX_CONNECTIONS", 3)
    path = agent.open()
    peers = [await agent.peer(path) for _ in range(3)]
    one_more = await agent.peer(path, None)
    assert await one_more.ended() == NOT_ALLOWED
    peers[0].close()
    await asyncio.sleep(0.05)
    await agent.peer(path)
    await agent.peer(agent.open("bob"))  # another session has its own limit


async def test_a_flood_is_slowed_down_and_others_are_served(agent: Agent) -> None:
    path = agent.open("eve")
    flooding = [await agent.peer(path) for _ in range(4)]
    victim = await agent.peer(agent.open("bob"))
    frame = Frame(Kind.MEMORY, (GIB,), GPU).pack()
    end = time.monotonic() + 1.0
    sent, waits = 0, []
    serving = 0
    while time.monotonic() < end:
        for peer in flooding:
            try:
                for _ in range(50):
                    peer.send_raw(frame)
                    sent += 1
            except BlockingIOError:
                pass
        begun = time.monotonic()
        victim.send(Kind.REQUEST, 1000, 0, serving, gpu=FIRST.uuid)
        lease = (await victim.until(Kind.GRANT)).fields[0]
        waits.append(time.monotonic() - begun)
        victim.send(Kind.RELEASE, lease, 0, 0, gpu=FIRST.uuid)
        serving += 1
    assert serving >= 20
    assert sorted(waits)[len(waits) // 2] < 0.2
    assert sent < 4 * 1500 + session_socket.FRAMES_IN_STORE + 2 * session_socket.FRAMES_PER_SECOND


async def test_a_connection_whose_process_has_ended_before_it_is_accepted_is_turned_away(agent: Agent) -> None:
    """Another process has its end: the driver's figures would belong to nobody."""
    path = agent.open("eve")
    peer = Peer(path)
    agent.peers.append(peer)
    connect = f"import socket; socket.socket(fileno={peer.socket.fileno()}).connect({path!r})"
    subprocess.run([sys.executable, "-c", connect], check=True, pass_fds=[peer.socket.fileno()])
    peer.socket.setblocking(False)
    peer.send(Kind.HELLO, Role.CUDA, os.getpid(), 100)
    assert await peer.ended() == NOT_ALLOWED
    assert not agent.node.sessions["eve"].cuda


async def test_connections_that_end_while_the_session_has_spent_its_turn_leave_no_errors(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """One after the other: one of them ends with the last frame that its session may send in a turn."""
    path = agent.open("eve")
    for _ in range(session_socket.PER_TURN + 1):
        peer = await agent.peer(path)
        peer.send_raw(b"x" * FRAME_BYTES)
        assert await peer.ended() == MALFORMED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await still_well(agent, await agent.peer(path))


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.NOTEBOOK])
async def test_a_peer_that_does_not_read_is_disconnected(agent: Agent, eventually: Eventually, role: Role) -> None:
    path = agent.open(gpus=(FIRST.uuid, SECOND.uuid), share_units=100)
    bystander, observer = await agent.peer(path), await agent.peer(path, role)
    session = agent.node.sessions["ada"]

    async def flood() -> None:
        for _ in range(200):
            for _ in range(10):
                try:
                    observer.send(Kind.QUERY)
                except OSError:
                    return
            await asyncio.sleep(0.005)

    await flood()
    await eventually(lambda: not session.observers and not session.notebooks)
    bystander.send(Kind.REQUEST, 1000, 0, 1, gpu=FIRST.uuid)
    await bystander.expect(Kind.GRANT)


def test_the_budget_fills_up_with_time() -> None:
    now = 0.0
    budget = Budget(lambda: now, rate=10, store=3)
    assert [budget.spend() for _ in range(4)] == [True, True, False, False]
    now = 0.35
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now = 100.0
    assert [budget.spend(2), budget.spend(2)] == [True, False]


async def test_who_asks_all_the_time_is_answered_less_often(agent: Agent) -> None:
    """QUERY looks at every session on the GPU, so it costs more than other frames."""
    path = agent.open()
    observer, other = await agent.peer(path, Role.OBSERVER), await agent.peer(agent.open("bob"), Role.OBSERVER)
    for _ in range(100):
        observer.send(Kind.QUERY)
    answers = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            while True:
                await observer.expect(Kind.STATUS)
                answers += 1
    assert 20 < answers < 90
    other.send(Kind.QUERY)
    await other.expect(Kind.STATUS)


async def test_who_reports_kernels_all_the_time_is_read_less_often(agent: Agent) -> None:
    """KERNELS looks at what every observer of the session has said, so it costs more than other frames."""
    path = agent.open()
    observer, other = await agent.peer(path, Role.NOTEBOOK), await agent.peer(agent.open("bob"), Role.NOTEBOOK)
    for number in range(180):
        observer.send(Kind.KERNELS, number % 2, 1, 0)
    began = time.monotonic()
    observer.send(Kind.QUERY)
    other.send(Kind.QUERY)
    await other.record()
    assert time.monotonic() - began < 0.2
    await observer.record()
    assert time.monotonic() - began > 0.3, "180 cost 3600, 2000 are saved up, and 4000 a second come"


async def test_the_log_is_not_flooded(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = agent.open()
    for _ in range(60):
        peer = Peer(path)
        await peer.connect(None)
        peer.send_raw(b"x")
        assert await peer.ended() == MALFORMED
        peer.close()
    assert 10 <= sum("a frame has 128 bytes" in record.getMessage() for record in caplog.records) <= 25


HOLDER = """
import os, socket, struct, sys, time
from gpushare_spawner.model.frames import Frame, Kind, gpu_bytes
path, gpu, fork = sys.argv[1], gpu_bytes(sys.argv[2]), sys.argv[3] == "fork"
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(path)
s.send(Frame(Kind.HELLO, (1, os.getpid(), 100), serial=1).pack())
s.send(Frame(Kind.REQUEST, (12 << 30, 0, 1), gpu, 2).pack())
while Frame.unpack(s.recv(128)).kind is not Kind.GRANT:
    pass
child = os.fork() if fork else -1
if child != 0:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", ["alone", "fork"])
async def test_a_holder_killed_inside_a_burst_hands_over(agent: Agent, fork: str) -> None:
    """Also when a forked child still has the socket open, so that the connection as such lives on."""
    path = agent.open("ada")
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, path, FIRST.uuid, fork, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    child = int(await holder.stdout.readline())
    try:
        waiting = await agent.peer(agent.open("bob"))
        waiting.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
        await waiting.quiet(0.05)
        holder.kill()
        begun = time.monotonic()
        await waiting.until(Kind.GRANT, timeout=5)
        assert time.monotonic() - begun < 2
    finally:
        if child > 0:
            os.kill(child, signal.SIGKILL)
        await holder.wait()


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if sys.argv[2] == "seqpacket" else socket.SOCK_STREAM)
try:
    s.connect(sys.argv[1])
    s.settimeout(3)
    try:
        s.send(b"x")
    except BrokenPipeError:
        pass
    try:
        print(s.recv(4096).hex())
    except ConnectionResetError:
        print(s.recv(4096).hex())  # it did not read what we said, but answered
except PermissionError:
    print("denied")
"""


def stranger(path: str, kind: str = "seqpacket") -> str:
    """What a process of another user gets to see."""
    done = subprocess.run([sys.executable, "-c", STRANGER, path, kind], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_user_cannot_enter(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    path = agent.open()
    agent.path.chmod(0o711)
    assert await asyncio.to_thread(stranger, path) == "denied"
    # even where folder and socket would let him in
    os.chmod(os.path.dirname(path), 0o777)
    os.chmod(path, 0o666)
    said = await asyncio.to_thread(stranger, path)
    error = Frame.unpack(bytes.fromhex(said))
    assert (error.kind, error.fields[0]) == (Kind.ERROR, NOT_ALLOWED)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
async def test_the_socket_is_its_users(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.path.chmod(0o700)
    path = agent.open(uid=65534)
    assert f"other users cannot enter {agent.path}" in caplog.text
    agent.path.chmod(0o711)
    assert (os.stat(path).st_uid, stat.S_IMODE(os.stat(path).st_mode)) == (65534, 0o600)
    folder = os.stat(os.path.dirname(path))
    assert (folder.st_uid, stat.S_IMODE(folder.st_mode)) == (0, 0o711)
    said = await asyncio.to_thread(stranger, path)  # lets him in, and tells him that "x" is no frame
    assert Frame.unpack(bytes.fromhex(said)).fields[0] == MALFORMED


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
async def test_a_trap_in_the_users_folder_hurts_nobody(agent: Agent, short_folder: Path) -> None:
    """Root re-creates the socket after a restart: what the user put there must not lead it anywhere."""
    path = agent.open(uid=65534)
    treasure = short_folder / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("kept")
    os.unlink(path)
    os.symlink(treasure, path)
    os.symlink(treasure, os.path.join(os.path.dirname(path), "more"))
    await agent.stop()
    await agent.start()
    assert (treasure / "file").read_text() == "kept"
    assert treasure.stat().st_uid == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(path)


def shows(agent: Agent, amount: int, pid: int | None = None) -> None:
    """NVML lists a process of this machine, this one unless told otherwise, with so many bytes on the first GPU."""
    agent.source.states[FIRST.uuid] = GpuState(healthy=True, processes={os.getpid() if pid is None else pid: amount})


async def run_together(agent: Agent, *peers: Peer, gib: int) -> bool:
    """Whether these get leases beside each other, each for so much managed memory."""
    for peer in peers:
        peer.send(Kind.REQUEST, gib * GIB, 0, 1, gpu=FIRST.uuid)
    with contextlib.suppress(TimeoutError):
        for peer in peers:
            await peer.until(Kind.GRANT, timeout=0.5)
        return True
    return False


@pytest.mark.parametrize("shown", [None, 2 * GIB])
async def test_a_false_claim_of_plain_memory_serialises_nobody(agent: Agent, shown: int | None) -> None:
    if shown is not None:
        shows(agent, shown)
    bob, cyd = await agent.peer(agent.open("bob")), await agent.peer(agent.open("cyd"))
    eve = [await agent.peer(agent.open("eve")) for _ in range(3)]
    for peer in eve:
        peer.send(Kind.MEMORY, 0, 2**63, gpu=FIRST.uuid)
    await asyncio.sleep(0.2)  # the agent has asked NVML since
    assert await run_together(agent, bob, cyd, gib=7)


async def test_plain_memory_that_nvml_confirms_counts(agent: Agent) -> None:
    shows(agent, 8 * GIB)
    eve = await agent.peer(agent.open("eve"))
    bob, cyd = await agent.peer(agent.open("bob")), await agent.peer(agent.open("cyd"))
    eve.send(Kind.MEMORY, 0, 8 * GIB, gpu=FIRST.uuid)
    await asyncio.sleep(0.2)
    assert not await run_together(agent, bob, cyd, gib=6)
    shows(agent, GIB)
    await cyd.until(Kind.GRANT, timeout=1)


async def hand_off_after(agent: Agent, lies: list[tuple[Kind, int, int]]) -> float:
    """Seconds that a hand-off of 8 GiB is taken to cost, after a session has said what it likes of its transfers."""
    eve, bob = await agent.peer(agent.open("eve")), await agent.peer(agent.open("bob"))
    eve.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await eve.until(Kind.GRANT)).fields[0]
    for kind, amount, nanoseconds in lies:
        eve.send(kind, amount, nanoseconds, 0, gpu=FIRST.uuid)
    bob.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    await asyncio.sleep(0.05)
    eve.send(Kind.IDLE, lease, 0, 0, gpu=FIRST.uuid)
    await eve.until(Kind.REVOKE)
    eve.send(Kind.REQUEST, 12 * GIB, 0, 2, gpu=FIRST.uuid)
    eve.send(Kind.RELEASE, lease, 0, 1, gpu=FIRST.uuid)
    for kind, amount, nanoseconds in lies:
        eve.send(kind, amount, nanoseconds, lease, gpu=FIRST.uuid)
    await bob.until(Kind.GRANT)
    eve.send(Kind.MEMORY, 12 * GIB, 0, gpu=FIRST.uuid)
    bob.send(Kind.REQUEST, 12 * GIB, 0, 2, gpu=FIRST.uuid)
    await asyncio.sleep(0.05)
    return agent.node.arbitrations[FIRST.uuid]._arbiter._cost.sequential(8 * GIB)


@pytest.mark.parametrize(
    "lies",
    [
        [(Kind.PAGED_IN, 2**63, 2**64 - 1), (Kind.PAGED_OUT, 2**63, 2**64 - 1)],
        [(Kind.PAGED_IN, 2**63, 1), (Kind.PAGED_OUT, 2**63, 1)],
    ],
)
async def test_false_times_of_transfers_move_nobodys_turn_beyond_the_stated_limits(
    agent: Agent, lies: list[tuple[Kind, int, int]]
) -> None:
    guessed = 2 * 8 * GIB / 8e9
    assert guessed / 4 < await hand_off_after(agent, lies) < guessed * 4


@pytest.mark.parametrize(("connections", "managed"), [(1, 2**63), (60, 12 * GIB), (1, 48 * GIB)])
async def test_a_claim_beyond_the_gpu_stretches_no_time_slice_beyond_the_gpu(
    agent: Agent, connections: int, managed: int
) -> None:
    eve = [await agent.peer(agent.open("eve")) for _ in range(connections)]
    bob = await agent.peer(agent.open("bob"))
    for peer in [*eve, bob]:
        peer.send(Kind.REQUEST, 12 * GIB if peer is bob else managed, 0, 1, gpu=FIRST.uuid)
    await asyncio.sleep(0.2)
    lengths = agent.node.arbitrations[FIRST.uuid]._arbiter._schedule.lengths
    assert lengths.round_seconds < 1.01 * (16 + 12) * GIB * 2 / 8e9 / 0.025
