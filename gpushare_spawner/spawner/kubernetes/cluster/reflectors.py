"""KubeSpawner's shared watches, restarted when they end, and one more watch, for the agents' reports.

`Dated` reflectors record the time of their last list. `Watches` starts the reflectors that one spawner needs.
`snapshot` reads their objects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kubespawner.reflector import NamespacedResourceReflector, ResourceReflector
from kubespawner.spawner import PodReflector
from traitlets import default

from gpushare_spawner.model.kubernetes.objects import REPORT_COMPONENT, REPORT_COMPONENT_LABEL
from gpushare_spawner.spawner.kubernetes.kubespawner_private import KubeSpawnerPrivate

PODS = "pods"
REPORTS = "gpushare-reports"
"""The kind in the key of the shared reflector."""

LIST_WITHIN = 10.0
"""Seconds that a list may take while a caller waits for it."""
_SLACK = 5.0
_ENDS_WITHIN = 2.0
"""Seconds within which a cancelled watch ends."""

_renewals: WeakKeyDictionary[Any, asyncio.Task[None]] = WeakKeyDictionary()
"""Reflectors that are being renewed, each with the renewal for which all callers wait."""
_replacements: WeakKeyDictionary[Any, asyncio.Task[Any]] = WeakKeyDictionary()
"""Undated reflectors that are being replaced, each with the start of its `Dated` reflector, for which all callers
wait."""


class SnapshotStale(Exception):
    """The hub's data on the cluster are outdated and could not be renewed. ``str()`` is the failure and its reason.

    ``forbidden``: the hub's role does not allow the list.
    """

    def __init__(self, message: str, forbidden: bool = False) -> None:
        super().__init__(message)
        self.forbidden = forbidden


class Dated(ResourceReflector):  # type: ignore[misc]
    """A reflector that records when it last listed all objects."""

    listed_at: float | None = None
    """When the last list was requested (monotonic clock, seconds); None: never."""
    behind = False
    """Whether the last list failed."""
    starting = False
    """Whether its first list is under way."""

    async def start(self) -> None:
        """Start as other reflectors do; concurrent callers wait for the first list."""
        self.starting = True
        try:
            await super().start()
        finally:
            self.starting = False

    async def _list_and_update(self, resource_version: Any = None) -> Any:
        # With "0" the API server may answer from an outdated cache: a new pod would be missing, and its GPU would be
        # allocated twice. Without a version the list is up to date.
        requested_at, before = time.monotonic(), self.resources
        try:
            listed = await super()._list_and_update(None if resource_version == "0" else resource_version)
        except BaseException:
            self.behind = True
            raise
        # KubeSpawner's reflectors list again every 10 s. Keep the identity of unchanged objects, so that readers that
        # compare by identity (`ChangedObjects`) neither read them again nor store a second copy.
        for name, item in self.resources.items():
            previous = before.get(name)
            if previous is not None and _version(previous) == _version(item):
                self.resources[name] = previous
        self.listed_at, self.behind = requested_at, False
        return listed

    @property
    def oldest_healthy(self) -> float:
        """Maximum age (seconds) of the last list of a healthy reflector.

        KubeSpawner's reflectors end each watch after ``timeout_seconds`` and list again, so an old list reveals a watch
        that hangs. A hub that starts hundreds of servers simultaneously is late with the list too, and must not get
        more work, so ``restart_seconds`` are added.
        """
        watch_seconds = float(self.timeout_seconds or self.request_timeout or 60)
        return watch_seconds + float(self.restart_seconds) + _SLACK

    @property
    def up_to_date(self) -> bool:
        """Whether the last list succeeded and is not too old."""
        return (
            not self.behind and self.listed_at is not None and time.monotonic() - self.listed_at <= self.oldest_healthy
        )


class DatedPodReflector(Dated, PodReflector):  # type: ignore[misc]
    """KubeSpawner's reflector of the hub's pods, with the time of its last list."""


class ReportReflector(Dated, NamespacedResourceReflector):  # type: ignore[misc]
    """The agents' reports: ConfigMaps in the hub's namespace."""

    kind = "configmaps"
    list_method_name = "list_namespaced_config_map"

    @default("labels")
    def _labels_default(self) -> dict[str, str]:
        return {REPORT_COMPONENT_LABEL: REPORT_COMPONENT}


def is_watching(reflector: Any) -> bool:
    """Return whether the reflector's watch is running; a running watch may still hang or be behind."""
    return reflector.watch_task is not None and not reflector.watch_task.done()


def has_listed(reflector: Any) -> bool:
    """Return whether the reflector has ever listed all objects; before that its content is incomplete."""
    first = reflector.first_load_future
    return bool(first.done() and not first.cancelled() and first.exception() is None)


