"""A real kernel over a websocket through the proxy, spoken to as JupyterLab does (the Jupyter messaging protocol)."""

from __future__ import annotations

import asyncio
import json
import uuid
from datetime import UTC, datetime
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect


class CellFailed(AssertionError):
    """A cell raised; the message is its traceback."""


class Kernel:
    """One connection to one kernel; cells run one after the other."""

    def __init__(self, connection: WebSocketClientConnection) -> None:
        self._connection = connection
        self._session = uuid.uuid4().hex

    @classmethod
    async def connect(cls, url: str, path: str, token: str) -> Kernel:
        """Connect to the kernel at this path (``/user/…/api/kernels/ID``)."""
        address = url.replace("http", "ws", 1) + path + "/channels"
        request = HTTPRequest(
            address, headers={"Authorization": f"token {token}"}, connect_timeout=20, request_timeout=20
        )
        return cls(await websocket_connect(request, max_message_size=2**26))

    async def send(self, code: str) -> str:
        """Start a cell; the id of its message."""
        message = {
            "header": {
                "msg_id": uuid.uuid4().hex,
                "msg_type": "execute_request",
                "username": "e2e",
                "session": self._session,
                "date": datetime.now(UTC).isoformat(),
                "version": "5.3",
            },
            "parent_header": {},
            "metadata": {},
            "content": {"code": code, "silent": False, "store_history": True, "allow_stdin": False},
            "buffers": [],
            "channel": "shell",
        }
        await self._connection.write_message(json.dumps(message))
        return str(message["header"]["msg_id"])  # type: ignore[index]

    async def result(self, cell: str, timeout: float = 40.0) -> str:
        """What the cell wrote to its standard output. Raises CellFailed, or TimeoutError."""
        async with asyncio.timeout(timeout):
            return await self._result(cell)

    async def run(self, code: str, timeout: float = 40.0) -> str:
        """Run a cell and wait for its end; see `result`."""
        return await self.result(await self.send(code), timeout)

    async def _result(self, cell: str) -> str:
        written: list[str] = []
        replied = idle = False
        failure: str | None = None
        while not (replied and idle):
            raw = await self._connection.read_message()
            if raw is None:
                raise CellFailed("the connection to the kernel was closed")
            message: dict[str, Any] = json.loads(raw)
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] in ("restarting", "dead"):
                raise CellFailed(f"the kernel is {content['execution_state']}")
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream" and content["name"] == "stdout":
                written.append(content["text"])
            elif kind == "error":
                failure = "\n".join(content["traceback"])
            elif kind == "execute_reply":
                replied = True
            elif kind == "status" and content["execution_state"] == "idle":
                idle = True
        if failure is not None:
            raise CellFailed(failure)
        return "".join(written).strip()

    def close(self) -> None:
        """Close the connection; the kernel lives on."""
        self._connection.close()
