"""A start's second step: a place on a GPU, for which a start may have to wait in line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException
from traitlets import Float, Integer, TraitError, validate

from gpushare_spawner.model.kubernetes import HOSTNAME_LABEL
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.kubernetes.api_errors import worded
from gpushare_spawner.spawner.kubernetes.options import ChoosingSpawner
from gpushare_spawner.spawner.kubernetes.pod_manifest import holds_share
from gpushare_spawner.spawner.kubernetes.pods import orphans
from gpushare_spawner.spawner.kubernetes.reservations import PodReservations, PodShare
from gpushare_spawner.spawner.kubernetes.snapshot import ClusterView
from gpushare_spawner.spawner.progress import Story
from gpushare_spawner.spawner.queue.queue import Wish

ORPHANS_EVERY = 60.0
"""Seconds between two looks for pods that nobody owns, at least."""
ORPHAN_AGE = 120.0
"""Seconds for which such a pod is left alone after it was made."""


class PlacingSpawner(ChoosingSpawner):
    """Finds places by the cluster's pods and reports; see `PodReservations` for the line."""

    where = "this cluster"
    away = "the cluster's GPUs and pods cannot be looked at"

    share_unit_size = Integer(
        1,
        min=1,
        max=100,
        help="""
        How many units of 1 % of a GPU one device of the agents' device plugin stands for; the agents' ``--unit-size``.
        """,
    ).tag(config=True)

    @validate("share_unit_size")
    def _valid_share_unit_size(self, proposal: Any) -> int:
        size = int(proposal["value"])
        if UNITS_PER_GPU % size:
            raise TraitError(f"share_unit_size {size} does not divide {UNITS_PER_GPU}: use one like 1, 5 or 25")
        return size

    view_patience = Float(
        20.0,
        min=0,
        help="""
        Seconds that a start waits while what the GPUs hold is not known, before it is refused: the cluster's API does
        not answer, or no agent has published a report within two minutes.
        """,
    ).tag(config=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reservation: PodShare | None = None

    @property
    def reservations(self) -> PodReservations:
        """The shares in flight and the line, one for all spawners of the hub."""
        return self._shared(("cluster", self.reports_namespace), self._new_reservations)

    def _new_reservations(self) -> PodReservations:
        cluster = ClusterView(self.reflectors, self._reports_key, self.share_unit_size, self.log)
        return PodReservations(cluster, self.log, patience=self.view_patience, **self._line_settings())

    async def _place(self, template: Template | None, patience: float, story: Story) -> None:
        if template is not None and template.gpu is not None:
            await self._watch()
            await self._clear_way()
        await super()._place(template, patience, story)

    def _wish(self, template: Template) -> Wish:
        return replace(super()._wish(template), node=self._only_node())

    def _only_node(self) -> str:
        """The node that the admin's settings pin this server to; empty where they do not."""
        pinned = self.node_selector.get(HOSTNAME_LABEL)
        for key in ("nodeSelector", "node_selector"):
            pinned = (self.extra_pod_config.get(key) or {}).get(HOSTNAME_LABEL, pinned)
        return str(self._expand_all(pinned)) if pinned else ""

    def _reserved(self, reservation: PodShare) -> None:
        self._reservation = reservation

    def _gpus_of(self, reservation: Any) -> str:
        return f"{super()._gpus_of(reservation)} of {reservation.placement.node}"

    async def _clear_way(self) -> None:
        """Remove what an earlier start left: this server's own pod, and pods of servers that the hub has forgotten."""
        pod = self._pod()
        if pod is not None and holds_share(pod) and not pod["metadata"].get("deletionTimestamp"):
            # KubeSpawner would do it when it creates the new one; until then it would hold what this one waits for
            self.log.warning("Removing pod %s, which an earlier start of this server left", self.pod_name)
            try:
                await super(GPUShareBase, self).stop(now=True)
            except Exception as error:
                self.log.warning("Pod %s is not removed yet: %s", self.pod_name, error)
        settings = getattr(self.user, "settings", None)
        if isinstance(settings, dict) and "users" in settings:
            self._remove_orphans_soon()

    def _remove_orphans_soon(self) -> None:
        kept: dict[str, float] = self._shared(("orphans",), dict)
        now = time.monotonic()
        if now - kept.get("looked", -ORPHANS_EVERY) < ORPHANS_EVERY:
            return
        kept["looked"] = now
        room = self.reservations
        for pod in orphans(room.cluster.pods(), self.hub.api_url, self._hub_runs, time.time() - ORPHAN_AGE):
            room.in_background(
                self._remove_pod(pod["metadata"], "it holds a GPU share, and the hub knows no such server")
            )

    async def _remove_pod(self, metadata: Mapping[str, Any], why: str) -> None:
        name, namespace = metadata["name"], metadata["namespace"]
        self.log.warning("Removing pod %s/%s: %s", namespace, name, why)
        try:
            await self.api.delete_namespaced_pod(
                name=name, namespace=namespace, body={"preconditions": {"uid": metadata["uid"]}}
            )
        except (ApiException, ClientError, TimeoutError) as error:
            self.log.warning("Pod %s/%s is not removed yet: %s", namespace, name, worded(error))

    def _pod(self) -> Mapping[str, Any] | None:
        reflector = self.pod_reflector
        return reflector.pods.get(f"{self.namespace}/{self.pod_name}") if reflector is not None else None
