"""What the doctor says of GPUs that two nodes report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.clients.api import ApiFailure, ClusterApi, ListAnswer
from gpushare_spawner.clients.service_account import NoCluster
from gpushare_spawner.doctor import cluster
from gpushare_spawner.doctor.cluster import check_gpus
from gpushare_spawner.doctor.finding import Level, Machine
from gpushare_spawner.model.kubernetes.objects import REPORT_KEY, REPORT_SELECTOR, report_name, written_report
from tests.placement.reports import gpu, report

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAMESPACE": "jhub"}


def config_map(node: str, *uuids: str, name: str = "") -> dict[str, Any]:
    written = written_report(report(node, [gpu(uuid, number) for number, uuid in enumerate(uuids)]))
    return {"metadata": {"name": name or report_name(node)}, "data": {REPORT_KEY: written}}


def said(
    monkeypatch: pytest.MonkeyPatch, answer: list[dict[str, Any]] | Exception, tmp_path: Path
) -> tuple[Level, str]:
    """The only finding of a doctor in a pod of the namespace jhub."""

    class Api:
        async def list(self, path: str, **query: str) -> Any:
            assert (path, query) == ("/api/v1/namespaces/jhub/configmaps", {"labelSelector": REPORT_SELECTOR})
            if isinstance(answer, Exception):
                raise answer
            return ListAnswer(json.dumps({"items": answer, "metadata": {"resourceVersion": "1"}}))

        async def close(self) -> None:
            pass

    async def connect() -> Api:
        if isinstance(answer, NoCluster):
            raise answer
        return Api()

    monkeypatch.setattr(ClusterApi, "connect", connect)
    (finding,) = check_gpus(Machine(tmp_path, POD))
    assert finding.where == cluster.GPUS
    assert (finding.remedy != "") == (finding.level is Level.PROBLEM)
    return finding.level, finding.what


def test_one_gpu_of_two_nodes_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forged = config_map("n3", "a", name=report_name("n4"))
    unreadable = {"metadata": {"name": report_name("n5")}, "data": {REPORT_KEY: "?"}}
    maps = [config_map("n2", "a", "b"), config_map("n1", "a", "c"), forged, unreadable]
    level, what = said(monkeypatch, maps, tmp_path)
    assert level is Level.PROBLEM
    assert what.startswith("GPU a is reported by the nodes n1 and n2. It counts for n1 alone")
    assert cluster.reported_gpus(Machine(tmp_path, POD)) == {"a", "b", "c"}


def test_different_gpus_are_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert said(monkeypatch, [config_map("n1", "a"), config_map("n2", "b")], tmp_path) == (
        Level.OK, "no two of 2 nodes report the same GPU",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            ApiFailure(403, "forbidden"),
            "this account may not read the reports of other nodes: run `gpushare doctor` in",
        ),
        (ApiFailure(0, "no answer"), "the API server does not say: no answer"),
        (NoCluster("no kubeconfig"), "the API server cannot be asked: no kubeconfig"),
    ],
)
def test_what_cannot_be_read_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, why: str
) -> None:
    level, what = said(monkeypatch, error, tmp_path)
    assert (level, what[: len(why)]) == (Level.SKIPPED, why)
    assert cluster.reported_gpus(Machine(tmp_path, POD)) == frozenset()


def test_a_machine_that_is_no_node_is_not_asked(tmp_path: Path) -> None:
    (finding,) = check_gpus(Machine(tmp_path, {}))
    assert (finding.level, finding.what) == (Level.SKIPPED, "this machine is not a node of a cluster")
