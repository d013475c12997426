"""``gpushare status`` and ``gpushare_spawner.notebook.status()``: what they show, whatever the agent does."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.cli import main
from gpushare_spawner.model.frames import Frame, Kind, Role
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.share_status import (
    AdminMessage,
    AgentRecord,
    ControlsStatus,
    DeliveredStatus,
    GpuTimeStatus,
    PendingAction,
    ShareStatus,
)
from gpushare_spawner.notebook import status
from gpushare_spawner.wording import notices, share_status
from gpushare_spawner.wording.amounts import clock, near_clock, utc
from tests.notebook.scripted_agent import GIB, GPU, OTHER_GPU, Script, ScriptedAgent
from tests.present import present


def of(**changes: Any) -> ShareStatus:
    """The status that an agent with this script would give."""
    return Script(**changes).status()


def test_the_status_of_an_active_share(agent: ScriptedAgent) -> None:
    now = status()
    assert now.known
    assert (now.share_units, now.tier, now.effective_units, now.guaranteed_units) == (25, Tier.ACTIVE, 25, 25)
    assert (now.memory_bytes, now.resident_bytes, now.limit_bytes) == (int(3.1 * GIB), GIB, 16 * GIB)
    assert (now.gpus[0].uuid, now.lease, now.neighbours) == (GPU, "none", 1)
    assert now.idle_seconds is None
    assert now.notice is None
    hello = agent.heard[0]
    assert (hello.kind, hello.fields[0]) == (Kind.HELLO, Role.NOTEBOOK)


def test_a_limit_of_gpu_time_is_said_and_is_a_reason_for_slow_work() -> None:
    limited = of(time_limit=25, lease="held", quiet=0.0)
    assert "\nmaximum         at most 25 % of the GPU's time\n" in share_status.page(limited, 0.0)
    assert share_status.tier_now(limited) == (
        "You have 0.25 GPU: guaranteed while others work, at most 25 % of the GPU's time, also while others are idle."
    )
    reason = "Your share has at most 25 % of the GPU's time, also while no other session computes."
    assert reason in share_status.why_slow(limited)
    assert reason not in share_status.why_slow(of(lease="held", quiet=0.0))
    assert "maximum" not in share_status.page(of(), 0.0)


def test_an_announced_step_a_burst_and_two_gpus(agent: ScriptedAgent) -> None:
    script = agent.script
    script.share = script.effective = script.guaranteed = 100
    script.gpus = [GPU, OTHER_GPU]
    script.step = (Tier.DOWNGRADED, 1_700_000_000.5, 10)
    script.quiet, script.lease = 90.0, "held"
    now = status()
    assert now.notice == PendingAction(Tier.DOWNGRADED, 1_700_000_000.5, 10)
    assert [gpu.uuid for gpu in now.gpus] == [GPU, OTHER_GPU]
    assert now.idle_seconds == 90
    assert now.memory_bytes == 2 * int(3.1 * GIB)
    assert share_status.line(now) == "2 GPUs · active · 6.2 of 32 GiB"
    assert "GPU 1: memory" in str(now)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "0.25 GPU · active · 3.1 of 16 GiB"),
        ({"lease": "waiting"}, "0.25 GPU · active · waiting for the GPU · 3.1 of 16 GiB"),
        ({"tier": Tier.DOWNGRADED, "effective": 10}, "0.25 GPU · downgraded to 0.10 GPU · 3.1 of 16 GiB"),
        ({"tier": Tier.RELEASED, "effective": 0}, "0.25 GPU · released · 3.1 of 16 GiB"),
        (
            {"tier": Tier.RELEASED, "effective": 0, "lease": "waiting"},
            "0.25 GPU · released · waiting for the GPU · 3.1 of 16 GiB",
        ),
        ({"borrowed": 15}, "0.25 GPU · active · 0.15 GPU borrowed · 3.1 of 16 GiB"),
        ({"share": 100, "effective": 100, "memory": 0}, "1 GPU · active · 0 of 16 GiB"),
        ({"memory": 5 * 2**20}, "0.25 GPU · active · 5 MiB of 16 GiB"),
    ],
)
def test_the_line_in_the_status_bar(changes: dict[str, Any], line: str) -> None:
    assert share_status.line(of(**changes)) == line


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ((IdleCause.IDLE, 0), "will stop at {time}: idle. Save your work, or run a cell to keep it running."),
        ((IdleCause.IDLE, 8 * 3600), "idle for 8 h. Save your work, or run a cell to keep it running."),
        ((IdleCause.MAX_AGE, 86400), "it has run for 24 h, the limit here. Save your work"),
        ((IdleCause.OTHER, 0), "Your server will stop at {time}. Save your work."),
    ],
)
def test_the_notice_of_a_stop_says_its_cause(agent: ScriptedAgent, cause: tuple[IdleCause, float], said: str) -> None:
    agent.script.step, agent.script.cause = (Tier.STOPPED, 1_700_000_000.5, 0), cause
    now = status()
    text = notices.notice(now, present(now.notice))
    assert said in text
    assert len(text.replace("{time}", "12:34 on 24 Nov")) <= notices.TOAST_LETTERS
    assert ("keep it" in text) is (cause[0] is IdleCause.IDLE)


def test_status_shows_what_the_share_delivered_beside_what_it_promised(agent: ScriptedAgent) -> None:
    agent.script.delivered = (1500.0, 1482.0, 12, 0.0224, 1.94)
    now = status()
    assert now.delivered == DeliveredStatus(1500.0, 1482.0, 12, 0.0224, 1.94)
    assert "received 24 min of the 25 min that it was entitled to while other sessions competed" in str(now)
    assert "12: half under 22 ms, 95 % under 1.9 s" in str(now)
    explanation = share_status.explanation(now)
    assert (
        "GPU time: received 24 min of the 25 min that it was entitled to while other sessions competed." in explanation
    )
    assert "Waits: 12: half under 22 ms, 95 % under 1.9 s." in explanation


def test_status_shows_what_the_share_delivered_on_each_gpu(agent: ScriptedAgent) -> None:
    agent.script.gpus, agent.script.delivered = [GPU, OTHER_GPU], (1500.0, 1482.0, 12, 0.0224, 1.94)
    agent.script.delivered_on = (GpuTimeStatus(1500.0, 1482.0), GpuTimeStatus(0.0, 0.0))
    now = status()
    assert present(now.delivered).gpus == agent.script.delivered_on
    assert now.as_json()["delivered"]["gpus"][1] == {"entitled_seconds": 0.0, "delivered_seconds": 0.0}
    assert share_status.delivered(now)[1:3] == [
        ("GPU 0: GPU time", "received 24 min of the 25 min that it was entitled to"),
        ("GPU 1: GPU time", "no competition yet"),
    ]
    assert re.search(r"^GPU 1: GPU time +no competition yet$", str(now), re.MULTILINE)


def test_without_competition_or_with_an_older_agent_status_says_nothing_of_gpu_time() -> None:
    for nothing in (of(), of(delivered=(0.0, 0.0, 0, 0.0, 0.0))):
        assert share_status.delivered(nothing) == []
        assert "entitled" not in share_status.page(nothing, 0)


def test_the_explanation_tells_what_happens_to_the_work() -> None:
    lent = share_status.explanation(of(borrowed=15, guaranteed=25, lease="waiting", step=(Tier.RELEASED, 5.0, 0)))
    assert "0.15 GPU of 0.25 GPU is borrowed from idle sessions" in lent
    terms = "0.10 GPU while the rest is borrowed from idle sessions; 0.25 GPU after these have stopped"
    assert f"reclaimed when they work again.\nGuaranteed: {terms}." in lent
    assert "guaranteed while others work" not in lent
    assert "is waiting: other sessions are using the GPU" in lent
    assert "will be released at {time}" in lent
    assert "Memory: 3.1 of 16 GiB allocated, 1 GiB of it on the GPU." in lent
    released = share_status.explanation(of(tier=Tier.RELEASED, effective=0, sessions=1))
    assert "GPU cells run at once; some seconds of GPU time restore the share" in released
    assert "No other session shares the GPU" in released


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            PendingAction(Tier.DOWNGRADED, 1.0, 10),
            "Your GPU share will be downgraded to 0.10 GPU at {time}: it is idle.",
        ),
        (PendingAction(Tier.RELEASED, 1.0, 0), "Your GPU share will be released at {time}: it is idle."),
        (PendingAction(Tier.STOPPED, 1.0, 0), "Your server will stop at {time}: idle."),
    ],
)
def test_notices(step: PendingAction, said: str) -> None:
    text = notices.notice(of(quiet=1.0), step)
    assert text.startswith(said)
    assert text.count("{time}") == 1
    assert "to keep it" in text
    assert len(text.replace("{time}", "12:34 on 24 Nov")) <= notices.TOAST_LETTERS


@pytest.mark.parametrize("tier", [Tier.DOWNGRADED, Tier.RELEASED])
def test_a_session_that_never_worked_reads_that_its_idle_time_counts_from_the_start(tier: Tier) -> None:
    new = replace(of(), idle_seconds=None)
    notice = notices.notice(new, PendingAction(tier, 1.0, 10))
    assert "at {time}: no GPU work since the start. Run a GPU cell to keep it." in notice
    assert len(notice.replace("{time}", "12:34 on 24 Nov")) <= notices.TOAST_LETTERS
    idle = replace(of(tier=tier, effective=0), idle_seconds=None)
    assert ": no GPU work since the start. Your data is kept." in notices.changed(idle)
    assert len(notices.changed(idle)) <= notices.TOAST_LETTERS
    assert ": no GPU work since the start. Variables" in share_status.explanation(idle)


def test_reclaimed_units_are_notified_with_a_word_on_the_restart() -> None:
    said = notices.reclaimed(of(borrowed=15, guaranteed=10))
    assert said.startswith("0.10 GPU of your 0.25 GPU is guaranteed now: others reclaimed the rest. The dashboard says")
    assert len(said) <= notices.TOAST_LETTERS
    for other in (of(), of(borrowed=15, guaranteed=25), of(tier=Tier.RELEASED, effective=0, borrowed=15, guaranteed=0)):
        assert notices.reclaimed(other) == ""
    assert notices.reclaimed(ShareStatus(problem="away")) == notices.reclaimed(ShareStatus(shared=False)) == ""


def test_borrowed_units_of_a_whole_gpu_and_a_part_of_another_are_those_of_each() -> None:
    more: dict[str, Any] = {"gpus": [GPU, OTHER_GPU], "share": 100, "last": 50, "effective": 100}
    lent = of(**more, borrowed=70, guaranteed=100)
    assert lent.units_now == ((100, 70), (50, 20))
    assert "1.50 GPU · active · 0.70 + 0.20 GPU borrowed" in share_status.line(lent)
    assert share_status.terms(lent)[0].text == "1.50 GPU, 0.70 + 0.20 GPU of it borrowed"
    assert "0.70 + 0.20 GPU of 1.50 GPU is borrowed" in share_status.explanation(lent)
    # the session owns all its units of the last GPU
    whole = of(**more, borrowed=40, guaranteed=100)
    assert whole.units_now == ((100, 40), (50, 0))
    assert share_status.borrowed_now(whole) == "0.40 GPU"
    partly = of(**more, borrowed=70, guaranteed=45)
    assert partly.units_now == ((45, 15), (45, 15))
    assert share_status.borrowed_now(of(**more, borrowed=100, guaranteed=100)) == "1.50 GPU"
    halves = of(gpus=[GPU, OTHER_GPU], share=50, effective=50, borrowed=20, guaranteed=50)
    assert share_status.borrowed_now(halves) == "2 × 0.20 GPU"


def test_units_that_a_tier_or_their_owner_has_taken_are_not_borrowed() -> None:
    released = of(tier=Tier.RELEASED, effective=0, borrowed=25, guaranteed=0)
    assert "borrowed" not in share_status.line(released) + share_status.explanation(released)
    reclaimed = of(borrowed=15, guaranteed=10)
    assert "borrowed" not in share_status.line(reclaimed) + share_status.page(reclaimed, 0)
    terms = "0.10 GPU while the rest is reclaimed by its owners; 0.25 GPU after these have stopped"
    assert f"guaranteed now  {terms}\n" in share_status.page(reclaimed, 0)
    said = share_status.explanation(reclaimed)
    assert "Of your 0.25 GPU, 0.10 GPU is guaranteed now: the owners of the lent units have reclaimed the rest." in said
    assert "The dashboard says whether the full share is free elsewhere" in said
    partly = share_status.explanation(of(borrowed=15, guaranteed=18))
    # 0.08 GPU of it is still borrowed, so it is not guaranteed
    assert "Of your 0.25 GPU, you have 0.18 GPU now: the owners of the lent units have reclaimed the rest." in partly
    assert "Guaranteed: 0.10 GPU while the rest is borrowed from idle sessions; 0.25 GPU after" in partly
    toast = notices.reclaimed(of(borrowed=15, guaranteed=18))
    assert toast.startswith("You have 0.18 GPU of your 0.25 GPU now: others reclaimed the rest.")
    assert len(toast) <= notices.TOAST_LETTERS
    assert "You have 0.25 GPU now" not in partly


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tier": Tier.DOWNGRADED, "effective": 10}, "Your GPU share was downgraded to 0.10 GPU while it was idle"),
        ({"tier": Tier.RELEASED, "effective": 0}, "Your GPU share was released while it was idle"),
        ({}, "Your GPU share is restored: 0.25 GPU."),
    ],
)
def test_what_is_said_after_a_change(changes: dict[str, Tier | int], said: str) -> None:
    text = notices.changed(of(quiet=1.0, **changes))
    assert text.startswith(said)
    assert len(text) <= notices.TOAST_LETTERS


def test_without_a_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    assert not status().shared
    assert share_status.line(status()) == ""
    assert main(["status"]) == 0
    assert "This server has no GPU share" in capsys.readouterr().out


def test_the_agent_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUSHARE_SOCKET", str(tmp_path / "nothing"))
    now = status()
    assert now.shared
    assert not now.known
    assert "No such file or directory" in now.problem
    assert main(["status"]) == 1
    assert "GPU work continues without the agent" in capsys.readouterr().out


def test_an_agent_that_does_not_answer_costs_the_timeout_and_no_more(agent: ScriptedAgent) -> None:
    agent.silent = True
    started = time.monotonic()
    assert "did not answer within 0.3 s" in status(timeout=0.3).problem
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (Frame(Kind.ERROR, (4,)).pack(), "This session has ended"),
        (Frame(Kind.ERROR, (3,)).pack(), "does not accept requests from this user"),
        (Frame(Kind.ERROR, (99,)).pack(), "code 99"),
        (b"short", "cannot be read: a frame has 128 bytes"),
        (bytes(128), "cannot be read: wrong magic"),
        (bytes(129), "cannot be read"),
    ],
)
def test_an_agent_that_answers_otherwise(agent: ScriptedAgent, sent: bytes, said: str) -> None:
    agent.after_hello = sent
    assert said in status().problem


def test_numbers_that_stand_for_nothing(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = agent._answers
    packet = AgentRecord(status=replace(agent.script.status(), tier=77)).packet()  # type: ignore[arg-type]
    monkeypatch.setattr(agent, "_answers", lambda frame: [packet] if frame.kind is Kind.QUERY else welcome(frame))
    assert "77 is not a valid Tier" in status().problem


def test_a_path_that_is_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SOCKET", "/" + "x" * 200)
    assert not status().known


async def test_status_works_beside_a_running_event_loop(agent: ScriptedAgent) -> None:
    assert status().known


def test_the_command_in_words(agent: ScriptedAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.script.step = (Tier.DOWNGRADED, 0.001, 10)
    agent.script.quiet = 600.0
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    for row in (
        "share           0.25 GPU",
        "tier            active",
        "GPU work        none for 10 min",
        "other sessions  1",
    ):
        assert row in said
    assert "{time}" not in said


@pytest.mark.parametrize(
    ("sessions", "with_work", "said"),
    [
        (1, 0, "none"),
        (1, 1, "none"),
        (3, 0, "2"),
        (3, 1, "2; 1 of 3 sessions on the GPU has work now"),
        (3, 3, "2; 3 of 3 sessions on the GPU have work now"),
    ],
)
def test_other_sessions_and_how_many_sessions_have_work(sessions: int, with_work: int, said: str) -> None:
    page = share_status.page(of(sessions=sessions, with_work=with_work), now=0.0)
    assert f"other sessions  {said}" in page.splitlines()


def test_a_notice_that_comes_soon_has_seconds() -> None:
    at = 1_700_000_030.0
    soon = of(step=(Tier.RELEASED, at, 0), quiet=1.0)
    assert f"will be released at {near_clock(at, at - 20)}: it is idle" in share_status.page(soon, at - 20)
    assert f"will be released at {clock(at, at - 300)}: it is idle" in share_status.page(soon, at - 300)
    assert near_clock(at, at - 20).count(":") == 2


def test_the_command_in_json(agent: ScriptedAgent, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--socket", str(agent.path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["share_units"], said["tier"], said["known"]) == (25, "active", True)
    assert said["gpus"][0]["uuid"] == GPU


def test_what_users_and_admins_decided_is_shown(agent: ScriptedAgent) -> None:
    script = agent.script
    script.keep_until, script.exempt_until, script.largest_share = 2_000_000_000.5, None, 50
    script.message = ("Node 3 will be drained tonight. " * 3, 1_999_999_999.25)
    now = status()
    assert now.controls == ControlsStatus(
        keep_until=2_000_000_000.5,
        exempt=True,
        exempt_until=None,
        largest_share_units=50,
        messages=(AdminMessage("Node 3 will be drained tonight. " * 3, 1_999_999_999.25),),
    )
    assert abs(now.at - time.time()) < 10
    assert share_status.line(now) == "0.25 GPU · active · kept · 3.1 of 16 GiB"
    until = clock(2_000_000_000.5, time.time())
    for row in (
        f"kept            until {until}: no idle action",
        "exempt          indefinitely: no idle action, by an admin's decision",
        "message         Node 3 will be drained tonight. Node 3",
    ):
        assert row in str(now)
    script.exempt_until = 2_000_000_000.5
    assert f"exempt          until {until}: no idle action" in str(status())
    script.keep_until = script.exempt_until = 0.0
    assert not {"kept", "exempt"} & {row.split(" ")[0] for row in str(status()).splitlines()}


def test_a_message_cannot_look_like_further_rows(agent: ScriptedAgent) -> None:
    agent.script.message = ("Hello\ntier            released\n\n  bye", 1_999_999_999.25)
    rows = str(status()).splitlines()
    assert [row for row in rows if row.startswith("tier ")] == ["tier            active"]
    assert any(row.startswith("message         Hello tier released bye (an admin, ") for row in rows)


def test_all_messages_are_shown_with_their_instants_in_local_time(agent: ScriptedAgent) -> None:
    agent.script.message = ("Hello.", 1_999_999_999.0)
    agent.script.drain = (f"Your server will be stopped at {utc(1_999_999_980.0)}.", 1_999_999_998.0)
    rows = [row.removeprefix("message").strip() for row in str(status()).splitlines() if row.startswith("message ")]
    now = time.time()
    stop, told = clock(1_999_999_980.0, now), clock(1_999_999_998.0, now)
    assert rows[0] == f"Your server will be stopped at {stop}. (an admin, {told})"
    assert rows[1].startswith("Hello. (an admin, ")
    agent.script.message = agent.script.drain = None
    assert "message" not in str(status()), "withdrawn"


def test_an_older_agent_says_nothing_of_decisions() -> None:
    assert of(takes_asks=False).controls is None


def test_watch_shows_it_again_until_ctrl_c(agent: ScriptedAgent) -> None:
    command = [sys.executable, "-m", "gpushare_spawner.cli", "status", "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        first = json.loads(present(watching.stdout).readline())
        agent.script.tier = Tier.RELEASED
        second = json.loads(present(watching.stdout).readline())
        watching.send_signal(2)
        assert watching.wait(10) == 0
    assert (first["tier"], second["tier"]) == ("active", "released")


def test_what_a_cell_imports_is_light() -> None:
    code = "import sys, gpushare_spawner.notebook as n; n.status(); print([m for m in HEAVY if m in sys.modules])"
    heavy = ["pydantic", "jupyterhub", "tornado", "jupyter_server", "yaml", "rich"]
    done = subprocess.run([sys.executable, "-c", f"HEAVY={heavy}; {code}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_many_ask_at_once(agent: ScriptedAgent) -> None:
    answers: list[ShareStatus] = []
    asking = [threading.Thread(target=lambda: answers.append(status())) for _ in range(10)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(10)
    assert [answer.known for answer in answers] == [True] * 10


def test_a_stream_socket_is_no_session_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stream"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        monkeypatch.setenv("GPUSHARE_SOCKET", str(path))
        assert "The agent is unavailable" in status().problem


def test_an_agent_that_dies_while_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SOCKET", str(tmp_path / "s"))
    agent = ScriptedAgent(tmp_path / "s")
    agent.silent = True
    agent.start()
    threading.Timer(0.3, agent.stop).start()
    assert "closed the connection" in status(timeout=10).problem


def test_a_server_that_waits_for_what_it_gave_back_says_so() -> None:
    now = replace(of(), lacks_requests=True)
    said = "less guaranteed CPU and memory"
    for text in (share_status.explanation, lambda status: share_status.page(status, now=0.0)):
        assert said in text(now)
        assert said not in text(of())


def test_suspended_session_says_so_and_one_that_cannot_be_suspended_says_why() -> None:
    suspended, stays = replace(of(), suspended=True), replace(of(), not_suspendable="Process 7 has managed memory.")
    stuck = replace(suspended, not_suspendable="Process 7 cannot be restored: the driver did not answer.")
    for text in (share_status.explanation, lambda status: share_status.page(status, now=0.0)):
        assert "This session is suspended" in text(suspended)
        assert "cannot be suspended and keeps its GPU memory: Process 7 has managed memory." in text(stays)
        assert "cannot be resumed for now: Process 7" in text(stuck)
        assert "cannot be suspended" not in text(stuck)
        assert "suspended" not in text(of())
