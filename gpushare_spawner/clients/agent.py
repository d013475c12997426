"""Client of a machine's agent over its control socket.

model/control.py defines the requests; agent/node.py answers them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from pydantic import BaseModel, ValidationError

from gpushare_spawner.model.control import (
    MAX_LINE_BYTES,
    AgentUnreachable,
    Answer,
    AskedRequest,
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    Opened,
    OpenRequest,
    ReportRequest,
    ServiceRequest,
    TierRequest,
)
from gpushare_spawner.model.report import Report
from gpushare_spawner.wording.amounts import reason


def default_control_socket() -> Path:
    """Return the control socket of this machine's agent: ``$GPUSHARE_CONTROL`` or /run/gpushare/control.sock."""
    return Path(os.environ.get("GPUSHARE_CONTROL") or "/run/gpushare/control.sock")


class AgentClient:
    """Client of one agent. Each request uses its own connection, so tasks can share a client.

    Every method raises `AgentUnreachable` if no agent answers within `timeout` seconds or its answer is invalid, and
    `ControlRefused` (with a code for programs and a sentence for people) if the agent rejects the request.
    """

    def __init__(self, socket: str | Path, timeout: float = 5.0) -> None:
        self.socket = Path(socket)
        self.timeout = timeout

    async def report(self) -> Report:
        """Return the agent's report about its node."""
        answer = await self._ask(ReportRequest())
        try:
            return Report.model_validate(answer)
        except ValidationError as error:
            raise AgentUnreachable(f"the agent on {self.socket} sent a report that cannot be read: {error}") from None

    def report_age(self) -> float:
        """Return the age of the last report in seconds: 0, because the agent creates a report for each request."""
        return 0.0

    async def open(self, request: OpenRequest) -> Opened:
        """Reserve a share. The answer contains the environment of the notebook server."""
        answer = await self._ask(request)
        try:
            return Opened.model_validate(answer)
        except ValidationError as error:
            raise AgentUnreachable(
                f"the agent on {self.socket} opened a session without an environment: {error}"
            ) from None

    async def confirm(self, id: str, pid: int) -> None:
        """Confirm that the session's process is running, with its pid on the agent's machine."""
        await self._ask(ConfirmRequest(id=id, pid=pid))

    async def close(self, id: str) -> None:
        """Close the session. Closing a session that is not open is not an error."""
        await self._ask(CloseRequest(id=id))

    async def send(self, request: ServiceRequest) -> None:
        """Send a request of the service; returns after the agent has carried it out.

        An agent that predates the request refuses it with code ``bad-request``. The other codes are at the
        requests in `model.control`.
        """
        await self._ask(request)

    async def carried_out(self, request: TierRequest) -> bool:
        """Return whether the tier has changed: always true, because the agent answers after the change."""
        return True

    async def wait_for_ask(self, within: float) -> bool:
        """Return whether notebook servers have requests for the service.

        Waits for the first request, at most ``within`` seconds.
        """
        answer = await self._ask(AskedRequest(within=within), within + self.timeout)
        return answer.get("asked") is True

    async def _ask(self, request: BaseModel, timeout: float | None = None) -> dict[str, object]:
        patience = timeout if timeout is not None else self.timeout
        try:
            async with asyncio.timeout(patience):
                answer = await self._answer(request.model_dump_json().encode() + b"\n", patience)
        except TimeoutError:
            raise AgentUnreachable(f"the agent on {self.socket} did not answer within {patience:g} s") from None
        except FileNotFoundError:
            raise AgentUnreachable(
                f"no agent runs here: {self.socket} does not exist; start `gpushare agent`"
            ) from None
        except ConnectionRefusedError:
            raise AgentUnreachable(f"no agent listens on {self.socket}; start `gpushare agent`") from None
        except PermissionError:
            raise AgentUnreachable(
                f"{self.socket} can only be used by root and by the user that the agent runs as"
            ) from None
        except (OSError, ValueError) as error:
            raise AgentUnreachable(f"the agent on {self.socket} cannot be asked: {reason(error)}") from None
        if answer.error is not None:
            raise ControlRefused(answer.error.code, answer.error.message)
        return answer.result

    async def _answer(self, line: bytes, patience: float) -> Answer:
        """Return the agent's answer. Repeats the request for ``patience`` seconds while the agent is overloaded."""
        clock = asyncio.get_running_loop().time
        end, pause = clock() + patience, 0.05
        while True:
            text = await self._exchange(line)
            try:
                answer = Answer.model_validate_json(text)
            except ValidationError:
                fault = "closed the connection without an answer" if not text else "sent an answer that cannot be read"
                raise AgentUnreachable(f"the agent on {self.socket} {fault}") from None
            if answer.error is None or answer.error.code != "overloaded":
                return answer
            if clock() + pause > end - 0.1:
                raise AgentUnreachable(f"the agent on {self.socket} is overloaded: {answer.error.message}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _exchange(self, line: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(sock=await self._connected(), limit=MAX_LINE_BYTES)
        try:
            writer.write(line)
            await writer.drain()
            return await reader.readline()
        finally:
            writer.close()

    async def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            while True:
                try:
                    connection.connect(str(self.socket))
                    return connection
                except BlockingIOError:
                    # the agent's backlog is full; the socket does not connect later by itself
                    await asyncio.sleep(0.01)
        except BaseException:
            connection.close()
            raise
