"""What a card says of now, on one snapshot, without an agent, a clock or a hub."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.availability import AvailabilityNow
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from tests.spawner.queue.machine import Machine

HALF = Template.model_validate({"name": "half", "display_name": "Half", "gpu": {"fraction": 0.5}})
CPU = Template.model_validate({"name": "cpu", "display_name": "CPU"})


@pytest.fixture
def machine() -> Machine:
    return Machine()


def available(machine: Machine, *ineligible: str) -> AvailabilityNow:
    return AvailabilityNow(machine.check(), machine.queue, "this cluster", lambda template: frozenset(ineligible))


def test_a_template_starts_now_where_an_eligible_node_has_free_units(machine: Machine) -> None:
    machine.hold("a", 100)
    assert available(machine).availability(HALF).text == "Starts now"
    assert available(machine, "a").availability(HALF).text == "Starts now"


def test_free_units_of_nodes_that_keep_a_template_out_are_none_for_it(machine: Machine) -> None:
    machine.hold("a", 100)
    met = available(machine, "b").availability(HALF)
    assert (met.kind, met.text) == ("wait", "First in queue")


def test_a_template_that_all_nodes_keep_out_says_so(machine: Machine) -> None:
    met = available(machine, "a", "b").availability(HALF)
    assert (met.kind, met.text) == ("never", "No suitable node")
    assert "because of their taints or labels" in met.detail


def test_a_template_without_a_gpu_needs_no_node_with_a_gpu(machine: Machine) -> None:
    assert available(machine, "a", "b").availability(CPU).kind == "now"


def test_what_would_start_now_counts_each_alternative_s_own_nodes(machine: Machine) -> None:
    machine.hold("a", 100)
    other = HALF.model_copy(update={"name": "other", "display_name": "Other"})
    asked = [SpawnRequest(Tenant("ada"), template) for template in (HALF, other, CPU)]
    alternatives = (replace(asked[0], ineligible=lambda: frozenset({"b"})), *asked[1:])
    now = available(machine)
    for _ in now.preparing(alternatives):
        pass
    assert now.startable(alternatives) == (other, CPU)
