"""What the library is to a process: nothing before cuInit, nothing in a child, no hindrance at exit, no foreign
thread's business.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gpushare_spawner
from gpushare_spawner.model.frames import Kind
from tests.native.preload_agent import GenerousAgent, ScriptedAgent

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients"]


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(socket_path, gpus, total=1 << 29)
    yield agent
    agent.stop()


def test_inert_until_cuinit(start: Start, agent: ScriptedAgent) -> None:
    client = start("""
        def state():
            files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
            return [len(os.listdir("/proc/self/task")), sorted(os.readlink(f) for f in files if os.path.exists(f))]
        before = state()
        library = c.CDLL("libcuda.so.1")
        library.cuDriverGetVersion(c.byref(c.c_int()))
        say(before == state())
        say(before[0])
        hear()
        library.cuInit(0)
        say(state()[0] > before[0])
        hear()
    """)
    assert client.hear() is True
    assert client.hear() == 1
    agent.no_peer(0.2)
    client.say()
    assert client.hear() is True
    assert agent.peer().hello is not None


def test_the_library_says_the_packages_version(start: Start, agent: ScriptedAgent) -> None:
    start("Driver(); hear()")
    hello = agent.peer().hello
    major, minor, patch = (int(part) for part in gpushare_spawner.__version__.split("."))
    assert hello is not None
    assert hello.fields[2] == major * 10000 + minor * 100 + patch


def test_a_program_under_it_that_never_uses_a_gpu(start: Start, agent: ScriptedAgent) -> None:
    client = start("""
        import subprocess
        command = ["sh", "-c", "echo fine; git --version >/dev/null 2>&1; true"]
        say(subprocess.run(command, capture_output=True, text=True).stdout)
    """)
    assert client.hear() == "fine\n"
    assert client.end() == ""
    agent.no_peer(0.1)


def test_a_forked_child_is_a_process_of_its_own(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """Forked before cuInit, parent and child each connect; the child's end does not end the parent's connection."""
    client = start("""
        child = os.fork()
        d = Driver()
        d.spin(0.001)
        d.synchronize()
        if child == 0:
            os._exit(7)
        say([child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
        hear()
        d.spin(0.001)
        d.synchronize()
        say("still here")
        hear()
    """)
    peers = [agent.peer(), agent.peer()]
    for lease, peer in enumerate(peers, 1):
        peer.expect(Kind.REQUEST)
        peer.grant(gpus[0], lease)
    child, status = client.hear()
    assert status == 7
    by_pid = {peer.hello.fields[1]: peer for peer in peers if peer.hello}
    assert set(by_pid) == {client.process.pid, child}
    assert by_pid[child].closed()
    parent = by_pid[client.process.pid]
    parent.expect(Kind.RELEASE)
    client.say()
    parent.expect(Kind.REQUEST, skip=())
    parent.grant(gpus[0], 9)
    assert client.hear() == "still here"


def test_a_child_forked_after_cuinit_starts_afresh(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """It holds none of its parent's files and no thread; whatever the driver then says to it is the driver's."""
    client = start("""
        d = Driver()
        def sockets():
            files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
            kinds = [os.readlink(f) for f in files if os.path.exists(f)]
            return sum(kind.startswith(("socket:", "anon_inode:[eventfd")) for kind in kinds)
        here = sockets()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, bytes([sockets(), len(os.listdir("/proc/self/task"))]))
            os._exit(0)
        os.waitpid(child, 0)
        say([here, *os.read(read, 2)])
        hear()
    """)
    before, in_child, threads = client.hear()
    assert before == 2
    assert (in_child, threads) == (0, 1)
    agent.peer().nothing(0.1)


def test_exit_does_not_hang_and_keeps_the_status(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """A thread waits at the shut gate while the main thread ends the program."""
    client = start("""
        d = Driver()
        spin = d.kernel("spin")
        def work():
            d("cuCtxSetCurrent", d.context)
            d.launch(spin, c.c_uint64(1000))
        threading.Thread(target=work, daemon=True).start()
        hear()
        sys.exit(5)
    """)
    peer = agent.peer()
    peer.expect(Kind.REQUEST)
    client.say()
    client.end(status=5, timeout=5)


def test_threads_without_a_context_pass(start: Start, agent: ScriptedAgent) -> None:
    """The driver's own answer, at once."""
    client = start("""
        d = Driver()
        spin = d.kernel("spin")
        answers = []
        def work():
            one = c.c_uint(1)
            pointer = c.pointer(c.c_uint64(1000))
            answers.append(d.result("cuLaunchKernel", spin, one, one, one, one, one, one, c.c_uint(0), None,
                                    (c.c_void_p * 1)(c.cast(pointer, c.c_void_p)), None))
            answers.append(d.result("cuMemAlloc_v2", c.byref(c.c_uint64()), c.c_size_t(100)))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(5)
        say([thread.is_alive(), answers])
        hear()
    """)
    assert client.hear() == [False, [201, 201]]
    agent.peer().nothing(0.1)


def test_many_short_threads(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    """Records of threads that ended are used again; none of them is waited for."""
    agent = GenerousAgent(socket_path, gpus, total=1 << 29)
    client = start("""
        d = Driver()
        add = d.kernel("add_u32")
        at = d.alloc(4096)
        d.write(at, bytes(4096))
        def work():
            d("cuCtxSetCurrent", d.context)
            d.launch(add, c.c_uint64(at), c.c_uint64(1), c.c_uint32(1))
        for _ in range(40):
            threads = [threading.Thread(target=work) for _ in range(10)]
            for t in threads: t.start()
            for t in threads: t.join()
        d.synchronize()
        say(int.from_bytes(d.read(at, 4), "little"))
        hear()
    """)
    assert client.hear() == 400
    deadline = time.monotonic() + 5
    while not any(frame.kind is Kind.RELEASE for _, frame in agent.frames):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    agent.stop()


def test_cuda_bindings_run_on_it(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    """NVIDIA's own Python bindings, which ask for every function by cuGetProcAddress."""
    agent = GenerousAgent(socket_path, gpus, total=1 << 29)
    client = start("""
        from cuda.bindings import driver
        def ok(answer):
            code, *rest = answer
            assert code == driver.CUresult.CUDA_SUCCESS, code
            return rest[0] if len(rest) == 1 else rest
        ok(driver.cuInit(0))
        context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
        ok(driver.cuCtxSetCurrent(context))
        at = ok(driver.cuMemAlloc(4096))
        ok(driver.cuMemsetD32(at, 0x01020304, 1024))
        data = bytearray(4096)
        ok(driver.cuMemcpyDtoH(data, at, 4096))
        managed = ok(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, at))
        say([data == bytes([4, 3, 2, 1]) * 1024, int(managed), ok(driver.cuMemGetInfo())[1]])
        ok(driver.cuMemFree(at))
    """)
    assert client.hear() == [True, 0, 1 << 29]
    client.end()
    assert any(frame.kind is Kind.REQUEST for _, frame in agent.frames)
    agent.stop()


def test_library_keeps_the_socket_and_the_log_that_it_was_started_with(
    start: Start, agent: ScriptedAgent, socket_path: Path, gpus: list[bytes], tmp_path: Path
) -> None:
    """A program that changes its environment while the background thread works."""
    log = tmp_path / "log"
    client = start(
        """
        d = Driver()
        os.environ["GPUSHARE_SOCKET"] = "/nowhere"
        os.environ["GPUSHARE_LOG"] = "off"
        say("changed")
        hear()
        """,
        GPUSHARE_LOG=f"info,{log}",
    )
    agent.peer()
    assert client.hear() == "changed"
    agent.stop()
    again = ScriptedAgent(socket_path, gpus)
    assert again.peer().hello is not None
    assert "the connection to the agent ended" in log.read_text()
    client.say()
    client.end()
    again.stop()


def test_background_thread_is_served_soon_after_it_wakes_up_and_no_other_thread_is_changed(
    start: Start, agent: ScriptedAgent
) -> None:
    """sched_getattr says 0.2 ms for it on Linux 6.12 or later, and 0 for every thread on older kernels."""
    client = start("""
        import platform, struct
        Driver()
        libc = c.CDLL(None)
        def attributes(tid):
            raw = c.create_string_buffer(48)
            number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
            assert libc.syscall(c.c_long(number), c.c_int(tid), raw, c.c_uint(48), c.c_uint(0)) == 0
            policy, _, nice, _, runtime = struct.unpack_from("=IQiIQ", raw.raw, 4)
            return policy, nice, runtime
        names = {int(t): open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")}
        ours = [tid for tid, name in names.items() if name == "gpushare"]
        say([attributes(ours[0]), attributes(os.getpid()), os.getpriority(os.PRIO_PROCESS, 0)])
        hear()
    """)
    agent.peer()
    ours, main, nice = client.hear()
    new_kernel = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 12)
    assert ours == [0, nice, 200_000 if new_kernel else 0]
    assert main[2] != 200_000
    client.say()
    client.end()
