"""Reflectors that know how fresh they are: KubeSpawner's for pods, and one of the same kind for agents' reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from kubespawner.reflector import NamespacedResourceReflector, ResourceReflector
from kubespawner.spawner import PodReflector
from traitlets import default

from gpushare_spawner.model.kubernetes import REPORT_COMPONENT, REPORT_COMPONENT_LABEL

LIST_WITHIN = 10.0
"""Seconds that a list may take when somebody waits for it."""
_SLACK = 5.0
_ENDS_WITHIN = 2.0
"""Seconds within which a watch that was called off is gone."""

_renewals: WeakKeyDictionary[Any, asyncio.Task[None]] = WeakKeyDictionary()
"""Reflectors that are being brought up to date: whoever wants the same waits for the same."""


class SnapshotStale(Exception):
    """What the hub knows of the cluster is not fresh, and could not be made so. ``str()`` says what and why.

    ``forbidden``: the hub's role does not allow it to look.
    """

    def __init__(self, message: str, forbidden: bool = False) -> None:
        super().__init__(message)
        self.forbidden = forbidden


class Dated(ResourceReflector):  # type: ignore[misc]
    """A reflector that remembers when it last had everything from the API server."""

    listed_at: float | None = None
    """When the last list was asked for (monotonic clock, seconds); None: never."""
    behind = False
    """The last list failed."""
    starting = False
    """Its first list is under way."""

    async def start(self) -> None:
        """As every reflector; who comes meanwhile waits for the first list."""
        self.starting = True
        try:
            await super().start()
        finally:
            self.starting = False

    async def _list_and_update(self, resource_version: Any = None) -> Any:
        # "0" lets the API server answer from a cache that may be behind what we have seen already: a pod that was just
        # made would be missing, and its GPU given away twice. Without a version the answer is the newest.
        asked, before = time.monotonic(), self.resources
        try:
            found = await super()._list_and_update(None if resource_version == "0" else resource_version)
        except BaseException:
            self.behind = True
            raise
        # KubeSpawner's reflectors list again every 10 s: objects that are as known stay the same ones, so that readers
        # that compare with what they have seen (`ChangedObjects`) neither read them anew nor keep a second copy
        for name, item in self.resources.items():
            known = before.get(name)
            if known is not None and _version(known) == _version(item):
                self.resources[name] = known
        self.listed_at, self.behind = asked, False
        return found

    @property
    def oldest_healthy(self) -> float:
        """Age (seconds) of the last list while all is well, at most.

        KubeSpawner's reflectors end each watch after ``timeout_seconds`` and list again: a watch that hangs shows by
        the age of its list. A hub that starts hundreds of servers at once is late with that too; it must not be given
        more to do then, hence ``restart_seconds`` on top.
        """
        watch_seconds = float(self.timeout_seconds or self.request_timeout or 60)
        return watch_seconds + float(self.restart_seconds) + _SLACK

    @property
    def up_to_date(self) -> bool:
        """Whether the last list came, and not too long ago."""
        return (
            not self.behind and self.listed_at is not None and time.monotonic() - self.listed_at <= self.oldest_healthy
        )


class DatedPodReflector(Dated, PodReflector):  # type: ignore[misc]
    """KubeSpawner's reflector of the hub's pods, dated."""


class ReportReflector(Dated, NamespacedResourceReflector):  # type: ignore[misc]
    """The agents' reports: ConfigMaps in the hub's namespace."""

    kind = "configmaps"
    list_method_name = "list_namespaced_config_map"

    @default("labels")
    def _labels_default(self) -> dict[str, str]:
        return {REPORT_COMPONENT_LABEL: REPORT_COMPONENT}


def is_watching(reflector: Any) -> bool:
    """Whether the reflector's watch lives; it may still hang, or be behind."""
    return reflector.watch_task is not None and not reflector.watch_task.done()


def has_listed(reflector: Any) -> bool:
    """Whether it ever had everything from the API server: else what it shows means nothing."""
    first = reflector.first_load_future
    return bool(first.done() and not first.cancelled() and first.exception() is None)


async def freshen(reflector: Any) -> None:
    """See to it that a reflector shows what is. Cheap when it does already.

    A reflector whose first list failed stays empty for ever, and one that has given up stays as it was; KubeSpawner
    keeps both. Here they are started again, and so is one whose watch hangs or is behind. Raises SnapshotStale.
    """
    if is_watching(reflector) and (not isinstance(reflector, Dated) or reflector.up_to_date):
        return
    renewal = _renewals.get(reflector)
    if renewal is None or renewal.done():
        renewal = _renewals[reflector] = asyncio.ensure_future(_renew(reflector))
        # whoever asked for it may have left: then nobody fetches its exception
        renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.shield(renewal)


async def _renew(reflector: Any) -> None:
    try:
        await asyncio.wait_for(_start_again(reflector), LIST_WITHIN)
    except Exception as error:
        what = f"the list of {reflector.kind} in {reflector.namespace or 'all namespaces'}"
        forbidden = getattr(error, "status", None) == 403
        raise SnapshotStale(f"{what} cannot be had: {_worded(error)}", forbidden) from error


async def _start_again(reflector: Any) -> None:
    first = reflector.first_load_future
    if not first.done() and getattr(reflector, "starting", True):
        await asyncio.shield(first)
        return
    if is_watching(reflector):
        # only the watch itself writes what is seen: a list of ours beside it could undo what it has seen meanwhile
        reflector.watch_task.cancel()
        await asyncio.wait({reflector.watch_task}, timeout=_ENDS_WITHIN)
    if first.done() and not has_listed(reflector):
        reflector.first_load_future = first = asyncio.get_running_loop().create_future()
    try:
        await reflector.start()
    except BaseException as error:
        if not first.done():
            # whoever waits for the first list must not wait for ever
            first.set_exception(SnapshotStale(f"the list of {reflector.kind} was called off: {error!r}"))
        if not first.cancelled():
            # fetched here: it is raised, and must not be logged as forgotten too
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
