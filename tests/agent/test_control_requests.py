"""Requests of the control socket against the parts that they change, without sockets, files or GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.agent.node import MAX_UID, ControlRequests
from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.control import (
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    NoticeRequest,
    OpenRequest,
    ReportRequest,
    TierRequest,
)
from gpushare_spawner.model.layers import MemoryEngine
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import LIBRARIES, request_for
from tests.agent.peers import FIRST, SECOND


class Parts:
    """What the requests are carried out on: it writes down what it was asked to do, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.sessions: dict[str, Session] = {}
        self.full: ControlRefused | None = None
        self.trouble: str | None = None
        self.no_socket: str | None = None
        self.barrier_at: Path | None = None
        self.tiers = SimpleNamespace(apply_request=self._decide, notify=self._notify)
        self.store = SimpleNamespace(flush=self._flush, missing=self._missing)
        self.unwritten: str | None = None
        node: Any = SimpleNamespace(
            registry=self,
            gpus={FIRST.uuid: FIRST, SECOND.uuid: SECOND},
            shares=SimpleNamespace(check_free_units=self._check_free_units),
            rounds=SimpleNamespace(trouble=lambda uuid: self.trouble),
            state_folder=SimpleNamespace(barrier=lambda: self.barrier_at),
            libraries=LIBRARIES,
            report=lambda: Report(node="here", published_at=1.0, gpus=()),
            wall_clock=lambda: 1000.0,
        )
        self.requests = ControlRequests(node)

    # the registry

    def add(self, record: SessionRecord) -> Session:
        self.done.append(f"add {record.request.id}")
        session = Session(record, (FIRST,))
        self.sessions[session.id] = session
        return session

    def listen(self, session: Session) -> str | None:
        self.done.append(f"listen {session.id}")
        if self.no_socket is None:
            session.socket = SimpleNamespace(path=Path("/run/s/gpu"))
        return self.no_socket

    def reopen(self, session: Session, request: OpenRequest) -> None:
        self.done.append(f"reopen {session.id}")

    def confirm(self, session: Session, process: object) -> None:
        self.done.append(f"confirm {session.id}")

    def end(self, name: str, reason: str) -> None:
        self.done.append(f"end {name}: {reason}")
        self.sessions.pop(name, None)

    # the other parts

    def _check_free_units(self, gpu: object, share_units: int, borrowed_units: int) -> None:
        self.done.append(f"check {share_units} units, {borrowed_units} borrowed")
        if self.full is not None:
            raise self.full

    def _decide(self, session: Session, request: TierRequest) -> None:
        self.done.append(f"{session.id} to {request.tier}")

    def _notify(self, session: Session, request: NoticeRequest) -> None:
        self.done.append(f"notice {request.tier} to {session.id}")

    async def _flush(self) -> None:
        self.done.append("flush")

    async def _missing(self, name: str) -> str | None:
        return self.unwritten


@pytest.fixture
def parts() -> Parts:
    return Parts()


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """The code and the sentence that a call is refused with."""
    with pytest.raises(ControlRefused) as refused:
        call()
    return refused.value.code, refused.value.message


async def test_open_is_answered_when_its_record_is_on_the_disk(parts: Parts) -> None:
    answer = await parts.requests.answer(request_for("ada", borrowed_units=5))
    assert answer["environment"]["GPUSHARE_SOCKET"] == "/run/s/gpu"
    assert "GPUSHARE_ENGINE" not in answer["environment"]
    assert parts.done == ["check 25 units, 5 borrowed", "add ada", "listen ada", "flush"]


async def test_open_is_refused_and_undone_where_its_record_cannot_be_written(parts: Parts) -> None:
    parts.unwritten = "Read-only file system (/var/lib/gpushare/records)"
    with pytest.raises(ControlRefused, match=r"session ada on disk: Read-only file system \(/var") as refused:
        await parts.requests.answer(request_for("ada"))
    assert refused.value.code == "internal"
    assert parts.done[-1] == "end ada: its record cannot be written"


async def test_engine_suspend_stands_in_the_environment(parts: Parts) -> None:
    answer = await parts.requests.answer(request_for("ada", engine=MemoryEngine.SUSPEND))
    assert answer["environment"]["GPUSHARE_ENGINE"] == "suspend"
    assert refusal(lambda: parts.requests.open(request_for("ada")))[0] == "exists"


async def test_report_waits_for_no_disk(parts: Parts) -> None:
    assert (await parts.requests.answer(ReportRequest()))["node"] == "here"
    assert parts.done == []


