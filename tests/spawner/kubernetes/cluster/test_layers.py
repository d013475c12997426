"""Free capacity of other sharing layers, by facts of a cluster, without an API server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import GPU_COUNT, SHARE, SessionAnnotations, gpu_names
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod, LayerCapacity, LayerRequest, Tenant
from gpushare_spawner.spawner.kubernetes.cluster import layers as cluster_layers
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS, ClusterLayers, Pending, layers_in_force
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.queue.snapshot import LayerOutcome, LayerVerdict, SpawnRequest

SHARED = "nvidia.com/gpu.shared"
SLICED = LayersFile.model_validate({"rules": [{"models": ["*L4*"], "layer": "time-slicing"}]})


def template(fraction: float = 0.25, **gpu: Any) -> Template:
    return Template.model_validate({"name": "t", "display_name": "T", "gpu": {"fraction": fraction, **gpu}})


def node(
    name: str = "a", replicas: int = 4, model: str = "NVIDIA-L4", labels: Mapping[str, str] | None = None
) -> ClusterNode:
    found = {
        "nvidia.com/gpu.product": model,
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.memory": "24576",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
        "nvidia.com/gpu.replicas": str(replicas),
        **(labels or {}),
    }
    return ClusterNode(name, found, allocatable={SHARED: replicas})


def pod(name: str, on: str = "a", token: str = "", units: int = 25) -> ClusterPod:
    """A pod of the hub with a replica."""
    session = SessionAnnotations(
        session=name,
        template="t",
        share_units=units,
        gpus=gpu_names(LayerName.TIME_SLICING, name, 1),
        gpu_indices=(0,),
        tier_since=0.0,
        effective_units=units,
        layer=LayerName.TIME_SLICING,
    )
    annotations = {**session.annotations(), RESERVATION: token or name}
    return ClusterPod(name, "hub", on, session.labels(), annotations, {SHARED: 1})


def layers(
    nodes: Iterable[ClusterNode] = (),
    pods: Iterable[ClusterPod] = (),
    file: LayersFile = SLICED,
    pending: Mapping[str, Pending] | None = None,
) -> ClusterLayers:
    return ClusterLayers(file, ClusterFacts(tuple(nodes), tuple(pods)), pending=lambda: pending or {})


def met(
    found: ClusterLayers, asked: Template | None = None, on: str = "", ineligible: Iterable[str] = ()
) -> LayerVerdict:
    return found.verdict(SpawnRequest(Tenant("ada"), asked or template(), on, ineligible=lambda: frozenset(ineligible)))


def test_layers_are_in_force_where_the_file_or_a_template_names_them() -> None:
    assert layers_in_force(None, [template()]) == set()
    assert layers_in_force(SLICED, []) == {LayerName.TIME_SLICING}
    assert layers_in_force(None, [template(layer="kai"), template(layer="native")]) == {LayerName.KAI}


def test_a_template_is_served_by_the_layers_of_the_gpus_that_it_accepts() -> None:
    found = layers()
    assert (found.names(template()), found.native(template())) == ((LayerName.TIME_SLICING,), True)
    assert (found.names(template(models=["*A100*"])), found.native(template(models=["*A100*"]))) == ((), True)
    assert (found.names(template(layer="hami")), found.native(template(layer="hami"))) == ((LayerName.HAMI,), False)
    assert found.names(template(layer="native")) == ()
    cpu = Template.model_validate({"name": "c", "display_name": "C"})
    assert (found.names(cpu), found.native(cpu)) == ((), False)


def test_replicas_are_free_until_pods_have_them() -> None:
    first = met(layers([node()], [pod(str(number)) for number in range(3)]))
    assert first.outcome is LayerOutcome.NOW
    assert first.offer is not None
    assert (first.offer.layer, first.offer.request.rule) == (LayerName.TIME_SLICING, SLICED.rules[0])
    assert [(kind.model, kind.count) for kind in first.gpus] == [("NVIDIA-L4", 1)]
    full = met(layers([node()], [pod(str(number)) for number in range(4)]))
    assert full.outcome is LayerOutcome.WAIT
    why = "Not enough free capacity: this needs 0.25 GPU, and NVIDIA time-slicing has no free place for it."
    assert full.why == why


@pytest.mark.parametrize(("pending", "outcome"), [(3, LayerOutcome.NOW), (4, LayerOutcome.WAIT)])
def test_reservations_count_until_their_pods_are_on_a_node(pending: int, outcome: LayerOutcome) -> None:
    reserved = {f"token-{number}": Pending(LayerName.TIME_SLICING, 25) for number in range(pending)}
    assert met(layers([node()], pending=reserved)).outcome is outcome
    placed = [pod(str(number), token=f"token-{number}") for number in range(pending)]
    assert met(layers([node(replicas=8)], placed, pending=reserved), template(0.1)).outcome is LayerOutcome.NOW


def test_a_reservation_whose_pod_is_on_a_node_counts_once() -> None:
    reserved = {f"token-{number}": Pending(LayerName.TIME_SLICING, 25) for number in range(2)}
    placed = [pod(str(number), token=f"token-{number}") for number in range(2)]
    found = layers([node()], placed, pending=reserved)
    assert [found._taken(LayerName.TIME_SLICING, 25), met(found).outcome] == [0, LayerOutcome.NOW]


def test_pods_of_an_earlier_hub_count_before_their_scheduler_has_placed_them() -> None:
    waiting = [pod(str(number), on="") for number in range(4)]
    assert met(layers([node()], waiting)).outcome is LayerOutcome.WAIT
    assert met(layers([node()], waiting[:3])).outcome is LayerOutcome.NOW
    # larger servers count as several
    found = layers([node()], [pod("big", on="", units=100)])
    assert found._taken(LayerName.TIME_SLICING, 25) == 4


def test_a_pod_of_another_namespace_that_says_it_is_a_session_takes_no_place() -> None:
    forged = pod("forged", on="", units=100)
    facts = ClusterFacts((node(),), (forged,))
    assert met(ClusterLayers(SLICED, facts, ours=lambda token: token != "forged")).outcome is LayerOutcome.NOW
    assert met(ClusterLayers(SLICED, facts)).outcome is LayerOutcome.WAIT


def test_a_count_of_gpus_with_thousands_of_digits_is_a_wrong_annotation() -> None:
    wrong = pod("wrong", on="")
    endless = replace(wrong, annotations={**wrong.annotations, GPU_COUNT: "9" * 5000})
    units = replace(wrong, annotations={**wrong.annotations, SHARE: "9" * 5000})
    assert met(layers([node()], [endless, units])).outcome is LayerOutcome.NOW


def test_an_error_in_one_layer_refuses_its_spawns_alone_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(request: LayerRequest) -> LayerCapacity:
        raise ZeroDivisionError

    broken = replace(POD_LAYERS[LayerName.TIME_SLICING], free=fails)
    monkeypatch.setattr(cluster_layers, "POD_LAYERS", {**POD_LAYERS, LayerName.TIME_SLICING: broken})
    monkeypatch.setattr(cluster_layers, "_LOGGED", set())
    for _ in range(2):
        found = met(layers([node()]))
        assert (found.outcome, found.why) == (
            LayerOutcome.NEVER,
            "The hub cannot read the free capacity that NVIDIA time-slicing publishes. The hub's log has the error.",
        )
    assert caplog.text.count("Cannot read the objects that NVIDIA time-slicing publishes") == 1


def test_only_nodes_that_the_server_can_run_on_count() -> None:
    two = layers([node("a"), node("b")])
    assert met(two, ineligible=["a"]).outcome is LayerOutcome.NOW
    assert met(two, ineligible=["a", "b"]).why.startswith("No node that this server can run on shares its GPUs by")
    assert met(two, on="b").outcome is LayerOutcome.NOW
    assert met(two, on="c").outcome is LayerOutcome.NEVER


def test_a_share_that_no_node_can_give_is_refused_with_the_layer_s_reason() -> None:
    found = met(layers([node(replicas=4)]), template(0.5))
    assert found.outcome is LayerOutcome.NEVER
    assert "No node has at most 2 replicas" in found.why


def test_nodes_of_a_rule_serve_no_other_layer() -> None:
    file = LayersFile.model_validate({"rules": [{"nodes": {"pool": "mps"}, "layer": "mps"}]})
    pool = node("b", labels={"pool": "mps", "nvidia.com/gpu.sharing-strategy": "mps"})
    found = layers([node("a"), pool], file=file)
    assert met(found, template(layer="mps")).outcome is LayerOutcome.NOW
    # the node without a rule does for a template that names the layer
    named = met(found, template(layer="time-slicing"))
    assert named.offer is not None
    assert [one.name for one in named.offer.request.facts.nodes] == ["a"]


def test_what_is_not_known_yet_waits_and_what_cannot_be_known_is_left_to_the_scheduler() -> None:
    unknown = ClusterLayers(SLICED, None)
    assert (met(unknown).outcome, met(unknown).why) == (
        LayerOutcome.WAIT,
        "The hub has not read the cluster's nodes and pods yet.",
    )
    forbidden = ClusterLayers(
        LayersFile.model_validate({"rules": [{"layer": "kai"}]}), None, unreadable=frozenset({LayerName.KAI})
    )
    found = met(forbidden)
    assert (found.outcome, found.certain) == (LayerOutcome.NOW, False)
    needs_nodes = met(ClusterLayers(SLICED, None, unreadable=frozenset({LayerName.TIME_SLICING})))
    assert needs_nodes.outcome is LayerOutcome.NEVER
    assert needs_nodes.why.startswith("The hub may not read the cluster's nodes and pods")
    assert unknown.gpus == 0


def test_quotas_count_the_gpus_of_nodes_with_a_rule() -> None:
    assert layers([node("a"), node("b", model="NVIDIA-A100")]).gpus == 1
    # of GPUs with an agent the agent reports how many they are
    native = LayersFile.model_validate({"rules": [{"models": ["*L4*"], "layer": "native"}, {"layer": "hami"}]})
    assert layers([node("a"), node("b", model="NVIDIA-A100")], file=native).gpus == 1


def test_what_is_found_for_one_server_is_kept_for_the_next_one_of_the_same_instant() -> None:
    found = layers([node("a"), node("b")])
    first, second, elsewhere = met(found).offer, met(found, template(0.1)).offer, met(found, on="b").offer
    assert first is not None
    assert second is not None
    assert elsewhere is not None
    assert first.request.facts is second.request.facts
    assert [one.name for one in elsewhere.request.facts.nodes] == ["b"]


def test_a_template_that_was_edited_is_another_one_for_spawns_that_come_then() -> None:
    found = layers([node(replicas=2)], [pod("there")])
    assert met(found, template(0.5)).outcome is LayerOutcome.NOW
    assert met(found, template(0.75)).outcome is LayerOutcome.NEVER


def test_card_is_told_the_profile_of_the_mig_device_that_a_server_gets_while_it_is_free_and_while_it_is_not() -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/mig.strategy": "mixed",
              "nvidia.com/gpu.memory": "81920", "nvidia.com/mig-1g.10gb.memory": "9728"}  # fmt: skip
    nodes = [ClusterNode("a", labels, allocatable={"nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-3g.40gb": 0})]
    asked = template(0.1, layer="mig")
    taken = ClusterPod("x", "hub", "a", requests={"nvidia.com/mig-1g.10gb": 1})
    for pods, outcome in (((), LayerOutcome.NOW), ((taken,), LayerOutcome.WAIT)):
        verdict = met(layers(nodes, pods, LayersFile()), asked)
        assert verdict.outcome is outcome
        assert verdict.profile is not None
        assert (verdict.profile.name, verdict.profile.memory_bytes) == ("1g.10gb", 9728 * 2**20)
    assert met(layers([node()])).profile is None
