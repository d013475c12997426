"""For how long placement blocks the hub's event loop, on a large cluster.

``python -m benchmarks.placement_loop [--gpus N] [--starts N] [--json]``; `benchmarks.placement` runs it too.

The real queue for pods (`PodReservations`) places spawns that come at once, one for ten GPUs, while 50 others wait
for eight GPUs on one node. More starts than the half full cluster has room for end with an error. What the hub would
have from the API server stands in dicts, as KubeSpawner's reflectors and the hub's reader of nodes and pods keep
them: ConfigMaps with reports, pods with annotations, free CPU and memory of nodes. During the measurement each node
reports once a minute, pods of placed spawns appear and run, and sessions change their tier.

A heartbeat runs in each turn of the event loop. ``loop_ms`` is the most CPU time of the loop's thread between two
heartbeats. What the simulated cluster itself needs is part of it, and so are the first reading of the whole cluster and
Python's garbage collector. ``gc_ms`` is the longest run of the collector alone; ``gc_full_ms`` is what a collection of
all generations takes at the end, whether one came or not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from benchmarks.ledger_check import check_ledger
from benchmarks.placement_cluster import GPUS_PER_NODE, MODELS, SHARES, cluster, resources
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels
from gpushare_spawner.model.kubernetes.objects import REPORT_KEY, NodeFacts, report_name, written_report
from gpushare_spawner.model.report import Notice, Report, SessionReport
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.node import Requested
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.kubernetes.cluster.node_resources import ClusterResources
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import PODS, REPORTS
from gpushare_spawner.spawner.kubernetes.cluster.snapshot import ClusterSnapshots
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation, PodReservations
from gpushare_spawner.spawner.queue.queue import Ticket
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.templates.folder import Policy

NAMESPACE = "hub"
REPORTS_KEY = (REPORTS, NAMESPACE)
WAITING = 50
REPORT_EVERY = 60.0
"""Seconds between two reports of a node."""
WAIT_ON = 5.0
"""Seconds for which the 50 wait on after the others have been placed."""
GPUS_PER_START = 10
"""A start takes 1.27 GPUs in the mean, and about half of them are free: most starts on a cluster of any size find a
place."""
START_SECONDS = (0.1, 2.0)
"""From a place to a running pod, at least and at most."""
STUCK_SECONDS = 30.0
"""For so long no start was placed: the others never are."""
NOTICE_EVERY = 50
"""One session in so many has been told of an idle action."""


@dataclass
class Reflector:
    """What `ClusterSnapshots` reads of a reflector whose watch is fine."""

    kind: str
    resources: dict[str, Any] = field(default_factory=dict)
    namespace: str = NAMESPACE

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.watch_task = loop.create_task(asyncio.Event().wait())
        self.first_load_future: asyncio.Future[None] = loop.create_future()
        self.first_load_future.set_result(None)


def template(share: Share, name: str, models: Sequence[str] = ()) -> Template:
    """A template for a share, with CPU and memory in proportion."""
    gpu: dict[str, Any] = {"count": share.count} if share.units == 100 else {"fraction": share.units / 100}
    guarantees = {
        "cpu": {"guarantee": round(8 * share.fraction, 1)},
        "memory": {"guarantee": f"{round(32 * share.fraction * 1024)}Mi"},
    }
    wanted = gpu | ({"models": list(models)} if models else {})
    return Template.model_validate({"name": name, "display_name": name, "gpu": wanted, "resources": guarantees})


def pod(session: SessionReport, number: int, notice: Notice | None, token: str = "") -> dict[str, Any]:
    """A pod as the API server writes it, as far as the hub reads it."""
    index = tuple(int(uuid.split("-")[1]) % 8 for uuid in session.gpus)
    said = SessionAnnotations(
        session=session.id,
        template=session.template,
        share_units=session.share_units,
        borrowed_units=session.borrowed_units,
        gpus=session.gpus,
        gpu_indices=index,
        tier=Tier.ACTIVE if session.effective_units else Tier.RELEASED,
        tier_since=0.0,
        effective_units=session.effective_units,
        notice=notice,
    )
    annotations = said.annotations() | ({RESERVATION: token} if token else {})
    return {
        "metadata": {
            "namespace": NAMESPACE,
            "name": f"jupyter-{number}",
            "uid": f"uid-{number}",
            "resourceVersion": str(number),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels(),
            "annotations": annotations,
        },
        "spec": {},
        "status": {"phase": "Running"},
    }


class SimulatedHub:
    """The queue of a hub, and what the API server would show it."""

    def __init__(self, reports: Sequence[Report], seed: int) -> None:
        self.chance = random.Random(seed)
        self.number = 0
        self.pods = Reflector(PODS)
        self.reports = Reflector(REPORTS)
        now = time.time()
        self.nodes = [report.model_copy(update={"sessions": (), "published_at": now}) for report in reports]
        self.later = {report.node: self.config_map(report, now + 60.0) for report in self.nodes}
        for report in self.nodes:
            self.show(self.config_map(report, now))
        for report in reports:
            for session in report.sessions:
                self.add_pod(session)
        capacity = ClusterResources(None, logging.getLogger("benchmark"))  # type: ignore[arg-type]
        # what the reader of nodes and pods has, without the API server that it reads
        free = {
            report.node: {
                "metadata": {"name": report.node},
                "facts": NodeFacts(report.node, {"kubernetes.io/hostname": report.node}),
                "allocatable": resources(report),
                "gpus": {gpu.index: gpu.capacity_units for gpu in report.gpus},
            }
            for report in reports
        }
        self.on_nodes: dict[str, Any] = {}
        capacity._nodes = SimpleNamespace(current=True, objects=free)  # type: ignore[assignment]
        capacity._pods = SimpleNamespace(current=True, objects=self.on_nodes)  # type: ignore[assignment]
        reflectors = {(PODS, NAMESPACE): self.pods, REPORTS_KEY: self.reports}
        log = logging.getLogger("benchmark")
        # the reports' clock stands still: on a slow machine they would be too old before the cluster is made
        snapshots = ClusterSnapshots(reflectors, REPORTS_KEY, 1, log, clock=lambda: now, node_resources=capacity)
        self.templates = [template(share, f"t{number}") for number, share in enumerate(SHARES)]
        self.big = [template(Share(100, 8), f"big-{number}", [model]) for number, model in enumerate(MODELS)]
        self.reservations = PodReservations(
            snapshots,
            logging.getLogger("benchmark"),
            strategy=StrandingAwareFgd(),
            queue_length=2 * WAITING,
            policy=lambda: Policy(templates=(*self.templates, *self.big)),
        )

    def config_map(self, report: Report, at: float) -> dict[str, Any]:
        """A node's report as the API server has it."""
        name = report_name(report.node)
        written = written_report(report.model_copy(update={"published_at": at}))
        metadata = {"namespace": NAMESPACE, "name": name, "resourceVersion": str(at)}
        return {"metadata": metadata, "data": {REPORT_KEY: written}}

    def show(self, config_map: dict[str, Any]) -> None:
        """A watch event with a report."""
        self.reports.resources[f"{NAMESPACE}/{config_map['metadata']['name']}"] = config_map

    def add_pod(self, session: SessionReport, token: str = "") -> dict[str, Any]:
        """A watch event with a new pod."""
        self.number += 1
        notice = None
        if not token and self.number % NOTICE_EVERY == 0:
            at = time.time() + self.chance.uniform(60, 900)
            notice = Notice(tier=Tier.RELEASED, at=at, reason="idle", effective_units=0)
        made = pod(session, self.number, notice, token)
        self.pods.resources[f"{NAMESPACE}/{made['metadata']['name']}"] = made
        return made

    async def report(self) -> None:
        """Every node reports once a minute, also while the loop is slow: the hub forgets nodes that are silent."""
        nodes = self.chance.sample(self.nodes, len(self.nodes))
        began, shown = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) / REPORT_EVERY * len(nodes))
            for number in range(shown, due):
                later = self.later[nodes[number % len(nodes)].node]
                self.show({**later, "metadata": {**later["metadata"], "resourceVersion": f"later-{number}"}})
            shown = due
            await asyncio.sleep(max(0.001, REPORT_EVERY / len(nodes)))

    async def start(self, user: str, wanted: Template, runs: bool = True) -> None:
        """One spawn: reserve, and then the pod appears, is bound and runs."""
        request = SpawnRequest(Tenant(user), wanted)
        share = await self.reservations.reserve(request, 600.0, self.joined)
        if not runs:
            return
        await asyncio.sleep(self.chance.uniform(*START_SECONDS))
        self.run(share)

    def joined(self, ticket: Ticket) -> None:
        """As the spawner does."""
        ticket.alternatives = tuple(SpawnRequest(ticket.request.tenant, template) for template in self.templates)

    def run(self, share: PodReservation) -> None:
        """The pod of a reservation runs."""
        units = share.request.share.units
        session = SessionReport(
            id=share.request.session,
            user="u",
            template=share.request.template.name,
            gpus=share.placement.gpus,
            share_units=units,
            borrowed_units=share.placement.borrowed,
            tier_since=0,
            effective_units=units,
            guaranteed_units=units,
            opened_at=0,
        )
        made = self.add_pod(session, share.token)
        requested = share.request.placement_request(self.reservations.cluster._last[1])  # type: ignore[index]
        self.on_nodes[made["metadata"]["name"]] = {
            "metadata": made["metadata"],
            "node": share.placement.node,
            "requested": Requested(requested.cpu, requested.memory, 1),
            "token": share.token,
        }
        self.reservations.arrived(share, made)


