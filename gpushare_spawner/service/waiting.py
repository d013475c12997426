"""The queue of spawns as far as hub and agents show it: servers that the hub is starting, and that hold no share yet.

The queue itself is the spawner's (`spawner.queue`), in another process. What the hub tells the user of a spawn counts;
where nothing is known of that, positions follow the queue's rule from what hub and agents say. Pure.

Which sessions are over quota, by the agents' reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import suitable_models
from gpushare_spawner.quota import Charge, QuotaAccounts, QuotaUsage
from gpushare_spawner.service.hub.client import HubServer


@dataclass(frozen=True)
class WaitingSpawn:
    """One spawn that waits for a GPU."""

    server: HubServer
    template: Template
    position: int
    """In the queue, first = 1: only spawns that could use the same GPUs count."""
    told: QueueProgress | None = None
    """What the hub tells its user; None: unknown."""


def waiting_spawns(
    pending: Sequence[HubServer],
    reports: Sequence[Report],
    templates: Mapping[str, Template],
) -> list[WaitingSpawn]:
    """Return the spawns that wait. ``pending``: the hub's, the longest first; ``reports``: of all agents.

    Spawns of templates without a GPU, and those whose share an agent reports, do not wait.
    """
    placed = {(session.user, session.server) for report in reports for session in report.sessions}
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    waiting: list[WaitingSpawn] = []
    wanted: list[frozenset[str]] = []
    for server in pending:
        template = templates.get(server.profile or "")
        if template is None or template.gpu is None or (server.user, server.name) in placed:
            continue
        suitable = suitable_models(template.gpu, kinds)
        ahead = sum(not suitable.isdisjoint(other) for other in wanted)
        waiting.append(WaitingSpawn(server, template, ahead + 1))
        wanted.append(suitable)
    return waiting


def as_told(waiting: Sequence[WaitingSpawn], told: Mapping[tuple[str, str], QueueProgress]) -> Sequence[WaitingSpawn]:
    """Return the spawns with what the hub tells their users, in the order of its queue. ``told``: by user and server
    name."""
    if not told:
        return waiting
    known = [
        replace(one, position=said.queue_position, told=said)
        if (said := told.get((one.server.user, one.server.name))) is not None
        else one
        for one in waiting
    ]
    return sorted(known, key=lambda one: one.position)


def quota_use(quotas: Quotas, reports: Iterable[Report]) -> QuotaUsage:
    """Return what the sessions of all reports use."""
    accounts = QuotaAccounts(quotas)
    usage = QuotaUsage(accounts)
    for report in reports:
        for session in report.sessions:
            account = accounts.find(session.quota, session.user)
            units = session.share_units * len(session.gpus)
            usage.put(Charge(session.id, session.user, account, units, session.begun))
    return usage
