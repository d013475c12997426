"""A blocking connection to the agent over the session socket, for a command or a notebook cell.

`ask` reads the share's status once, and `ask_cells` the executions of cells. `ReadableStatus` prints like ``gpushare
status``. `named` adds the names of a session's processes for its user: the notebook of a kernel, or the file of another
program. The server extension's persistent connection is in session_client.py.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from gpushare_spawner.model.frames import Feature, Frame, Kind, QueryTopic, Role
from gpushare_spawner.model.layers import LAYER_VARIABLE
from gpushare_spawner.model.share_status import (
    ANNOTATIONS_VARIABLE,
    MAX_RECORD_BYTES,
    AgentRecord,
    CellsStatus,
    ShareStatus,
)
from gpushare_spawner.wording.amounts import AGENT_CLOSED, agent_refused, agent_silent, agent_unavailable, reason
from gpushare_spawner.wording.layers import NO_AGENT_FOR_CELLS, NO_CELLS, NO_SHARE

SOCKET_VARIABLE = "GPUSHARE_SOCKET"
"""Variable with the path of the session's socket, set by the spawner. Without it, the server has no share."""
LIBRARY_VERSION = 100
"""This client's version in HELLO: 0.1.0 as major*10000 + minor*100 + patch."""

Answer = TypeVar("Answer")


class AgentUnavailable(Exception):
    """Missing answer of the agent. The message is a sentence with the reason."""


def hello() -> tuple[int, ...]:
    """Return the fields of a notebook server's HELLO."""
    return Role.NOTEBOOK, os.getpid(), LIBRARY_VERSION


def unpack(packet: bytes) -> Frame | AgentRecord:
    """Return the record, or the connection's first frame. Raises AgentUnavailable if the connection has ended."""
    if not packet:
        raise AgentUnavailable(AGENT_CLOSED)
    try:
        received = AgentRecord.parse(packet) if packet.startswith(b"{") else Frame.unpack(packet)
    except (ValueError, TypeError, RecursionError) as error:
        raise AgentUnavailable(agent_unavailable(f"its answer cannot be read: {error}")) from error
    if isinstance(received, Frame) and received.kind is Kind.ERROR:
        raise AgentUnavailable(agent_refused(received.fields[0]))
    return received


def session_socket() -> str | None:
    """Return the path of the session's socket; None without a share."""
    return os.environ.get(SOCKET_VARIABLE) or None


class AgentConnection:
    """A connection after WELCOME. Its methods raise TimeoutError, OSError, ValueError or AgentUnavailable."""

    def __init__(self, path: str, deadline: float) -> None:
        """Connect. `deadline`: the `time.monotonic` instant by which all calls must end."""
        self._deadline = deadline
        self._serial = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(self._left())
            self._socket.connect(path)
            self.send(Kind.HELLO, *hello())
            while not (isinstance(packet := self._next(), Frame) and packet.kind is Kind.WELCOME):
                pass
            self.features = Feature(packet.fields[6])
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, kind: Kind, *fields: int) -> None:
        """Send a frame."""
        self._serial += 1
        self._socket.send(Frame(kind, fields, serial=self._serial).pack())

    def record(self) -> AgentRecord:
        """Return the next record."""
        while not isinstance(packet := self._next(), AgentRecord):
            pass
        return packet

    def _next(self) -> Frame | AgentRecord:
        self._socket.settimeout(self._left())
        return unpack(self._socket.recv(MAX_RECORD_BYTES))

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def with_agent(path: str, timeout: float, use: Callable[[AgentConnection], Answer]) -> Answer:
    """Return the result of `use` within ``timeout`` seconds. Raises only AgentUnavailable."""
    try:
        with AgentConnection(path, time.monotonic() + timeout) as connection:
            return use(connection)
    except TimeoutError as error:
        raise AgentUnavailable(agent_silent(timeout)) from error
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or reason(error)
        raise AgentUnavailable(agent_unavailable(f"{why}: {path}")) from error


