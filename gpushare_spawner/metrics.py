"""Metrics of a GPU, of a node's host memory and of a session. The agent and the service each add their own labels.

Names follow Prometheus' rules: base units, and ``_total`` for counters. A metric's samples can be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from gpushare_spawner.model.report import GpuReport, HostMemoryReport, Report, SessionReport

Labeled = TypeVar("Labeled")
Item = tuple[Sequence[str], Labeled]
"""The label values, and the labeled object."""


@dataclass(frozen=True)
class Figure(Generic[Labeled]):
    """One metric."""

    name: str
    """Name without ``_total``. In the tables it also lacks the prefix, which `_named` adds."""
    meaning: str
    value: Callable[[Labeled], float | None]
    """Function that returns the sample; None: unknown, so there is no sample."""
    counter: bool = False
    """Whether the value only increases; False: a gauge."""


def _named(prefix: str, *figures: Figure[Labeled]) -> tuple[Figure[Labeled], ...]:
    """Return the figures with a prefix before their names."""
    return tuple(replace(figure, name=prefix + figure.name) for figure in figures)


GPU: tuple[Figure[GpuReport], ...] = _named(
    "gpushare_gpu_",
    Figure("capacity_units", "Units of 1 % that the agent may guarantee", lambda gpu: gpu.capacity_units),
    Figure("memory_bytes", "Memory of the GPU", lambda gpu: gpu.memory_bytes),
    Figure(
        "memory_used_bytes", "Memory of the GPU in use, as the driver reports it", lambda gpu: gpu.memory_used_bytes
    ),
    Figure(
        "utilization_ratio",
        "Fraction of the driver's last sample period (at most a second) in which the GPU computed, from 0 to 1",
        lambda gpu: gpu.utilisation,
    ),
    Figure(
        "temperature_celsius", "Temperature of the GPU, as the driver reports it", lambda gpu: gpu.temperature_celsius
    ),
    Figure("power_watts", "Power draw of the GPU, as the driver reports it", lambda gpu: gpu.power_watts),
    Figure("healthy", "1 while the GPU is healthy", lambda gpu: gpu.healthy),
    Figure("waiting_sessions", "Sessions with GPU work that wait for a lease", lambda gpu: gpu.waiting),
)

NODE: tuple[Figure[Report], ...] = _named(
    "gpushare_node_",
    Figure(
        "state_durable",
        "1 while sessions and changes of their tiers are on the agent's disk, 0 while some are only in its memory",
        lambda report: report.state_trouble is None,
    ),
)

HOST_MEMORY: tuple[Figure[HostMemoryReport], ...] = _named(
    "gpushare_node_host_memory_",
    Figure("budget_bytes", "Host memory that paged-out GPU memory may use", lambda memory: memory.budget_bytes),
    Figure(
        "needed_bytes",
        "Host memory that is needed if every session uses all that it has allocated, and at least its guarantee",
        lambda memory: memory.needed_bytes,
    ),
    Figure("paged_out_bytes", "Host memory that paged-out GPU memory uses now", lambda memory: memory.paged_out_bytes),
)

SESSION: tuple[Figure[SessionReport], ...] = _named(
    "gpushare_session_",
    Figure("share_units", "Share of the session on each of its GPUs", lambda session: session.share_units),
    Figure("effective_units", "Units that the tier leaves the session", lambda session: session.effective_units),
    Figure(
        "guaranteed_units", "Units that are guaranteed to the session now", lambda session: session.guaranteed_units
    ),
    Figure(
        "memory_bytes",
        "GPU memory that the session has allocated, on the GPU or paged out",
        lambda session: session.memory_bytes,
    ),
    Figure(
        "memory_resident_bytes",
        "The part of the session's GPU memory that is on the GPU",
        lambda session: session.resident_bytes,
    ),
    Figure("busy", "1 while the session has GPU work that runs or waits", lambda session: session.gpu_busy),
    Figure(
        "bypassing_processes",
        "Processes of the session that use the GPU without the library",
        lambda session: len(session.bypassing_pids),
    ),
    Figure(
        "gpu_seconds",
        "Time with a burst of the session on its GPUs, since it was opened",
        lambda session: session.gpu_seconds,
        counter=True,
    ),
    # sums over its GPUs like the time above; the status and the REST API have the time on each GPU
    Figure(
        "energy_joules",
        "Energy of its GPUs since it was opened: by delivered time, and without work by held units",
        lambda session: session.energy_joules,
        counter=True,
    ),
    Figure(
        "entitled_seconds",
        "GPU time to which the session was entitled while others competed",
        lambda session: session.delivered.entitled_seconds,
        counter=True,
    ),
    Figure(
        "delivered_seconds",
        "GPU time that the session received while others competed",
        lambda session: session.delivered.delivered_seconds,
        counter=True,
    ),
    Figure(
        "early_page_ins_used",
        "Page-ins and resumptions before a launch that was expected of a submitted cell and came",
        lambda session: session.early_page_ins_used,
        counter=True,
    ),
    Figure(
        "early_page_ins_unused",
        "Page-ins and resumptions before a launch that was expected of a submitted cell and did not come",
        lambda session: session.early_page_ins_unused,
        counter=True,
    ),
    Figure(
        "memory_limit_hits",
        "Allocations of device memory that a limit refused",
        lambda session: session.memory_limit_hits.count,
        counter=True,
    ),
)

LEASE_WAIT = "gpushare_session_lease_wait_seconds"


def families(
    figures: Iterable[Figure[Labeled]], labels: Sequence[str], items: Iterable[Item[Labeled]]
) -> Iterator[Metric]:
    """Yield one family for each figure, with a sample for each item."""
    items = list(items)
    for figure in figures:
        kind = CounterMetricFamily if figure.counter else GaugeMetricFamily
        family = kind(figure.name, figure.meaning, labels=labels)
        for values, labeled in items:
            if (value := figure.value(labeled)) is not None:
                family.add_metric(values, value)
        yield family


def session_families(labels: Sequence[str], items: Iterable[Item[SessionReport]]) -> Iterator[Metric]:
    """Yield the metric families of sessions: `SESSION`, and lease waits as a summary without a sum."""
    items = list(items)
    yield from families(SESSION, labels, items)
    waits = SummaryMetricFamily(
        LEASE_WAIT,
        "Waits of the session's GPU work for a lease since it was opened: their number, and quantiles of their length "
        "(up to 50 % too high)",
        labels=labels,
    )
    for values, session in items:
        key, record = dict(zip(labels, values, strict=True)), session.delivered
        waits.add_sample(LEASE_WAIT, key | {"quantile": "0.5"}, record.wait_p50_seconds)
        waits.add_sample(LEASE_WAIT, key | {"quantile": "0.95"}, record.wait_p95_seconds)
        waits.add_sample(f"{LEASE_WAIT}_count", key, record.waits)
    yield waits
