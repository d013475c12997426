"""The control socket: one JSON object per line in each direction. model/control.py defines the requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpushare_spawner.agent.session_socket import credentials
from gpushare_spawner.agent.state_folder import check_length
from gpushare_spawner.background import cancel
from gpushare_spawner.descriptors import Acceptor
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.control import MAX_LINE_BYTES, REQUEST, Answer, ControlRefused, ErrorCode, Failure, Request
from gpushare_spawner.model.part import faults
from gpushare_spawner.wording.amounts import reason

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
"""Maximum number of requests that are handled at a time; others wait."""
MAX_CONNECTIONS = 1024
"""Maximum number of connections with or without a request. Further connections get the answer `overloaded`."""
BACKLOG = 4096
"""Number of connections that the kernel queues until they are accepted; it may queue fewer (net.core.somaxconn)."""
QUIET_AFTER = 300.0
"""Seconds without a request after which a connection is closed."""
READ_WITHIN = 5.0
"""Seconds within which a peer must send its request when there are too many connections."""
WRITE_WITHIN = 30.0
"""Seconds within which a peer must read its answer."""


class CannotListen(RuntimeError):
    """Error for a control socket that cannot be created. The message states the reason."""


class ControlSocket:
    """Server that only the agent's owner and root may use."""

    def __init__(self, path: Path, answer: Callable[[Request], Awaitable[dict[str, Any]]]) -> None:
        """Prepare the socket. `answer` carries out a request, or raises ControlRefused."""
        self.path = path
        self._answer = answer
        self._acceptor: Acceptor | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._at_work = asyncio.Semaphore(MAX_AT_ONCE)
        self._crowded = LogOnce(
            log,
            "requests on the control socket are rejected",
            "requests on the control socket are answered again",
            10.0,
        )

    async def start(self) -> None:
        """Listen. Raises CannotListen or PathTooLong."""
        check_length(self.path)
        if _somebody_listens(self.path):
            raise CannotListen(f"another agent answers on {self.path}; stop it, or use a different --control-socket")
        if self.path.is_socket():
            self.path.unlink()  # left behind by an agent that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(self.path))
        except OSError as error:
            listener.close()
            why = "the path is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise CannotListen(f"the control socket {self.path} cannot be made: {why}") from None
        finally:
            os.umask(before)
        listener.setblocking(False)
        listener.listen(BACKLOG)
        trouble = LogOnce(
            log,
            "no connection to the control socket can be accepted",
            "connections to the control socket are accepted again",
            lasts=10.0,
        )
        self._acceptor = Acceptor(listener, self._accepted, trouble, at_once=64)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._acceptor is not None:
            self._acceptor.close()
        await cancel(*self._connections)
        self.path.unlink(missing_ok=True)

    def _accepted(self, connection: socket.socket) -> None:
        pid, uid = credentials(connection)
        if uid not in (os.geteuid(), 0):
            log.warning("process %d of uid %d may not use the control socket", pid, uid)
            connection.close()
            return
        too_many = len(self._connections) >= MAX_CONNECTIONS
        if len(self._connections) >= 2 * MAX_CONNECTIONS:
            connection.close()  # there are too many connections even for the answer `overloaded`
            return
        if too_many:
            self._crowded.about(f"there are {MAX_CONNECTIONS} connections; the last one is from process {pid}")
        else:
            self._crowded.resolved()
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._connected(connection, too_many))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connected(self, connection: socket.socket, too_many: bool) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES)
        try:
            if too_many:
                # Read first, because closing a connection with unread input discards its answer.
                async with asyncio.timeout(READ_WITHIN):
                    await reader.readline()
                message = f"the agent has {MAX_CONNECTIONS} connections on its control socket; try again in a second"
                await _write(writer, _failure("overloaded", message))
            else:
                await self._serve(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # the peer has disconnected or sends nothing, or the agent is closing
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                async with asyncio.timeout(QUIET_AFTER):
                    line = await reader.readline()
            except ValueError:
                await _write(
                    writer, _failure("bad-request", f"a request is one line of at most {MAX_LINE_BYTES} bytes")
                )
                return
            if not line:
                return
            async with self._at_work:
                answer = await self._handle(line)
            await _write(writer, answer)

    async def _handle(self, line: bytes) -> Answer:
        try:
            request = REQUEST.validate_json(line)
        except ValidationError as error:
            return _failure("bad-request", "; ".join(faults(error, "request")[:5])[:2000])
        try:
            return Answer(result=await self._answer(request))
        except ControlRefused as refusal:
            return _failure(refusal.code, refusal.message)
        except Exception as error:
            log.exception("%s failed", request.op)
            return _failure("internal", f"{request.op} failed: {reason(error)}")


async def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    writer.write(answer.model_dump_json().encode() + b"\n")
    async with asyncio.timeout(WRITE_WITHIN):
        await writer.drain()


def _failure(code: ErrorCode, message: str) -> Answer:
    return Answer(error=Failure(code=code, message=message))


def _somebody_listens(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK)
    return True
