"""Shares, pods and reservations for tests of the parts, without a hub and without an API server."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from gpushare_spawner.model.kubernetes.annotations import HUB, SESSION, labels
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.reservations import Exclusions, PodReservation
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest

HALF = Template.model_validate({"name": "half-gpu", "display_name": "0.50 GPU", "gpu": {"fraction": 0.5}})


def share(token: str = "token-1", node: str = "node-a") -> PodReservation:
    """Half of GPU 3 of a node."""
    gpu = GpuReport(index=3, uuid=f"GPU-{node}", model="A100", memory_bytes=2**30)
    return PodReservation(SpawnRequest(Tenant("ada"), HALF), Placement(node, (gpu.uuid,)), (gpu,), token)


def pod(phase: str = "Pending", token: str = "token-1", **status: Any) -> dict[str, Any]:
    """A pod of ours as the API server writes it."""
    annotations = {RESERVATION: token, SESSION: "ada", HUB: "http://hub/api"}
    metadata = {"name": "jupyter-ada", "namespace": "hub", "uid": "u-1", "annotations": annotations}
    return {
        "metadata": {**metadata, "labels": labels(), "creationTimestamp": "2020-01-01T00:00:00+00:00"},
        "spec": {"nodeName": "node-a"},
        "status": {"phase": phase, **status},
    }


def not_admitted() -> dict[str, Any]:
    """A pod that its node refused."""
    return pod("Failed", reason="UnexpectedAdmissionError", message="no healthy devices")


class FakeReservations:
    """Remembers what becomes of reservations. ``seen`` are the pods that the watch shows."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.given_back: list[str] = []
        self.lingering: list[str] = []
        self.distrusted: list[str] = []
        self.arrives = True
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.cluster = self
        self.exclusions = Exclusions()

    def pods(self) -> list[dict[str, Any]]:
        return self.seen

    def distrust(self, node: str) -> None:
        self.distrusted.append(node)

    def give_back(self, share: PodReservation) -> None:
        self.given_back.append(share.token)

    def keep_place_of(self, share: PodReservation) -> None:
        self.lingering.append(share.token)

    def arrived(self, share: PodReservation, pod: Any) -> bool:
        return self.arrives

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(work)

    async def late_pods(self, token: str) -> Any:
        for found in self.seen:
            yield found

    async def finish(self) -> None:
        for task in self.tasks:
            await task
