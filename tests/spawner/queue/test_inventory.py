"""The kinds of GPUs there are, kept up to date."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.queue import snapshot
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuKind, GpuSnapshot


def gpu(uuid: str, model: str = "A100", memory: int = 80) -> GpuReport:
    return GpuReport(index=0, uuid=uuid, model=model, memory_bytes=memory)


def test_gpus_of_one_model_and_memory_are_one_kind() -> None:
    inventory = GpuInventory()
    inventory.put("n", [gpu("a"), gpu("b"), gpu("c", memory=40)])
    inventory.put("m", [gpu("d")])
    assert inventory.kinds == (GpuKind("A100", 80, 3), GpuKind("A100", 40, 1))
    inventory.put("n", [gpu("a"), gpu("b", model="H100")])
    assert sorted(inventory.kinds, key=str) == [GpuKind("A100", 80, 2), GpuKind("H100", 80, 1)]
    assert sorted(inventory.gpus) == ["a", "b", "d"]


def test_a_node_that_is_dropped_takes_its_gpus_along() -> None:
    inventory = GpuInventory()
    inventory.put("n", [gpu("a")])
    inventory.put("empty", [])
    assert len(inventory) == 2
    inventory.drop("n")
    inventory.drop("unknown")
    assert (len(inventory), dict(inventory.gpus), inventory.kinds) == (1, {}, ())


def test_a_gpu_that_two_nodes_report_counts_once_and_stays_while_one_reports_it() -> None:
    inventory = GpuInventory()
    inventory.put("m", [gpu("a", memory=40)])
    inventory.put("b", [gpu("a")])
    assert inventory.kinds == (GpuKind("A100", 80, 1),)
    assert inventory.doubled == {"a": ("b", "m")}
    inventory.drop("b")
    assert inventory.doubled == {}
    assert inventory.kinds == (GpuKind("A100", 40, 1),)
    inventory.drop("m")
    assert not inventory.gpus


def test_snapshots_of_the_same_kinds_find_the_gpus_of_a_template_once(monkeypatch: pytest.MonkeyPatch) -> None:
    suits = Mock(return_value=True)
    monkeypatch.setattr(GpuKind, "suits", suits)
    inventory = GpuInventory()
    inventory.put("n", [gpu("a")])
    half = Template.model_validate({"name": "half", "display_name": "Half", "gpu": {"fraction": 0.5}})
    assert [GpuSnapshot(inventory).models(half) for _ in range(3)] == [{"A100"}] * 3
    inventory.put("n", [gpu("a").model_copy(update={"healthy": False})])
    GpuSnapshot(inventory).request(half)
    assert suits.call_count == 1
    inventory.put("m", [gpu("b", model="H100")])
    assert GpuSnapshot(inventory).models(half) == {"A100", "H100"}
    mps = LayersFile.model_validate({"rules": [{"layer": "mps"}]})
    assert GpuSnapshot(inventory, rules=mps).request(half).layer is LayerName.MPS


def test_files_that_change_for_ever_leave_no_templates_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_SUITING", 3)
    inventory = GpuInventory()
    inventory.put("n", [gpu("a")])
    for number in range(10):
        name = f"half-{number}"
        GpuSnapshot(inventory).models(Template.model_validate({"name": name, "display_name": name}))
    assert len(inventory._suiting) <= 4
