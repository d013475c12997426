"""The ledger that is kept from what reflectors show: always what a ledger made anew would be."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.kubernetes.annotations import SESSION, SessionAnnotations, gpu_names, labels, pod_session
from gpushare_spawner.model.kubernetes.objects import (
    MIRROR,
    REPORT_KEY,
    REPORT_STALE_SECONDS,
    NodeFacts,
    PodConstraints,
    report_name,
    written_report,
)
from gpushare_spawner.model.layers import LayerName, Placement
from gpushare_spawner.model.layers_file import MigInstance, MigOptions, MigProfile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import ClaimsReport, GpuReport, Notice, Report
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.sharing.base import ClusterPod, LayerRequest, Tenant
from gpushare_spawner.sharing.native import granted_session
from gpushare_spawner.spawner.kubernetes.cluster import snapshot
from gpushare_spawner.spawner.kubernetes.cluster.layers import Pending
from gpushare_spawner.spawner.kubernetes.cluster.node_resources import ClusterResources, trimmed_pod
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import PODS, REPORTS
from gpushare_spawner.spawner.kubernetes.cluster.snapshot import ClusterSnapshots
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation, PodReservations
from gpushare_spawner.spawner.queue.availability import AvailabilityNow
from gpushare_spawner.spawner.queue.queue import LoopBreaks
from gpushare_spawner.spawner.queue.snapshot import LayerOffer, SpawnRequest
from tests.placement.reports import session

KEY = (REPORTS, "hub")
LOG = logging.getLogger("test")


class Cluster:
    """Two nodes of two GPUs, and what reflectors show of them."""

    def __init__(self) -> None:
        self.version = 0
        self.reports = self.reflector("configmaps")
        self.pods = self.reflector("pods")
        self.capacity = ClusterResources(None, LOG)  # type: ignore[arg-type]
        self.free: dict[str, Any] = {}
        self.bound: dict[str, Any] = {}
        self.capacity._nodes = SimpleNamespace(current=True, objects=self.free)  # type: ignore[assignment]
        self.capacity._pods = SimpleNamespace(current=True, objects=self.bound)  # type: ignore[assignment]
        reflectors = {KEY: self.reports, (PODS, "hub"): self.pods}
        self.snapshots = ClusterSnapshots(reflectors, KEY, 1, LOG, self.capacity)
        self.reservations = PodReservations(self.snapshots, LOG)
        for node in ("n", "m"):
            self.report(node)
            self.allocatable(node, 64_000)

    def reflector(self, kind: str) -> Any:
        loop = asyncio.get_running_loop()
        first = loop.create_future()
        first.set_result(None)
        watch = loop.create_future()
        return SimpleNamespace(kind=kind, namespace="hub", resources={}, watch_task=watch, first_load_future=first)

    def report(
        self, node: str, gpus: int = 2, age: float = 0.0, like: str = "", units: int = 100, parts: Any = ({}, {})
    ) -> None:
        """``like``: the node whose GPUs it reports as its own; ``units``: of each; ``parts``: as in `OPTIONAL`."""
        known = {"model": "A100", "memory_bytes": 2**30, "capacity_units": units, **parts[1]}
        cards = tuple(GpuReport(index=i, uuid=f"GPU-{like or node}-{i}", **known) for i in range(gpus))
        published_at = time.time() - age + (self.version + 1) * 1e-6
        self.put_report(Report(node=node, published_at=published_at, gpus=cards, **parts[0]))

    def put_report(self, report: Report) -> None:
        self.version += 1
        node = report.node
        metadata = {"name": report_name(node), "namespace": "hub", "resourceVersion": str(self.version)}
        self.reports.resources[node] = {"metadata": metadata, "data": {REPORT_KEY: written_report(report)}}

    def allocatable(self, node: str, cpu: int, pool: str = "") -> None:
        facts = NodeFacts(node, {"pool": pool})
        free = NodeResources(cpu, 2**40, 110)
        self.free[node] = {"metadata": {"name": node}, "facts": facts, "allocatable": free, "gpus": {0: 100, 1: 100}}

    def pod(
        self, name: str, gpu: str, units: int = 25, token: str = "", notice: Notice | None = None, odd: bool = False
    ) -> dict[str, Any]:
        self.version += 1
        said = SessionAnnotations(
            session=name,
            template="t",
            share_units=units,
            gpus=(gpu,),
            gpu_indices=(int(gpu[-1]),),
            tier=Tier.ACTIVE,
            tier_since=0.0,
            effective_units=units,
            notice=notice,
        )
        annotations = {} if odd else said.annotations() | ({RESERVATION: token} if token else {})
        limits = {f"gpushare-spawner.io/gpu-{gpu[-1]}": str(units)}
        made = {
            "metadata": {
                "name": name,
                "namespace": "hub",
                "uid": f"uid-{name}",
                "resourceVersion": str(self.version),
                "labels": labels(),
                "annotations": annotations,
            },
            "spec": {"nodeName": gpu[4], "containers": [{"name": "notebook", "resources": {"limits": limits}}]},
            "status": {"phase": "Running"},
        }
        self.pods.resources[f"hub/{name}"] = made
        return made

    def bind(self, name: str, node: str, cpu: int, token: str = "") -> None:
        requested = Requested(cpu, 0, 1)
        self.bound[name] = {"metadata": {"name": name}, "node": node, "requested": requested, "token": token}

    def reserve(self, token: str, gpu: str, units: int = 25) -> PodReservation:
        allocation = Allocation(f"s#{token}", (gpu,), units, 0, units, 0.0, uncounted=Requested(1000, 0, 1))
        self.reservations._in_flight[token] = allocation
        return PodReservation(None, None, (), token)  # type: ignore[arg-type]

    async def ledger(self) -> Ledger:
        await self.reservations.snapshot()
        return self.reservations.feed.ledger

    async def same_anew(self) -> None:
        kept = await self.ledger()
        fresh = ClusterSnapshots(self.snapshots.reflectors, KEY, 1, LOG, ClusterResources(None, LOG))  # type: ignore[arg-type]
        await fresh.snapshot(0.0, lambda: self.reservations._in_flight, self.reservations.in_flight)
        assert kept.allocations == fresh.feed.ledger.allocations
        for uuid, gpu in fresh.feed.ledger.capacity.gpus.items():
            found = kept.capacity.gpus[uuid]
            assert (found.unowned, found.free) == (gpu.unowned, gpu.free)
        for node, known in kept.capacity.nodes.items():
            used = [pod["requested"].cpu for pod in self.bound.values() if pod["node"] == node]
            counted = {pod["token"] for pod in self.bound.values()}
            here = {gpu.uuid for gpu in known.gpus}
            mine = [token for token, held in self.reservations._in_flight.items() if held.gpus[0] in here]
            waiting = 1000 * sum(token not in counted for token in mine)
            assert known.resources.cpu == self.free[node]["allocatable"].cpu - sum(used) - waiting


async def test_a_share_counts_once_from_the_reservation_to_the_pod_that_runs() -> None:
    cluster = Cluster()
    share = cluster.reserve("t1", "GPU-n-0")
    assert (await cluster.ledger()).free_units("GPU-n-0") == 75
    made = cluster.pod("ada", "GPU-n-0", token="t1")
    assert (await cluster.ledger()).free_units("GPU-n-0") == 75
    assert list((await cluster.ledger()).allocations) == ["s#t1"]
    assert cluster.reservations.arrived(share, made)
    assert (await cluster.ledger()).free_units("GPU-n-0") == 75
    assert list((await cluster.ledger()).allocations) == ["hub/ada#uid-ada"]
    del cluster.pods.resources["hub/ada"]
    assert (await cluster.ledger()).free_units("GPU-n-0") == 100


async def test_rules_for_other_sessions_count_from_the_reservation_to_the_pods_annotations_after_a_restart() -> None:
    def template(name: str, **fields: Any) -> Template:
        return Template.model_validate({"name": name, "display_name": name, "gpu": {"fraction": 0.25}, **fields})

    async def place(wanted: Template, name: str) -> Placement | None:
        found = await cluster.reservations.snapshot()
        return cluster.reservations.feed.ledger.place(SpawnRequest(Tenant(name), wanted).placement_request(found))

    cluster = Cluster()
    exam = template("exam", labels=["exam"], placement={"apart_from": ["course"], "nodes": ["n"]})
    course = template("course", labels=["course"], placement={"nodes": ["n"]})
    lone = template("lone", placement={"alone": True, "nodes": ["n"]})
    beside = template("beside", placement={"nodes": ["n"]})
    placement = await place(exam, "ada")
    assert placement == Placement("n", ("GPU-n-0",))
    snapshot = await cluster.reservations.snapshot()
    ticket = cluster.reservations.queue.join(SpawnRequest(Tenant("ada"), exam), 0.0)
    await cluster.reservations._reserve_on(ticket, placement, snapshot)
    share = ticket.result.result()
    assert isinstance(share, PodReservation)
    for _ in range(2):
        assert await place(course, "bob") == Placement("n", ("GPU-n-1",))
        assert await place(lone, "cyd") == Placement("n", ("GPU-n-1",))
        assert await place(beside, "dan") == Placement("n", ("GPU-n-0",))
        # then a hub that has only the pod's annotations
        made = cluster.pod("ada", "GPU-n-0", token=share.token)
        said = granted_session(Tenant("ada"), exam, placement, {"GPU-n-0": 0}, 0.0)
        made["metadata"]["annotations"] = {**said.annotations(), RESERVATION: share.token}
        assert pod_session(said.annotations()) == said
        cluster.snapshots = ClusterSnapshots(cluster.snapshots.reflectors, KEY, 1, LOG, cluster.capacity)
        cluster.reservations = PodReservations(cluster.snapshots, LOG)


async def test_gpus_of_another_layer_count_in_the_quota_from_the_reservation_to_the_end_of_the_pod() -> None:
    cluster = Cluster()
    quotas = Quotas.model_validate({"groups": {"ml": {"maximum": 2}}})
    cluster.reservations.quotas._read = lambda: quotas
    template = Template.model_validate({"name": "two", "display_name": "2", "gpu": {"count": 2, "layer": "mig"}})
    tenant = Tenant("ada", quota="group:ml")
    ticket = cluster.reservations.queue.join(SpawnRequest(tenant, template), 0.0)
    offer = LayerOffer(LayerName.MIG, LayerRequest(tenant, template, MigOptions()), frozenset({"kept"}))
    given = cluster.reservations._reserve_by_layer(ticket, offer, Placement("", ()), "t1")
    assert cluster.reservations._pending() == {"t1": Pending(LayerName.MIG, 200, frozenset({"kept"}))}
    ledger = await cluster.ledger()
    assert list(ledger.allocations.values()) == [given]
    cluster.reservations.quotas.bring_up_to_date(400)
    usage = cluster.reservations.quotas.usage
    assert usage is not None
    account = usage.accounts.find("group:ml", "ada")
    assert usage.used(account).units == 200
    made = cluster.pod("ada", "GPU-n-0", units=100, token="t1")
    said = pod_session(made["metadata"]["annotations"])
    said = replace(said, layer=LayerName.MIG, gpus=gpu_names(LayerName.MIG, "ada", 2), quota="group:ml")
    made["metadata"] |= {"labels": said.labels(), "annotations": {**said.annotations(), RESERVATION: "t1"}}
    share = ticket.result.result()
    assert isinstance(share, PodReservation)
    assert cluster.reservations.arrived(share, made)
    assert (await cluster.ledger()).free_units("GPU-n-0") == 100
    assert usage.used(account).units == 200
    assert cluster.reservations._pending() == {}
    del cluster.pods.resources["hub/ada"]
    await cluster.ledger()
    assert usage.used(account).units == 0


async def test_a_pod_that_arrives_while_the_cluster_is_read_is_never_missing(monkeypatch: Any) -> None:
    cluster = Cluster()
    await cluster.ledger()
    share = cluster.reserve("t1", "GPU-n-0")
    await cluster.ledger()

    async def slowly(self: LoopBreaks, pieces: Any) -> None:
        for _ in pieces:
            await asyncio.sleep(0)
            assert cluster.reservations.feed.ledger.free_units("GPU-n-0") <= 75

    monkeypatch.setattr(LoopBreaks, "through", slowly)
    reading = asyncio.ensure_future(cluster.reservations.snapshot())
    for turn in range(30):
        await asyncio.sleep(0)
        if turn == 3:
            assert cluster.reservations.arrived(share, cluster.pod("ada", "GPU-n-0", token="t1"))
    await reading
    assert (await cluster.ledger()).free_units("GPU-n-0") == 75


async def test_a_reading_that_its_form_no_longer_waits_for_counts_every_pod(monkeypatch: Any) -> None:
    cluster = Cluster()
    await cluster.ledger()
    monkeypatch.setattr(LoopBreaks, "pause_if_due", lambda self: asyncio.sleep(0))
    for number in range(10):
        cluster.pod(f"p{number}", "GPU-n-0", units=10)
        cluster.bind(f"p{number}", "n", 1000)
    for turns in range(12):
        form = asyncio.ensure_future(cluster.reservations.snapshot())
        for _ in range(turns):
            await asyncio.sleep(0)
        form.cancel()
        assert await asyncio.gather(form, return_exceptions=True)
    assert (await cluster.ledger()).free_units("GPU-n-0") == 0
    assert (await cluster.ledger()).capacity.nodes["n"].resources.cpu == 54_000


@pytest.mark.parametrize("failing", [(Ledger, "change"), (Ledger, "put_node"), (Ledger, "put_resources")])
async def test_an_error_while_the_cluster_is_read_loses_no_change(
    failing: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    cluster.pod("eve", "GPU-n-1")
    await cluster.ledger()
    working, errors = getattr(*failing), iter([True])

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        if next(errors, False):
            raise RuntimeError("the ledger contradicts itself")
        return working(*args, **kwargs)

    monkeypatch.setattr(*failing, fails_once)
    cluster.pod("ada", "GPU-n-0")
    del cluster.pods.resources["hub/eve"]
    cluster.report("l")
    cluster.allocatable("l", 64_000)
    cluster.reserve("t1", "GPU-m-0")
    for _ in range(2):
        available = await cluster.reservations.availability_now()
    assert isinstance(available, AvailabilityNow)
    monkeypatch.undo()
    await cluster.same_anew()
    assert (await cluster.ledger()).free_units("GPU-n-0") == 75
    assert (await cluster.ledger()).free_units("GPU-l-1") == 100


async def test_a_pod_whose_annotations_will_not_do_counts_by_its_limits_once_its_gpu_is_known() -> None:
    cluster = Cluster()
    del cluster.reports.resources["n"]
    cluster.pod("odd", "GPU-n-1", units=40, odd=True)
    await cluster.ledger()
    cluster.report("n")
    assert (await cluster.ledger()).free_units("GPU-n-1") == 60


async def test_a_pod_with_a_claim_whose_annotations_will_not_do_counts_as_whole_gpus() -> None:
    cluster = Cluster()
    spec = cluster.pod("ada", "GPU-n-1", odd=True)["spec"]
    (container,) = spec["containers"]
    container["resources"] = {}
    container["env"] = [{"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-n-1"}]
    spec["resourceClaims"] = [{"name": "gpushare", "resourceClaimName": "ada-1"}]
    gpus = (await cluster.ledger()).capacity.gpus
    assert (gpus["GPU-n-1"].unowned, gpus["GPU-n-0"].unowned) == (0, 100)


async def test_a_pod_that_cannot_be_read_costs_only_itself_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.pod("bad", "GPU-n-0", units=30)
    assert (await cluster.ledger()).free_units("GPU-n-0") == 70
    parsed = cluster.snapshots._parsed

    def broken(pod: dict[str, Any]) -> Any:
        if pod["metadata"]["name"] == "bad":
            raise RuntimeError("no such thing")
        return parsed(pod)

    monkeypatch.setattr(cluster.snapshots, "_parsed", broken)
    for _ in range(3):
        cluster.pod("bad", "GPU-n-0", units=50)
        cluster.pod("good", "GPU-n-1", units=40)
        ledger = await cluster.ledger()
        assert (ledger.free_units("GPU-n-0"), ledger.free_units("GPU-n-1")) == (70, 60), "as it was before"
    assert [record.message for record in caplog.records] == [
        "Pod hub/bad cannot be read, so its earlier state still counts"
    ]
    del cluster.pods.resources["hub/bad"]
    assert (await cluster.ledger()).free_units("GPU-n-0") == 100


async def test_a_pod_of_contradictory_numbers_counts_by_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    monkeypatch.setattr(cluster.snapshots, "whole_devices", lambda units: 1000)
    cluster.pod("ada", "GPU-n-0", units=30)
    assert (await cluster.ledger()).free_units("GPU-n-0") == 70


async def test_a_bound_pod_and_a_node_that_cannot_be_read_cost_only_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster()
    await cluster.ledger()
    cluster.bound["bad"] = {"metadata": {"name": "bad"}}
    cluster.bind("good", "n", 4000)
    cluster.free["bad"] = {"metadata": {"name": "bad"}}
    cluster.allocatable("m", 32_000)
    for _ in range(2):
        nodes = (await cluster.ledger()).capacity.nodes
        assert (nodes["n"].resources.cpu, nodes["m"].resources.cpu) == (60_000, 32_000)
    assert sorted(record.message.split(" cannot")[0] for record in caplog.records) == ["Node bad", "Pod bad"]


async def test_what_pods_that_are_no_sessions_request_cannot_become_free() -> None:
    cluster = Cluster()
    cluster.free["n"]["allocatable"] = NodeResources.of_empty_node(64_000, 2**40)
    cluster.bind("daemon", "n", 4000)
    cluster.bind("ada", "n", 10_000, token="t")
    resources = (await cluster.ledger()).capacity.nodes["n"].resources
    assert (resources.cpu, resources.session_cpu, resources.most_cpu) == (50_000, 60_000, 64_000)
    del cluster.bound["daemon"]
    assert (await cluster.ledger()).capacity.nodes["n"].resources.session_cpu == 64_000


async def test_a_report_that_cannot_be_read_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.reports.resources["bad"] = {"data": {}}
    cluster.report("o")
    assert sorted((await cluster.ledger()).capacity.nodes) == ["m", "n", "o"]
    assert [record.message.split(" cannot")[0] for record in caplog.records] == ["ConfigMap bad"]


async def test_a_report_that_offers_more_than_its_node_is_refused_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    cluster.report("n", units=1000)
    assert list((await cluster.ledger()).capacity.nodes) == ["m"]
    said = (await cluster.reservations.snapshot()).awaited
    assert "node n reports 1000 units of GPU 0, and the node itself offers 100" in said
    assert not caplog.records, "a node that joins has no devices in its status for some seconds"
    monkeypatch.setattr(snapshot, "BEYOND_SECONDS", 0.0)
    for _ in range(3):
        cluster.report("n", units=1000)
        await cluster.ledger()
    assert [one.message for one in caplog.records] == [said]
    cluster.report("n")
    assert sorted((await cluster.ledger()).capacity.nodes) == ["m", "n"]


CLAIMS = ClaimsReport(folder="/x", socket="/x/s")
INSTANCE = MigInstance(gpu="GPU-n", gpu_model="A100", profile=MigProfile("1g.10gb", 1, 7, 1, 10 * 2**30))
OPTIONAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "claims": ({"claims": CLAIMS}, {}),
    "mig": ({}, {"mig": INSTANCE}),
    "both": ({"claims": CLAIMS}, {"mig": INSTANCE}),
}
"""Parts that a report can have, and those of its GPUs."""


@pytest.mark.parametrize(
    ("devices", "units", "placed"),
    [
        ({0: 100, 1: 100}, 100, True),
        ({0: 100, 1: 100}, 101, False),
        ({0: 100, 1: 100}, 1000, False),
        ({0: 100}, 100, False),
        ({0: 100, 1: 99}, 100, False),
        ({}, 101, False),
        ({0: 0, 1: 0}, 1000, False),
        (None, 100, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("optional", OPTIONAL)
async def test_each_gpu_of_a_report_is_held_against_the_nodes_status(
    devices: Any, units: int, placed: bool, optional: str
) -> None:
    """None: the hub may not read nodes, and only the bounds of a report count."""
    cluster = Cluster()
    if devices is None:
        cluster.snapshots.node_resources = ClusterResources(None, LOG)  # type: ignore[arg-type]
    else:
        cluster.free["n"]["gpus"] = devices
    cluster.report("n", units=units, parts=OPTIONAL[optional])
    assert ("n" in (await cluster.ledger()).capacity.nodes) is placed


@pytest.mark.parametrize("devices", [{}, {0: 0, 1: 0}], ids=str)
async def test_gpus_that_pods_get_by_claims_have_the_units_of_the_hubs_settings(devices: dict[int, int]) -> None:
    """The kubelet of a node that had the device plugin before goes on to say 0."""
    cluster = Cluster()
    cluster.free["n"]["gpus"] = devices
    cluster.report("n", parts=OPTIONAL["claims"])
    assert "n" in (await cluster.ledger()).capacity.nodes
    cluster.report("n")
    assert "n" not in (await cluster.ledger()).capacity.nodes, "without claims the status counts"
    cluster.report("n", units=150, parts=OPTIONAL["claims"])
    assert "n" not in (await cluster.ledger()).capacity.nodes
    said = (await cluster.reservations.snapshot()).awaited
    assert "reports 150 units of GPU 0, and by the hub's setting claims_overcommit a GPU has at most 100" in said
    cluster.snapshots.claimed_capacity = 150
    cluster.report("n", units=150, parts=OPTIONAL["claims"])
    assert "n" in (await cluster.ledger()).capacity.nodes


async def test_the_instances_of_a_gpu_have_no_more_units_together_than_the_gpu() -> None:
    cluster = Cluster()
    cluster.free["n"]["gpus"] = {0: 100}
    for instances, placed in ((2, True), (3, False)):
        cards = [
            GpuReport(index=0, uuid=f"MIG-{i}", model="A100", memory_bytes=2**30, capacity_units=50, mig=INSTANCE)
            for i in range(instances)
        ]
        cluster.put_report(Report(node="n", published_at=time.time() + instances * 1e-3, gpus=tuple(cards)))
        assert ("n" in (await cluster.ledger()).capacity.nodes) is placed


@pytest.mark.parametrize(
    "mark",
    [{"annotations": {MIRROR: "x"}}, {"ownerReferences": [{"kind": "Node", "name": "n"}]}],
    ids=["mirror", "owned"],
)
@pytest.mark.parametrize("odd", [True, False])
async def test_a_pod_that_its_node_has_made_takes_nothing_and_is_no_reservations(
    mark: dict[str, Any], odd: bool
) -> None:
    cluster = Cluster()
    share = cluster.reserve("t1", "GPU-n-0", units=30)
    before = (await cluster.ledger()).allocations
    made = cluster.pod("victim", "GPU-n-1", token="t1", notice=Notice(tier=Tier.RELEASED, at=1.0, reason="x"), odd=odd)
    for part, value in mark.items():
        made["metadata"][part] = {**made["metadata"][part], **value} if part == "annotations" else value
    assert (await cluster.ledger()).allocations == before
    assert not cluster.snapshots.shows("t1")
    assert not cluster.reservations.arrived(share, made)
    assert list(cluster.snapshots.pods()) == []
    assert (await cluster.reservations.snapshot()).notices == ()
    assert not cluster.snapshots._promised
    assert trimmed_pod(made)["token"] == ""
    facts = ClusterPod.of(made, {})
    assert not facts.labels
    assert not any(name.startswith("gpushare-spawner.io/") for name in facts.annotations)


async def test_a_pod_stays_its_users_whatever_its_annotations_say_later(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.pod("own", "GPU-n-0", units=30)
    (before,) = (await cluster.ledger()).allocations.values()
    for _ in range(2):
        taken = cluster.pod("own", "GPU-n-0", units=40)
        taken["metadata"]["annotations"] |= {SESSION: "victim", "gpushare-spawner.io/quota": "user/victim"}
        (now,) = (await cluster.ledger()).allocations.values()
        assert (now.user, now.quota, now.share_units) == (before.user, before.quota, 40)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "a change of gpushare-spawner.io/session, gpushare-spawner.io/quota is refused" in said
    again = cluster.pod("own", "GPU-n-0")
    again["metadata"] |= {"uid": "another"}
    again["metadata"]["annotations"] |= {SESSION: "bob"}
    (now,) = (await cluster.ledger()).allocations.values()
    assert now.user == "bob", "another pod of that name"


async def test_a_share_that_has_grown_takes_devices_from_the_nodes_status_and_nothing_is_refused() -> None:
    """The plugin offers the 25 devices of the pod and as many as 60 units leave: 65."""
    cluster = Cluster()
    cluster.pod("ada", "GPU-n-0", units=60)
    await cluster.ledger()
    cluster.free["n"]["gpus"] = {0: 65, 1: 100}
    assert "n" in (await cluster.ledger()).capacity.nodes
    cluster.free["n"]["gpus"] = {0: 39, 1: 100}
    assert "n" not in (await cluster.ledger()).capacity.nodes


async def test_pods_that_change_or_go_no_longer_excuse_what_a_report_offers() -> None:
    cluster = Cluster()
    cluster.free["n"]["gpus"] = {0: 39, 1: 100}

    async def placed() -> bool:
        await cluster.ledger()  # reports are counted before pods, so a pod counts from the next look on
        return "n" in (await cluster.ledger()).capacity.nodes

    for units, enough in ((60, False), (61, True), (60, False)):
        cluster.pod("ada", "GPU-n-0", units=units)
        assert await placed() is enough
    cluster.pod("bob", "GPU-n-0", units=1)
    assert await placed()
    del cluster.pods.resources["hub/bob"]
    assert not await placed()
    cluster.pods.resources.clear()
    assert not await placed()
    assert not cluster.snapshots._promised, "nothing is kept of pods that have gone"


async def test_a_gpu_that_two_nodes_report_is_logged_when_that_begins(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    for _ in range(2):
        cluster.report("n", like="m")
        assert sorted((await cluster.ledger()).capacity.gpus) == ["GPU-m-0", "GPU-m-1"]
    assert [one.message.partition(".")[0] for one in caplog.records] == [
        f"GPU GPU-m-{number} is reported by the nodes m and n" for number in range(2)
    ]
    cluster.report("n")
    await cluster.ledger()
    cluster.report("n", like="m")
    await cluster.ledger()
    assert len(caplog.records) == 4, "it began anew"


async def test_a_node_cannot_take_a_gpu_from_the_node_that_has_it_by_reporting_it() -> None:
    """An attacker on a node could draw all spawns to it."""
    cluster = Cluster()
    cluster.report("honest")
    await cluster.ledger()
    for _ in range(2):
        cluster.report("a-hostile", gpus=3, like="honest")
        gpus = (await cluster.ledger()).capacity.gpus
        assert [gpus[f"GPU-honest-{number}"].node for number in range(3)] == ["honest", "honest", "a-hostile"]
        assert cluster.snapshots._inventory.doubled["GPU-honest-0"] == ("honest", "a-hostile")
        cluster.report("honest")
    cluster.report("honest", age=3600.0)
    assert (await cluster.ledger()).capacity.gpus["GPU-honest-0"].node == "a-hostile", "the other one is silent"
    cluster.report("honest")
    assert (await cluster.ledger()).capacity.gpus["GPU-honest-0"].node == "honest", "as before"


async def test_a_node_whose_report_is_too_old_is_offered_to_nobody_until_it_reports_again() -> None:
    cluster = Cluster()
    cluster.report("n", age=REPORT_STALE_SECONDS + 5)
    ledger = await cluster.ledger()
    assert list(ledger.capacity.nodes) == ["m"]
    snapshot = await cluster.reservations.snapshot()
    assert snapshot.awaited.startswith("Node n sends no reports")
    assert len(snapshot.gpus) == 2
    cluster.report("n")
    assert sorted((await cluster.ledger()).capacity.nodes) == ["m", "n"]


async def test_a_node_whose_clock_is_ahead_is_silent_as_soon_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawns would be placed on a node that is gone, until the clock of the hub reaches its last report."""
    cluster = Cluster()
    for node in ("n", "m"):
        cluster.report(node, age=-86400.0)
    assert sorted((await cluster.ledger()).capacity.nodes) == ["m", "n"]
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + REPORT_STALE_SECONDS + 5, time=time.time)
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.cluster.snapshot.time", later)
    cluster.report("m", age=-86400.0)
    assert list((await cluster.ledger()).capacity.nodes) == ["m"]
    assert (await cluster.reservations.snapshot()).awaited == (
        "Node n sends no reports; the last one is 2 min 5 s old."
    )


