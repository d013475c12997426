"""KubeSpawner's shared watches, restarted after an end; and one more, of the agents' reports.

Their objects are read by `snapshot`.
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

    ``reflectors`` is the dict that all spawners of the hub share. ``lock`` returns the lock of a key, shared by all of
    them. ``namespace``: the namespace of the spawner's pod.
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
        """Start a reflector as KubeSpawner does; restart a reflector that has ended.

        If a restart fails, the last objects are shown, as KubeSpawner does; no spawn is placed by them.
        """
        key = self._kube.reflector_key(kind)
        if kind == PODS:
            reflector_class = DatedPodReflector
            if self._undated(key):
                # made before there were templates: it has no time of its last list. One spawner replaces it for all
                async with self._lock(key):
                    return await self._start(kind, reflector_class, replace or self._undated(key), **settings)
        return await self._start(kind, reflector_class, replace, **settings)

    def _undated(self, key: tuple[Any, ...]) -> bool:
        reflector = self._reflectors.get(key)
        return reflector is not None and not isinstance(reflector, Dated)

    async def _start(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> Any:
        reflector = self._reflectors.get(self._kube.reflector_key(kind))
        if reflector is not None and not replace:
            if not is_watching(reflector):
                try:
                    await freshen(reflector)
                except SnapshotStale as error:
                    if not has_listed(reflector):
                        raise
                    self._log.warning("%s; what was seen last is shown", error)
            return reflector
        starting = asyncio.ensure_future(self._kube.start_reflector(kind, reflector_class, replace, **settings))
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # a cancelled start must not leave other callers waiting for a first list that never arrives
        return await asyncio.shield(starting)

    async def ensure(self, reports_key: tuple[Any, ...], make_reports: Callable[[], Any]) -> None:
        """Make sure that pods and reports are watched; `snapshot` checks that the watches are healthy."""
        if reports_key not in self._reflectors:
            self._reflectors[reports_key] = make_reports()
        try:
            await self._kube.watch_pods()
        except Exception as error:
            self._not_yet(error)

    async def pods_patiently(self) -> None:
        """Make sure that pods are watched, after several tries. Raises the error of the last try."""
        # a starting hub takes a failed poll for a stopped server, and one failed list would stop all of them
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
