"""One machine: which GPUs and MIG instances do for a template, by its layer and by `layers.yaml`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.report import GpuReport, Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.strategy import BestFit
from gpushare_spawner.spawner.queue.availability import Availability, AvailabilityNow
from gpushare_spawner.spawner.queue.queue import PlacementCheck, SpawnQueue
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot
from gpushare_spawner.wording.spawn_form import not_on_one_machine
from tests.placement.instances import A100, GIB, PROFILES, instance
from tests.present import present

T4 = "Tesla T4"


def whole(uuid: str, model: str = A100, index: int = 0) -> GpuReport:
    return GpuReport(index=index, uuid=uuid, model=model, memory_bytes=80 * GIB)


def template(name: str = "t", idle: dict[str, object] | None = None, **gpu: Any) -> Template:
    return Template.model_validate({"name": name, "display_name": name, "gpu": gpu, "idle": idle or {}})


def rules(*given: dict[str, object]) -> LayersFile:
    return LayersFile.model_validate({"rules": list(given)})


MIG_RULE: dict[str, object] = {"models": ["*A100*"], "layer": "mig"}


class OneMachine:
    """GPUs of one machine, and what sessions have of them."""

    def __init__(self, *gpus: GpuReport, layers: LayersFile | None = None) -> None:
        self.gpus, self.layers = gpus, layers or LayersFile()
        self.held: list[Allocation] = []

    def take(self, asked: Template, name: str) -> str:
        """Place a session; the UUID of its GPU."""
        check = self.check()
        place = present(check.verdict(check.snapshot.request(asked)).placement)
        share = present(asked.gpu).share
        self.held.append(Allocation(name, place.gpus, share.units, place.borrowed, share.units, 0.0, layer=place.layer))
        return place.gpus[0]

    def check(self) -> PlacementCheck:
        inventory = GpuInventory()
        inventory.put("here", self.gpus)
        feed = LedgerFeed()
        ledger = feed.follow([Report(node="here", published_at=0.0, gpus=self.gpus)], self.held)
        return PlacementCheck(GpuSnapshot(inventory, rules=self.layers), ledger, BestFit())

    def says(self, asked: Template) -> Availability:
        return AvailabilityNow(self.check(), SpawnQueue(5)).availability(asked)


def test_template_with_mig_takes_the_smallest_instance_then_larger_ones_then_waits() -> None:
    machine = OneMachine(
        whole("GPU-0"), instance("MIG-3", "3g.40gb", "GPU-1", 1), instance("MIG-1", "1g.10gb", "GPU-1", 1)
    )
    tenth = template(fraction=0.1, layer="mig")
    now = machine.says(tenth)
    assert (now.kind, now.layer, now.profile) == ("now", LayerName.MIG, PROFILES["1g.10gb"])
    assert [(kind.model, kind.count) for kind in now.gpus] == [(f"{A100} MIG 3g.40gb", 1), (f"{A100} MIG 1g.10gb", 1)]
    assert machine.take(tenth, "ada") == "MIG-1"
    assert machine.says(tenth).profile == PROFILES["3g.40gb"]
    assert machine.take(tenth, "bob") == "MIG-3"
    waits = machine.says(tenth)
    assert (waits.kind, waits.text, waits.profile) == ("wait", "First in queue", PROFILES["1g.10gb"])


@pytest.mark.parametrize(
    "gpu",
    [
        {"fraction": 0.5, "layer": "mig"},
        {"fraction": 0.1, "layer": "mig", "memory": {"guarantee": "40Gi"}},
        {"fraction": 0.1, "layer": "mig", "models": ["*H100*"]},
        {"count": 2, "layer": "mig"},
        {"fraction": 0.1},
        {"fraction": 0.1, "layer": "mps"},
    ],
)
def test_no_wait_helps_where_no_instance_will_do(gpu: dict[str, Any]) -> None:
    machine = OneMachine(instance("MIG-3", "3g.40gb"), instance("MIG-1", "1g.10gb"))
    assert machine.says(template(**gpu)).kind == "never"


@pytest.mark.parametrize("gpu", [{"fraction": 0.1, "layer": "hami"}, {"count": 2, "layer": "mps"}])
def test_card_says_what_the_spawn_would_be_told(gpu: dict[str, Any]) -> None:
    machine, asked = OneMachine(whole("GPU-0"), whole("GPU-1", index=1)), template(**gpu)
    assert (machine.says(asked).kind, machine.says(asked).detail) == ("never", not_on_one_machine(asked))
    assert machine.says(asked).detail
    now = AvailabilityNow(machine.check(), SpawnQueue(5))
    mps = template(fraction=0.1, layer="mps")
    assert now.startable([now.request(asked), now.request(mps)]) == (mps,)


def test_mps_waits_for_native_sessions_to_end_and_the_card_says_so() -> None:
    machine = OneMachine(whole("GPU-0"))
    machine.take(template(fraction=0.25), "ada")
    quarter = machine.says(template(fraction=0.25, layer="mps"))
    assert quarter.kind == "wait"
    assert quarter.detail.startswith("0.25 GPU is free on a GPU, but the sessions there do not use NVIDIA MPS")
    machine.take(template(fraction=0.5), "bob")
    assert machine.says(template(fraction=0.5, layer="mps")).detail.startswith("Not enough free capacity")


def test_memory_decides_where_the_template_guarantees_it() -> None:
    machine = OneMachine(instance("MIG-1", "1g.10gb"), instance("MIG-12", "1g.20gb"), instance("MIG-3", "3g.40gb"))
    for guarantee, uuid in (("9Gi", "MIG-1"), ("10Gi", "MIG-12"), ("12.5%", "MIG-1"), ("30%", "MIG-3")):
        asked = template(fraction=0.1, layer="mig", memory={"guarantee": guarantee})
        check = machine.check()
        assert present(check.verdict(check.snapshot.request(asked)).placement).gpus == (uuid,)


def test_patterns_of_models_are_for_the_gpu_that_the_instance_is_a_part_of() -> None:
    machine = OneMachine(instance("MIG-1", "1g.10gb"))
    assert machine.says(template(fraction=0.1, layer="mig", models=[A100])).kind == "now"


def test_template_without_a_layer_has_the_layer_of_the_rule_for_the_model() -> None:
    machine = OneMachine(whole("GPU-0", T4), layers=rules({"models": ["*T4*"], "layer": "mps"}))
    quarter = template(fraction=0.25)
    assert machine.says(quarter).layer is LayerName.MPS
    machine.take(quarter, "ada")
    assert machine.held[0].layer is LayerName.MPS
    assert machine.says(template(fraction=0.25, layer="native")).kind == "wait"
    # a template that promises what the layer cannot keep is not offered there
    assert machine.says(template(fraction=0.25, idle={"downgrade_after": "5m", "downgrade_to": 0.1})).kind == "never"
    assert machine.says(template(count=2)).kind == "never"


def test_without_a_rule_the_layer_is_native_and_instances_are_for_templates_that_name_mig() -> None:
    machine = OneMachine(whole("GPU-0"), instance("MIG-1", "1g.10gb", "GPU-1", 1))
    assert machine.says(template(fraction=0.1)).layer is None
    assert machine.take(template(fraction=0.1), "ada") == "GPU-0"
    assert machine.take(template(fraction=0.1, layer="mig"), "bob") == "MIG-1"


def test_machine_with_one_gpu_native_and_one_in_mig_mode_serves_a_template_by_both() -> None:
    layers = rules(MIG_RULE)
    machine = OneMachine(whole("GPU-0"), instance("MIG-1", "1g.10gb", "GPU-1", 1), layers=layers)
    tenth, large = template(fraction=0.1), template("large", fraction=0.5)
    assert machine.says(tenth).layer is LayerName.MIG
    assert machine.take(tenth, "ada") == "MIG-1"
    assert machine.says(tenth).layer is None
    assert machine.take(tenth, "bob") == "GPU-0"
    assert machine.take(large, "cem") == "GPU-0"
    assert machine.says(large).kind == "wait"
    # a notebook that is to be downgraded while idle is never on an instance
    downgraded = template(fraction=0.1, idle={"downgrade_after": "5m", "downgrade_to": 0.05})
    machine.held.clear()
    assert machine.take(downgraded, "eve") == "GPU-0"


def test_first_rule_that_works_on_one_machine_counts_and_node_labels_match_nothing() -> None:
    gpu = whole("GPU-0", T4)
    for given, layer in (
        ([{"layer": "hami"}, {"layer": "mps"}], LayerName.MPS),
        ([{"nodes": {"pool": "a"}, "layer": "mps"}], None),
        ([{"layer": "native"}, {"layer": "mig"}], None),
        ([{"layer": "mig"}], None),
    ):
        assert OneMachine(gpu, layers=rules(*given)).says(template(fraction=0.25)).layer is layer


def test_units_of_all_gpus_count_an_instance_as_the_part_that_it_is() -> None:
    snapshot = OneMachine(whole("GPU-0"), instance("MIG-3", "3g.40gb"), instance("MIG-1", "1g.10gb")).check().snapshot
    assert snapshot.capacity_units == 100 + 42 + 14


def test_instances_of_several_gpus_are_one_kind() -> None:
    first, second = instance("MIG-1", "1g.10gb", "GPU-1", 1), instance("MIG-2", "1g.10gb", "GPU-2", 2)
    snapshot = OneMachine(first, second, replace_profile(first)).check().snapshot
    assert [kind.count for kind in snapshot.kinds] == [2, 1]


def replace_profile(gpu: GpuReport) -> GpuReport:
    """The same model name with other sizes."""
    mig = present(gpu.mig)
    return gpu.model_copy(update={"uuid": "MIG-3", "mig": replace(mig, profile=replace(mig.profile, memory_slices=2))})


def test_refusal_says_which_instances_there_are() -> None:
    half = template(fraction=0.5, layer="mig")
    machine = OneMachine(instance("MIG-3", "3g.40gb"), instance("MIG-1", "1g.10gb"), instance("MIG-2", "1g.10gb"))
    never = machine.says(half)
    assert (never.kind, never.text) == ("never", "No suitable GPU")
    assert never.detail.startswith("No MIG instance that the template accepts provides 0.50 GPU with the memory")
    assert "This machine has: 1g.10gb, 3g.40gb." in never.detail
    assert OneMachine(whole("GPU-0")).says(half).detail.startswith("This machine has no MIG instance.")
