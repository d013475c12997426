"""The metrics, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.service.web.gpu_bar import gpu_bar, units_of

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(
    snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], counters: Counters, now: float
) -> bytes:
    """Return all metrics at this moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families(snapshots, decisions, counters, now)))
    return generate_latest(registry)


def families(
    snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], counters: Counters, now: float
) -> Iterator[Metric]:
    """Yield each metric family, with its samples."""
    yield from (
        *_agents(snapshots),
        *_gpus(snapshots),
        *_host_memory(snapshots),
        *_sessions(decisions, now),
        *_culler(counters),
    )


class _Once:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _agents(snapshots: Sequence[NodeSnapshot]) -> Iterator[Metric]:
    agents = GaugeMetricFamily("gpushare_agents", "Agents, by whether they are available", labels=["available"])
    agents.add_metric(["yes"], sum(snapshot.report is not None for snapshot in snapshots))
    agents.add_metric(["no"], sum(snapshot.report is None for snapshot in snapshots))
    yield agents


def _host_memory(snapshots: Sequence[NodeSnapshot]) -> Iterator[Metric]:
    host = GaugeMetricFamily(
        "gpushare_node_host_memory_bytes",
        "Host memory for paged-out GPU memory: budget, needed at most, paged out now",
        labels=["node", "kind"],
    )
    for snapshot in snapshots:
        if snapshot.report is not None and snapshot.report.host_memory is not None:
            for kind in ("budget", "needed", "paged_out"):
                host.add_metric([snapshot.report.node, kind], getattr(snapshot.report.host_memory, f"{kind}_bytes"))
    yield host


def _gpus(snapshots: Sequence[NodeSnapshot]) -> Iterator[Metric]:
    labels = ["node", "gpu", "model"]
    units = GaugeMetricFamily(
        "gpushare_gpu_units",
        "Share units: used by their owner, borrowed, lent but not borrowed, or free",
        labels=[*labels, "kind"],
    )
    memory = GaugeMetricFamily("gpushare_gpu_memory_bytes", "Memory of the GPU", labels=labels)
    used = GaugeMetricFamily(
        "gpushare_gpu_memory_used_bytes", "Memory of the GPU in use, as the driver reports it", labels=labels
    )
    healthy = GaugeMetricFamily("gpushare_gpu_healthy", "1 while the GPU is healthy", labels=labels)
    waiting = GaugeMetricFamily(
        "gpushare_gpu_waiting_sessions", "Sessions with GPU work that wait for a lease", labels=labels
    )
    for snapshot in snapshots:
        for gpu in snapshot.report.gpus if snapshot.report is not None else ():
            key = [snapshot.report.node, str(gpu.index), gpu.model] if snapshot.report is not None else []
            bar = gpu_bar(gpu, snapshot.report.sessions if snapshot.report is not None else ())
            for kind in ("owned", "borrowed", "lent", "free"):
                units.add_metric([*key, kind], units_of(bar, kind))
            memory.add_metric(key, gpu.memory_bytes)
            used.add_metric(key, gpu.memory_used_bytes)
            healthy.add_metric(key, float(gpu.healthy))
            waiting.add_metric(key, gpu.waiting)
    yield from (units, memory, used, healthy, waiting)


def _sessions(decisions: Sequence[SessionDecision], now: float) -> Iterator[Metric]:
    count = GaugeMetricFamily("gpushare_sessions", "Number of sessions", labels=["node", "template", "tier"])
    for (node, template, tier), number in Counter(
        (one.node, one.session.template, one.session.tier.value) for one in decisions
    ).items():
        count.add_metric([node, template, tier], number)
    labels = ["node", "user", "server"]
    share = GaugeMetricFamily("gpushare_session_share_units", "Share of the session on each of its GPUs", labels=labels)
    effective = GaugeMetricFamily(
        "gpushare_session_effective_units", "Units that the tier leaves the session", labels=labels
    )
    memory = GaugeMetricFamily(
        "gpushare_session_memory_bytes", "GPU memory that the session has allocated", labels=labels
    )
    resident = GaugeMetricFamily(
        "gpushare_session_resident_bytes", "The part of the session's GPU memory that is on the GPU", labels=labels
    )
    idle = GaugeMetricFamily(
        "gpushare_session_gpu_idle_seconds",
        "Time since the last GPU work of the session that counts as use",
        labels=labels,
    )
    worked = CounterMetricFamily(
        "gpushare_session_gpu_seconds",
        "Time with a burst of the session on its GPUs, since it was opened",
        labels=labels,
    )
    entitled = CounterMetricFamily(
        "gpushare_session_entitled_seconds",
        "GPU time that the session was entitled to while others competed",
        labels=labels,
    )
    delivered = CounterMetricFamily(
        "gpushare_session_delivered_seconds", "GPU time that the session received while others competed", labels=labels
    )
    waits = CounterMetricFamily(
        "gpushare_session_waits", "How often the session's GPU work waited for a lease", labels=labels
    )
    wait = GaugeMetricFamily(
        "gpushare_session_wait_seconds",
        "Length of the session's waits for a lease, by quantile",
        labels=[*labels, "quantile"],
    )
    hits = CounterMetricFamily(
        "gpushare_session_memory_limit_hits", "Memory allocations that a limit refused", labels=labels
    )
    for one in decisions:
        key = [one.node, one.session.user, one.session.server]
        record = one.session.delivered
        entitled.add_metric(key, record.entitled_seconds)
        delivered.add_metric(key, record.delivered_seconds)
        waits.add_metric(key, record.waits)
        hits.add_metric(key, one.session.memory_limit_hits.count)
        wait.add_metric([*key, "0.5"], record.wait_p50_seconds)
        wait.add_metric([*key, "0.95"], record.wait_p95_seconds)
        share.add_metric(key, one.session.share_units)
        effective.add_metric(key, one.session.effective_units)
        memory.add_metric(key, one.session.memory_bytes)
        resident.add_metric(key, one.session.resident_bytes)
        idle.add_metric(key, 0.0 if one.session.gpu_busy else max(0.0, now - one.decision.idle_since))
        worked.add_metric(key, one.session.gpu_seconds)
    yield from (count, share, effective, memory, resident, idle, worked, entitled, delivered, waits, wait, hits)


def _culler(counters: Counters) -> Iterator[Metric]:
    actions = CounterMetricFamily("gpushare_culler_actions", "Idle actions carried out, by new tier", labels=["tier"])
    notices = CounterMetricFamily("gpushare_culler_notices", "Notices sent, by announced tier", labels=["tier"])
    withdrawn = CounterMetricFamily(
        "gpushare_culler_notices_withdrawn", "Notices withdrawn, mostly because of activity", labels=["tier"]
    )
    for tier in (Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED):
        actions.add_metric([tier.value], counters.actions[tier])
        notices.add_metric([tier.value], counters.notices[tier])
        withdrawn.add_metric([tier.value], counters.withdrawn[tier])
    failures = CounterMetricFamily("gpushare_culler_failures", "Failures by component", labels=["component"])
    for component in ("agent", "hub", "session", "round"):
        failures.add_metric([component], counters.failures[component])
    yield from (actions, notices, withdrawn, failures)
    if counters.last_round is not None:
        yield GaugeMetricFamily(
            "gpushare_culler_last_round_timestamp_seconds",
            "Time of the end of the last round",
            value=counters.last_round,
        )
