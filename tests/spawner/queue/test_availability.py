"""What a card says of now, on one snapshot, without an agent, a clock or a hub."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

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


def test_a_place_is_looked_for_once_until_a_node_changes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = available(machine)
    place = Mock(wraps=now.check.ledger.place)
    monkeypatch.setattr(now.check.ledger, "place", place)
    for _ in now.preparing([now.request(HALF)]):
        pass
    assert now.availability(HALF).kind == "now"
    assert place.call_count == 1
    request = now.request(HALF).placement_request(now.check.snapshot)
    machine.hold("a", 100)
    machine.hold("b", 100)
    machine.check()
    assert now.check.verdict(request).placement is None
    assert place.call_count == 2
