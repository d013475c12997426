"""The gate and the lease: launches wait for GRANT, a revoked program gives way and loses nothing, an agent may do
what it likes.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Feature, Frame, Kind
from tests.native.preload_agent import Peer, ScriptedAgent
from tests.native.preload_clients import Client
from tests.present import present

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients"]
MIB = 1 << 20

FILL = """
d = Driver()
n = 4 << 20
at = d.alloc(4 * n)
say("ready")
hear()
d.fill(at, n, 7)
d.synchronize()
say(d.read(at + 4 * n - 4, 4).hex())
hear()
"""


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(socket_path, gpus, total=1 << 30)
    yield agent
    agent.stop()


def test_hello_and_account(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(FILL)
    peer = agent.peer()
    assert peer.hello is not None
    assert peer.hello.fields[:3] == (1, client.process.pid, 100)
    assert peer.hello.fields[3] == Feature.PACE | Feature.RESERVE | Feature.PAGE_IN
    memory = peer.hear()
    assert memory is not None
    assert (memory.kind, memory.gpu, memory.fields[:2]) == (Kind.MEMORY, gpus[0], (16 * MIB, 0))
    assert client.hear() == "ready"


def test_a_launch_waits_for_the_grant(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    peer.nothing(0.2)  # allocating asks for nothing
    client.say()
    request = peer.expect(Kind.REQUEST)
    assert (request.gpu, request.fields[:3]) == (gpus[0], (16 * MIB, 0, 1))
    peer.nothing(0.3)
    assert not _ready(client), "the kernel ran without a lease"
    peer.grant(gpus[0], 1, prefetch=16 * MIB)
    paged_in = peer.expect(Kind.PAGED_IN)
    assert paged_in.fields[0] == 0, "memory that was never used, and so never moved out, is not fetched"
    assert client.hear() == "07000000"


def _ready(client: Client) -> bool:
    import select

    return bool(select.select([present(client.process.stdout)], [], [], 0)[0])


def test_idle_busy_and_giving_back(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """The end of a burst is told within milliseconds, new work is BUSY, a second of quiet gives the lease back."""
    client = start("""
        d = Driver()
        spin = d.kernel("spin")
        for seconds in (0.1, 0.05):
            d.launch(spin, c.c_uint64(int(seconds * 1e9)))
            d.synchronize()
            time.sleep(0.3)
        say(hear())
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 5)
    idle = peer.expect(Kind.IDLE, skip=(Kind.MEMORY,))
    assert idle.fields[0] == 5
    assert 0.09e9 < idle.fields[1] < 0.25e9, "GPU-busy time of the burst"
    assert 0 < idle.fields[2] < 0.1e9, "time since the last work"
    assert peer.expect(Kind.BUSY, skip=()).fields[0] == 5
    again = peer.expect(Kind.IDLE, skip=())
    assert again.fields[1] > idle.fields[1] + 0.04e9
    release = peer.expect(Kind.RELEASE, skip=())
    assert (release.fields[0], release.fields[2]) == (5, 0)
    peer.nothing(0.3)
    client.say("over")
    assert client.hear() == "over"
    client.end()