@pytest.mark.parametrize("step", [86400.0, -86400.0])
async def test_a_clock_that_is_set_makes_no_report_older_or_younger(step: float) -> None:
    cluster = Cluster()
    stepped = 0.0
    cluster.snapshots._clock = WallClock(lambda: time.time() + stepped)
    cluster.report("n", age=REPORT_STALE_SECONDS + 5)
    assert list((await cluster.ledger()).capacity.nodes) == ["m"]
    stepped = step
    assert list((await cluster.ledger()).capacity.nodes) == ["m"], "one agent is as silent as before, and one is not"
    cluster.report("n", age=-step)
    cluster.report("m", age=-step)
    assert sorted((await cluster.ledger()).capacity.nodes) == ["m", "n"]


async def test_an_agent_that_only_observes_is_no_node_to_wait_for() -> None:
    cluster = Cluster()
    cluster.report("observing", age=REPORT_STALE_SECONDS + 5, gpus=0)
    assert (await cluster.reservations.snapshot()).awaited == ""
    cluster.report("observing", gpus=0)
    assert sorted((await cluster.ledger()).capacity.nodes) == ["m", "n"]


async def test_announced_idle_actions_come_and_go_with_their_pods() -> None:
    cluster = Cluster()
    due = Notice(tier=Tier.RELEASED, at=1.0, reason="idle", effective_units=0)
    cluster.pod("ada", "GPU-n-0", notice=due)
    assert (await cluster.reservations.snapshot()).notices == (("hub/ada#uid-ada", due),)
    cluster.pod("ada", "GPU-n-0")
    assert (await cluster.reservations.snapshot()).notices == ()


