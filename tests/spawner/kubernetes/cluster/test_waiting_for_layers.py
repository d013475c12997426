"""Spawns that wait for another layer: a node is kept for one that later ones overtake, and estimates of waits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, gpu_names
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing import kubeshare
from gpushare_spawner.sharing.base import (
    COUNT_LABEL,
    PRODUCT_LABEL,
    ClusterClaim,
    ClusterFacts,
    ClusterNode,
    ClusterPod,
    Tenant,
)
from gpushare_spawner.spawner.kubernetes.cluster.layers import ClusterLayers, Pending
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.queue.availability import AvailabilityNow
from gpushare_spawner.spawner.queue.queue import (
    MOST_OVERTAKEN,
    PAUSE_SECONDS,
    UNKNOWN_HOLD_SECONDS,
    PlacementCheck,
    Placer,
    Ticket,
)
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot, SpawnRequest
from tests.spawner.queue.machine import Machine

FILE = LayersFile.model_validate({"rules": [{"models": ["*"], "layer": "kubeshare"}]})


@dataclass
class Cluster:
    """KubeShare's nodes with one GPU each; its scheduler packs pods on as few of them as it can."""

    nodes: tuple[str, ...] = ("a", "b")
    models: dict[str, str] = field(default_factory=dict)
    units: int = 100
    running: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Node and units of each server."""
    pending: dict[str, Pending] = field(default_factory=dict)
    machine: Machine = field(default_factory=lambda: Machine(nodes={}, length=50))

    def layers(self) -> ClusterLayers:
        nodes = tuple(
            ClusterNode(name, {PRODUCT_LABEL: self.models.get(name, "NVIDIA-L4"), COUNT_LABEL: "1"})
            for name in self.nodes
        )
        pods = tuple(_pod(name, node, units) for name, (node, units) in self.running.items())
        return ClusterLayers(FILE, ClusterFacts(nodes, pods), pending=lambda: self.pending)

    def check(self) -> PlacementCheck:
        made = self.machine.check()
        snapshot = GpuSnapshot(made.snapshot.inventory, layers=self.layers())
        return replace(made, snapshot=snapshot)

    def waits(self, name: str, **gpu: Any) -> Ticket:
        gpu.setdefault("layer", "kubeshare")
        return self.machine.join(name, **gpu)

    def look(self) -> list[str]:
        """Passes over the queue until no spawn is placed any more; the names of those that were.

        Each ends with the first one: its scheduler has placed it before the next pass.
        """
        started = []
        while (name := self._first_placed()) is not None:
            started.append(name)
        return started

    def _first_placed(self) -> str | None:
        placer = Placer(self.check(), self.machine.feed, self.machine.queue, "this cluster")
        for ticket in self.machine.queue:
            if placer.place(ticket) is not None:
                self.schedule(ticket)
                return ticket.request.session
        return None

    def schedule(self, ticket: Ticket) -> None:
        """Place a server as the layer's scheduler does, which knows nothing of the queue."""
        assert ticket.offer is not None
        units = ticket.request.share.total_units
        used = {name: sum(u for node, u in self.running.values() if node == name) for name in self.nodes}
        fitting = [
            name
            for name in self.nodes
            if used[name] + units <= self.units and name not in ticket.offer.excluded_nodes and self.suits(name, ticket)
        ]
        self.running[ticket.request.session] = max(fitting, key=lambda name: used[name]), units
        self.machine.queue.leave(ticket)

    def suits(self, name: str, ticket: Ticket) -> bool:
        models = ticket.request.gpu.models
        return not models or any(model.strip("*") in self.models.get(name, "") for model in models)


def _pod(name: str, node: str, units: int, stops: float | None = None, tier: Tier = Tier.STOPPED) -> ClusterPod:
    session = SessionAnnotations(
        session=name,
        template="t",
        share_units=units,
        gpus=gpu_names(LayerName.KUBESHARE, name, 1),
        gpu_indices=(0,),
        tier_since=0.0,
        effective_units=units,
        layer=LayerName.KUBESHARE,
        notice=Notice(tier=tier, at=stops, reason="idle") if stops is not None else None,
    )
    annotations = {**session.annotations(), RESERVATION: name, kubeshare.UUID: f"GPU-{node}"}
    labels = {**session.labels(), kubeshare.REQUEST: f"{units / 100:.2f}"}
    return ClusterPod(name, "hub", node, labels, annotations)