@pytest.mark.parametrize(
    ("request_", "done"),
    [
        (CloseRequest(id="ada"), ["end ada: closed", "flush"]),
        (TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"), ["ada to released", "flush"]),
        (NoticeRequest(id="ada", tier=Tier.RELEASED), ["notice released to ada", "flush"]),
        (ConfirmRequest(id="ada", pid=os.getpid()), ["confirm ada", "flush"]),
    ],
)
async def test_each_request_reaches_its_part(parts: Parts, request_: Any, done: list[str]) -> None:
    parts.requests.open(request_for())
    parts.done.clear()
    assert await parts.requests.answer(request_) == {}
    assert parts.done == done


@pytest.mark.parametrize(
    "request_",
    [
        TierRequest(id="ben", tier=Tier.RELEASED, effective_units=0, reason="idle"),
        NoticeRequest(id="ben", tier=None),
        ConfirmRequest(id="ben", pid=1),
    ],
)
async def test_request_for_an_unknown_session_is_refused(parts: Parts, request_: Any) -> None:
    with pytest.raises(ControlRefused) as refused:
        await parts.requests.answer(request_)
    assert refused.value.code == "unknown-session"
    assert parts.done == []


async def test_closing_an_unknown_session_is_no_error(parts: Parts) -> None:
    assert await parts.requests.answer(CloseRequest(id="ben")) == {}


def test_second_open_of_the_same_share_begins_the_session_anew(parts: Parts) -> None:
    first = parts.requests.open(request_for())
    parts.done.clear()
    assert parts.requests.open(request_for()) == first
    assert parts.done == ["reopen ada"], "its own units are no obstacle, and its socket stays"


@pytest.mark.parametrize("change", [{"share_units": 30}, {"gpus": (SECOND.uuid,)}])
def test_open_with_another_share_than_before_is_refused(parts: Parts, change: dict[str, Any]) -> None:
    parts.requests.open(request_for())
    parts.done.clear()
    code, message = refusal(lambda: parts.requests.open(request_for(**change)))
    assert code == "exists"
    assert message.endswith("close it first")
    assert parts.done == []


def test_share_without_capacity_changes_nothing(parts: Parts) -> None:
    parts.full = ControlRefused("no-capacity", "full")
    assert refusal(lambda: parts.requests.open(request_for())) == ("no-capacity", "full")
    assert parts.sessions == {}


def test_session_without_a_socket_ends_again(parts: Parts) -> None:
    parts.no_socket = "the path is too long"
    code, message = refusal(lambda: parts.requests.open(request_for()))
    assert (code, message) == ("internal", "cannot create the socket of session ada: the path is too long")
    assert parts.done[-1] == "end ada: it has no socket"


def test_session_that_lost_its_socket_stays_when_a_second_open_cannot_make_one(parts: Parts) -> None:
    parts.requests.open(request_for())
    parts.sessions["ada"].socket = None
    parts.no_socket = "the disk is full"
    assert refusal(lambda: parts.requests.open(request_for()))[0] == "internal"
    assert "ada" in parts.sessions


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"borrowed_units": 26}, "bad-request", "borrowed_units: 26 is more than the share of 25"),
        ({"gpus": (FIRST.uuid, FIRST.uuid), "share_units": 100}, "bad-request", "the same GPU is listed twice"),
        ({"uid": MAX_UID + 1}, "bad-request", f"a uid is a number from 0 to {MAX_UID}"),
        ({"memory_limit": "0.00000000001%"}, "bad-request", "leaves no memory"),
        ({"gpus": ("GPU-9",)}, "unknown-gpu", "this machine has no GPU GPU-9"),
    ],
)
def test_open_that_cannot_be_right_is_refused_with_the_reason(
    parts: Parts, changes: dict[str, Any], code: str, said: str
) -> None:
    refused_with, message = refusal(lambda: parts.requests.open(request_for(**changes)))
    assert refused_with == code
    assert said in message
    assert parts.done == []


def test_unhealthy_gpu_takes_no_session(parts: Parts) -> None:
    parts.trouble = "GPU 0 does not answer"
    assert refusal(lambda: parts.requests.open(request_for())) == ("unhealthy-gpu", "GPU 0 does not answer")


def test_agent_that_is_not_root_gives_no_socket_to_another_user(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, message = refusal(lambda: parts.requests.open(request_for(uid=1001)))
    assert code == "bad-request"
    assert "run it as root" in message
    parts.requests.open(request_for(uid=1000))


def test_user_who_cannot_reach_the_socket_is_logged(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    parts.barrier_at = Path("/home/hub")
    if os.geteuid():
        pytest.skip("only root opens sessions of other users")
    parts.requests.open(request_for(uid=12345))
    assert "uid 12345 cannot reach its socket: other users cannot enter /home/hub (chmod o+x)" in caplog.text


def test_process_that_does_not_exist_confirms_nothing(parts: Parts) -> None:
    parts.requests.open(request_for())
    code, message = refusal(lambda: parts.requests.confirm(ConfirmRequest(id="ada", pid=2**22 + 1)))
    assert code == "bad-request"
    assert message.endswith("session ada stays unconfirmed")
