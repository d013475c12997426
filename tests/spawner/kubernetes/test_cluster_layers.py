"""Which other layers can serve a template, and what a server meets there."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, Tenant
from gpushare_spawner.spawner.kubernetes.cluster.layers import ClusterLayers
from gpushare_spawner.spawner.queue.snapshot import LayerOutcome, SpawnRequest

FILE = LayersFile.model_validate(
    {"rules": [{"models": ["*A100*"], "layer": "metagpu"}, {"nodes": {"pool": "kai"}, "layer": "kai"}]}
)
A100 = ClusterNode(
    "a", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, allocatable={"cnvrg.io/metagpu": 100}
)  # fmt: skip


def template(gpu: dict[str, Any], **fields: Any) -> Template:
    return Template.model_validate({"name": "t", "display_name": "t", "gpu": gpu, **fields})


def layers(*nodes: ClusterNode) -> ClusterLayers:
    return ClusterLayers(FILE, ClusterFacts(nodes))


def test_template_that_promises_what_a_layer_cannot_keep_is_not_offered_on_its_nodes() -> None:
    plain = template({"fraction": 0.25})
    oversubscribed = template({"fraction": 0.25, "memory": {"oversubscribe": True}})
    downgraded = template({"fraction": 0.25}, idle={"downgrade_after": "5m", "downgrade_to": 0.1})
    there = layers(A100)
    assert there.names(plain) == (LayerName.METAGPU, LayerName.KAI)
    assert there.names(oversubscribed) == there.names(downgraded) == ()
    assert all(there.native(one) for one in (plain, oversubscribed, downgraded))


@pytest.mark.parametrize(("models", "expected"), [(["*80GB*"], True), (["*A100*"], True), (["*T4*"], False)])
def test_layer_of_a_node_is_found_by_its_model_whatever_the_patterns_look_like(
    models: list[str], expected: bool
) -> None:
    asked = template({"fraction": 0.25, "models": models})
    assert (LayerName.METAGPU in layers(A100).names(asked)) is expected


def test_server_starts_where_a_layer_has_a_place_and_waits_where_it_has_none() -> None:
    asked = template({"fraction": 0.5, "layer": "metagpu"})
    assert layers(A100).verdict(SpawnRequest(Tenant("ada"), asked)).outcome is LayerOutcome.NOW
    assert layers(A100).verdict(SpawnRequest(Tenant("ada"), asked, "b")).outcome is LayerOutcome.NEVER
    assert (
        layers(A100).verdict(SpawnRequest(Tenant("ada"), asked, ineligible=lambda: frozenset({"a"}))).outcome
        is LayerOutcome.NEVER
    )
    closed = ClusterNode("a", A100.labels, allocatable=A100.allocatable, unschedulable=True)
    assert layers(closed).verdict(SpawnRequest(Tenant("ada"), asked)).outcome is LayerOutcome.WAIT