async def test_idle_times_are_those_that_the_node_of_the_session_s_pod_reports() -> None:
    cluster, now = Cluster(), time.time()
    cluster.pod("ada", "GPU-n-0")
    cluster.pod("bob", "GPU-n-1")
    allocations = [
        Allocation(name, (f"GPU-n-{i}",), 25, 0, 25, opened_at=now - 900) for i, name in enumerate(("ada", "bob"))
    ]
    ada, bob = (session(allocation) for allocation in allocations)
    known = {"last_gpu_activity": now - 600, "kernels": 1, "last_kernel_activity": now - 60}
    sessions = (ada.model_copy(update=known), bob.model_copy(update={"gpu_busy": True}))
    cluster.report("n", parts=({"sessions": sessions}, {}))
    cluster.report("m", parts=({"sessions": (bob,)}, {}))
    idle_since = (await cluster.reservations.snapshot()).idle_since
    assert idle_since("hub/ada#uid-ada") == (now - 600, now - 60)
    assert idle_since("hub/bob#uid-bob") is None, "another node has no say about it"
    assert idle_since("hub/eve#uid-eve") is None
    del cluster.reports.resources["n"]
    assert (await cluster.reservations.snapshot()).idle_since("hub/ada#uid-ada") is None
    assert cluster.snapshots._idle.keys() == {"m"}


