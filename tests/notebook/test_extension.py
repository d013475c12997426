"""The server extension, in a real Jupyter server where an installation puts it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner import __version__
from gpushare_spawner.model.frames import AskKind, Kind
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.notebook.extension import dashboard, notice_asks
from gpushare_spawner.notebook.session_client import KernelActivity, kernel_activity
from tests.notebook.jupyter import ROOT, Jupyter, running
from tests.notebook.scripted_agent import Script, ScriptedAgent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(tmp_path_factory.mktemp("agent") / "s.sock") as agent:
        yield agent


@pytest.fixture(scope="module")
def server(agent: ScriptedAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    with running(tmp_path_factory.mktemp("jupyter"), GPUSHARE_SOCKET=str(agent.path)) as jupyter:
        yield jupyter


def known_status(server: Jupyter) -> Any:
    """The status, once the server has met the agent."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        code, body = server.get("gpushare/status")
        assert code == 200
        if body["known"]:
            return body
        time.sleep(0.1)
    raise AssertionError(body)


def test_it_is_enabled_by_being_installed_and_answers(server: Jupyter, agent: ScriptedAgent) -> None:
    agent.script.step = (Tier.RELEASED, time.time() + 300, 0)
    status = known_status(server)
    assert (status["share_units"], status["tier"]) == (25, "active")
    assert status["line"] == "0.25\u00a0GPU · active · 3.1 of 16\u00a0GiB"
    time.sleep(0.6)  # an answer is fresh for half a second
    status = known_status(server)
    assert status["notice"]["tier"] == "released"
    assert "{time}" in status["notice_text"]
    assert "{time}" in status["explanation"]


def test_only_the_owner_may_ask(server: Jupyter) -> None:
    assert server.get("gpushare/status", token=None)[0] == 403
    assert server.get("gpushare/status", token="wrong")[0] == 403


def test_what_a_user_asks_for_reaches_the_service_and_is_answered(server: Jupyter, agent: ScriptedAgent) -> None:
    known_status(server)
    agent.script.answer = (True, "The share is kept for 4 h.")
    assert server.post("gpushare/ask", {"kind": "keep", "value": 14400}) == (
        200,
        {"done": True, "text": "The share is kept for 4\u00a0h."},
    )
    assert agent.of_kind(Kind.ASK)[-1].fields[1:3] == (AskKind.KEEP, 14400)
    status = known_status(server)
    assert abs(status["keep_until"] - time.time() - 14400) < 60
    assert {"name": "kept", "text": "until {time}: no idle action", "at": status["keep_until"]} in status["terms"]
    agent.script.answer = (False, "No.")
    assert server.post("gpushare/ask", {"kind": "end-keep"}) == (200, {"done": False, "text": "No."})
    agent.script.answer, agent.script.keep_until = (True, "It was done."), 0.0


def test_what_is_no_ask_is_refused_with_a_sentence(server: Jupyter, agent: ScriptedAgent) -> None:
    before = len(agent.of_kind(Kind.ASK))
    code, said = server.post("gpushare/ask", {"kind": "keep", "value": -1})
    assert code == 400
    assert json.loads(said)["text"].startswith('"value" must be a number')
    assert server.post("gpushare/ask", {}, data=b"{")[0] == 400
    assert len(agent.of_kind(Kind.ASK)) == before


def test_only_the_owner_may_ask_for_something_and_no_foreign_page(server: Jupyter, agent: ScriptedAgent) -> None:
    before = len(agent.of_kind(Kind.ASK))
    assert server.post("gpushare/ask", {"kind": "release"}, token=None)[0] == 403
    assert server.post("gpushare/ask", {"kind": "release"}, token="wrong")[0] == 403
    # with the owner's login by cookie, as a browser has it, and without the token of the page
    cookie = server.login()
    code, said = server.post("gpushare/ask", {"kind": "release"}, token=None, headers={"Cookie": cookie})
    assert code == 403
    assert "_xsrf" in said
    xsrf = next(part.partition("=")[2] for part in cookie.split("; ") if part.startswith("_xsrf="))
    with_token = {"Cookie": cookie, "X-XSRFToken": xsrf}
    assert len(agent.of_kind(Kind.ASK)) == before
    assert server.post("gpushare/ask", {"kind": "release"}, token=None, headers=with_token)[0] == 200
    agent.script.tier, agent.script.effective = Tier.ACTIVE, 25


