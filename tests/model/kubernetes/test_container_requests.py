"""What a container requests, and what a released session gives back of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import PREFIX
from gpushare_spawner.model.kubernetes.container_requests import (
    REQUESTS,
    Requests,
    container_requests,
    missing_requests,
    requests_patch,
)

GIB = 2**30
FULL = Requests(1000, 4 * GIB)
LOW = Requests(100, GIB)


def pod(
    asked: Requests | None = FULL,
    granted: Requests | None = None,
    full: str | None = None,
    quality: str = "Burstable",
    **status: Any,
) -> dict[str, Any]:
    resources: dict[str, Any] = {"limits": {"cpu": "4", "gpushare-spawner.io/gpu-0": "25"}}
    if asked is not None:
        resources["requests"] = {**asked.written(), "gpushare-spawner.io/gpu-0": "25"}
    state = {"name": "notebook", **status}
    if granted is not None:
        state["resources"] = {"requests": granted.written()}
    return {
        "metadata": {"name": "n", "annotations": {} if full is None else {REQUESTS: full}},
        "spec": {"containers": [{"name": "side"}, {"name": "notebook", "resources": resources}]},
        "status": {"qosClass": quality, "containerStatuses": [{"name": "side"}, state]},
    }


def written(requests: Requests) -> str:
    return json.dumps(requests.written())


def test_the_container_with_the_share_counts() -> None:
    found = container_requests(pod())
    assert found is not None
    assert (found.container, found.requested, found.granted, found.full) == ("notebook", FULL, FULL, None)
    assert found.changeable
    assert not found.lacking
    assert not found.restored


def test_of_a_pod_with_a_claim_the_notebook_counts_though_no_container_names_the_claim() -> None:
    item = pod()
    del item["spec"]["containers"][1]["resources"]["limits"]["gpushare-spawner.io/gpu-0"]
    assert container_requests(item) is None
    item["spec"]["resourceClaims"] = [{"name": "gpushare", "resourceClaimName": "n-1"}]
    found = container_requests(item)
    assert found is not None
    assert (found.container, found.requested) == ("notebook", FULL)
    assert missing_requests(item) == ()


@pytest.mark.parametrize("quality", ["Guaranteed", "BestEffort", ""])
def test_only_burstable_pods_can_be_changed(quality: str) -> None:
    found = container_requests(pod(quality=quality))
    assert found is not None
    assert not found.changeable


def test_without_both_requests_there_is_nothing_to_change() -> None:
    assert container_requests(pod(asked=None)) is None
    half = pod()
    del half["spec"]["containers"][1]["resources"]["requests"]["memory"]
    assert container_requests(half) is None
    assert container_requests({"metadata": {"name": "n"}, "spec": {"containers": [{"name": "a"}]}}) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", "{", '{"cpu": "1"}', '{"cpu": "a", "memory": "1"}'])
def test_requests_that_cannot_be_read_are_left_alone(text: str) -> None:
    assert container_requests(pod(full=text)) is None


def test_what_the_node_has_granted_is_its_word_and_else_what_it_allocated() -> None:
    found = container_requests(pod(granted=LOW))
    assert found is not None
    assert found.granted == LOW
    found = container_requests(pod(allocatedResources=LOW.written()))
    assert found is not None
    assert found.granted == LOW


@pytest.mark.parametrize(
    ("asked", "granted", "lacking", "restored"),
    [
        (LOW, LOW, True, False),
        (FULL, LOW, True, False),
        (FULL, Requests(1000, GIB), True, False),
        (FULL, FULL, False, True),
        (LOW, FULL, False, False),
    ],
)
def test_lacking_until_the_node_has_granted_all_and_restored_then(
    asked: Requests, granted: Requests, lacking: bool, restored: bool
) -> None:
    found = container_requests(pod(asked, granted, written(FULL)))
    assert found is not None
    assert found.full == FULL
    assert (found.lacking, found.restored) == (lacking, restored)


@pytest.mark.parametrize(
    ("cpu", "memory", "used", "wanted"),
    [
        (100, GIB, Requests(0, 0), LOW),
        (None, GIB, Requests(0, 0), Requests(1000, GIB)),
        (100, None, Requests(0, 0), Requests(100, 4 * GIB)),
        (100, GIB, Requests(250, 2 * GIB), Requests(250, 2 * GIB)),
        (100, GIB, Requests(9000, 9 * GIB), FULL),
        (2000, 9 * GIB, Requests(0, 0), FULL),
    ],
)
def test_a_released_container_keeps_what_it_uses_and_never_more_than_it_had(
    cpu: int | None, memory: int | None, used: Requests, wanted: Requests
) -> None:
    found = container_requests(pod())
    assert found is not None
    assert found.released(cpu, memory, used) == wanted


@pytest.mark.parametrize(
    ("asked", "whole"), [(LOW, FULL), (Requests(3000, GIB), Requests(3000, 4 * GIB)), (Requests(3000, 9 * GIB), None)]
)
def test_requests_that_somebody_else_has_raised_are_not_lowered_on_return(
    asked: Requests, whole: Requests | None
) -> None:
    found = container_requests(pod(asked, full=written(FULL)))
    assert found is not None
    assert found.whole == (whole or asked)


def test_which_requests_a_container_lacks() -> None:
    assert missing_requests(pod()) == ()
    assert missing_requests(pod(asked=None)) == ("cpu", "memory")
    half = pod()
    del half["spec"]["containers"][1]["resources"]["requests"]["memory"]
    assert missing_requests(half) == ("memory",)


def test_lowered_requests_only_rise() -> None:
    found = container_requests(pod(Requests(250, 2 * GIB), full=written(FULL)))
    assert found is not None
    assert found.released(100, GIB, Requests(0, 0)) == Requests(250, 2 * GIB)
    assert found.released(100, GIB, Requests(300, 0)) == Requests(300, 2 * GIB)


def test_requests_that_were_written_down_and_not_lowered_yet_go_down() -> None:
    found = container_requests(pod(FULL, full=written(FULL)))
    assert found is not None
    assert found.released(100, GIB, Requests(0, 0)) == LOW


def test_both_requests_stand_in_every_patch() -> None:
    found = container_requests(pod())
    assert found is not None
    container = {"name": "notebook", "resources": {"requests": {"cpu": "100m", "memory": str(GIB)}}}
    assert found.patch(LOW, "7") == {"metadata": {"resourceVersion": "7"}, "spec": {"containers": [container]}}


def test_the_annotation_is_read_as_it_was_written() -> None:
    (text,) = requests_patch(FULL).values()
    found = container_requests(pod(LOW, full=text))
    assert found is not None
    assert found.full == FULL
    assert requests_patch(None) == {REQUESTS: None}
    assert REQUESTS.startswith(PREFIX)