async def test_free_cpu_is_forgotten_when_the_reader_knows_nothing_any_more() -> None:
    cluster = Cluster()
    cluster.bind("other", "n", 4000)
    assert (await cluster.ledger()).capacity.nodes["n"].resources.cpu == 60_000
    cluster.capacity._nodes.current = False  # type: ignore[union-attr, misc]
    assert (await cluster.ledger()).capacity.nodes["n"].resources == NodeResources()
    cluster.capacity._nodes.current = True  # type: ignore[union-attr, misc]
    assert (await cluster.ledger()).capacity.nodes["n"].resources.cpu == 60_000


GPUS = st.sampled_from(["GPU-n-0", "GPU-n-1", "GPU-m-0", "GPU-m-1"])
NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.tuples(st.just("pod"), NAMES, GPUS),
    st.tuples(st.just("gone"), NAMES),
    st.tuples(st.just("ended"), NAMES),
    st.tuples(st.just("reserve"), NAMES, GPUS),
    st.tuples(st.just("cancel"), NAMES),
    st.tuples(st.just("bind"), NAMES, st.sampled_from(["n", "m"])),
    st.tuples(st.just("unbind"), NAMES),
    st.tuples(st.just("report"), st.sampled_from(["n", "m"]), st.integers(1, 2)),
    st.tuples(st.just("list"), st.just("")),
    st.tuples(st.just("read"), st.just("")),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS, max_size=20))
