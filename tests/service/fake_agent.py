"""An agent without GPUs: a control socket, and sessions that the test describes. It does what it is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from gpushare_spawner.idle.use import UseCount
from gpushare_spawner.model.control import (
    REQUEST,
    Answer,
    AnswerRequest,
    AskedRequest,
    ControlsRequest,
    CordonRequest,
    Failure,
    MessageRequest,
    NoticeRequest,
    ReportRequest,
    Request,
    ResizeRequest,
    TierRequest,
)
from gpushare_spawner.model.controls import AskAnswer, Cordon
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import EndedSession, GpuReport, Notice, Report, SessionReport
from gpushare_spawner.model.share import Tier, UseRule, session_id, voids_idle_action

GIB = 2**30


class FakeAgent:
    """``asked``: every request but for reports, in order. ``before`` is called with each request, before it is done."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self.clock = clock
        self.node = "fake"
        self.sessions: dict[str, SessionReport] = {}
        self.asked: list[Any] = []
        self.cordons: tuple[Cordon, ...] = ()
        self.ended: list[EndedSession] = []
        self.stop_trouble: str | None = None
        self.answers: list[AskAnswer] = []
        self._rules: dict[str, UseRule | None] = {}
        self._counts: dict[str, UseCount] = {}
        self.older = False
        """Whether it does not know session controls yet."""
        self.kept: Callable[[NoticeRequest], Notice | None] = lambda request: request.notice
        self.before: Callable[[Request], None] = lambda request: None
        self.gpus: tuple[GpuReport, ...] = (
            GpuReport(index=0, uuid="GPU-0", model="Simulated GPU 16 GiB", memory_bytes=16 * GIB, simulated=True),
            GpuReport(index=1, uuid="GPU-1", model="Simulated GPU 16 GiB", memory_bytes=16 * GIB, simulated=True),
        )

    def add(self, user: str, server: str = "", **changes: Any) -> str:
        """An idle, active session with a quarter of GPU 0, opened now; returns its id."""
        name = session_id(user, server)
        values = {
            "id": name, "user": user, "server": server, "template": "quarter", "gpus": ("GPU-0",), "share_units": 25,
            "tier_since": self.clock(), "effective_units": 25, "guaranteed_units": 25, "opened_at": self.clock(),
            "memory_limit_bytes": 16 * GIB, "kernels": 1, "kernels_busy": 0,
        }  # fmt: skip
        self.sessions[name] = SessionReport(**(values | changes))
        return name

    def change(self, name: str, **changes: Any) -> None:
        self.sessions[name] = self.sessions[name].model_copy(update=changes)

    def work(self, name: str, seconds: float = 20.0) -> None:
        """A burst that ends now: up if it counts as use, and notices are taken back; but see `SessionReport.yields`.

        ``seconds``: how long it took the GPU.
        """
        session = self.sessions[name]
        self.change(name, gpu_seconds=session.gpu_seconds + seconds, last_gpu_activity=self.clock())
        if not self._used(self.sessions[name]):
            return
        notice = session.notice if session.notice is not None and not session.notice.averted_by_work else None
        if session.yields:
            self.change(name, last_gpu_activity=self.clock(), notice=notice)
            return
        since = session.tier_since if session.tier is Tier.ACTIVE else self.clock()
        self.change(
            name, tier=Tier.ACTIVE, tier_since=since, effective_units=session.share_units,
            guaranteed_units=session.share_units, last_gpu_activity=self.clock(), notice=notice,
        )  # fmt: skip

    def _used(self, session: SessionReport) -> bool:
        notice = session.notice
        rule = notice.use if session.tier is Tier.ACTIVE and notice is not None else self._rules.get(session.id)
        if rule is None:
            return True
        return self._counts[session.id].add(self.clock(), session.gpu_seconds, False, rule)

    def _count(self, session: SessionReport) -> None:
        self._counts[session.id] = UseCount(self.clock(), session.gpu_seconds)

    def report(self) -> Report:
        report = Report(
            node=self.node,
            published_at=self.clock(),
            gpus=self.gpus,
            sessions=tuple(self.sessions.values()),
            ended=tuple(self.ended),
            supports_budgets=not self.older,
            stop_trouble=self.stop_trouble,
        )
        return report.with_cordons(self.cordons)

    @property
    def told(self) -> list[tuple[str, str, str | None]]:
        """(what, session, tier) of all notices and tiers that were asked for."""
        asked = [request for request in self.asked if request.op in ("tier", "notice")]
        return [(request.op, request.id, request.tier and request.tier.value) for request in asked]

    def answer(self, request: Request) -> Answer:
        self.before(request)
        if isinstance(request, ReportRequest):
            return Answer(result=self.report().model_dump(mode="json"))
        if isinstance(request, AskedRequest):
            if self.older:
                return _refusal("bad-request", "op: 'asked' does not match")
            return Answer(result={"asked": any(session.asks for session in self.sessions.values())})
        self.asked.append(request)
        if isinstance(request, CordonRequest):
            if self.older:
                return _refusal("bad-request", "op: 'cordon' does not match")
            others = [one for one in self.cordons if one.gpu != request.gpu]
            self.cordons = (*others, *([request.cordon] if request.cordon is not None else []))
            return Answer()
        session = self.sessions.get(request.id)
        if session is None:
            return _refusal("unknown-session", f"there is no session {request.id}")
        if isinstance(request, NoticeRequest):
            if session.notice is None and session.tier is Tier.ACTIVE:
                self._count(session)
            self.change(request.id, notice=self.kept(request))
        elif isinstance(request, ControlsRequest | MessageRequest | AnswerRequest):
            if self.older:
                return _refusal("bad-request", "op: 'controls' does not match")
            self._set(session, request)
        elif isinstance(request, ResizeRequest):
            return self._resize(session, request)
        elif isinstance(request, TierRequest):
            if self.older and request.background:
                return _refusal("bad-request", "background: unknown field")
            guards = request.if_idle_since, request.if_gpu_seconds
            if voids_idle_action(session.gpu_busy, session.last_gpu_activity, session.gpu_seconds, *guards):
                return _refusal("busy", f"session {request.id} has worked meanwhile")
            self._rules[session.id] = request.use
            self._count(session)
            lost = session.share_units - request.effective_units if request.yields_until is not None else 0
            self.change(
                request.id, tier=request.tier, tier_since=self.clock(), effective_units=request.effective_units,
                guaranteed_units=request.effective_units, notice=None, yields=request.yields_until is not None,
                borrowed_units=max(session.borrowed_units, lost), background=request.background,
            )  # fmt: skip
        return Answer()

    def _set(self, session: SessionReport, request: ControlsRequest | MessageRequest | AnswerRequest) -> None:
        """Session controls, as the agent keeps them."""
        if isinstance(request, MessageRequest):
            standing = request.messages(session.messages)
            self.change(session.id, message=standing[-1] if standing else None, messages=standing)
            return
        if isinstance(request, ControlsRequest):
            self.change(session.id, **dict(request.controls))
        if request.answer is not None:
            self.answers.append(request.answer)
            number = request.answer.number
            self.change(session.id, asks=tuple(ask for ask in session.asks if ask.number != number))

    def _resize(self, session: SessionReport, request: ResizeRequest) -> Answer:
        """As an agent whose units are all owned: nothing is lent. A memory limit in percent counts."""
        owned = sum(
            one.share_units
            for one in self.sessions.values()
            if set(one.gpus) & set(session.gpus) and one is not session
        )
        if owned + request.share_units > 100:
            return _refusal("no-capacity", f"{100 - owned} units are free")
        units = (
            request.share_units if session.tier is Tier.ACTIVE else min(session.effective_units, request.share_units)
        )
        limit = session.memory_limit_bytes
        if request.memory_limit is not None:
            limit = resolve_bytes(request.memory_limit, 16 * GIB)
        self.change(
            request.id, share_units=request.share_units, last_units=request.last_units, effective_units=units,
            guaranteed_units=units, memory_limit_bytes=limit,
        )  # fmt: skip
        return Answer()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    answer = self.answer(REQUEST.validate_json(line))
                except Refuse as refusal:
                    answer = _refusal("internal", str(refusal))
                writer.write(answer.model_dump_json().encode() + b"\n")
                await writer.drain()
        writer.close()


class Refuse(Exception):
    """Raised by `FakeAgent.before`: the request is refused as an internal error."""


def _refusal(code: Any, message: str) -> Answer:
    return Answer(error=Failure(code=code, message=message))


@contextlib.asynccontextmanager
async def fake_agent(path: Path, clock: Callable[[], float]) -> AsyncIterator[FakeAgent]:
    agent = FakeAgent(path, clock)
    server = await asyncio.start_unix_server(agent._serve, str(path))
    try:
        yield agent
    finally:
        server.close()
        path.unlink(missing_ok=True)
