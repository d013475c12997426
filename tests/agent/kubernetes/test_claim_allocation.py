"""What a ResourceClaim says that a session may have, and why it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent.kubernetes.claims.allocation import (
    ClaimKey,
    PreparedClaim,
    PreparedClaims,
    claim_allocation,
)
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments
from gpushare_spawner.model.kubernetes.objects import DRIVER, claim_folder, device_name
from tests.agent.peers import FIRST, SECOND

KEY = ClaimKey("jhub", "ada-1", "uid-1")
GPUS = {gpu.uuid: gpu for gpu in (FIRST, SECOND)}


def result(units: str | None = "25", **changes: Any) -> dict[str, Any]:
    values = {"request": "gpu-0", "driver": DRIVER, "pool": "node-a", "device": device_name(FIRST.uuid), "shareID": "s"}
    consumed = {} if units is None else {"consumedCapacity": {"units": units, "memory": "4Gi"}}
    return {**values, **consumed, **changes}


def claim(*results: dict[str, Any], uid: str = "uid-1", pods: bool = True) -> dict[str, Any]:
    reserved = [{"resource": "pods", "name": "ada", "uid": "pod-1"}] if pods else []
    status = {"allocation": {"devices": {"results": list(results)}}, "reservedFor": reserved}
    return {"metadata": {"uid": uid}, "status": status}


def test_units_by_gpu_of_all_requests_of_this_driver() -> None:
    other = result(device=device_name(SECOND.uuid), request="gpu-1")
    foreign = result(driver="gpu.example.org")
    found = claim_allocation(claim(result("25"), other, result("2500m"), foreign), KEY, "node-a", GPUS)
    # a part of a unit is a whole one
    assert found.units == {FIRST.uuid: 28, SECOND.uuid: 25}
    assert found.pod == "ada"
    assert [(one.request, one.device, one.share) for one in found.devices][:2] == [
        ("gpu-0", device_name(FIRST.uuid), "s"),
        ("gpu-1", device_name(SECOND.uuid), "s"),
    ]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (claim(result(), uid="uid-2"), "its uid is uid-2, not uid-1"),
        (claim(result(), pods=False), "is not reserved for a pod"),
        (claim(), "has no device of gpushare-spawner.io"),
        ({"metadata": {"uid": "uid-1"}}, "is not reserved for a pod"),
        (claim(result(pool="node-b")), "is allocated on node node-b"),
        (claim(result(device="gpu-9")), "not a GPU of this agent"),
        (claim(result(None)), "the feature gate DRAConsumableCapacity is off in the scheduler"),
        (claim(result(None, adminAccess=True)), "with admin access, for monitoring: it holds no units"),
        (claim(result("many")), "is not a quantity"),
        (claim(result("0")), "a share is at least 1 unit"),
    ],
)
def test_what_no_session_can_have_is_refused_with_the_reason(item: dict[str, Any], why: str) -> None:
    with pytest.raises(DevicesRefused, match=why):
        claim_allocation(item, KEY, "node-a", GPUS)


def prepared(uid: str = "uid-1", **held: tuple[str, ...]) -> PreparedClaim:
    return PreparedClaim(namespace="jhub", name="ada-1", uid=uid, pod="ada", held=held, devices=())


def test_prepared_claims_are_there_again_after_a_restart(tmp_path: Path) -> None:
    claims = PreparedClaims(tmp_path / "claims")
    claims.put(prepared(a=("a-1", "a-2"), b=("b-1",)))
    claims.put(prepared("uid-2", a=("a-3",)))
    claims.remove("uid-2")
    (tmp_path / "claims" / "broken.json").write_text("{")
    again = PreparedClaims(tmp_path / "claims")
    assert again.get("uid-1") == prepared(a=("a-1", "a-2"), b=("b-1",))
    assert again.get("uid-2") is None
    assert again.ids == {"a-1", "a-2", "b-1"}
    # one folder for the whole claim
    assert again.folder_name(["a-1", "a-2"]) == again.folder_name(["b-1"]) == claim_folder("jhub", "ada-1")
    assert again.folder_name(["a-3"]) != claim_folder("jhub", "ada-1")


def test_pods_of_claims_stand_beside_those_that_the_kubelet_lists(tmp_path: Path) -> None:
    claims = PreparedClaims(tmp_path)
    claims.put(prepared(a=("a-1",), b=("b-1",)))
    listed = KubeletAssignments({("jhub", "ben"): {"nvidia.com/gpu": (frozenset({"0"}),)}}, {}, 1.0)
    joined = claims.joined(listed, {"a": 0, "b": 3})
    assert joined.by_pod == {
        **listed.by_pod,
        ("jhub", "ada"): {
            "gpushare-spawner.io/gpu-0": (frozenset({"a-1"}),),
            "gpushare-spawner.io/gpu-3": (frozenset({"b-1"}),),
        },
    }
    assert joined.started == 1.0
