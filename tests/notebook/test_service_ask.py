"""`gpushare keep` and `gpushare release`: an ask goes to the service through the agent, and its answer is printed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.cli import main
from gpushare_spawner.model.frames import AskKind, Frame, Kind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.notebook.client import AgentUnavailable
from gpushare_spawner.notebook.session_client import NoAnswer, ServiceAsk, WrongAsk, ask_service
from tests.notebook.scripted_agent import ScriptedAgent

LONG = "The share is kept until tomorrow. " * 10


def asked(agent: ScriptedAgent) -> list[tuple[int, int]]:
    """Kind and value of each ask that came."""
    return [frame.fields[1:3] for frame in agent.of_kind(Kind.ASK)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [
        (["keep", "4h"], AskKind.KEEP, 14400),
        (["keep", "90m"], AskKind.KEEP, 5400),
        (["keep", "end"], AskKind.END_KEEP, 0),
        (["keep"], AskKind.KEEPS, 0),
        (["release"], AskKind.RELEASE, 0),
    ],
)
def test_a_command_asks_and_prints_the_answer(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str], words: list[str], kind: AskKind, value: int
) -> None:
    agent.script.answer = agent.script.keeps = (True, LONG)
    assert main(words) == 0
    assert capsys.readouterr().out == LONG + "\n"
    assert asked(agent) == [(kind, value)]
    number = agent.of_kind(Kind.ASK)[0].fields[0]
    assert 0 < number < 2**32


@pytest.mark.parametrize("words", [["keep", "4h"], ["release"]])
@pytest.mark.parametrize("done", [True, False])
def test_a_program_gets_the_answer_as_json(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str], words: list[str], done: bool
) -> None:
    agent.script.answer = (done, "Said.")
    assert main([*words, "--json"]) == int(not done)
    assert json.loads(capsys.readouterr().out) == {"done": done, "text": "Said."}


def test_what_was_not_done_is_said_and_the_exit_status_is_1(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.script.answer = (False, "You keep another share already.")
    assert main(["keep", "1h"]) == 1
    assert capsys.readouterr().out == "You keep another share already.\n"


@pytest.mark.parametrize("time_given", ["0", "0.4", "soon", "nan", "-4h", "1e30", "99999999999999999999h"])
def test_a_time_that_is_none_is_not_asked_for(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str], time_given: str
) -> None:
    assert main(["keep", "--", time_given]) == 2
    assert time_given in capsys.readouterr().err
    assert asked(agent) == []


def test_a_service_that_does_not_answer_costs_the_timeout(agent: ScriptedAgent) -> None:
    agent.script.answer = None
    began = time.monotonic()
    with pytest.raises(NoAnswer, match=r"No answer within 0\.3 s: perhaps the idle culler is unavailable"):
        ask_service(ServiceAsk.of(AskKind.RELEASE), timeout=0.3)
    assert time.monotonic() - began < 5


def test_an_agent_that_does_not_welcome_is_not_the_service(agent: ScriptedAgent, tmp_path: Path) -> None:
    agent.after_hello = Frame(Kind.DEVICE).pack()
    with pytest.raises(AgentUnavailable, match=r"The agent did not answer within 0\.3 s") as error:
        ask_service(ServiceAsk.of(AskKind.RELEASE), timeout=0.3)
    assert not isinstance(error.value, NoAnswer)


def test_without_a_share_or_an_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["release", "--socket", str(tmp_path / "nothing")]) == 1
    assert "The agent is unavailable (No such file or directory" in capsys.readouterr().err
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    assert main(["release"]) == 1
    assert "This server has no GPU share" in capsys.readouterr().err


def test_a_broken_text_is_said_to_be_unreadable(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = agent._answers
    broken = b'{"answer": {"number": 1}}'
    monkeypatch.setattr(agent, "_answers", lambda frame: [broken] if frame.kind is Kind.ASK else answers(frame))
    with pytest.raises(AgentUnavailable, match="a ServiceAnswer lacks fields"):
        ask_service(ServiceAsk.of(AskKind.RELEASE))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, '"kind" must be one of keep, end-keep, release, stop, share, shares, keeps, advice.'),
        ([], '"kind" must be one of'),
        ({"kind": "steal"}, '"kind" must be one of'),
        ({"kind": ["keep"]}, '"kind" must be one of'),
        ({"kind": "keep"}, '"value" must be a number of at least 1: the length of the keep in seconds.'),
        ({"kind": "keep", "value": "4h"}, '"value" must be a number'),
        ({"kind": "keep", "value": True}, '"value" must be a number'),
        ({"kind": "keep", "value": float("nan")}, '"value" must be a number'),
        ({"kind": "keep", "value": float("inf")}, '"value" must be a number'),
        ({"kind": "keep", "value": -1}, '"value" must be a number'),
        ({"kind": "keep", "value": 10**400}, '"value" must be a number'),
        ({"kind": "share", "value": 0}, "the share in units of 1 %"),
    ],
)
def test_what_a_browser_may_not_send(body: Any, said: str) -> None:
    with pytest.raises(WrongAsk) as error:
        ServiceAsk.from_json(body)
    assert said in str(error.value)


def test_what_a_browser_may_send() -> None:
    keep = ServiceAsk.from_json({"kind": "keep", "value": 3600.4, "more": 1})
    assert (keep.kind, keep.value) == (AskKind.KEEP, 3600)
    stop = ServiceAsk.from_json({"kind": "stop", "value": 77})
    assert (stop.kind, stop.value) == (AskKind.STOP, 0)
    assert keep.number != stop.number


def test_a_release_is_seen_in_the_status(agent: ScriptedAgent) -> None:
    from gpushare_spawner.notebook import status

    assert main(["release"]) == 0
    assert status().tier is Tier.RELEASED
