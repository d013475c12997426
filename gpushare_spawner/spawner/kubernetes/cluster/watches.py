"""KubeSpawner's shared watches, brought back to life when they have died; and one more, of the agents' reports.

What they show is read by `snapshot`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from gpushare_spawner.spawner.kubernetes.cluster.reflectors import (
    Dated,
    DatedPodReflector,
    SnapshotStale,
    freshen,
    has_listed,
    is_watching,
)
from gpushare_spawner.spawner.kubernetes.cluster.snapshot import PODS
from gpushare_spawner.spawner.kubernetes.kubespawner_private import KubeSpawnerPrivate

PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between the tries of `Watches.pods_patiently`."""


class Watches:
    """The watches that one spawner needs.

    ``reflectors`` is the dict that all spawners of the hub share. ``lock`` gives the lock of a key, one for all of
    them. ``namespace``: where the spawner's pod is.
    """

    def __init__(
        self,
        kube: KubeSpawnerPrivate,
        reflectors: MutableMapping[tuple[Any, ...], Any],
        lock: Callable[[tuple[Any, ...]], asyncio.Lock],
        namespace: str,
        log: logging.Logger,
    ) -> None:
        self._kube = kube
        self._reflectors = reflectors
        self._lock = lock
        self._namespace = namespace
        self._log = log

    async def start(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> Any:
        """As KubeSpawner starts a reflector; one that has died is brought back to life.

        Where that fails now, what it saw last is shown, as KubeSpawner does; nothing is placed by it.
        """
        key = self._kube.reflector_key(kind)
        if kind == PODS:
            reflector_class = DatedPodReflector
            if self._undated(key):
                # from before there were templates: it does not say how fresh it is. One spawner replaces it for all
                async with self._lock(key):
                    return await self._start(kind, reflector_class, replace or self._undated(key), **settings)
        return await self._start(kind, reflector_class, replace, **settings)

    def _undated(self, key: tuple[Any, ...]) -> bool:
        known = self._reflectors.get(key)
        return known is not None and not isinstance(known, Dated)

    async def _start(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> Any:
        known = self._reflectors.get(self._kube.reflector_key(kind))
        if known is not None and not replace:
            if not is_watching(known):
                try:
                    await freshen(known)
                except SnapshotStale as error:
                    if not has_listed(known):
                        raise
                    self._log.warning("%s; what was seen last is shown", error)
            return known
        starting = asyncio.ensure_future(self._kube.start_reflector(kind, reflector_class, replace, **settings))
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # a start that is called off must not leave the others waiting for a first list that never comes
        return await asyncio.shield(starting)

    async def ensure(self, reports_key: tuple[Any, ...], make_reports: Callable[[], Any]) -> None:
        """See to it that pods and reports are watched; `snapshot` checks that they are watched well."""
        if reports_key not in self._reflectors:
            self._reflectors[reports_key] = make_reports()
        try:
            await self._kube.watch_pods()
        except Exception as error:
            self._not_yet(error)

    async def pods_patiently(self) -> None:
        """See to it that pods are watched, after several tries if need be. Raises what the last one raised."""
        # a hub that starts takes a failed poll for a stopped server, and one failed list would do that to all of them
        for pause in PAUSES:
            try:
                await self._kube.watch_pods()
                return
            except Exception as error:
                self._not_yet(error)
                await asyncio.sleep(pause)
        await self._kube.watch_pods()

    def _not_yet(self, error: Exception) -> None:
        self._log.warning("Pods in %s are not watched yet: %s", self._namespace, error)