async def freshen(reflector: Any) -> None:
    """Make sure that a reflector is up to date. Cheap if it already is.

    A reflector stays empty forever after its first list failed, and a reflector that has given up no longer changes;
    KubeSpawner keeps both. This function restarts them, and also a reflector with a watch that hangs or is behind.
    Raises SnapshotStale.
    """
    if is_watching(reflector) and (not isinstance(reflector, Dated) or reflector.up_to_date):
        return
    renewal = _renewals.get(reflector)
    if renewal is None or renewal.done():
        renewal = _renewals[reflector] = asyncio.ensure_future(_renew(reflector))
        # if the caller was cancelled, no code retrieves the exception
        renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.shield(renewal)


async def _renew(reflector: Any) -> None:
    try:
        await asyncio.wait_for(_start_again(reflector), LIST_WITHIN)
    except Exception as error:
        what = f"the list of {reflector.kind} in {reflector.namespace or 'all namespaces'}"
        forbidden = getattr(error, "status", None) == 403
        raise SnapshotStale(f"{what} is unavailable: {_worded(error)}", forbidden) from error


async def _start_again(reflector: Any) -> None:
    first = reflector.first_load_future
    if not first.done() and getattr(reflector, "starting", True):
        await asyncio.shield(first)
        return
    if is_watching(reflector):
        # Only the watch itself writes the objects. Another list in parallel could undo its changes.
        reflector.watch_task.cancel()
        await asyncio.wait({reflector.watch_task}, timeout=_ENDS_WITHIN)
    if first.done() and not has_listed(reflector):
        reflector.first_load_future = first = asyncio.get_running_loop().create_future()
    try:
        await reflector.start()
    except BaseException as error:
        if not first.done():
            # callers must not wait forever for the first list
            first.set_exception(SnapshotStale(f"the list of {reflector.kind} was cancelled: {error!r}"))
        if not first.cancelled():
            # Retrieve the exception: it is raised, and must not also be logged as never retrieved.
            first.exception()
        raise


def _version(item: Mapping[str, Any]) -> tuple[Any, Any]:
    metadata = item["metadata"]
    return metadata.get("uid"), metadata.get("resourceVersion")


def _worded(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {LIST_WITHIN:.0f} s"
    status = getattr(error, "status", None)
    if status == 403:
        return "the hub's role does not allow it (403)"
    return f"{status} {getattr(error, 'reason', '')}".strip() if status is not None else str(error) or repr(error)


PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between the attempts of `Watches.pods_patiently`."""


@dataclass(frozen=True)
class Watches:
    """The watches that one spawner needs."""

    kube: KubeSpawnerPrivate
    reflectors: MutableMapping[tuple[Any, ...], Any]
    """KubeSpawner's dict, which all spawners of the hub share."""
    namespace: str
    """The namespace of the spawner's pod."""
    log: logging.Logger

    async def start(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> Any:
        """Start a reflector as KubeSpawner does; restart a reflector that has ended.

        If a restart fails, the last objects remain readable, as in KubeSpawner; no spawn is placed on the basis of
        them.
        """
        reflector = self.reflectors.get(self.kube.reflector_key(kind))
        if kind == PODS and reflector is not None and not isinstance(reflector, Dated):
            # another spawner class of this hub created it, without the time of its last list
            starting = _replacements.get(reflector)
            if starting is None or starting.done():
                starting = _replacements[reflector] = self._begin(kind, reflector_class, True, settings)
            return await asyncio.shield(starting)
        if reflector is not None and not replace:
            if not is_watching(reflector):
                try:
                    await freshen(reflector)
                except SnapshotStale as error:
                    if not has_listed(reflector):
                        raise
                    self.log.warning("%s; the last known state is shown", error)
            return reflector
        # a cancelled start must not leave other callers waiting for a first list that never arrives
        return await asyncio.shield(self._begin(kind, reflector_class, replace, settings))

    def _begin(self, kind: str, reflector_class: Any, replace: bool, settings: Mapping[str, Any]) -> asyncio.Task[Any]:
        starting = asyncio.ensure_future(self.kube.start_reflector(kind, reflector_class, replace, **settings))
        # if the caller was cancelled, no code retrieves the exception
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return starting

    async def ensure(self, reports_key: tuple[Any, ...], make_reports: Callable[[], Any]) -> None:
        """Make sure that pods and reports are watched; `snapshot` checks that the watches are healthy."""
        if reports_key not in self.reflectors:
            self.reflectors[reports_key] = make_reports()
        try:
            await self.kube.watch_pods()
        except Exception as error:
            self._not_yet(error)

    async def pods_patiently(self) -> None:
        """Make sure that pods are watched, in several attempts. Raises the error of the last attempt."""
        # a starting hub treats a failed poll as a stopped server, so one failed list would stop all servers
        for pause in PAUSES:
            try:
                await self.kube.watch_pods()
                return
            except Exception as error:
                self._not_yet(error)
                await asyncio.sleep(pause)
        await self.kube.watch_pods()

    def _not_yet(self, error: Exception) -> None:
        self.log.warning("Pods in %s are not watched yet: %s", self.namespace, error)
