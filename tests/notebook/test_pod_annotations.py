"""A server without an agent reads its notices from its pod's annotations, which the kubelet keeps as files."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_spawner.cli import main
from gpushare_spawner.model.controls import Controls, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.kubernetes.annotations import (
    LAYER,
    NOTICE,
    SessionAnnotations,
    controls_patch,
    gpu_names,
    messages_patch,
    notice_patch,
)
from gpushare_spawner.model.kubernetes.objects import SESSION_FILES, session_files_volume
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.share_status import AdminMessage, PendingAction
from gpushare_spawner.notebook import status
from gpushare_spawner.notebook.client import AgentUnavailable
from gpushare_spawner.notebook.extension import answer
from gpushare_spawner.notebook.pod_annotations import PodAnnotations
from gpushare_spawner.notebook.session_client import ServiceAsk, SessionClient
from gpushare_spawner.wording.layers import NO_AGENT
from tests.kubernetes.standin.downward_volumes import write_downward_volumes
from tests.notebook.jupyter import Jupyter, running

NOW = 1_700_000_000.0
STOP = Notice(
    tier=Tier.STOPPED, at=NOW + 900, reason="idle", cause=IdleCause.IDLE, after_seconds=8 * 3600, effective_units=0
)


class Pod:
    """The annotations of a pod, and the kubelet that writes them as files."""

    def __init__(self, folder: Path, layer: LayerName = LayerName.KAI, gpus: int = 1) -> None:
        found = SessionAnnotations(
            session="ada",
            template="quarter",
            quota="secret-group",
            share_units=25 if gpus == 1 else 100,
            gpus=gpu_names(layer, "ada", gpus),
            gpu_indices=tuple(range(gpus)),
            tier_since=NOW,
            effective_units=25 if gpus == 1 else 100,
            layer=layer,
        )
        self.layer = layer
        self.files = folder / "session"
        self._folder = folder
        self._metadata = {"annotations": found.annotations(), "labels": found.labels()}
        self.write({})

    def write(self, patch: dict[str, str | None]) -> None:
        """The service patches annotations, and the kubelet writes them."""
        annotations = {**self._metadata["annotations"], **patch}
        self._metadata["annotations"] = {name: text for name, text in annotations.items() if text is not None}
        volumes = [{"name": "session", **session_files_volume()}]
        write_downward_volumes({"metadata": self._metadata, "spec": {"volumes": volumes}}, self._folder)

    @property
    def environment(self) -> dict[str, str]:
        return {"GPUSHARE_LAYER": str(self.layer), "GPUSHARE_ANNOTATIONS": str(self.files)}


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    pod = Pod(tmp_path)
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    for name, value in pod.environment.items():
        monkeypatch.setenv(name, value)
    return pod


def read(pod: Pod) -> PodAnnotations:
    return PodAnnotations(pod.files, str(pod.layer), clock=lambda: NOW)


def test_share_and_notice_are_those_of_the_annotations(pod: Pod) -> None:
    annotations = read(pod)
    before = annotations.status()
    assert (before.known, before.measured, before.takes_asks) == (True, False, False)
    assert (before.layer, before.share_units, before.gpu_count, before.notice) == ("kai", 25, 1, None)
    pod.write(notice_patch(STOP))
    assert annotations.status().notice == PendingAction(Tier.STOPPED, NOW + 900, 0, IdleCause.IDLE, 8 * 3600)
    pod.write(notice_patch(None))
    assert annotations.status().notice is None


def test_decisions_hold_until_they_end(pod: Pod) -> None:
    keep = Keep(until=NOW + 60, since=NOW, by="ada")
    pod.write(controls_patch(Controls(keep=keep, exemption=Exemption(by="root", reason="exam"))))
    pod.write(messages_patch([Message(text="Two lines.\nBoth of them.", by="root", at=NOW)], MessageCause.ADMIN))
    said = read(pod).status().controls
    assert said is not None
    assert (said.keep_until, said.exempt, said.exempt_until) == (NOW + 60, True, None)
    assert said.messages == (AdminMessage("Two lines.\nBoth of them.", NOW),)
    over = keep.model_copy(update={"until": NOW - 1})
    pod.write(controls_patch(Controls(keep=over, exemption=Exemption(by="root", reason="exam", until=NOW - 1))))
    said = read(pod).status().controls
    assert said is not None
    assert (said.keep_until, said.exempt) == (None, False)


def test_several_gpus_are_counted(tmp_path: Path) -> None:
    assert read(Pod(tmp_path, gpus=2)).status().gpu_count == 2


def test_files_are_read_again_only_after_the_kubelet_has_replaced_them(pod: Pod) -> None:
    annotations = read(pod)
    before = annotations.status()
    for file in (pod.files / "..data").iterdir():
        file.write_text("no session at all")
    assert annotations.status() == before
    pod.write(notice_patch(STOP))
    assert annotations.status().notice is not None


@pytest.mark.parametrize("broken", ["missing", "no share", "wrong notice"])
def test_annotations_that_cannot_be_read_are_a_problem_that_is_said(pod: Pod, broken: str) -> None:
    if broken == "missing":
        shutil.rmtree(pod.files)
    elif broken == "no share":
        pod.write({"gpushare-spawner.io/share": None})
    else:
        pod.write({NOTICE: "{}"})
    found = read(pod).status()
    assert found.problem.startswith("The annotations of this server's pod cannot be read: ")
    assert not found.known


def test_the_user_sees_no_quota(pod: Pod) -> None:
    assert LAYER not in SESSION_FILES
    assert not any("secret-group" in file.read_text() for file in pod.files.iterdir() if file.is_file())


def test_commands_say_the_share_and_where_to_keep_it(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.write(notice_patch(STOP.model_copy(update={"at": time.time() + 900})))
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "shared by     KAI Scheduler." in said
    assert "Your server will stop at " in said
    assert str(status()) in said
    assert main(["smi"]) == 0
    assert "shared by     KAI Scheduler." in capsys.readouterr().out, "there are no figures to draw"
    assert main(["keep", "4h"]) == 1
    assert NO_AGENT in capsys.readouterr().err


def test_the_browser_gets_the_notice_and_no_ask_without_an_agent(pod: Pod) -> None:
    pod.write(notice_patch(STOP))
    client = SessionClient(pod=read(pod))
    body = answer(asyncio.run(client.query()))
    assert (body["known"], body["line"]) == (True, "0.25\u00a0GPU · KAI Scheduler")
    assert body["notice_text"].startswith("Your server will stop at {time}: idle for 8\u00a0h.")
    assert (body["asks"], body["notice_controls"], body["asks_text"]) == ([], [], NO_AGENT)
    with pytest.raises(AgentUnavailable, match="No agent serves this server"):
        asyncio.run(client.ask(ServiceAsk.of(AskKind.KEEP, 3600)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, Jupyter]]:
    pod = Pod(tmp_path_factory.mktemp("pod"))
    with running(tmp_path_factory.mktemp("jupyter"), JUPYTERHUB_BASE_URL="/", **pod.environment) as jupyter:
        yield pod, jupyter


@pytest.mark.slow
def test_jupyter_serves_the_notice_and_offers_nothing_that_cannot_be_asked(served: tuple[Pod, Jupyter]) -> None:
    pod, server = served
    pod.write(notice_patch(STOP))
    code, body = server.get("gpushare/status")
    assert (code, body["known"], body["line"]) == (200, True, "0.25\u00a0GPU · KAI Scheduler")
    assert body["notice_text"].startswith("Your server will stop at {time}: idle for 8\u00a0h.")
    assert (body["asks"], body["notice_controls"], body["asks_text"]) == ([], [], NO_AGENT)
    assert server.post("gpushare/ask", {"kind": "keep", "value": 3600}) == (
        503,
        json.dumps({"done": False, "text": NO_AGENT}),
    )
