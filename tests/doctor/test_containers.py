"""doctor/system.py: how containers get a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.finding import Level, Machine
from gpushare_spawner.doctor.system import check_containers

GPU = Gpu(0, "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb", "NVIDIA L4", 24 * 2**30, minor=0)


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
NONE: Mapping[str, str] = {}


def last(root: Path, gpus: tuple[Gpu, ...] = (GPU,), environment: Mapping[str, str] = NONE) -> Level:
    return check_containers(gpus, Machine(root, {"PATH": "/bin", **environment}))[-1].level


def write_cdi(root: Path, device: str) -> None:
    (root / "etc/cdi").mkdir(parents=True, exist_ok=True)
    found = {"name": "0", "containerEdits": {"deviceNodes": [{"path": device}]}}
    (root / "etc/cdi/nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": [found]}))


def test_a_machine_without_containers_is_not_checked(tmp_path: Path) -> None:
    assert last(tmp_path) is Level.SKIPPED


def test_a_node_needs_the_toolkit_or_a_name_for_each_gpu(tmp_path: Path) -> None:
    (tmp_path / "var/lib/kubelet").mkdir(parents=True)
    assert last(tmp_path) is Level.PROBLEM
    write_cdi(tmp_path, "/dev/nvidia1")
    assert last(tmp_path) is Level.PROBLEM
    write_cdi(tmp_path, "/dev/nvidia0")
    assert last(tmp_path) is Level.OK
    (tmp_path / "etc/cdi/nvidia.json").unlink()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-ctk").touch(0o755)
    assert last(tmp_path) is Level.OK


def test_a_container_that_sees_its_gpus_needs_no_toolkit_of_its_own(tmp_path: Path) -> None:
    assert last(tmp_path, environment=POD) is Level.OK
    assert last(tmp_path, (), environment=POD) is Level.PROBLEM


def test_a_kubelet_and_cdi_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "var/lib/kubelet").mkdir(parents=True)
    write_cdi(tmp_path, "/dev/nvidia0")
    engines, names = check_containers((GPU,), Machine(tmp_path, POD))
    assert engines.what == str(tmp_path / "var/lib/kubelet")
    assert names.what == "each GPU has a name: nvidia.com/gpu=0"