class NoRoom(Exception):
    """The cluster is too small for what is started."""


class Heartbeat:
    """How long the turns of the event loop took, and the garbage collections, in seconds of CPU time of its thread."""

    def __init__(self) -> None:
        # arrays: the collector does not walk them
        self.turns = array("d", [0.0])
        self.collections = array("d", [0.0])

    async def beat(self) -> None:
        """Measure until cancelled."""
        gc.callbacks.append(self._collects)
        try:
            last = time.thread_time()
            while True:
                await asyncio.sleep(0)
                now = time.thread_time()
                self.turns.append(now - last)
                last = now
        finally:
            gc.callbacks.remove(self._collects)

    def _collects(self, moment: str, _: object) -> None:
        if moment == "start":
            self._began = time.thread_time()
        else:
            self.collections.append(time.thread_time() - self._began)


async def check_hub(hub: SimulatedHub) -> None:
    """Check the ledger after a last snapshot. Raises LedgerError.

    On a loaded machine a pass is still reading when the last spawn has ended, and between two pieces of a reading a
    pod that has just come counts beside its reservation.
    """
    await hub.reservations.snapshot()
    check_ledger(hub.reservations.feed.ledger)


async def measure(gpus: int, starts: int, seed: int) -> dict[str, float]:
    """Milliseconds that the event loop was blocked, and seconds until all were placed. Raises NoRoom."""
    if gpus < GPUS_PER_NODE * len(MODELS):
        raise NoRoom(
            f"the spawns that wait need a node of each model: give at least {GPUS_PER_NODE * len(MODELS)} --gpus"
        )
    hub = SimulatedHub(cluster(gpus, seed, none_empty=True), seed)
    gc.collect()
    chance = random.Random(seed)
    heartbeat = Heartbeat()
    tasks = [asyncio.create_task(work) for work in (heartbeat.beat(), hub.report())]
    began = time.perf_counter()
    waiting = [
        asyncio.create_task(hub.start(f"big-{n}", hub.big[n % len(hub.big)], runs=False)) for n in range(WAITING)
    ]
    while sum(ticket.ahead is not None for ticket in hub.reservations.queue) < WAITING:
        await asyncio.sleep(0.01)
    first = time.perf_counter() - began
    turns_before = len(heartbeat.turns)
    began = time.perf_counter()
    coming = []
    for number in range(starts):
        coming.append(asyncio.create_task(hub.start(f"user-{number}", chance.choice(hub.templates))))
        if number % 10 == 9:
            # each start is a request of its own to the hub: ten of them in one turn of its loop
            await asyncio.sleep(0)
    fewest, since = starts, time.monotonic()
    while (left := len(hub.reservations.queue) - WAITING) > 0:
        if left < fewest:
            fewest, since = left, time.monotonic()
        elif time.monotonic() - since > STUCK_SECONDS:
            raise NoRoom(f"{left} of {starts} starts find no place on {gpus} GPUs: give fewer --starts")
        await asyncio.sleep(0.01)
    placed = time.perf_counter() - began
    await asyncio.gather(*coming)
    await asyncio.sleep(WAIT_ON)
    still = sum(not task.done() for task in waiting)
    after = heartbeat.turns[turns_before:]
    for task in (*tasks, *waiting):
        task.cancel()
    await asyncio.gather(*tasks, *waiting, return_exceptions=True)
    await check_hub(hub)
    for watch in (hub.pods.watch_task, hub.reports.watch_task):
        watch.cancel()
    began = time.thread_time()
    gc.collect()
    full = time.thread_time() - began
    return {
        "loop_ms": round(max(heartbeat.turns) * 1e3, 2),
        "loop_starts_ms": round(max(after) * 1e3, 2),
        "gc_ms": round(max(heartbeat.collections) * 1e3, 2),
        "gc_full_ms": round(full * 1e3, 2),
        "first_pass_s": round(first, 2),
        "placed_s": round(placed, 2),
        "waiting": still,
    }


def run(gpus: int, starts: int, seed: int) -> dict[str, float]:
    """Measure and print; see `measure`."""
    found = asyncio.run(measure(gpus, starts, seed))
    print(
        f"\nthe hub's event loop on {gpus} GPUs, {found['waiting']} waiting and {starts} starting at once: "
        f"blocked for {found['loop_ms']} ms at most, {found['loop_starts_ms']} ms after the first reading "
        f"({found['first_pass_s']} s); all placed after {found['placed_s']} s"
    )
    return found


def main() -> int:
    """Command line; 0 where all 50 waited on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--starts", type=int, help=f"default: one for {GPUS_PER_START} GPUs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    starts = options.gpus // GPUS_PER_START if options.starts is None else options.starts
    try:
        found = run(options.gpus, starts, options.seed)
    except NoRoom as error:
        parser.exit(1, f"{error}\n")
    if options.json:
        print(json.dumps(found))
    return 0 if found["waiting"] == WAITING else 1


if __name__ == "__main__":
    raise SystemExit(main())
