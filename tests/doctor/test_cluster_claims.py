"""What the doctor says of GPU shares by claims, by facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.claims.probe import socket_paths
from gpushare_spawner.doctor.cluster import ClaimFacts, check_claims, claim_findings
from gpushare_spawner.doctor.finding import Level, Machine

GATE = "--kubernetes dra: the API server drops requestPolicy from ResourceSlices"
GOOD = ClaimFacts(in_use=True, server="v1.36.2", runtime="containerd://1.7.27")


def said(facts: ClaimFacts) -> list[tuple[Level, str, str]]:
    return [(finding.level, finding.where, finding.what) for finding in claim_findings(facts)]


def test_a_machine_that_is_no_node_is_not_asked() -> None:
    (finding,) = check_claims(None, Machine(Path("/nowhere"), {}))
    assert (finding.level, finding.what) == (Level.SKIPPED, "this machine is not a node of a cluster")


def test_a_node_that_gives_gpus_by_claims() -> None:
    assert said(GOOD) == [
        (Level.OK, "API server", "Kubernetes v1.36.2"),
        (Level.OK, "GPU shares by claims", "the API server keeps shares of devices (gate DRAConsumableCapacity)"),
        (Level.OK, "DRA driver's sockets", "the socket for registration and the driver's own socket exist"),
        (Level.OK, "container runtime", "containerd://1.7.27"),
    ]


def test_a_gate_that_is_off_is_a_problem_where_claims_are_used_and_none_elsewhere() -> None:
    refused = replace(GOOD, refused=GATE)
    assert (Level.PROBLEM, "GPU shares by claims", GATE) in said(refused)
    other = said(replace(refused, in_use=False))
    assert (
        Level.SKIPPED, "GPU shares by claims",
        f"the agent uses the device plugin's API; claims are not available: {GATE}",
    ) in other  # fmt: skip
    assert not any(level is Level.PROBLEM for level, _, _ in other)


def test_a_node_with_the_device_plugin_learns_that_claims_can_be_had() -> None:
    for in_use, who in ((False, "the agent uses the device plugin's API"), (None, "no agent answers")):
        found = said(replace(GOOD, in_use=in_use, missing=socket_paths(Path("/var/lib/kubelet"))))
        assert (Level.OK, "GPU shares by claims", f"{who}; claims are available with --kubernetes dra") in found
        assert all(level is Level.OK for level, _, _ in found)


def test_taints_that_are_dropped_and_sockets_that_are_gone_are_told() -> None:
    missing = socket_paths(Path("/var/lib/kubelet"))[1:]
    found = {where: (level, what) for level, where, what in said(replace(GOOD, taints=False, missing=missing))[2:]}
    assert found["GPU shares by claims"][0] is Level.NOTE
    level, what = found["DRA driver's sockets"]
    assert level is Level.PROBLEM
    assert what.startswith("/var/lib/kubelet/plugins_registry/gpushare-spawner.io-reg.sock")


@pytest.mark.parametrize(
    ("runtime", "level"),
    [
        ("containerd://1.6.20", Level.NOTE),
        ("containerd://1.7.1~ds1", Level.NOTE),
        ("containerd://1.7.2", Level.OK),
        ("containerd://2.0.0-rc.1", Level.OK),
        ("cri-o://1.30.1", Level.OK),
        ("", Level.SKIPPED),
    ],
)
def test_containerd_that_leaves_out_cdi_names_is_noted(runtime: str, level: Level) -> None:
    last = claim_findings(replace(GOOD, runtime=runtime))[-1]
    assert (last.level, last.where) == (level, "container runtime")


def test_an_api_server_that_does_not_answer_is_told() -> None:
    why = "the API server cannot be asked: refused"
    assert said(replace(GOOD, server="", no_answer="refused")) == [(Level.SKIPPED, "GPU shares by claims", why)]