def ask_cells(path: str | None = None, timeout: float = 2.0) -> CellsStatus:
    """Return the executions of cells. ``path`` defaults to $GPUSHARE_SOCKET. Raises AgentUnavailable."""

    def cells(connection: AgentConnection) -> CellsStatus:
        if Feature.CELLS not in connection.features:
            raise AgentUnavailable(NO_CELLS)
        connection.send(Kind.QUERY, QueryTopic.CELLS)
        while (answer := connection.record().cells) is None:
            pass
        return answer

    path = path or session_socket()
    if path is None:
        raise AgentUnavailable(NO_AGENT_FOR_CELLS if os.environ.get(LAYER_VARIABLE) else NO_SHARE)
    return with_agent(path, timeout, cells)


_KERNEL = re.compile(r"kernel-([0-9a-f]{8})[0-9a-f-]*\.json")
_LETTERS = 40


def named(status: ShareStatus, proc: Path = Path("/proc")) -> ShareStatus:
    """Return the status with the names of its processes, where these can be read."""
    return replace(
        status, processes=tuple(replace(process, name=process_name(process.pid, proc)) for process in status.processes)
    )


KERNEL = "the kernel "
"""Begin of the name of a kernel's process."""


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """Return "the kernel of train.ipynb", "the kernel 1a2b3c4d", "train.py" or "process 123". Raises nothing.

    Jupyter Server passes the path of the notebook to a kernel in JPY_SESSION_NAME.
    """
    arguments = _words(proc / str(pid) / "cmdline")
    kernel = next((match for word in arguments if (match := _KERNEL.search(word))), None)
    if kernel is not None:
        environment = dict(word.partition("=")[::2] for word in _words(proc / str(pid) / "environ"))
        notebook = environment.get("JPY_SESSION_NAME")
        return f"{KERNEL}of {_short(notebook)}" if notebook else f"{KERNEL}{kernel[1]}"
    if not arguments:
        return f"process {pid}"
    program = Path(arguments[0]).name
    if program.startswith("python"):
        options = [word for word in arguments[1:] if word.startswith("-")]
        script = next((word for word in arguments[1:] if not word.startswith("-")), "")
        if script and not {"-c", "-m"} & set(options):
            return f"{_short(script)} (process {pid})"
    return f"{_short(program)} (process {pid})"


def _short(path: str) -> str:
    name = "".join(letter for letter in Path(path).name if letter.isprintable())
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def _words(path: Path) -> list[str]:
    try:
        return [word for word in path.read_bytes().decode(errors="replace").split("\0") if word]
    except OSError:
        return []


class ReadableStatus(ShareStatus):
    """The result of ``gpushare_spawner.notebook.status()`` in a cell or a script."""

    def __str__(self) -> str:
        # only a cell that prints the status imports pydantic
        from gpushare_spawner.wording.share_status import page

        return page(self, time.time())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Display the value in a cell like ``gpushare status``."""
        printer.text(str(self))


def ask(path: str | None = None, timeout: float = 2.0) -> ReadableStatus:
    """Return the share's status within ``timeout`` seconds. ``path`` defaults to $GPUSHARE_SOCKET. Raises nothing."""
    path = path or session_socket()
    if path is None:
        return _by_annotations() or ReadableStatus(shared=False)
    try:
        return with_agent(path, timeout, _status)
    except AgentUnavailable as error:
        return _by_annotations() or ReadableStatus(problem=str(error))


def _by_annotations() -> ReadableStatus | None:
    """Return another sharing layer's status from the pod's annotations; None if the pod has none."""
    if ANNOTATIONS_VARIABLE not in os.environ:
        return None
    # not at the top: it imports pydantic, which a cell needs only with another layer
    from gpushare_spawner.notebook.pod_annotations import PodAnnotations

    pod = PodAnnotations.of(os.environ)
    return ReadableStatus(**vars(pod.status())) if pod is not None else None


def _status(connection: AgentConnection) -> ReadableStatus:
    connection.send(Kind.QUERY)
    while (status := connection.record().status) is None:
        pass
    return ReadableStatus(**vars(replace(named(status), at=time.time())))
