"""The node's report for the hub: a ConfigMap, written after changes at limited rates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.session_records import Cordons
from gpushare_spawner.background import Background, set_within
from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.kubernetes.objects import (
    PUBLISHED_AT,
    REPORT_COMPONENT,
    REPORT_COMPONENT_LABEL,
    REPORT_KEY,
    cordon_annotations,
    cordons_of,
    report_name,
    written_report,
)
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Tier

log = logging.getLogger(__name__)


class PublishedReport(Background):
    """Keeps the ConfigMap up to date. A failed write is retried; nothing waits for it.

    The first report is written immediately. After `close`, the last report stays until it is stale.
    """

    def __init__(
        self, api: ClusterApi, settings: ClusterSettings, report: Callable[[], Report], cordons: Cordons | None = None
    ) -> None:
        """`report` creates the newest report.

        `cordons` stores the cordons that the service has written to the ConfigMap, in case the ConfigMap is lost.
        """
        self._cordons = cordons
        self._api = api
        self._namespace = settings.namespace
        self._report = report
        self._settings = settings.publish
        self._owners = settings.owners
        self._poke = asyncio.Event()
        self._written: Report | None = None
        self._written_at = float("-inf")
        self._trouble = LogOnce(
            log,
            "cannot publish the report of this node; the hub places no spawn here",
            "the report of this node is published again",
        )

    def changed(self) -> None:
        """Publish the report soon if it is due."""
        self._poke.set()

    async def _run(self) -> None:
        pause = self._settings.capacity_every
        while True:
            try:
                report = self._report()
                if self._is_due(report):
                    await self._write(report)
                    self._written, self._written_at = report, _now()
                    self._trouble.resolved()
                    pause = self._settings.capacity_every
                    await asyncio.sleep(pause)
            except Exception as failure:
                if not isinstance(failure, ApiFailure):
                    log.exception("cannot publish the report of this node; retrying")
                self._trouble.about(failure)
                self._poke.set()  # it is still due
                pause = min(2 * pause, self._settings.at_most_every)
                await asyncio.sleep(pause)
            await self._news()

    async def _news(self) -> None:
        """Wait for the next check: soon after a change, otherwise after `poll_every` or later."""
        settings = self._settings
        patience = max(settings.poll_every, self._written_at + settings.at_most_every - _now())
        if await set_within(self._poke, patience):
            await asyncio.sleep(settings.capacity_delay)
        self._poke.clear()

    def _is_due(self, report: Report) -> bool:
        written, age = self._written, _now() - self._written_at
        if written is None or age >= self._settings.refresh_every or _capacity(report) != _capacity(written):
            return True
        if _works_before_its_stop(report, written) or _asks(report) != _asks(written):
            return True
        return age >= self._settings.at_most_every and _content(report) != _content(written)

    async def _write(self, report: Report) -> None:
        try:
            await self._put(report, self._owners)
        except ApiFailure as failure:
            if failure.status != 403 or not self._owners:
                raise
            # in some clusters, an account may set an owner only if it may delete the object
            await self._put(report, [])
            log.info(
                "the report's ConfigMap stays when this agent's pod is deleted; the pod cannot be set as its owner: %s",
                failure,
            )
            self._owners = []

    async def _put(self, report: Report, owners: list[dict[str, object]]) -> None:
        name = report_name(report.node)
        metadata: Json = {
            "labels": {REPORT_COMPONENT_LABEL: REPORT_COMPONENT},
            "annotations": {PUBLISHED_AT: f"{report.published_at:.3f}"},
        }
        if owners:
            metadata["ownerReferences"] = owners
        item: Json = {"metadata": metadata, "data": {REPORT_KEY: written_report(report)}}
        path = f"/api/v1/namespaces/{self._namespace}/configmaps"
        try:
            await self._keep_cordons(await self._api.patch(f"{path}/{name}", item))
        except ApiFailure as failure:
            if failure.status != 404:
                raise
            if self._cordons is not None:
                metadata["annotations"] |= cordon_annotations(self._cordons.now)
            new = {"apiVersion": "v1", "kind": "ConfigMap", **item, "metadata": {**metadata, "name": name}}
            await self._api.create(path, new)

    async def _keep_cordons(self, written: Json) -> None:
        if self._cordons is None:
            return
        try:
            await self._cordons.replace(cordons_of(written["metadata"].get("annotations")))
        except (OSError, ValueError) as error:
            log.warning("cannot store the cordons of this node on its disk: %s", error)


def _capacity(report: Report) -> object:
    """Return the part on which placement depends: the GPUs, and their allocated and lent units."""
    gpus = [(gpu.uuid, gpu.healthy, gpu.cordoned, gpu.capacity_units) for gpu in report.gpus]
    sessions = [
        (
            session.id,
            session.gpus,
            session.share_units,
            session.last_units,
            session.borrowed_units,
            session.borrowed_each,
            session.effective_units,
            session.tier,
        )
        for session in report.sessions
    ]
    return gpus, sessions


def _asks(report: Report) -> object:
    """Return the requests of notebook servers: their users wait for the answers."""
    return [(session.id, session.asks) for session in report.sessions if session.asks]


def _works_before_its_stop(report: Report, written: Report) -> bool:
    """Return whether a session about to be stopped is working although the service counts it as idle.

    Only the start of work counts: a later idle report can wait without harm.
    """
    for session in report.sessions:
        works = session.gpu_busy or session.kernels_busy
        if works and session.notice is not None and session.notice.tier is Tier.STOPPED:
            before = written.session(session.id)
            if before is None or not (before.gpu_busy or before.kernels_busy):
                return True
    return False


def _content(report: Report) -> Report:
    # host memory, temperature, power and energy change constantly, and are published with the rest
    sessions = tuple(session.model_copy(update={"energy_joules": 0.0}) for session in report.sessions)
    gpus = tuple(gpu.model_copy(update={"temperature_celsius": None, "power_watts": None}) for gpu in report.gpus)
    return report.model_copy(update={"published_at": 0.0, "host_memory": None, "gpus": gpus, "sessions": sessions})


def _now() -> float:
    return asyncio.get_running_loop().time()