def busy() -> Cluster:
    """Two GPUs with two servers of half a GPU each."""
    cluster = Cluster()
    for number in range(4):
        cluster.running[f"s{number}"] = "ab"[number // 2], 50
    return cluster


async def test_a_large_spawn_starts_though_smaller_ones_never_stop_coming() -> None:
    """Each time a server ends, the next small spawn is there already: no GPU is ever free as a whole by itself."""
    cluster = busy()
    cluster.waits("big", count=1)
    order = ["s0", "s2", "s1", "s3"]
    started: list[str] = []
    for number in range(60):
        cluster.waits(f"n{number}", fraction=0.5)
        # one of each node in turns ends
        ended = next(name for name in order if name in cluster.running)
        order.remove(ended)
        del cluster.running[ended]
        now = cluster.look()
        order += now
        started += now
        if "big" in started:
            break
    assert "big" in started
    assert MOST_OVERTAKEN <= started.index("big") <= MOST_OVERTAKEN + 4


async def overtaken(cluster: Cluster, name: str = "big", **gpu: Any) -> Ticket:
    """A spawn for a whole GPU that small ones have overtaken until a node is kept for it."""
    ticket = cluster.waits(name, **(gpu or {"count": 1}))
    cluster.look()
    ticket.overtaken = MOST_OVERTAKEN
    cluster.look()
    return ticket


async def test_later_spawns_are_placed_on_other_nodes_and_wait_where_there_are_none() -> None:
    cluster = busy()
    del cluster.running["s0"]
    big = await overtaken(cluster)
    assert big.held_elsewhere == "a"
    small = cluster.waits("small", fraction=0.5)
    assert cluster.look() == []
    assert (small.ahead, small.hint) == (1, "Earlier spawns are placed first.")
    card = AvailabilityNow(cluster.check(), cluster.machine.queue, "this cluster")
    assert card.availability(small.request.template).text == "Position 3 in queue"
    assert card.startable([small.request], small.hold_name) == ()
    # for the spawn that the node is kept for it is free: its user may choose a smaller template instead
    assert card.startable([small.request], big.hold_name) == (small.request.template,)
    del cluster.running["s2"]
    assert cluster.look() == ["small"]
    assert small.offer is not None
    assert small.offer.excluded_nodes == {"a"}
    assert cluster.running["small"][0] == "b"
    del cluster.running["s1"]
    assert cluster.look() == ["big"]
    assert cluster.running["big"] == ("a", 100)


async def test_a_node_of_a_layer_is_kept_for_a_stated_time_and_again_after_a_pause() -> None:
    cluster = busy()
    big = await overtaken(cluster)
    assert big.held_elsewhere == "a"
    cluster.machine.now = UNKNOWN_HOLD_SECONDS
    cluster.look()
    assert big.held_elsewhere == ""
    cluster.machine.now += PAUSE_SECONDS
    cluster.look()
    assert big.held_elsewhere == "a"


async def test_spawns_in_flight_elsewhere_do_not_hold_up_the_one_that_the_node_is_kept_for() -> None:
    cluster = busy()
    big = await overtaken(cluster)
    del cluster.running["s0"], cluster.running["s1"]
    cluster.pending["small"] = Pending(LayerName.KUBESHARE, 50)
    assert cluster.look() == []
    cluster.pending["small"] = Pending(LayerName.KUBESHARE, 50, frozenset({"a"}))
    assert big.held_elsewhere == "a"
    assert cluster.look() == ["big"]


async def test_the_node_is_free_for_others_when_the_spawn_leaves() -> None:
    cluster = busy()
    del cluster.running["s0"]
    big = await overtaken(cluster)
    cluster.waits("small", fraction=0.5)
    assert cluster.look() == []
    cluster.machine.queue.leave(big)
    assert cluster.look() == ["small"]


async def test_one_node_of_a_kind_is_kept_at_a_time_and_for_the_first() -> None:
    cluster = busy()
    first = await overtaken(cluster, "first")
    second = await overtaken(cluster, "second")
    assert (first.held_elsewhere, second.held_elsewhere) == ("a", "")
    cluster.machine.queue.leave(first)
    cluster.look()
    assert second.held_elsewhere == "a"


async def test_spawns_for_other_nodes_do_not_overtake_it() -> None:
    cluster = Cluster(models={"a": "NVIDIA-A100", "b": "NVIDIA-L4"})
    cluster.running["s0"] = "a", 50
    big = cluster.waits("big", count=1, models=["*A100*"])
    for number in range(2 * MOST_OVERTAKEN):
        cluster.waits(f"small{number}", fraction=0.1, models=["*L4*"])
    assert len(cluster.look()) == 2 * MOST_OVERTAKEN
    assert (big.overtaken, big.held_elsewhere) == (0, "")


async def test_the_node_with_the_least_sessions_is_kept_and_stays_the_one() -> None:
    cluster = busy()
    del cluster.running["s2"]
    big = await overtaken(cluster)
    assert big.held_elsewhere == "b"
    del cluster.running["s0"], cluster.running["s1"]
    cluster.running["s4"] = "a", 20
    cluster.look()
    assert big.held_elsewhere == "b"
    # it is gone: another one is kept
    cluster.nodes = ("a",)
    cluster.look()
    assert big.held_elsewhere == "a"


@pytest.mark.parametrize(("models", "kept"), [([], ""), (["*L4*"], "a")])
async def test_no_node_is_kept_where_gpus_with_an_agent_are(models: list[str], kept: str) -> None:
    cluster = busy()
    cluster.machine = Machine()
    for gpu in ("a", "b"):
        cluster.machine.hold(gpu, 100)
    ticket = await overtaken(cluster, "both", count=1, layer=None, models=models)
    assert ticket.held_elsewhere == kept


# -- estimates --


def starts_by(pods: list[ClusterPod], servers: int = 1, pending: dict[str, Pending] | None = None, **gpu: Any) -> Any:
    """When servers can be placed on two nodes with one GPU each."""
    nodes = tuple(ClusterNode(name, {PRODUCT_LABEL: "NVIDIA-L4", COUNT_LABEL: "1"}) for name in "ab")
    layers = ClusterLayers(FILE, ClusterFacts(nodes, tuple(pods)), pending=lambda: pending or {})
    asked = {"name": "asked", "display_name": "A", "gpu": {"layer": "kubeshare", **gpu}}
    return layers.starts_by(SpawnRequest(Tenant("ada"), Template.model_validate(asked)), servers)


FULL = [_pod("s0", "a", 50, 100.0), _pod("s1", "a", 50, 300.0), _pod("s2", "b", 50, 200.0), _pod("s3", "b", 50)]


@pytest.mark.parametrize(
    ("gpu", "servers", "at"),
    [
        ({"fraction": 0.5}, 1, 100.0),
        ({"fraction": 0.5}, 2, 200.0),
        ({"fraction": 0.5}, 3, 300.0),
        ({"fraction": 0.5}, 4, None),
        # a whole one only when both sessions on it have stopped
        ({"count": 1}, 1, 300.0),
        ({"count": 1}, 2, None),
    ],
)
def test_a_place_is_expected_when_sessions_with_a_notice_have_stopped(gpu: Any, servers: int, at: float | None) -> None:
    assert starts_by(FULL, servers, **gpu) == at


def test_servers_in_flight_are_expected_to_take_the_first_places() -> None:
    assert starts_by(FULL, pending={"token": Pending(LayerName.KUBESHARE, 50)}, fraction=0.5) == 200.0


def test_nothing_is_expected_of_other_notices_and_of_pods_that_are_not_the_hub_s() -> None:
    downgraded = [*FULL[1:], _pod("s0", "a", 50, 100.0, Tier.RELEASED)]
    assert starts_by(downgraded, fraction=0.5) == 200.0
    nodes = (ClusterNode("a", {PRODUCT_LABEL: "NVIDIA-L4", COUNT_LABEL: "1"}),)
    layers = ClusterLayers(FILE, ClusterFacts(nodes, tuple(FULL[:2])), ours=lambda token: token != "s0")
    asked = Template.model_validate({"name": "t", "display_name": "T", "gpu": {"layer": "kubeshare", "fraction": 0.5}})
    assert layers.starts_by(SpawnRequest(Tenant("ada"), asked), 1) == 300.0


def test_claims_of_pods_that_have_stopped_are_free() -> None:
    claims = tuple(
        ClusterClaim(name, "hub", pods=frozenset(pods)) for name, pods in (("c0", ["s0"]), ("c1", ["s0", "s1"]))
    )
    facts = ClusterFacts(pods=tuple(FULL), claims=(*claims, ClusterClaim("unused", "hub")))
    later = facts.without({("hub", "s0"), ("else", "s1")})
    assert [pod.name for pod in later.pods] == ["s1", "s2", "s3"]
    assert [claim.name for claim in later.claims] == ["c1", "unused"]
    read = ClusterClaim.of(
        {
            "metadata": {"name": "c", "namespace": "hub"},
            "status": {"reservedFor": [{"resource": "pods", "name": "s0", "uid": "1"}, {"resource": "x", "name": "y"}]},
        }
    )
    assert read.pods == {"s0"}
