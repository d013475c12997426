"""The service's metrics in Prometheus' text format. Families of GPUs and sessions are in `gpushare_spawner.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gpushare_spawner.metrics import GPU, HOST_MEMORY, NODE, families, session_families
from gpushare_spawner.model.quota import NOTHING, BudgetState
from gpushare_spawner.model.share import Tier
from gpushare_spawner.quota.accounts import QuotaUsage
from gpushare_spawner.service.actions.context import WAIT_BOUNDS, Component, Counters
from gpushare_spawner.service.sources import ServiceSnapshot
from gpushare_spawner.service.units import KINDS, units_of

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(snapshot: ServiceSnapshot, counters: Counters, history_problem: str | None = None) -> bytes:
    """Return all metrics as text.

    ``history_problem``: the reason why the history cannot be stored; empty: it is stored; None: there is no history.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(service_families(snapshot, counters, history_problem)))
    return generate_latest(registry)


def service_families(
    snapshot: ServiceSnapshot, counters: Counters, history_problem: str | None = None
) -> Iterator[Metric]:
    """Yield each metric family with its samples."""
    yield from (
        *_agents(snapshot),
        *_gpus(snapshot),
        *_nodes(snapshot),
        *_sessions(snapshot),
        *_queue(snapshot),
        *_waits(counters),
        *_quotas(snapshot.usage),
        *_budgets(snapshot.budgets),
        *_prices(snapshot),
        *_culler(counters),
        *_history(history_problem),
    )


