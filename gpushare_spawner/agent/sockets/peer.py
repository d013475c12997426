"""The process at the other end of a connection, as the kernel knows it: never as it describes itself.

The kernel notes the pid of a peer when it connects, and gives the pid away again when the process has ended. So a
connection that is accepted late can carry the pid of another process, perhaps of another user.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName

SO_PEERPIDFD = 77
"""include/uapi/asm-generic/socket.h of Linux 6.5; the same on x86-64 and aarch64. Python has no name for it yet."""
_UNKNOWN_OPTION = (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENOSYS)
"""What older kernels and user-space kernels (gVisor) answer."""
_HAS_ENDED = (errno.ESRCH, errno.EINVAL, errno.ENODATA)
"""What kernels from 6.5 on answer for a process that was reaped; since 6.16 they give a pidfd all the same."""
_CREDENTIALS = struct.Struct("3i")
_PIDFD = struct.Struct("i")


@dataclass(frozen=True)
class Peer:
    """The process that made a connection."""

    pid: int
    """0 where the process is in a pid namespace that the agent cannot see."""
    uid: int
    """Its effective uid when it connected."""
    process: ProcessName | None = None
    """None where the agent cannot see it."""
    pidfd: int | None = None
    """Becomes readable when the process ends; None: the kernel has no pidfd, or the process is the agent itself."""


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the peer at the time of its connect (SO_PEERCRED)."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def identified(connection: socket.socket) -> Peer:
    """Return the process that made this connection, and no later one of the same pid. The caller closes its pidfd.

    Raises ProcessLookupError where that process has ended, and OSError where no descriptor is left.
    """
    pid, uid = credentials(connection)
    pidfd = _pidfd_of_connection(connection)
    known = pidfd is not None  # by the connection itself, so that it cannot be of another process
    if pidfd is None and pid:
        pidfd = _pidfd_of(pid)
    try:
        name = processes.named(pid) if pid else None
        if (pidfd is not None and _has_ended(pidfd)) or (pid and name is None):
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
        if pid and not known and not _can_have_connected(pid, uid):
            raise ProcessLookupError(errno.ESRCH, f"pid {pid} is another process by now")
    except OSError:
        if pidfd is not None:
            os.close(pidfd)
        raise
    if pidfd is not None and pid == os.getpid():
        os.close(pidfd)
        pidfd = None
    return Peer(pid, uid, name, pidfd)


def _pidfd_of_connection(connection: socket.socket) -> int | None:
    """Return a pidfd of the process that connected; None where the kernel cannot tell. Raises as `identified`."""
    try:
        answer = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _PIDFD.size)
    except OSError as error:
        if error.errno in _UNKNOWN_OPTION:
            return None
        if error.errno in _HAS_ENDED:
            raise ProcessLookupError(errno.ESRCH, "the process that connected has ended") from error
        raise
    return int(_PIDFD.unpack(answer)[0])


def _pidfd_of(pid: int) -> int | None:
    """Return a pidfd of the process that has this pid now; None where the kernel has none. Raises as `identified`."""
    before = processes.named(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):  # EPERM: a seccomp profile
            return None
        raise
    if before is None or processes.named(pid) != before:
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return pidfd


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _can_have_connected(pid: int, uid: int) -> bool:
    """Whether the process of this pid has that uid in any form: a process of another user did not connect."""
    return uid in processes.uids(pid)