def test_a_kernel_that_runs_long_is_no_end_of_a_burst(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start("""
        d = Driver()
        d.spin(0.5)
        say(hear())
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    began = time.monotonic()
    peer.expect(Kind.IDLE, skip=(Kind.MEMORY,))
    assert time.monotonic() - began > 0.35
    client.say()


def test_revoked_it_gives_way_and_loses_nothing(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start("""
        d = Driver()
        size = 24 * MIB
        blocks = [d.alloc(size) for _ in range(4)]
        data = [os.urandom(size) for _ in blocks]
        for at, bytes_ in zip(blocks, data):
            d.write(at, bytes_)
        d.spin(0.2)
        say("running")
        d.spin(0.001)
        d.synchronize()
        hear()
        say([d.read(at, size) == bytes_ for at, bytes_ in zip(blocks, data)])
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 11)
    client.hear()
    peer.revoke(gpus[0], 11, page_out=80 * MIB)
    release = peer.expect(Kind.RELEASE)
    assert (release.fields[0], release.fields[2]) == (11, 1)
    assert release.fields[1] > 0.1e9, "the kernel was waited for"
    out = peer.expect(Kind.PAGED_OUT, skip=(Kind.REQUEST, Kind.MEMORY))
    assert (out.fields[0], out.fields[2]) == (80 * MIB, 11)
    peer.send(Kind.PAGE_OUT, 1 << 40, gpu=gpus[0])
    rest = peer.expect(Kind.PAGED_OUT, skip=(Kind.REQUEST, Kind.MEMORY))
    assert (rest.fields[0], rest.fields[2]) == (96 * MIB, 0)
    client.say()
    peer.grant(gpus[0], 12, prefetch=1 << 40)
    back = peer.expect(Kind.PAGED_IN, skip=(Kind.REQUEST, Kind.MEMORY))
    assert back.fields[0] == 96 * MIB
    assert client.hear() == [True] * 4


def test_stale_revokes_and_unknown_leases_are_ignored(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    peer.revoke(gpus[0], 99)
    client.say()
    peer.expect(Kind.REQUEST)
    peer.revoke(gpus[0], 98, page_out=MIB)
    peer.grant(gpus[0], 0)  # still in line
    peer.grant(gpus[0], 3)
    assert client.hear() == "07000000"
    peer.revoke(gpus[0], 97)
    assert peer.expect(Kind.RELEASE).fields[:1] == (3,)


def test_a_revoke_that_crosses_the_release_still_pages_out(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 4)
    peer.expect(Kind.RELEASE)
    peer.revoke(gpus[0], 4, page_out=16 * MIB)
    out = peer.expect(Kind.PAGED_OUT)
    assert (out.fields[0], out.fields[2]) == (16 * MIB, 4)


def test_streams_of_all_kinds_are_waited_for(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """Work in a non-blocking stream, in the thread's own default stream, and in a stream destroyed behind it."""
    client = start("""
        d = Driver()
        kinds = [d.stream(1), c.c_void_p(2), d.stream(1)]
        spin = d.kernel("spin")
        for stream in kinds:
            hear()
            d.launch(spin, c.c_uint64(int(0.3e9)), stream=stream)
            if stream is kinds[2]:
                d("cuStreamDestroy_v2", stream)
            say("launched")
        hear()
    """)
    peer = agent.peer()
    for lease in (1, 2, 3):
        client.say()
        peer.expect(Kind.REQUEST)
        peer.grant(gpus[0], lease)
        began = time.monotonic()
        client.hear()
        peer.revoke(gpus[0], lease)
        peer.expect(Kind.RELEASE)
        assert time.monotonic() - began > 0.25, f"kind {lease} was not waited for"


def test_threads_share_the_gate(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start("""
        d = Driver()
        kernel = d.kernel("add_u32")
        n, rounds = 1024, 200
        at = d.alloc(4 * n)
        d.write(at, bytes(4 * n))
        def work(stream):
            d("cuCtxSetCurrent", d.context)
            for _ in range(rounds):
                d.launch(kernel, c.c_uint64(at), c.c_uint64(n), c.c_uint32(1))
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        say("ready")
        hear()
        for t in threads: t.start()
        for t in threads: t.join()
        d.synchronize()
        say(int.from_bytes(d.read(at, 4), "little"))
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    lease = 1
    peer.grant(gpus[0], lease)
    client.hear()
    client.say()
    for _ in range(5):  # in the middle of their launches
        time.sleep(0.01)
        peer.revoke(gpus[0], lease, page_out=MIB)
        peer.expect(Kind.RELEASE, skip=(Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.REQUEST, Kind.PAGED_OUT))
        lease += 1
        peer.grant(gpus[0], lease)
    deadline = time.monotonic() + 10
    while not _ready(client) and time.monotonic() < deadline:
        try:
            frame = peer.hear(0.05)
        except TimeoutError:
            continue
        if frame and frame.kind is Kind.REQUEST:
            lease += 1
            peer.grant(gpus[0], lease)
    assert client.hear() == 1200


def test_capturing_is_not_gated(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """Without any lease a graph is captured; launching it waits."""
    client = start("""
        d = Driver()
        fill = d.kernel("fill_u32")
        at = d.alloc(4 * 1024)
        stream = d.stream()
        d("cuStreamBeginCapture_v2", stream, c.c_int(0))
        for value in (1, 2, 3):
            d.launch(fill, c.c_uint64(at), c.c_uint64(1024), c.c_uint32(value), stream=stream)
        graph, executable = c.c_void_p(), c.c_void_p()
        d("cuStreamEndCapture", stream, c.byref(graph))
        d("cuGraphInstantiateWithFlags", c.byref(executable), graph, c.c_uint64(0))
        say("captured")
        d("cuGraphLaunch", executable, stream)
        d("cuStreamSynchronize", stream)
        say(d.read(at, 4).hex())
        hear()
    """)
    peer = agent.peer()
    assert client.hear() == "captured"
    peer.expect(Kind.REQUEST)
    peer.nothing(0.2)
    assert not _ready(client)
    peer.grant(gpus[0], 1)
    assert client.hear() == "03000000"


def test_two_gpus_have_two_leases(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start("""
        a, b = Driver(0), Driver(1)
        def work(d, name):
            d("cuCtxSetCurrent", d.context)
            d.spin(0.01)
            d.synchronize()
            say(name)
        threads = [threading.Thread(target=work, args=arguments) for arguments in ((a, "a"), (b, "b"))]
        for t in threads: t.start()
        for t in threads: t.join()
        hear()
    """)
    peer = agent.peer()
    requests = {peer.expect(Kind.REQUEST).gpu, peer.expect(Kind.REQUEST).gpu}
    assert requests == set(gpus)
    peer.grant(gpus[1], 2)
    assert client.hear() == "b"
    peer.nothing(0.2, skip=(Kind.MEMORY, Kind.IDLE, Kind.BUSY))
    assert not _ready(client), "the other GPU's lease let it through"
    peer.grant(gpus[0], 1)
    assert client.hear() == "a"


def test_several_processes_of_a_session(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    first, second = start(FILL), start(FILL)
    peers = [agent.peer(), agent.peer()]
    clients = {client.process.pid: client for client in (first, second)}
    for client in clients.values():
        client.hear()
        client.say()
    for peer in peers:
        peer.expect(Kind.REQUEST)
    for lease, peer in enumerate(peers, 1):
        assert peer.hello is not None
        client = clients[peer.hello.fields[1]]
        assert not _ready(client)
        peer.grant(gpus[0], lease)
        assert client.hear() == "07000000"


# The agent at its worst: nothing of this may end or change the program.


def test_no_agent_at_all(start: Start) -> None:
    client = start(FILL)
    client.hear()
    client.say()
    assert client.hear() == "07000000"
    client.say()
    client.end()


def test_an_agent_that_comes_later_is_found(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    client = start("""
        d = Driver()
        # work may go on ungated for a moment after the greeting, until the library has read its answer
        for turn, launches in ((1, 1), (2, 500)):
            for _ in range(launches):
                d.spin(0.001)
                d.synchronize()
            say(turn)
            hear()
    """)
    assert client.hear() == 1
    agent = ScriptedAgent(socket_path, gpus)
    peer = agent.peer()
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    assert client.hear() == 2
    agent.stop()


@pytest.mark.parametrize("works", [True, False], ids=["works", "is idle"])
def test_new_agent_hears_of_work_that_was_launched_without_one(
    start: Start, socket_path: Path, gpus: list[bytes], works: bool
) -> None:
    """The program launches nothing more: only the library can say that it works."""
    client = start(f"""
        d = Driver()
        d.spin({2.0 if works else 0.001})
        if not {works}:
            d.synchronize()
        say("launched")
        hear()
        d.synchronize()
    """)
    assert client.hear() == "launched"
    agent = ScriptedAgent(socket_path, gpus)
    peer = agent.peer()
    if works:
        assert peer.expect(Kind.REQUEST, timeout=1.0).gpu == gpus[0]
        peer.grant(gpus[0], 1)
        idle = peer.expect(Kind.IDLE, timeout=5.0, skip=(Kind.MEMORY,))
        assert idle.fields[1] > 0.5e9, "nanoseconds of work under the lease"
    else:
        peer.nothing(0.5)
    client.say()
    client.end()
    agent.stop()


@pytest.mark.parametrize("waiting", [True, False], ids=["at the gate", "while it runs"])
def test_the_agent_is_killed(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], socket_path: Path, waiting: bool
) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    if not waiting:
        peer.grant(gpus[0], 1)
        assert client.hear() == "07000000"
    agent.stop()
    if waiting:
        assert client.hear() == "07000000"
    again = ScriptedAgent(socket_path, gpus)
    peer = again.peer()
    memory = peer.hear()
    assert memory is not None
    assert (memory.kind, memory.fields[0]) == (Kind.MEMORY, 16 * MIB), "a new agent is told what there is"
    client.say()
    client.end()
    again.stop()


def test_an_agent_that_never_greets(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    agent = ScriptedAgent(socket_path, gpus, greets=False)
    began = time.monotonic()
    client = start(FILL)
    client.hear()
    client.say()
    assert client.hear() == "07000000"
    assert time.monotonic() - began < 8
    client.say()
    client.end()
    agent.stop()


def _frames(seed: int, gpu: bytes) -> list[bytes]:
    """Short, long, random and misplaced packets."""
    pick = random.Random(seed)
    grant = Frame(Kind.GRANT, (1,), gpu).pack()
    return [
        grant[:127],
        grant + b"\0",
        b"x",
        pick.randbytes(128),
        pick.randbytes(4096),
        b"\0\0\0\0" + grant[4:],
        grant[:4] + b"\2\0" + grant[6:],
        grant[:6] + b"\x2a\0" + grant[8:],
        Frame(Kind.HELLO, (1,)).pack(),
        Frame(Kind.GRANT, (1,), bytes(16)).pack(),
        Frame(Kind.ERROR, (4,)).pack(),
    ]


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (Frame(Kind.HELLO, (1,)), "the agent sent an unexpected frame (type 1)"),
        (Frame(Kind.ERROR, (2,)), "the agent uses another version of the protocol; restart the server"),
        (Frame(Kind.ERROR, (4,)), "the session has ended"),
        (Frame(Kind.ERROR, (77,)), "the agent refuses this process for a reason that this library does not know"),
        (None, "the connection to the agent ended"),
    ],
)
def test_library_logs_why_it_lost_the_agent_in_one_sentence(
    start: Start, agent: ScriptedAgent, frame: Frame | None, said: str
) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    if frame is not None:
        peer.send_raw(frame.pack())
        assert peer.closed()
    agent.stop()
    client.say()
    assert client.hear() == "07000000"
    client.say()
    assert client.end().splitlines() == [
        f"gpushare[{client.process.pid}]: {said}; GPU work continues without the agent"
    ]


def test_ended_session_is_no_error_in_the_log(start: Start, agent: ScriptedAgent) -> None:
    client = start(FILL, GPUSHARE_LOG="error")
    peer = agent.peer()
    client.hear()
    peer.send_raw(Frame(Kind.ERROR, (4,)).pack())
    assert peer.closed()
    client.say()
    assert client.hear() == "07000000"
    client.say()
    assert client.end() == ""


@pytest.mark.parametrize("number", range(11))
def test_bad_frames_end_the_connection_and_nothing_else(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], number: int
) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    agent.greets = False  # else a launch that wakes up late asks the new connection for a lease
    peer.send_raw(_frames(number, gpus[0])[number])
    assert client.hear() == "07000000", "the waiting launch is let through"
    assert peer.closed()
    again = agent.peer()
    agent.answer_hello(again)
    assert again.hello is not None, "it connects anew"
    client.say()
    client.end()


def test_a_holder_killed_leaves_nothing_connected(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """Killed inside a burst, with a child of its own alive: the connection ends at once all the same."""
    client = start("""
        d = Driver()
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        d.spin(0.5)
        say(child)
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    child = client.hear()
    client.process.kill()
    assert peer.closed(2)
    os.kill(child, 9)


def test_a_page_out_asked_for_during_another_has_an_answer_of_its_own(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start(FILL)
    peer = agent.peer()
    client.hear()
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 6)
    client.hear()
    peer.revoke(gpus[0], 6, page_out=16 * MIB)
    peer.send(Kind.PAGE_OUT, 16 * MIB, gpu=gpus[0])
    peer.send(Kind.PAGE_OUT, 8 * MIB, gpu=gpus[0])
    peer.expect(Kind.RELEASE, skip=(Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.PAGED_OUT))
    answers = [peer.expect(Kind.PAGED_OUT).fields[2]]
    while 6 not in answers:
        answers.append(peer.expect(Kind.PAGED_OUT).fields[2])
    client.say()
    client.end()


def test_thread_that_switches_between_gpus_waits_for_the_lease_of_each(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    """The default stream is another one in each context, and 40 streams have more names than a thread's table lines."""
    client = start("""
        a, b = Driver(0), Driver(1)
        streams = {}
        kernels = {}
        for d in (a, b):
            d("cuCtxSetCurrent", d.context)
            streams[d] = [None] + [d.stream() for _ in range(40)]
            kernels[d] = d.kernel("spin")
        say("ready")
        def launch(d):
            hear()
            d("cuCtxSetCurrent", d.context)
            for stream in streams[d]:
                d.launch(kernels[d], c.c_uint64(1000), stream=stream)
            say(d.device)
        for d in (a, b, a, b, b):
            launch(d)
        hear()
    """)
    peer = agent.peer()
    client.hear()
    leases = {0: 0, 1: 0}
    for number, device in enumerate((0, 1, 0, 1, 1), 1):
        client.say()
        if not leases[device]:
            request = peer.expect(Kind.REQUEST, skip=(Kind.MEMORY, Kind.IDLE, Kind.BUSY))
            assert request.gpu == gpus[device], "it asked for the other GPU"
            assert not _ready(client)
            peer.grant(gpus[device], number)
            leases[device] = number
        assert client.hear() == device
        if number == 3:  # only the first GPU's gate is shut: the second's launches go on
            peer.revoke(gpus[0], leases[0])
            peer.expect(Kind.RELEASE)
    client.say()


def test_stream_that_joins_a_capture_is_no_longer_gated(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """What was learnt of a stream while another is captured does not outlive cuStreamWaitEvent."""
    client = start("""
        d = Driver()
        spin = d.kernel("spin")
        first, second, event = d.stream(), d.stream(), c.c_void_p()
        d("cuEventCreate", c.byref(event), c.c_uint(2))
        d("cuStreamBeginCapture_v2", first, c.c_int(2))
        d.launch(spin, c.c_uint64(1000), stream=second)  # done, not recorded
        say("launched")
        hear()
        d("cuEventRecord", event, first)
        d("cuStreamWaitEvent", second, event, c.c_uint(0))
        d.launch(spin, c.c_uint64(1000), stream=second)
        say("recorded")
        d("cuEventRecord", event, second)
        d("cuStreamWaitEvent", first, event, c.c_uint(0))
        graph = c.c_void_p()
        d("cuStreamEndCapture", first, c.byref(graph))
        d.launch(spin, c.c_uint64(1000), stream=second)
        say("after")
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    assert client.hear() == "launched"
    peer.revoke(gpus[0], 1)
    peer.expect(Kind.RELEASE)
    client.say()
    assert client.hear() == "recorded", "a recorded launch waited for a lease"
    peer.expect(Kind.REQUEST)
    assert not _ready(client)
    peer.grant(gpus[0], 2)
    assert client.hear() == "after"


def test_lease_ends_with_the_connection_when_an_answer_cannot_be_sent(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    """An agent that asks and does not read: the library gives that connection up, and its lease with it."""
    client = start("""
        d = Driver()
        d.spin(0.001)
        say("running")
        while True:
            d.spin(0.001)
            d.synchronize()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    client.hear()
    peer.connection.settimeout(5)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(100_000):
            peer.send(Kind.PAGE_OUT, MIB, gpu=gpus[0])
        raise AssertionError("the library reads on although its answers are not read")
    again = agent.peer()
    request = again.expect(Kind.REQUEST)
    assert request.gpu == gpus[0], "it went on under the old lease"
    client.process.kill()


@pytest.mark.parametrize("how", ["stream", "context"])
def test_capture_that_goes_with_its_stream_or_context_is_not_waited_for(
    start: Start, agent: ScriptedAgent, gpus: list[bytes], how: str
) -> None:
    """The end of a later burst is found in milliseconds, not after the patience for captures."""
    client = start(f"""
        d = Driver()
        spin = d.kernel("spin")
        own = c.c_void_p()
        if {how!r} == "context":
            d("cuCtxCreate_v2", c.byref(own), c.c_uint(0), c.c_int(0))
        stream = d.stream()
        d("cuStreamBeginCapture_v2", stream, c.c_int(2))
        if {how!r} == "context":
            d("cuCtxDestroy_v2", own)
            d("cuCtxSetCurrent", d.context)
        else:
            d("cuStreamDestroy_v2", stream)
        d.launch(spin, c.c_uint64(20_000_000))
        d.synchronize()
        say("done")
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 1)
    assert client.hear() == "done"
    peer.expect(Kind.IDLE, timeout=1.0)


def test_context_that_waits_for_its_work_to_be_destroyed_holds_up_nobody(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    """Neither launches into new streams of another context, nor what the agent asks of another GPU; and the GPU is not
    said to be quiet before the work is done."""
    client = start("""
        b = Driver(1)
        b.spin(0.001)
        b.synchronize()
        d = Driver(0)
        kernel = d.kernel("spin")
        own = c.c_void_p()
        def destroy():
            d("cuCtxCreate_v2", c.byref(own), c.c_uint(0), c.c_int(0))
            del d.module
            spin = d.kernel("spin")
            say("made")
            hear()
            began = time.monotonic()
            d.launch(spin, c.c_uint64(1_200_000_000))
            ready.set()
            d("cuCtxDestroy_v2", own)
            took.append(time.monotonic() - began)
        ready, took = threading.Event(), []
        thread = threading.Thread(target=destroy)
        thread.start()
        ready.wait()
        time.sleep(0.1)
        began = time.monotonic()
        for _ in range(5):
            d.launch(kernel, c.c_uint64(1000), stream=d.stream())
        say(time.monotonic() - began)
        thread.join()
        say(took[0])
        hear()
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[1], 5)
    assert client.hear() == "made"
    client.say()
    skip = (Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.RELEASE)
    assert peer.expect(Kind.REQUEST, skip=skip).gpu == gpus[0]
    peer.grant(gpus[0], 1)
    assert client.hear() < 0.5, "a launch waited for the context of another thread"
    peer.revoke(gpus[0], 1)
    began = time.monotonic()
    if peer.expect(Kind.RELEASE).gpu == gpus[1]:  # its second of quiet
        peer.expect(Kind.RELEASE)
    assert time.monotonic() - began > 0.5, "released while the context's kernel ran"
    assert client.hear() > 1


PAGED_OUT_PROGRAM = """
d = Driver()
size = 24 * MIB
blocks = [d.alloc(size) for _ in range(4)]
data = [os.urandom(size) for _ in blocks]
for at, bytes_ in zip(blocks, data):
    d.write(at, bytes_)
d.synchronize()
say("ready")
hear()
say([d.read(at, size) == bytes_ for at, bytes_ in zip(blocks, data)])
hear()
"""


@pytest.fixture
def slow_bus(environment: dict[str, str]) -> None:
    """Pages come in at 200 MiB/s. Requested before the GPUs, which read it."""
    environment["SIMGPU_H2D"] = "200MiB"


def _paged_out(start: Start, agent: ScriptedAgent, gpu: bytes, blocks: int = 4) -> tuple[Client, Peer]:
    """Start a program that has no lease, and whose blocks of 24 MiB are on the host."""
    client = start(PAGED_OUT_PROGRAM.replace("range(4)", f"range({blocks})"))
    peer = agent.peer()
    assert peer.hello is not None
    assert peer.hello.fields[3] & Feature.PAGE_IN
    peer.expect(Kind.REQUEST)
    peer.grant(gpu, 11)
    client.hear()
    peer.revoke(gpu, 11, page_out=blocks * 24 * MIB)
    out = peer.expect(Kind.PAGED_OUT, skip=(Kind.RELEASE, Kind.MEMORY, Kind.IDLE, Kind.BUSY))
    assert out.fields[0] == blocks * 24 * MIB
    return client, peer


def test_pages_come_in_without_a_lease_before_the_launch(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client, peer = _paged_out(start, agent, gpus[0])
    peer.send(Kind.PAGE_IN, 48 * MIB, gpu=gpus[0])
    assert peer.expect(Kind.PAGED_IN).fields[0] == 48 * MIB
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 12, prefetch=1 << 40)
    assert peer.expect(Kind.PAGED_IN).fields[0] == 48 * MIB
    assert client.hear() == [True] * 4


def test_launch_during_its_page_in_waits_for_the_rest_of_the_pages_only(
    slow_bus: None, start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client, peer = _paged_out(start, agent, gpus[0])
    peer.send(Kind.PAGE_IN, 48 * MIB, gpu=gpus[0])
    client.say()
    peer.expect(Kind.REQUEST)
    peer.grant(gpus[0], 12, prefetch=48 * MIB)
    paged_in = peer.expect(Kind.PAGED_IN)
    assert paged_in.fields[0] == 96 * MIB, "both orders have one answer"
    assert paged_in.fields[1] > 0.4e9
    assert client.hear() == [True] * 4


def test_page_in_before_a_launch_ends_when_the_memory_is_needed(
    slow_bus: None, start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client, peer = _paged_out(start, agent, gpus[0], blocks=14)
    peer.send(Kind.PAGE_IN, 1 << 40, gpu=gpus[0])
    peer.nothing(0.2)
    peer.send(Kind.PAGE_OUT, 48 * MIB, gpu=gpus[0])
    moved = peer.expect(Kind.PAGED_IN).fields[0]
    assert 0 < moved < 14 * 24 * MIB
    out = peer.expect(Kind.PAGED_OUT)
    assert (out.fields[0], out.fields[2]) == (48 * MIB, 0)
    client.say()
    peer.expect(Kind.REQUEST)
    peer.send(Kind.PAGE_IN, 8 * MIB, gpu=gpus[0])
    peer.grant(gpus[0], 12, prefetch=1 << 40)
    assert peer.expect(Kind.PAGED_IN).fields[0] == 14 * 24 * MIB - moved + 48 * MIB, "what left was on the GPU"
    peer.send(Kind.PAGE_IN, 8 * MIB, gpu=gpus[0])
    assert peer.expect(Kind.PAGED_IN).fields[0] == 0, "it holds a lease"
    assert client.hear() == [True] * 14