@pytest.mark.parametrize(
    ("step", "cause", "offered"),
    [
        (Tier.DOWNGRADED, (IdleCause.IDLE, 900.0), ["keep", "release"]),
        (Tier.RELEASED, (IdleCause.IDLE, 900.0), ["keep", "release"]),
        (Tier.STOPPED, (IdleCause.IDLE, 900.0), ["keep"]),
        (Tier.STOPPED, (IdleCause.MAX_AGE, 900.0), []),
        (Tier.RELEASED, (IdleCause.RECLAIM, 0.0), []),
    ],
)
def test_a_notice_offers_what_prevents_the_action(
    step: Tier, cause: tuple[IdleCause, float], offered: list[str]
) -> None:
    script = Script(step=(step, 1_700_000_000.0, 0), cause=cause)
    assert notice_asks(script.status()) == offered
    script.takes_asks = False
    assert notice_asks(script.status()) == [], "this agent takes no ask"


def test_asking_is_no_activity_of_the_user(server: Jupyter) -> None:
    def last_activity() -> Any:
        return server.get("api/status?no_track_activity=1")[1]["last_activity"]

    before = last_activity()
    server.get("gpushare/status")
    assert last_activity() == before


def test_the_agent_hears_of_kernels(server: Jupyter, agent: ScriptedAgent) -> None:
    agent.wait_for(Kind.KERNELS)
    before = len(agent.of_kind(Kind.KERNELS))
    code, _ = server.post("api/kernels", {"name": "python3"})
    assert code == 201
    deadline = time.monotonic() + 30
    while not any(told.fields[1] == 1 for told in agent.of_kind(Kind.KERNELS)[before:]):
        assert time.monotonic() < deadline, "the agent did not hear of the new kernel"
        time.sleep(0.1)
    instant = agent.of_kind(Kind.KERNELS)[-1].fields[2] / 1e9
    assert abs(instant - time.time()) < 60


def kernel_environment(server: Jupyter) -> dict[str, str]:
    """The environment of a new kernel."""
    code, kernel = server.post("api/kernels", {"name": "python3"})
    assert code == 201
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if kernel["id"].encode() in (folder / "cmdline").read_bytes():
                    words = (folder / "environ").read_text().split("\0")
                    return dict(word.split("=", 1) for word in words if "=" in word)
        time.sleep(0.05)
    raise AssertionError("the kernel has no process")


def test_kernels_of_a_share_do_not_reserve_the_whole_gpu(server: Jupyter, agent: ScriptedAgent) -> None:
    environment = kernel_environment(server)
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


def test_what_image_user_or_template_chose_for_a_framework_stays(agent: ScriptedAgent, tmp_path: Path) -> None:
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "TF_FORCE_GPU_ALLOW_GROWTH": ""}
    with running(tmp_path, GPUSHARE_SOCKET=str(agent.path), **chosen) as server:
        environment = kernel_environment(server)
        assert {name: environment[name] for name in chosen} == chosen


def test_an_agent_that_goes_is_told_of_and_comes_back(server: Jupyter, agent: ScriptedAgent) -> None:
    agent.stop()
    deadline = time.monotonic() + 15
    while (status := server.get("gpushare/status")[1])["known"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert status["line"] == "GPU share: unknown"
    assert "GPU work continues without the agent" in status["explanation"]
    agent.start()
    known_status(server)
    assert "Traceback" not in server.log.read_text()


def test_without_a_share(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        code, status = server.get("gpushare/status")
        assert code == 200
        assert (status["shared"], status["known"], status["line"]) == (False, False, "")


def test_the_versions_are_one() -> None:
    package = json.loads((ROOT / "gpushare_spawner/notebook/lab/package.json").read_text())
    assert package["version"] == __version__


def test_kernels_that_come_and_go_while_they_are_counted() -> None:
    def get(kernel_id: str) -> SimpleNamespace:
        if kernel_id == "gone":
            raise KeyError(kernel_id)
        return SimpleNamespace(execution_state="busy" if kernel_id == "b" else "idle")

    manager = SimpleNamespace(list_kernel_ids=lambda: ["a", "gone", "b"], get_kernel=get)
    assert kernel_activity(manager) == KernelActivity(busy=1, alive=2, last_activity=0.0)


def test_the_dashboard_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dashboard() == "", "there is no hub"
    monkeypatch.setenv("JUPYTERHUB_BASE_URL", "/jupyter/")
    assert dashboard() == "/jupyter/services/gpushare/"
    monkeypatch.setenv("JUPYTERHUB_HOST", "https://hub.example.org")
    assert dashboard() == "https://hub.example.org/jupyter/services/gpushare/"
