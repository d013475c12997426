"""The report's ConfigMap: written when something changed, but not often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings, PublishSettings
from gpushare_spawner.agent.session_records import Cordons
from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json, KubeconfigConnection
from gpushare_spawner.model.controls import Ask, Cordon
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.kubernetes.objects import (
    PUBLISHED_AT,
    REPORT_KEY,
    REPORT_REFRESH_SECONDS,
    REPORT_SELECTOR,
    cordon_annotations,
    read_report,
    report_name,
    written_report,
)
from gpushare_spawner.model.report import GpuReport, Notice, Report, SessionReport
from gpushare_spawner.model.share import Tier

from .agent_account import AGENT_RULES
from .standin.client import path
from .standin.cluster import Cluster

SETTINGS = PublishSettings(
    at_most_every=0.8, refresh_every=60.0, capacity_delay=0.02, capacity_every=0.05, poll_every=0.05
)
SESSION = SessionReport(
    id="ada", user="ada", template="quarter-gpu", gpus=("GPU-1",), share_units=25, tier_since=1.0,
    effective_units=25, guaranteed_units=25, opened_at=1.0,
)  # fmt: skip


class Publisher:
    """A report that the test changes, published."""

    def __init__(self, cluster: Cluster, api: ClusterApi) -> None:
        self.cluster, self.api = cluster, api
        gpu = GpuReport(index=0, uuid="GPU-1", model="A100", memory_bytes=1)
        self.report = Report(node="a.node", published_at=0.0, gpus=(gpu,), sessions=(SESSION,))
        self.published: PublishedReport | None = None
        self.cordons: Cordons | None = None

    def start(self, settings: PublishSettings = SETTINGS, owner: tuple[str, str] | None = None) -> None:
        def now() -> Report:
            return self.report.model_copy(update={"published_at": time.time()})

        namespace = self.cluster.namespace
        own_pod, uid = ((namespace, owner[0]), owner[1]) if owner is not None else (None, None)
        place = ClusterSettings(namespace, own_pod=own_pod, own_pod_uid=uid, publish=settings)
        self.published = PublishedReport(self.api, place, now, self.cordons)
        self.published.start()

    def session(self, **changes: object) -> None:
        """Something is another."""
        self.report = self.report.model_copy(update={"sessions": (SESSION.model_copy(update=changes),)})
        assert self.published is not None
        self.published.changed()

    @property
    def writes(self) -> int:
        return sum(self.cluster.calls[verb, "configmaps"] for verb in ("patch", "create"))

    async def written(self, holds: Callable[[Report], bool], timeout: float = 30.0) -> Report:
        end = time.monotonic() + timeout
        while True:
            maps = await self.cluster.config_maps(REPORT_SELECTOR)
            reports = [Report.model_validate_json(one["data"][REPORT_KEY]) for one in maps]
            if reports and holds(reports[0]):
                return reports[0]
            assert time.monotonic() < end, reports
            await asyncio.sleep(0.02)


@pytest.fixture
async def publisher(cluster: Cluster) -> AsyncIterator[Publisher]:
    api = ClusterApi(KubeconfigConnection(cluster.api_client(await cluster.service_account("agent", AGENT_RULES))))
    publisher = Publisher(cluster, api)
    yield publisher
    if publisher.published is not None:
        await publisher.published.close()
    await api.close()


async def test_it_is_there_at_once_and_as_the_hub_looks_for_it(publisher: Publisher) -> None:
    publisher.start()
    await publisher.written(lambda report: True)
    (report,) = await publisher.cluster.config_maps("app.kubernetes.io/component=gpushare-report")
    found = report["metadata"]
    assert found["name"] == report_name("a.node") == "gpushare-report-a.node"
    assert found["labels"] == {"app.kubernetes.io/component": "gpushare-report"}
    assert abs(float(found["annotations"][PUBLISHED_AT]) - time.time()) < 10


async def test_nothing_new_is_not_written(publisher: Publisher) -> None:
    publisher.start()
    await publisher.written(lambda report: True)
    before = publisher.writes
    for _ in range(10):
        publisher.published.changed()  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
    assert publisher.writes == before


async def test_heat_and_power_alone_are_not_written(publisher: Publisher) -> None:
    publisher.start(replace(SETTINGS, at_most_every=0.1))
    await publisher.written(lambda report: True)
    before = publisher.writes
    (gpu,) = publisher.report.gpus
    publisher.report = publisher.report.model_copy(
        update={"gpus": (gpu.model_copy(update={"temperature_celsius": 70.0, "power_watts": 300.0}),)}
    )
    await asyncio.sleep(0.4)
    assert publisher.writes == before
    publisher.session(gpu_busy=True)
    assert (await publisher.written(lambda report: report.sessions[0].gpu_busy)).gpus[0].power_watts == 300


async def test_activity_is_written_no_more_than_so_often(publisher: Publisher) -> None:
    publisher.start()
    await publisher.written(lambda report: True)
    before, began = publisher.writes, time.monotonic()
    step = 0
    while time.monotonic() - began < 2.0:
        step += 1
        publisher.session(gpu_seconds=float(step))
        await asyncio.sleep(0.02)
    elapsed = time.monotonic() - began
    assert 1 <= publisher.writes - before <= elapsed / SETTINGS.at_most_every + 1
    await publisher.written(lambda report: report.sessions[0].gpu_seconds == step)


async def test_a_change_of_capacity_is_written_at_once(publisher: Publisher) -> None:
    publisher.start(replace(SETTINGS, at_most_every=60.0))
    await publisher.written(lambda report: True)
    publisher.session(gpu_seconds=1.0)
    publisher.session(effective_units=10)
    await publisher.written(lambda report: report.sessions[0].effective_units == 10)
    gpu = publisher.report.gpus[0].model_copy(update={"healthy": False})
    publisher.report = publisher.report.model_copy(update={"gpus": (gpu,)})
    publisher.published.changed()  # type: ignore[union-attr]
    await publisher.written(lambda report: not report.gpus[0].healthy)


async def test_what_a_notebook_server_asks_is_written_at_once_and_goes_at_once(publisher: Publisher) -> None:
    publisher.start(replace(SETTINGS, at_most_every=60.0))
    await publisher.written(lambda report: True)
    publisher.session(asks=(Ask(number=7, kind=AskKind.KEEP, value=3600, at=1.0),))
    await publisher.written(lambda report: len(report.sessions[0].asks) == 1)
    publisher.session(asks=())
    await publisher.written(lambda report: not report.sessions[0].asks)


async def test_a_server_about_to_be_stopped_that_works_is_told_of_at_once(publisher: Publisher) -> None:
    publisher.start(replace(SETTINGS, at_most_every=60.0))
    await publisher.written(lambda report: True)
    coming = Notice(tier=Tier.STOPPED, at=time.time() + 60, reason="idle")
    publisher.session(notice=coming)
    publisher.session(notice=coming, kernels=1, kernels_busy=1)
    await publisher.written(lambda report: report.sessions[0].kernels_busy == 1)
    # once: what works on and off is not written each time
    before = publisher.writes
    for busy in (0, 1, 0, 1):
        publisher.session(notice=coming, kernels=1, kernels_busy=busy)
        await asyncio.sleep(0.2)
    assert publisher.writes == before


async def test_a_report_that_cannot_be_made_is_made_later(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.start()
    await publisher.written(lambda report: True)
    good = publisher.report
    publisher.report = None  # type: ignore[assignment]
    publisher.published.changed()  # type: ignore[union-attr]
    await asyncio.sleep(0.3)
    assert "cannot publish the report of this node" in caplog.text
    publisher.report = good
    publisher.session(effective_units=7)
    await publisher.written(lambda report: report.sessions[0].effective_units == 7)


def test_the_report_of_a_node_that_is_full_fits_into_a_config_map() -> None:
    """16 GPUs with 100 sessions each, which is more than a kubelet takes."""
    gpus = tuple(
        GpuReport(index=index, uuid=f"GPU-8a5ce2b1-1c2d-4e3f-8a9b-0c1d2e3f4a{index:02}", model="A100", memory_bytes=1)
        for index in range(16)
    )
    working = {
        "memory_bytes": 2**34 + 1, "resident_bytes": 2**33 + 1, "memory_limit_bytes": 80 * 2**30, "gpu_busy": True,
        "last_gpu_activity": time.time(), "gpu_seconds": 12345.678901, "kernels": 3, "kernels_busy": 1,
        "last_kernel_activity": time.time(), "processes": 3,
    }  # fmt: skip
    sessions = tuple(
        SESSION.model_copy(
            update={**working, "id": f"some-user-{number:04}", "user": f"some-user-{number:04}", "gpus": (gpu.uuid,)}
        )
        for gpu in gpus
        for number in range(100)
    )
    report = Report(node="a.node", published_at=time.time(), gpus=gpus, sessions=sessions)
    written = written_report(report)
    assert Report.model_validate_json(written) == report
    assert len(written.encode()) < 1024 * 1024


async def test_where_owners_may_not_be_named_it_is_published_without(publisher: Publisher) -> None:
    """As on a cluster with the admission plugin OwnerReferencesPermissionEnforcement."""
    real, refused = publisher.api.patch, 0

    async def patch(path: str, patch: Json) -> Json:
        nonlocal refused
        if "ownerReferences" in patch["metadata"]:
            refused += 1
            raise ApiFailure(403, "cannot set an ownerRef on a resource you can't delete")
        return await real(path, patch)

    publisher.api.patch = patch  # type: ignore[method-assign, assignment]
    publisher.start(owner=("agent", "some-uid"))
    await publisher.written(lambda report: True)
    publisher.session(effective_units=5)
    await publisher.written(lambda report: report.sessions[0].effective_units == 5)
    assert refused == 1


async def test_it_is_refreshed_even_if_nothing_changed(publisher: Publisher) -> None:
    publisher.start(replace(SETTINGS, refresh_every=0.5))
    first = await publisher.written(lambda report: True)
    await publisher.written(lambda report: report.published_at > first.published_at)
    assert PublishSettings().refresh_every < REPORT_REFRESH_SECONDS
    assert PublishSettings().at_most_every == 15.0


async def test_it_is_written_when_the_api_server_is_back(publisher: Publisher) -> None:
    faults = publisher.cluster.faults
    for fault in ("500", "429", "reset", "lost"):
        faults.fail_next("patch", "configmaps", fault)
    publisher.start()
    await publisher.written(lambda report: True)
    # a ConfigMap that somebody deleted comes again
    name = report_name("a.node")
    await publisher.cluster.admin.delete(path("configmaps", publisher.cluster.namespace, name))
    publisher.session(effective_units=5)
    await publisher.written(lambda report: report.sessions[0].effective_units == 5)


async def test_a_write_that_failed_is_tried_again_soon(publisher: Publisher) -> None:
    publisher.start(replace(SETTINGS, at_most_every=60.0))
    await publisher.written(lambda report: True)
    publisher.cluster.faults.fail_next("patch", "configmaps", "500")
    publisher.session(effective_units=10)
    # nothing else changes: the next look that only activity would bring is a minute away
    await publisher.written(lambda report: report.sessions[0].effective_units == 10)


async def test_cordons_outlive_the_configmap(publisher: Publisher, tmp_path: Path) -> None:
    publisher.cordons = Cordons(tmp_path / "cordons.json")
    publisher.start()
    await publisher.written(lambda report: True)
    cordon = Cordon(gpu="GPU-1", by="boss", reason="Fan.", since=1.0)
    where = path("configmaps", publisher.cluster.namespace, report_name("a.node"))
    annotations = cordon_annotations([cordon])
    await publisher.cluster.admin.patch(where, {"metadata": {"annotations": annotations}})
    publisher.session(effective_units=5)
    await publisher.written(lambda report: report.sessions[0].effective_units == 5)
    async with asyncio.timeout(20):
        while Cordons(tmp_path / "cordons.json").now != (cordon,):
            await asyncio.sleep(0.02)
    await publisher.cluster.admin.delete(where)
    publisher.session(effective_units=6)
    await publisher.written(lambda report: report.sessions[0].effective_units == 6)
    (found,) = await publisher.cluster.config_maps(REPORT_SELECTOR)
    assert read_report(found).cordon("GPU-1") == cordon
    await publisher.cluster.admin.patch(where, {"metadata": {"annotations": dict.fromkeys(annotations)}})
    publisher.session(effective_units=7)
    await publisher.written(lambda report: report.sessions[0].effective_units == 7)
    async with asyncio.timeout(20):
        while publisher.cordons.now:
            await asyncio.sleep(0.02)


async def test_it_goes_with_the_agents_pod(publisher: Publisher) -> None:
    pod = await publisher.cluster.create_pod("agent")
    publisher.start(owner=("agent", pod["metadata"]["uid"]))
    await publisher.written(lambda report: True)
    (found,) = await publisher.cluster.config_maps(REPORT_SELECTOR)
    (reference,) = found["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"]) == ("Pod", "agent")
