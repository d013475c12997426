"""The scheduler's reasons, in words for users."""

from __future__ import annotations

import pytest

from gpushare_spawner.wording.spawn_failures import missing


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Insufficient cpu", "it has too little free CPU"),
        ("Insufficient memory", "it has too little free memory"),
        ("Insufficient nvidia.com/gpu", "it has too little free nvidia.com/gpu"),
        ("Insufficient gpushare-spawner.io/gpu-0", "it does not offer the units of the GPU that its agent reports"),
        ("Too many pods", "it already runs its maximum number of pods"),
        ("node(s) had untolerated taint {team: a}", "the server does not tolerate its taint team"),
        ("node(s) had untolerated taint(s)", "the server does not tolerate one of its taints"),
        ("node(s) had untolerated taint {node.kubernetes.io/not-ready: }", "it is not ready"),
        ("node(s) were unschedulable", "it is cordoned"),
        (
            "node(s) didn't match Pod's node affinity/selector",
            "it does not match the server's node selector or affinity",
        ),
        ("node(s) had volume node affinity conflict", "a volume of the server cannot be used there"),
        ("pod has unbound immediate PersistentVolumeClaims", "a persistent volume claim of the server is not bound"),
        ('persistentvolumeclaim "home" not found', "the persistent volume claim home does not exist"),
        ("something new", "something new"),
    ],
)
def test_a_reason_says_what_is_missing_on_the_node(reason: str, said: str) -> None:
    assert missing([reason]) == said


def test_several_reasons_are_named_once_each() -> None:
    several = ["Insufficient cpu", "Insufficient gpushare-spawner.io/gpu-0", "Insufficient gpushare-spawner.io/gpu-1"]
    assert missing(several) == (
        "it has too little free CPU and it does not offer the units of the GPU that its agent reports"
    )
