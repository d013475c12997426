"""Which process made a connection, where its pid belongs to another process by now."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_spawner.agent import processes, session_socket
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_socket import SO_PEERPIDFD, identified
from gpushare_spawner.model.frames import Kind, Role
from tests.agent.conftest import Agent
from tests.agent.peers import Peer

NEXT_PID = Path("/proc/sys/kernel/ns_last_pid")
NOBODY = 65534
TRIES = 200


def kernel_tells() -> bool:
    """Whether this kernel gives a pidfd of the process that connected."""
    one, other = socket.socketpair()
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


@pytest.fixture
def listener(short_folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(short_folder / "s"))
        listening.listen()
        yield listening


def connected_by_another(path: str, descriptor: int) -> int:
    """Have a process connect this socket and end. Return the pid that it had."""
    code = f"import os, socket; socket.socket(fileno={descriptor}).connect({path!r}); print(os.getpid())"
    done = subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[descriptor], stdout=subprocess.PIPE)
    return int(done.stdout)


def process_of_pid(pid: int, uid: int) -> None:
    """Start a process of this pid and user, which waits. Skips the test where the kernel does not allow it."""
    for _ in range(TRIES):
        try:
            NEXT_PID.write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"the next pid cannot be chosen: {error.strerror} ({NEXT_PID})")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.setuid(uid)
            os.write(write_end, b"1")
            signal.pause()
            os._exit(0)
        # until the child has changed its user, the agent would see the user of the tests
        os.read(read_end, 1)
        os.close(read_end)
        os.close(write_end)
        if child == pid:
            return
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pytest.skip(f"other processes were faster {TRIES} times")


@pytest.mark.parametrize("older_kernel", [False, True], ids=["SO_PEERPIDFD", "older kernel"])
async def test_process_that_got_the_pid_of_a_peer_that_ended_is_not_taken_for_it(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, older_kernel: bool
) -> None:
    """The pid is given away between connect and accept; the peer's end of the connection is still open."""
    if older_kernel:
        monkeypatch.setattr(session_socket, "_pidfd_of_connection", lambda connection: None)
    elif not kernel_tells():
        pytest.skip("this kernel has no SO_PEERPIDFD (Linux 6.5)")
    path = agent.open("eve")
    forged = Peer(path)
    agent.peers.append(forged)
    pid = connected_by_another(path, forged.socket.fileno())
    # an older kernel does not tell of two processes of one user which one has connected
    process_of_pid(pid, NOBODY if older_kernel else os.geteuid())
    try:
        forged.socket.setblocking(False)
        forged.send(Kind.HELLO, Role.CUDA, pid, 100)
        assert await forged.ended() is not None
        assert not agent.node.sessions["eve"].cuda
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_peer_is_the_process_that_connected(listener: socket.socket) -> None:
    code = f"import socket; s = socket.socket(1, 5); s.connect({listener.getsockname()!r}); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        accepted, _ = listener.accept()
        with accepted:
            found = identified(accepted)
            assert found.pid == process.pid
            assert found.uid == os.geteuid()
            assert found.process == processes.named(process.pid)
            assert found.pidfd is not None
            process.kill()
            process.wait()
            os.close(found.pidfd)
            open_before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(ProcessLookupError):
                identified(accepted)
            assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.fixture
def own_connection(listener: socket.socket) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            yield accepted


def test_pid_that_changes_hands_while_it_is_looked_at_is_refused(
    own_connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older kernel: the start times before and after the pidfd was opened differ."""
    starts = iter(range(10))
    monkeypatch.setattr(session_socket, "_pidfd_of_connection", lambda connection: None)
    monkeypatch.setattr(processes, "named", lambda pid: ProcessName(pid, next(starts), "boot"))
    with pytest.raises(ProcessLookupError):
        identified(own_connection)


@pytest.mark.parametrize("kernel", ["without pidfd", "without SO_PEERPIDFD"])
def test_older_kernels_name_the_peer_by_pid_and_start_time(
    own_connection: socket.socket, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    def no_option(connection: socket.socket) -> None:
        return None

    def no_pidfd(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(session_socket, "_pidfd_of_connection", no_option)
    if kernel == "without pidfd":
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    assert identified(own_connection).process == processes.named(os.getpid())


@pytest.mark.parametrize(
    ("answer", "raised"),
    [(errno.ESRCH, ProcessLookupError), (errno.EINVAL, ProcessLookupError), (errno.EMFILE, OSError)],
)
def test_what_the_kernel_refuses_names_no_process(
    own_connection: socket.socket, monkeypatch: pytest.MonkeyPatch, answer: int, raised: type[OSError]
) -> None:
    class Refusing:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            if option == SO_PEERPIDFD:
                raise OSError(answer, os.strerror(answer))
            return own_connection.getsockopt(level, option, size)

    with pytest.raises(raised) as refusal:
        identified(Refusing())  # type: ignore[arg-type]
    assert isinstance(refusal.value, ProcessLookupError) == (raised is ProcessLookupError)
