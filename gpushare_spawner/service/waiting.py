"""The queue of spawns and the use of quotas, from the hub's list and the agents' reports. Pure.

A spawn waits if the hub is starting its server and no agent reports its share. The queue itself is in the hub's process
(`spawner.queue`). The queue progress that the hub shows to a spawn's user takes precedence; without it, positions
follow the queue's rule.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import NOTHING, Quotas
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.request import suitable_models
from gpushare_spawner.quota.accounts import Account, Charge, QuotaAccounts, QuotaUsage, needs_of
from gpushare_spawner.service.hub.client import HubServer

PendingServers = Callable[[], Awaitable[Sequence[HubServer] | None]]
"""Function that returns the servers that the hub is starting, longest wait first; None: unknown."""


async def pending_unknown() -> None:
    """Return None, because the servers that the hub is starting are unknown."""


NO_TEMPLATES: Mapping[str, Template] = MappingProxyType({})

QueueProgressOf = Callable[[Sequence[HubServer]], Awaitable[Mapping[tuple[str, str], QueueProgress]]]
"""Returns the queue progress that the hub shows to the users of these spawns, by user and server name."""


async def progress_unknown(waiting: Sequence[HubServer]) -> Mapping[tuple[str, str], QueueProgress]:
    """Return nothing: the progress of the spawns is unknown."""
    return {}


@dataclass(frozen=True)
class WaitingSpawn:
    """A spawn that waits for a GPU."""

    server: HubServer
    template: Template
    position: int
    """Position in the queue, first = 1. Only spawns that could use the same GPUs count."""
    progress: QueueProgress | None = None
    """The progress that the hub shows to its user; None: unknown."""


def waiting_spawns(
    pending: Sequence[HubServer], reports: Sequence[Report], templates: Mapping[str, Template]
) -> list[WaitingSpawn]:
    """Return the waiting spawns.

    ``pending``: the hub's servers, longest wait first; ``reports``: those of all agents. A spawn does not wait if its
    template has no GPU or if an agent reports its share.
    """
    placed = {(session.user, session.server) for report in reports for session in report.sessions}
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    waiting: list[WaitingSpawn] = []
    models_of_waiting: list[frozenset[str]] = []
    for server in pending:
        template = templates.get(server.profile or "")
        if template is None or template.gpu is None or (server.user, server.name) in placed:
            continue
        suitable = suitable_models(template.gpu, kinds)
        ahead = sum(not suitable.isdisjoint(other) for other in models_of_waiting)
        waiting.append(WaitingSpawn(server, template, ahead + 1))
        models_of_waiting.append(suitable)
    return waiting


def in_order(
    waiting: Sequence[WaitingSpawn], progress_of: Mapping[tuple[str, str], QueueProgress]
) -> Sequence[WaitingSpawn]:
    """Return the spawns with the progress that the hub shows to their users, in the hub's queue order.

    ``progress_of``: the progress by user and server name.
    """
    if not progress_of:
        return waiting
    spawns = [
        replace(spawn, position=progress.queue_position, progress=progress)
        if (progress := progress_of.get((spawn.server.user, spawn.server.name))) is not None
        else spawn
        for spawn in waiting
    ]
    return sorted(spawns, key=lambda spawn: spawn.position)


def quota_use(
    quotas: Quotas,
    reports: Iterable[Report],
    templates: Mapping[str, Template] = NO_TEMPLATES,
    servers: Iterable[HubServer] = (),
) -> QuotaUsage:
    """Return the use of the quotas by the sessions in all reports, and by the hub's servers without a GPU.

    ``templates``: those in force; their CPU and memory count; ``servers``: all servers of the hub.
    """
    counted = templates if quotas.count_resources else NO_TEMPLATES
    needs = {name: needs_of(template, quotas) for name, template in counted.items()}
    accounts = QuotaAccounts(quotas)
    usage = QuotaUsage(accounts)
    for report in reports:
        for session in report.sessions:
            account = accounts.find(session.quota, session.user)
            charged = needs.get(session.template, NOTHING)
            charged = charged._replace(units=session.total_units)
            template = templates.get(session.template)
            reclaimable = template is None or template.reclaimable
            usage.put(Charge(session.id, session.user, account, charged, session.begun, reclaimable))
    for server in servers if quotas.count_resources else ():
        charged = needs.get(server.profile or "", NOTHING)
        charged_to = account_of(accounts, server)
        if charged_to is not None and charged != NOTHING and not charged.units:
            since = server.started if server.started is not None else math.inf
            usage.put(Charge(f"{server.label}#without-gpu", server.user, charged_to, charged, since))
    return usage


def account_of(accounts: QuotaAccounts, server: HubServer) -> Account | None:
    """Return the account to which a spawn will be charged; None: unknown."""
    if server.groups is not None:
        choices: Collection[Account] = accounts.of_user(server.user, server.groups)
    elif server.quota or accounts.find(f"user:{server.user}", "").configured:
        # the hub has checked the choice
        choices = [accounts.find(f"{kind}:{server.quota or server.user}", server.user) for kind in ("user", "group")]
        choices = [account for account in choices if account.configured]
    else:
        return None
    named = [account for account in choices if not server.quota or account.name == server.quota]
    return named[0] if named else None