def test_the_kept_ledger_is_what_a_new_one_would_be(events: list[tuple[Any, ...]]) -> None:
    async def happens() -> None:
        cluster = Cluster()
        for kind, name, *more in events:
            if kind == "pod":
                cluster.pod(name, more[0], token=f"t-{name}" if cluster.version % 2 else "")
            elif kind == "gone":
                cluster.pods.resources.pop(f"hub/{name}", None)
            elif kind == "ended" and f"hub/{name}" in cluster.pods.resources:
                cluster.pod(name, "GPU-n-0")["status"]["phase"] = "Failed"
            elif kind == "reserve":
                cluster.reserve(f"t-{name}", more[0])
            elif kind == "cancel":
                cluster.reservations._in_flight.pop(f"t-{name}", None)
            elif kind == "bind":
                cluster.bind(name, more[0], 500, f"t-{name}")
            elif kind == "unbind":
                cluster.bound.pop(name, None)
            elif kind == "report":
                cluster.report(name, gpus=more[0])
            elif kind == "list":
                # a list replaces all objects by equal ones
                cluster.pods.resources = {key: {**pod} for key, pod in cluster.pods.resources.items()}
            elif kind == "read":
                await cluster.same_anew()
        await cluster.same_anew()

    asyncio.run(happens())


