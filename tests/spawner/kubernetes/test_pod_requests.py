"""Requests of pods, counted as the scheduler counts them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.container_requests import memory_bytes, millicores, quantity
from gpushare_spawner.spawner.kubernetes.cluster.pods import pod_requests

GI = 2**30


def container(name: str = "c", cpu: str = "", memory: str = "", **more: Any) -> dict[str, Any]:
    asked = {key: value for key, value in (("cpu", cpu), ("memory", memory)) if value}
    return {"name": name, "resources": {"requests": asked}, **more}


def requests(**spec: Any) -> tuple[float, int]:
    status = spec.pop("status", {})
    found = pod_requests({"spec": spec, "status": status})
    return float(found.get("cpu", 0)), int(found.get("memory", 0))


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (4, "4"),
        ("4Gi", str(4 * GI)),
        ("1e3", "1000"),
        ("129M", "129000000"),
        ("7n", "7e-9"),
    ],
)
def test_quantities_are_read_as_the_api_server_writes_them(written: Any, number: str) -> None:
    assert quantity(written) == Decimal(number)


@pytest.mark.parametrize("written", ["", "four", "1 Gi", "1gi"])
def test_what_is_no_quantity_is_said_to_be_none(written: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(written)


def test_amounts_are_millicores_rounded_up_and_bytes() -> None:
    assert millicores({"cpu": "1500m"}) == 1500
    assert millicores({"cpu": "100u"}) == 1
    assert millicores({}) == 0
    assert memory_bytes({"memory": "1Ki"}) == 1024


def test_containers_add_up_and_overhead_comes_on_top() -> None:
    two = [container("a", "1", "1Gi"), container("b", "500m")]
    assert requests(containers=two) == (1.5, GI)
    assert requests(containers=two, overhead={"cpu": "250m", "memory": "1Gi"}) == (1.75, 2 * GI)


def test_a_limit_without_a_request_is_a_request() -> None:
    assert requests(containers=[{"name": "c", "resources": {"limits": {"cpu": "2"}}}]) == (2.0, 0)


def test_an_init_container_counts_where_it_asks_for_more() -> None:
    assert requests(containers=[container(cpu="1")], initContainers=[container("i", cpu="3")]) == (3.0, 0)
    assert requests(containers=[container(cpu="1")], initContainers=[container("i", cpu="500m")]) == (1.0, 0)


def test_sidecars_run_beside_containers_and_later_init_containers() -> None:
    sidecar = container("s", cpu="1", restartPolicy="Always")
    assert requests(containers=[container(cpu="1")], initContainers=[sidecar]) == (2.0, 0)
    assert requests(containers=[container(cpu="1")], initContainers=[sidecar, container("i", cpu="2")]) == (3.0, 0)
    assert requests(containers=[container(cpu="1")], initContainers=[container("i", cpu="2"), sidecar]) == (2.0, 0)


def test_of_a_container_that_is_being_resized_the_largest_amount_counts() -> None:
    states = [
        {"name": "c", "allocatedResources": {"cpu": "3"}, "resources": {"requests": {"cpu": "2", "memory": "2Gi"}}}
    ]
    found = requests(containers=[container(cpu="1", memory="1Gi")], status={"containerStatuses": states})
    assert found == (3.0, 2 * GI)


def test_requests_of_the_pod_as_a_whole_take_the_place_of_the_sum() -> None:
    found = requests(containers=[container(cpu="1", memory="1Gi")], resources={"requests": {"cpu": "4"}})
    assert found == (4.0, GI)
