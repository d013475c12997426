"""doctor/containers.py: how containers get a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.containers import ContainerFacts, findings, probe
from gpushare_spawner.doctor.finding import Level, Machine

GPU = Gpu(0, "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb", "NVIDIA L4", 24 * 2**30, minor=0)


def test_a_machine_without_containers_is_not_checked() -> None:
    assert [finding.level for finding in findings(ContainerFacts((GPU,)))] == [Level.SKIPPED]


def test_a_node_needs_the_toolkit_or_a_name_for_each_gpu() -> None:
    engines = ("/var/lib/kubelet",)
    assert findings(ContainerFacts((GPU,), engines))[-1].level is Level.PROBLEM
    assert findings(ContainerFacts((GPU,), engines, toolkit="/usr/bin/nvidia-ctk"))[-1].level is Level.OK
    assert findings(ContainerFacts((GPU,), engines, cdi={GPU.uuid: "nvidia.com/gpu=0"}))[-1].level is Level.OK
    other = {"GPU-other": "nvidia.com/gpu=1"}
    assert findings(ContainerFacts((GPU,), engines, cdi=other))[-1].level is Level.PROBLEM


def test_a_container_that_sees_its_gpus_needs_no_toolkit_of_its_own() -> None:
    assert {finding.level for finding in findings(ContainerFacts((GPU,), in_pod=True))} == {Level.OK}
    assert findings(ContainerFacts((), in_pod=True))[-1].level is Level.PROBLEM


def test_the_probe_finds_a_kubelet_and_cdi_names(tmp_path: Path) -> None:
    (tmp_path / "var/lib/kubelet").mkdir(parents=True)
    cdi = tmp_path / "etc/cdi"
    cdi.mkdir(parents=True)
    device = {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
    (cdi / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": [device]}))
    facts = probe((GPU,), Machine(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}))
    assert facts.engines == (str(tmp_path / "var/lib/kubelet"),)
    assert facts.cdi == {GPU.uuid: "nvidia.com/gpu=0"}
    assert facts.in_pod
