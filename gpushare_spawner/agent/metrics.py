"""The report as Prometheus metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpushare_spawner.model.report import Report


class ReportCollector(Collector):
    """Makes metrics of the newest report with each scrape."""

    def __init__(self, report: Callable[[], Report]) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        # without it the registry would ask for a report while it is being set up
        return ()

    def collect(self) -> Iterable[Metric]:
        """Everything that is worth a graph; bytes, seconds and share units of 1 %."""
        report = self._report()
        gpu = ("gpu", "model")
        capacity = GaugeMetricFamily("gpushare_gpu_capacity_units", "Units of 1 % that may be guaranteed", labels=gpu)
        total = GaugeMetricFamily("gpushare_gpu_memory_bytes", "Memory of the GPU", labels=gpu)
        used = GaugeMetricFamily("gpushare_gpu_memory_used_bytes", "Memory in use on the GPU", labels=gpu)
        healthy = GaugeMetricFamily("gpushare_gpu_healthy", "1 while the GPU answers its driver", labels=gpu)
        waiting = GaugeMetricFamily("gpushare_gpu_waiting_sessions", "Sessions with work and no lease", labels=gpu)
        for one in report.gpus:
            label = (one.uuid, one.model)
            capacity.add_metric(label, one.capacity_units)
            total.add_metric(label, one.memory_bytes)
            used.add_metric(label, one.memory_used_bytes)
            healthy.add_metric(label, one.healthy)
            waiting.add_metric(label, one.waiting)
        of = ("session", "user", "template")
        effective = GaugeMetricFamily("gpushare_session_effective_units", "Units that its tier leaves it", labels=of)
        guaranteed = GaugeMetricFamily(
            "gpushare_session_guaranteed_units", "Units that it would get now at least", labels=of
        )
        memory = GaugeMetricFamily("gpushare_session_memory_bytes", "Device memory that it allocated", labels=of)
        resident = GaugeMetricFamily("gpushare_session_resident_bytes", "The part of it on the GPU", labels=of)
        seconds = GaugeMetricFamily("gpushare_session_gpu_seconds", "Time with work on the GPU", labels=of)
        busy = GaugeMetricFamily("gpushare_session_busy", "1 while it has work for the GPU", labels=of)
        bypassing = GaugeMetricFamily(
            "gpushare_session_bypassing_processes", "Processes that use the GPU without the library", labels=of
        )
        entitled = CounterMetricFamily(
            "gpushare_session_entitled_seconds", "GPU time it was entitled to while others competed", labels=of
        )
        delivered = CounterMetricFamily(
            "gpushare_session_delivered_seconds", "GPU time it received while others competed", labels=of
        )
        waits = CounterMetricFamily("gpushare_session_waits", "Waits of its GPU work for a lease", labels=of)
        wait = GaugeMetricFamily(
            "gpushare_session_wait_seconds", "Length of its waits, by quantile", labels=(*of, "quantile")
        )
        for session in report.sessions:
            label3 = (session.id, session.user, session.template)
            effective.add_metric(label3, session.effective_units)
            guaranteed.add_metric(label3, session.guaranteed_units)
            memory.add_metric(label3, session.memory_bytes)
            resident.add_metric(label3, session.resident_bytes)
            seconds.add_metric(label3, session.gpu_seconds)
            busy.add_metric(label3, session.gpu_busy)
            bypassing.add_metric(label3, len(session.bypassing_pids))
            entitled.add_metric(label3, session.delivered.entitled_seconds)
            delivered.add_metric(label3, session.delivered.delivered_seconds)
            waits.add_metric(label3, session.delivered.waits)
            wait.add_metric((*label3, "0.5"), session.delivered.wait_p50_seconds)
            wait.add_metric((*label3, "0.95"), session.delivered.wait_p95_seconds)
        return [
            capacity,
            total,
            used,
            healthy,
            waiting,
            effective,
            guaranteed,
            memory,
            resident,
            seconds,
            busy,
            bypassing,
            entitled,
            delivered,
            waits,
            wait,
        ]


def serve_metrics(port: int, report: Callable[[], Report], address: str = "127.0.0.1") -> Callable[[], None]:
    """Serve them on a port of an address of this machine; returns what stops it.

    `report` is called on this loop. Raises OSError.
    """
    loop = asyncio.get_running_loop()

    async def now() -> Report:
        return report()

    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: asyncio.run_coroutine_threadsafe(now(), loop).result(timeout=5)))
    server, thread = start_http_server(port, addr=address, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return stop
