"""The kinds of GPUs there are, kept up to date."""

from __future__ import annotations

from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuKind


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