async def test_a_changed_node_alone_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = Cluster(), []
    accept = PodConstraints.accept
    monkeypatch.setattr(PodConstraints, "accept", lambda pod, node: asked.append(node.name) or accept(pod, node))  # type: ignore[func-returns-value]
    constraints = PodConstraints.of({"pool": "notebooks"}, [], [])
    assert cluster.snapshots.node_resources.ineligible(constraints) == frozenset()
    await cluster.ledger()
    assert cluster.snapshots.node_resources.ineligible(constraints) == {"n", "m"}
    asked.clear()
    cluster.allocatable("n", 32_000, pool="notebooks")
    await cluster.ledger()
    assert cluster.snapshots.node_resources.ineligible(constraints) == {"m"}
    cluster.allocatable("n", 16_000, pool="notebooks")
    await cluster.ledger()
    assert asked == ["n"]
    del cluster.free["m"]
    await cluster.ledger()
    assert cluster.snapshots.node_resources.ineligible(constraints) == frozenset()


async def test_gpus_of_a_new_report_that_are_as_known_stay_the_same_objects() -> None:
    cluster = Cluster()
    first = (await cluster.reservations.snapshot()).gpus["GPU-n-0"]
    cluster.report("n")
    assert (await cluster.reservations.snapshot()).gpus["GPU-n-0"] is first
    cluster.report("n", gpus=1)
    assert list((await cluster.reservations.snapshot()).gpus) == ["GPU-m-0", "GPU-m-1", "GPU-n-0"]