class _Once:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _agents(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    agents = GaugeMetricFamily("gpushare_agents", "Agents, by whether they are available", labels=["available"])
    silent = len(snapshot.snapshots) - len(snapshot.reports)
    yield _filled(agents, {"yes": len(snapshot.reports), "no": silent})
    unconfirmed = GaugeMetricFamily(
        "gpushare_unconfirmed_sessions",
        "Sessions in a node's report that no pod vouches for; they count for nothing",
        labels=["node"],
    )
    yield _filled(unconfirmed, {report.node: len(report.unconfirmed) for report in snapshot.reports})


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    """Return a family of one label with the value of each label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _nodes(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    yield from families(NODE, ("node",), [((report.node,), report) for report in snapshot.reports])
    nodes = [((report.node,), report.host_memory) for report in snapshot.reports if report.host_memory is not None]
    yield from families(HOST_MEMORY, ("node",), nodes)


def _gpus(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    labels = ("node", "gpu", "uuid", "model")
    units = GaugeMetricFamily(
        "gpushare_gpu_units",
        "Share units: used by their owner, borrowed, lent but not borrowed, or free",
        labels=[*labels, "kind"],
    )
    gpus = []
    for report in snapshot.reports:
        for gpu in report.gpus:
            key = (report.node, str(gpu.index), gpu.uuid, gpu.model)
            gpus.append((key, gpu))
            for kind in KINDS:
                units.add_metric([*key, kind], units_of(snapshot.bars[report.node, gpu.uuid], kind))
    yield units
    yield from families(GPU, labels, gpus)


def _sessions(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    count = GaugeMetricFamily("gpushare_sessions", "Number of sessions", labels=["node", "template", "tier"])
    for (node, template, tier), number in Counter(
        (decision.node, decision.session.template, decision.session.tier.value) for decision in snapshot.decisions
    ).items():
        count.add_metric([node, template, tier], number)
    yield count
    labels = ("node", "user", "server", "template")
    idle = GaugeMetricFamily(
        "gpushare_session_gpu_idle_seconds",
        "Time since the last GPU work of the session that counts as use",
        labels=labels,
    )
    sessions = []
    for decision in snapshot.decisions:
        key = (decision.node, decision.session.user, decision.session.server, decision.session.template)
        sessions.append((key, decision.session))
        idle.add_metric(
            key, 0.0 if decision.session.gpu_busy else max(0.0, snapshot.taken_at - decision.decision.idle_since)
        )
    yield idle
    yield from session_families(labels, sessions)


def _queue(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    spawns = GaugeMetricFamily("gpushare_queue_spawns", "Spawns that wait for a GPU now", labels=["template"])
    oldest = GaugeMetricFamily(
        "gpushare_queue_oldest_seconds", "How long the oldest of these spawns has waited", labels=["template"]
    )
    if snapshot.waiting is not None:
        since: dict[str, list[float]] = {
            name: [] for name, template in snapshot.templates.items() if template.gpu is not None
        }
        for spawn in snapshot.waiting:
            started = spawn.server.started if spawn.server.started is not None else snapshot.taken_at
            since.setdefault(spawn.template.name, []).append(started)
        for name, instants in since.items():
            spawns.add_metric([name], len(instants))
            oldest.add_metric([name], max(0.0, snapshot.taken_at - min(instants, default=snapshot.taken_at)))
    yield from (spawns, oldest)


def _waits(counters: Counters) -> Iterator[Metric]:
    waits = HistogramMetricFamily(
        "gpushare_spawn_wait_seconds",
        "Time from the begin of a spawn until it had its GPU; counted by the history",
        labels=["template"],
    )
    for template, counted in counters.waits.items():
        bounds = [*(f"{bound:g}" for bound in WAIT_BOUNDS), "+Inf"]
        waits.add_metric([template], list(zip(bounds, counted.cumulative(), strict=True)), counted.seconds)
    given_up = CounterMetricFamily(
        "gpushare_spawns_given_up",
        "Spawns that were cancelled, or failed, before they had a GPU; counted by the history",
        labels=["template"],
    )
    yield from (waits, _filled(given_up, counters.given_up))


def _quotas(usage: QuotaUsage | None) -> Iterator[Metric]:
    labels = ["kind", "account", "department"]
    guaranteed = GaugeMetricFamily(
        "gpushare_quota_guaranteed_units", "Share units that the quota guarantees", labels=labels
    )
    maximum = GaugeMetricFamily(
        "gpushare_quota_maximum_units", "Share units that the quota allows at most, if it has a maximum", labels=labels
    )
    used = GaugeMetricFamily("gpushare_quota_used_units", "Share units that are charged to the quota", labels=labels)
    over = GaugeMetricFamily(
        "gpushare_quota_over_units", "Those of the used share units that are over quota", labels=labels
    )
    if usage is not None:
        beyond = usage.over_quota()
        for account in filter(lambda account: account.has_servers, usage.all_accounts()):
            key = [account.kind.value, account.name, account.department]
            guaranteed.add_metric(key, account.quota.guaranteed_units)
            if account.quota.maximum_units is not None:
                maximum.add_metric(key, account.quota.maximum_units)
            used.add_metric(key, usage.used(account).units)
            over.add_metric(key, beyond.get(account.key, NOTHING).units)
    yield from (guaranteed, maximum, used, over)


def _budgets(budgets: Iterable[BudgetState]) -> Iterator[Metric]:
    labels = ["account", "user", "window"]
    whole = GaugeMetricFamily(
        "gpushare_budget_seconds",
        "GPU time that can be used within the budget's window, grants included",
        labels=labels,
    )
    used = GaugeMetricFamily("gpushare_budget_used_seconds", "GPU time that is used within the window", labels=labels)
    for state in budgets:
        key = [state.account, state.user, f"{state.window:.0f}s" if state.window is not None else "term"]
        whole.add_metric(key, 3600 * state.hours)
        used.add_metric(key, 3600 * state.used)
    yield from (whole, used)


def _prices(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    hour = GaugeMetricFamily(
        "gpushare_price_per_gpu_hour", "Price of a GPU-hour of the GPU's model now", labels=["model", "currency"]
    )
    energy = GaugeMetricFamily("gpushare_price_per_kwh", "Price of a kWh, in addition", labels=["currency"])
    co2 = GaugeMetricFamily("gpushare_co2_grams_per_kwh", "Grams of CO2 for each kWh")
    prices = snapshot.quotas.prices if snapshot.quotas is not None else None
    if prices is not None:
        for model in sorted({gpu.model for _, gpu in snapshot.counted_gpus}):
            hour.add_metric([model, prices.currency], prices.gpu_hour(model, snapshot.taken_at))
        energy.add_metric([prices.currency], prices.energy)
        co2.add_metric([], prices.co2)
    yield from (hour, energy, co2)


def _culler(counters: Counters) -> Iterator[Metric]:
    actions = CounterMetricFamily("gpushare_culler_actions", "Idle actions carried out, by new tier", labels=["tier"])
    notices = CounterMetricFamily("gpushare_culler_notices", "Notices sent, by tier of the action", labels=["tier"])
    withdrawn = CounterMetricFamily(
        "gpushare_culler_notices_withdrawn", "Notices withdrawn, mostly because of activity", labels=["tier"]
    )
    for family, counted in ((actions, counters.actions), (notices, counters.notices), (withdrawn, counters.withdrawn)):
        yield _filled(family, {tier: counted[tier] for tier in (Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED)})
    failures = CounterMetricFamily("gpushare_culler_failures", "Failures by component", labels=["component"])
    yield _filled(failures, {component: counters.failures[component] for component in get_args(Component)})
    last = GaugeMetricFamily(
        "gpushare_culler_last_round_timestamp_seconds", "Time of the end of the last round; 0: no round has ended yet"
    )
    last.add_metric([], counters.last_round if counters.last_round is not None else 0.0)
    yield last


def _history(problem: str | None) -> Iterator[Metric]:
    failing = GaugeMetricFamily(
        "gpushare_history_failing", "1 while the history's database does not take what is counted; only with a history"
    )
    if problem is not None:
        failing.add_metric([], bool(problem))
    yield failing
