"""`gpushare agent --kubernetes observe` as a process of its own: real library, simulated GPUs, killed and back."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.agent.command import Unusable
from gpushare_spawner.agent.kubernetes import options as cluster_options
from gpushare_spawner.agent.kubernetes.options import read
from gpushare_spawner.cli import subcommand_parser
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, gpu_names
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, OBSERVER
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport
from tests.agent.conftest import short_folder  # noqa: F401
from tests.present import present

from .cluster_agent import ClusterAgent
from .observing_agent import OBSERVER_RULES
from .standin.client import path
from .standin.cluster import Cluster, a_pod

ROOT = Path(__file__).parents[2]


class ObservingProcess(ClusterAgent):
    """Has the rights of an agent that observes, and no more."""

    async def observe(self) -> None:
        await self.start("--kubernetes", "observe")
        await self.cluster.wait_for_allocatable(self.kubelet.name, OBSERVER, 512)

    async def program(self, name: str) -> None:
        """A server of time-slicing that computes on the GPU for ever: its layer's plugin gives it the driver."""
        layer = LayerName.TIME_SLICING
        session = SessionAnnotations(
            session=name, template="quarter", share_units=25, gpus=gpu_names(layer, name, 1), gpu_indices=(0,),
            tier_since=time.time(), effective_units=25, layer=layer,
        )  # fmt: skip
        driver = {variable: self.environment[variable] for variable in ("LD_LIBRARY_PATH", "SIMGPU_STATE")}
        manifest = a_pod(
            name, command=[sys.executable, "-m", "tests.agent.cuda_program"], limits={OBSERVER: 1},
            env={**driver, "PYTHONPATH": str(ROOT)}, annotations=session.annotations(), labels=session.labels(),
            nodeSelector={HOSTNAME_LABEL: self.kubelet.name},
        )  # fmt: skip
        await self.cluster.admin.create(path("pods", self.cluster.namespace), manifest)
        await self.cluster.wait_for_phase(name, "Running")


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[ObservingProcess]:  # noqa: F811
    kubelet = await cluster.make_node()
    agent = ObservingProcess(short_folder, cluster, kubelet, await cluster.service_account("observer", OBSERVER_RULES))
    await agent.observe()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


def works(session: SessionReport | None) -> bool:
    """Whether a connected program computes."""
    return session is not None and session.processes == 1 and session.gpu_seconds > 0


@pytest.mark.slow
async def test_gpu_work_of_a_program_is_reported_before_and_after_the_agent_was_killed(agent: ObservingProcess) -> None:
    await agent.program("ada")
    report = await agent.published(lambda report: works(report.session("ada")))
    before = present(report.session("ada"))
    assert report.gpus == ()
    assert (before.layer, before.gpu_use_known) == (LayerName.TIME_SLICING, True)
    assert before.memory_bytes > 0
    agent.end(signal.SIGKILL)
    await agent.observe()
    after = await agent.session(
        "ada", lambda session: session.processes == 1 and session.gpu_seconds > before.gpu_seconds
    )
    assert after.opened_at == before.opened_at
    assert time.time() - present(after.last_gpu_activity) < 10
    await agent.cluster.admin.delete(path("pods", agent.cluster.namespace, "ada"), grace=0)
    await agent.published(lambda report: report.session("ada") is None)


def test_a_mounted_service_account_gives_the_namespace_only_in_a_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "namespace").write_text("users\n")
    monkeypatch.setattr(cluster_options, "_SERVICE_ACCOUNT", tmp_path / "namespace")
    for name in ("SIMGPU_STATE", "SIMGPU_NODE"):
        monkeypatch.setenv(name, "set")
    options = subcommand_parser("agent").parse_args(["--kubernetes", f"--host-dir={tmp_path}"])
    with pytest.raises(Unusable, match="outside a pod needs --namespace"):
        read(options)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert present(read(options)).settings.namespace == "users"


def test_a_unit_size_that_does_not_divide_a_gpu_is_refused(tmp_path: Path) -> None:
    arguments = ["--kubernetes", "--namespace=hub", f"--host-dir={tmp_path}", "--unit-size=7"]
    with pytest.raises(Unusable, match="--unit-size 7 does not divide 100"):
        read(subcommand_parser("agent").parse_args(arguments))


def test_simulated_gpus_get_the_nodes_name_unless_the_environment_says_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--kubernetes", "--namespace=hub", "--node=worker-1", f"--host-dir={tmp_path}"]
    for name, before in (("worker-1", None), ("other", "other")):
        monkeypatch.setenv("SIMGPU_STATE", str(tmp_path / "gpus"))
        monkeypatch.setenv("SIMGPU_NODE", before or "")
        if before is None:
            monkeypatch.delenv("SIMGPU_NODE")
        read(subcommand_parser("agent").parse_args(arguments))
        assert os.environ["SIMGPU_NODE"] == name
