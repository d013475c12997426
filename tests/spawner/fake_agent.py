"""An agent on a control socket (model/control.py) that counts like the real one, and fails when told to."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError, create_model

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.control import (
    MAX_LINE_BYTES,
    REQUEST,
    Answer,
    CloseRequest,
    ConfirmRequest,
    ErrorCode,
    Failure,
    OpenRequest,
    ReportRequest,
)
from gpushare_spawner.model.part import faults
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Tier
from tests.placement.reports import ledger_of

GIB = 2**30


class FakeAgent:
    """``gpus`` simulated GPUs of 16 GiB. `refuse` makes the next requests of a kind fail."""

    def __init__(self, socket: Path, gpus: int = 2, model: str = "Simulated GPU 16 GiB") -> None:
        self.socket = socket
        self.gpus = tuple(
            GpuReport(index=index, uuid=f"GPU-{index}", model=model, memory_bytes=16 * GIB, simulated=True)
            for index in range(gpus)
        )
        self.sessions: dict[str, SessionReport] = {}
        self.requests: list[Any] = []
        self.refuse: defaultdict[str, list[ErrorCode]] = defaultdict(list)
        self.unknown_fields: tuple[str, ...] = ()
        self.before: Callable[[Any], Any] | None = None
        """May be a coroutine function; what it raises ends the connection without an answer."""
        self.after: Callable[[Any], Any] | None = None
        """The same, between the action and the answer."""
        self.violations: list[str] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeAgent:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.socket, limit=MAX_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def asked(self, op: str) -> list[Any]:
        """The requests of one kind, in their order."""
        return [request for request in self.requests if request.op == op]

    def occupy(self, session: str, units: int, gpu: int = 0, **changes: Any) -> SessionReport:
        """A session that is simply there."""
        fields: dict[str, Any] = {
            "id": session,
            "user": session,
            "template": "other",
            "gpus": (f"GPU-{gpu}",),
            "share_units": units,
            "effective_units": units,
            "guaranteed_units": units,
            "tier_since": 1.0,
            "opened_at": 1.0,
            "pid": 1,
        }
        self.sessions[session] = SessionReport(**{**fields, **changes})
        return self.sessions[session]

    def report(self) -> Report:
        return Report(node="here", published_at=time.time(), gpus=self.gpus, sessions=tuple(self.sessions.values()))

    def owned(self) -> dict[str, int]:
        """Units that sessions own on each GPU."""
        return {
            gpu.uuid: sum(s.share_units - s.borrowed_units for s in self.sessions.values() if gpu.uuid in s.gpus)
            for gpu in self.gpus
        }

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                try:
                    request = REQUEST.validate_json(line)
                    if request.op == "open":
                        self._known_fields.validate_json(line)
                except ValidationError as error:
                    text = "; ".join(faults(error, "request"))
                    answer = Answer(error=Failure(code="bad-request", message=text))
                else:
                    self.requests.append(request)
                    if self.before is not None:
                        await _maybe(self.before(request))
                    answer = self._answer(request)
                    if self.after is not None:
                        await _maybe(self.after(request))
                writer.write(answer.model_dump_json().encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    @property
    def _known_fields(self) -> TypeAdapter[Any]:
        """The request to open a session as an agent's version without some fields has it."""
        fields: dict[str, Any] = {
            name: (field.annotation, field)
            for name, field in OpenRequest.model_fields.items()
            if name not in self.unknown_fields
        }
        return TypeAdapter(create_model("OlderRequest", __config__=OpenRequest.model_config, **fields))

    def _answer(self, request: Any) -> Answer:
        if self.refuse[request.op]:
            code = self.refuse[request.op].pop(0)
            return Answer(error=Failure(code=code, message=f"the test says {code}"))
        if isinstance(request, ReportRequest):
            return Answer(result=self.report().model_dump(mode="json"))
        if isinstance(request, OpenRequest):
            return self._open(request)
        if isinstance(request, ConfirmRequest):
            if request.id not in self.sessions:
                return Answer(error=Failure(code="unknown-session", message=f"no session {request.id}"))
            self.sessions[request.id] = self.sessions[request.id].model_copy(
                update={"confirmed": True, "pid": request.pid}
            )
            return Answer()
        if isinstance(request, CloseRequest):
            self.sessions.pop(request.id, None)
            return Answer()
        return Answer(error=Failure(code="internal", message="not in this fake"))

    def _open(self, request: OpenRequest) -> Answer:
        session = SessionReport(
            id=request.id,
            user=request.user,
            server=request.server,
            template=request.template,
            quota=request.quota,
            gpus=request.gpus,
            share_units=request.share_units,
            layer=request.layer,
            neighbours=request.neighbours,
            borrowed_units=request.borrowed_units,
            tier=Tier.ACTIVE,
            tier_since=time.time(),
            effective_units=request.share_units,
            guaranteed_units=request.share_units,
            opened_at=time.time(),
            confirmed=False,
        )
        there = self.sessions.get(request.id)
        if there is not None and (there.gpus, there.share_units) != (request.gpus, request.share_units):
            return Answer(error=Failure(code="exists", message=f"{request.id} is open"))
        self.sessions[request.id] = session
        ledger = ledger_of([self.report()])
        over = [uuid for uuid, units in self.owned().items() if units > 100]
        if over:
            del self.sessions[request.id]
            self.violations.append(f"{request.id} wanted {request.share_units} on {over}")
            return Answer(error=Failure(code="no-capacity", message=f"no room on {over[0]}"))
        check_ledger(ledger)
        return Answer(
            result={
                "environment": {
                    "GPUSHARE_SOCKET": f"/run/fake/{request.id}/socket",
                    "LD_PRELOAD": "/opt/fake/libgpushare.so",
                    "LD_LIBRARY_PATH": "/opt/fake/simgpu",
                    "CUDA_VISIBLE_DEVICES": ",".join(request.gpus),
                    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                }
            }
        )


async def _maybe(value: Any) -> None:
    if asyncio.iscoroutine(value):
        await value
