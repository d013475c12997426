"""Quotas in force for the queue: they determine the order of its spawns and the limits that refuse a spawn.

The rules are in the package `quota`. Current use comes from the ledger, so a restarted hub reads it again. Use over
quota by ended sessions, and their lengths, are kept in a file (`QuotaHistory`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.descriptors import replace_private
from gpushare_spawner.model.quota import (
    BUDGETS_AGE,
    BUDGETS_FILE,
    NOTHING,
    BudgetState,
    BudgetStates,
    Quotas,
    ResourceAmounts,
)
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.departures import SessionLengths
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.quota.accounts import Account, Charge, QuotaAccounts, QuotaUsage, needs_of
from gpushare_spawner.quota.budgets import Owner, states_shown
from gpushare_spawner.quota.entitlement import Added, Entitlements
from gpushare_spawner.quota.order import Admission, Asking, FairShare, admit, ordered
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import Ticket
from gpushare_spawner.wording.amounts import reason
from gpushare_spawner.wording.service import exceeds_cluster

SAVE_EVERY = 30.0
"""Seconds between two writes. Our value: a killed hub loses at most the use of that time, a tenth of the entry penalty.
"""
BAD = ".bad"
"""Suffix with which an invalid file is renamed."""


WITHOUT_GPU = "#without-gpu"
"""Suffix of the session ids of servers without a GPU: a session of the same server may still be in the ledger."""


class PastUse(BaseModel):
    """The file's content: JSON."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Literal[1] = 1
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the epoch."""
    used: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    """The part of the cluster that each account has used over quota, on average, see `quota.FairShare`."""
    lengths: dict[str, list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]] = {}
    """The seconds for which the recently ended sessions of each template lasted, oldest first."""


class QuotaHistory:
    """The file of past use. It is replaced as a whole: a killed hub leaves either the old or the new content.

    ``lengths``: the lengths of ended sessions, which the file keeps too.

    An invalid file is renamed. A file that cannot be read or written is not used until the next start of the hub. Each
    problem is logged once. No method raises.
    """

    def __init__(self, path: Path | None, log: logging.Logger, lengths: SessionLengths | None = None) -> None:
        """Store the path. ``path``: None if nothing is saved."""
        self._path = path
        self._log = log
        self._lengths = lengths or SessionLengths()
        self._saved: PastUse | None = None
        self._saved_at = -math.inf

    def load(self) -> PastUse | None:
        """Return the saved use; None if there is none. The first call adds the saved lengths to those of sessions."""
        if self._saved is None and self._path is not None:
            self._saved = self._read(self._path)
            saved = self._saved.lengths if self._saved is not None else {}
            # the newest of each template last: of all templates together only the newest count
            for _, template, seconds in sorted(
                (number - len(lengths), template, seconds)
                for template, lengths in saved.items()
                for number, seconds in enumerate(lengths)
            ):
                self._lengths.ended(template, seconds)
        return self._saved

    def _read(self, path: Path) -> PastUse | None:
        try:
            return PastUse.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up("read", error)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            aside = path.with_name(path.name + BAD)
            self._log.error(
                "The past use over quota in %s is lost: the file is not valid (%s). The file is kept as %s",
                path,
                first["msg"],
                aside.name,
            )
            with contextlib.suppress(OSError):
                path.replace(aside)
        return None

    def save(self, now: float, used: Mapping[str, float] | None) -> None:
        """Save the use over quota and the lengths if a write is due. ``now``: seconds since the epoch.

        ``used``: None without quotas; the saved use and its time stay.
        """
        last = self.load()
        if self._path is None or 0 <= now - self._saved_at < SAVE_EVERY:
            return
        past = last or PastUse(at=0.0)
        at, used = (past.at, past.used) if used is None else (max(0.0, now), used)
        content = PastUse(at=at, used=dict(used), lengths=self._lengths.recent)
        if content == past:
            self._saved_at = now
            return
        if not (used or content.lengths or self._path.exists()):
            return
        try:
            # it names users
            replace_private(self._path, content.model_dump_json().encode())
        except OSError as error:
            self._give_up("written", error)
        else:
            self._saved, self._saved_at = content, now

    def _give_up(self, what: str, error: OSError) -> None:
        self._log.warning(
            "%s cannot be %s (%s): the use over quota and the lengths of ended sessions are lost at a restart. "
            "Set quota_usage_file to a file that the hub can write",
            self._path,
            what,
            error.strerror or reason(error),
        )
        self._path = None


@dataclass(frozen=True)
class QuotaChoice:
    """An account that a user can choose."""

    account: Account
    admission: Admission | None
    """The quota's decision on a server now; None: unknown."""
    budgets: Sequence[BudgetState] = ()
    """The budgets that a server would use, least left first; empty: none, or what is left is unknown."""


class WrittenBudgets:
    """The states of budgets that the service writes for the form."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._changed_at = 0
        self._written_at = -math.inf
        self._states: dict[Owner, list[BudgetState]] = {}

    def of(self, account: Account, user: str) -> Sequence[BudgetState]:
        """Return the budgets of a user's server in an account; empty if what is left is unknown."""
        if not any(level.quota.budget or level.quota.per_user.budget for level in account.path):
            return ()
        try:
            changed_at = self._path.stat().st_mtime_ns
            if changed_at != self._changed_at:
                self._take(BudgetStates.model_validate_json(self._path.read_bytes()))
                self._changed_at = changed_at
        except (OSError, ValidationError):
            return ()
        now = self._clock()
        return states_shown(account, user, self._states, now) if abs(now - self._written_at) < BUDGETS_AGE else ()

    def _take(self, written: BudgetStates) -> None:
        self._written_at, self._states = written.written_at, {}
        for state in written.budgets:
            self._states.setdefault((state.account, state.user), []).append(state)


WRITTEN_BUDGETS = WrittenBudgets(Path(BUDGETS_FILE))
"""Those of the service that runs in the hub's folder."""


@dataclass(frozen=True)
class ServerWithoutGpu:
    """A server that starts or runs without a GPU. Its account is charged CPU and memory."""

    user: str
    quota: str
    """The key of its account."""
    template: str
    opened_at: float
    """Seconds since the epoch."""


class QueueQuotas:
    """The accounts of one ledger, and of the servers without a GPU.

    ``read`` returns the quotas in force, None without quotas. ``clock``: seconds since the epoch. ``history`` stores
    use over quota across restarts; None if nothing is stored. ``templates`` returns the templates in force; their CPU
    and memory count. ``without_gpu``: the servers without a GPU by session id; the caller changes it.
    """

    def __init__(
        self,
        ledger: Ledger,
        log: logging.Logger,
        read: Callable[[], Quotas | None] = lambda: None,
        clock: Callable[[], float] | None = None,
        history: QuotaHistory | None = None,
        templates: Callable[[], Sequence[Template]] = tuple,
        without_gpu: Mapping[str, ServerWithoutGpu] = MappingProxyType({}),
    ) -> None:
        self._ledger = ledger
        self._templates = templates
        self._not_reclaimable: frozenset[str] = frozenset()
        """Names of the templates with `reclaimable: false`."""
        self._guaranteed: dict[str, ResourceAmounts] = {}
        """What the servers of each template need; the last known amounts of a template that was removed."""
        self._without_gpu = without_gpu
        self._charged_without_gpu: dict[str, ServerWithoutGpu] = {}
        self._read = read
        if clock is None:
            clock = WallClock()
            clock.was_set = self._clock_was_set
        self._clock = clock
        self.usage: QuotaUsage | None = None
        """The use of each account, as of the last `bring_up_to_date`; None without quotas."""
        self._entitlements = Entitlements()
        self._entitled: dict[str, Added] = {}
        """The sessions that `_entitlements` counts."""
        self._changed_sessions: set[str] = set()
        self._closed: dict[str, int] = {}
        """The units that no session has on GPUs that accept no new sessions: no account is entitled to them."""
        self._fair: FairShare | None = None
        self._over_quota: dict[str, ResourceAmounts] = {}
        self._capacity = NOTHING
        self._log = log
        self._history = history or QuotaHistory(None, log)
        self._warned = ""
        ledger.observers.append(self._changed)

    def bring_up_to_date(self, capacity: int) -> None:
        """Read the quotas in force, and count the use over quota since the last call.

        ``capacity``: units of 1 % of all GPUs. The caller must have updated the ledger.
        """
        self.recount()
        self._count_entitlements()
        self._capacity = ResourceAmounts(capacity)
        if self.usage is None:
            self._fair = None
            self._history.save(self._clock(), None)
            return
        quotas = self.usage.accounts.quotas
        if quotas.count_resources:
            nodes = [node.resources for node in self._ledger.capacity.nodes.values()]
            cpu, memory = (node.most_cpu or 0 for node in nodes), (node.most_memory or 0 for node in nodes)
            self._capacity = ResourceAmounts(capacity, sum(cpu), sum(memory))
        self._warn(quotas)
        if self._fair is None:
            self._fair = self._past_use(quotas)
        else:
            self._fair.half_life = quotas.half_life
            self._fair.advance(self._clock(), self._over_quota, self._capacity)
        self._history.save(self._clock(), self._fair.all_used)
        self.note_use()

    def recount(self) -> None:
        """Read the quotas in force and the servers without a GPU. The caller must have updated the ledger."""
        quotas = self._read()
        if quotas is None:
            self.usage = None
            return
        guaranteed = dict(self._guaranteed)
        not_reclaimable = frozenset(template.name for template in self._templates() if not template.reclaimable)
        if quotas.count_resources:
            guaranteed |= {template.name: needs_of(template, quotas) for template in self._templates()}
        if (
            self.usage is None
            or quotas != self.usage.accounts.quotas
            or guaranteed != self._guaranteed
            or not_reclaimable != self._not_reclaimable
        ):
            self._guaranteed, self._not_reclaimable = guaranteed, not_reclaimable
            self._charged_without_gpu = {}
            self._entitlements, self._entitled = Entitlements(), {}
            self.usage = QuotaUsage(QuotaAccounts(quotas))
            for session, allocation in self._ledger.allocations.items():
                self._changed(session, allocation)
        self._charge_without_gpu(self.usage)

    def _count_entitlements(self) -> None:
        """Count the units of the sessions that have changed, or whose neighbours on a GPU have."""
        gpus = self._ledger.capacity.gpus
        for uuid in self._ledger.recounted:
            self._closed.pop(uuid, None)
            if uuid in gpus and not gpus[uuid].offered:
                self._closed[uuid] = min(max(0, gpus[uuid].free), UNITS_PER_GPU)
        if self.usage is None:
            self._ledger.recounted.clear()
            return
        accounts = self.usage.accounts
        changed = self._changed_sessions.union(*map(self._ledger.sessions_on, self._ledger.recounted))
        for session in changed:
            if (before := self._entitled.pop(session, None)) is not None:
                self._entitlements.remove(before)
            if (allocation := self._ledger.allocations.get(session)) is not None:
                account, has = accounts.find(allocation.quota, allocation.user), self._ledger.guaranteed_on(session)
                demand = allocation.total_of(allocation.most_units)
                self._entitled[session] = self._entitlements.add(account, sum(has.values()), demand)
        # only here: after an error above these sessions are counted again
        self._changed_sessions.clear()
        self._ledger.recounted.clear()

    def _warn(self, quotas: Quotas) -> None:
        """Log once if the guarantees exceed the reported GPUs."""
        exceeds = (exceeds_cluster(quotas, self._capacity.units) or "") if self._capacity.units else ""
        if exceeds and exceeds != self._warned:
            self._log.warning("Quotas: %s", exceeds)
        self._warned = exceeds

    def note_use(self) -> None:
        """Record the current use over quota, which is charged until the next call."""
        self._over_quota = self.usage.over_quota() if self.usage is not None else {}

    @property
    def anything_over_quota(self) -> bool:
        """Whether the last record had any use over quota."""
        return bool(self._over_quota)

    def order(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Return the tickets in the order in which they are served. ``tickets``: in order of arrival."""
        first_come = sorted(tickets, key=lambda ticket: (-ticket.request.template.rank, ticket.joined))
        if self.usage is None or self._fair is None:
            return first_come
        accounts = self.usage.accounts
        over_budget = self._over_budget(first_come) if accounts.quotas.has_budgets else []
        asking = [
            Asking(
                ticket,
                accounts.find(ticket.request.tenant.quota, ticket.request.tenant.user),
                needs_of(ticket.request.template, accounts.quotas),
                ticket.request.template.reclaimable,
            )
            for ticket in first_come
            if not ticket.result.done() and ticket not in over_budget
        ]
        return [*ordered(asking, self.usage, self._fair, self._capacity, partial(self._excess, asking)), *over_budget]

    def _over_budget(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Return the spawns with a used-up budget, which come last."""
        assert self.usage is not None
        used_up: dict[Owner, bool] = {}
        over = []
        for ticket in tickets:
            tenant = ticket.request.tenant
            owner = tenant.quota, tenant.user
            if owner not in used_up:
                states = WRITTEN_BUDGETS.of(self.usage.accounts.find(*owner), tenant.user)
                used_up[owner] = any(state.used_up for state in states)
            if used_up[owner] and not ticket.result.done():
                over.append(ticket)
        return over

    def _excess(self, asking: Iterable[Asking[Ticket]]) -> dict[str, float]:
        """Return the units that each account has beyond its entitlement, as the service computes it."""
        entitlements = self._entitlements.copy()
        for request in asking:
            entitlements.add(request.account, 0, request.needs.units)
        return entitlements.excess(self._capacity.units - sum(self._closed.values()))

    def admission(self, tenant: Tenant, template: Template) -> Admission | None:
        """Return whether a server would be within or over quota now, and the limit that refuses it.

        None if there are no quotas.
        """
        if self.usage is None:
            return None
        accounts = self.usage.accounts
        account, needs = accounts.find(tenant.quota, tenant.user), needs_of(template, accounts.quotas)
        return admit(self.usage, account, tenant.user, needs, template)

    def admitted(self, admission: Admission) -> None:
        """Charge the entry penalty for a spawn that was placed over quota."""
        if self._fair is not None and not admission.in_quota:
            self._fair.admitted(admission.account.key, admission.needs, self._capacity)

    def _charge_without_gpu(self, usage: QuotaUsage) -> None:
        """Charge new servers without a GPU, and no longer charge ended ones."""
        now = self._without_gpu if usage.accounts.quotas.count_resources else {}
        if now == self._charged_without_gpu:
            return
        for session in self._charged_without_gpu.keys() - now.keys():
            usage.drop(f"{session}{WITHOUT_GPU}")
        for session, server in now.items():
            account = usage.accounts.find(server.quota, server.user)
            needs = self._guaranteed.get(server.template, NOTHING)
            if not needs.units:  # the ledger has the servers with a GPU
                usage.put(Charge(f"{session}{WITHOUT_GPU}", server.user, account, needs, server.opened_at))
        self._charged_without_gpu = dict(now)

    def _past_use(self, quotas: Quotas) -> FairShare:
        """Return the saved use of earlier hub processes, plus the use since then by sessions that are over quota.

        No hub process has metered these sessions since the save.
        """
        now, kept = self._clock(), self._history.load()
        # if the clock was set back, no time has passed
        at = min(kept.at, now) if kept is not None else now
        fair = FairShare.restored(quotas.half_life, kept.used if kept is not None else {}, at)
        fair.advance(now, {}, self._capacity)
        if self.usage is not None:
            for charge in self.usage.over_quota_sessions():
                since = charge.opened_at if kept is None else max(charge.opened_at, at)
                fair.past(charge.account.key, charge.needs, self._capacity, now - since)
        return fair

    def _clock_was_set(self, by: float) -> None:
        if self._fair is not None:
            self._fair.clock_was_set(by)

    def _changed(self, session: str, allocation: Allocation | None) -> None:
        if self.usage is None:
            return
        self._changed_sessions.add(session)
        if allocation is None:
            self.usage.drop(session)
            return
        account = self.usage.accounts.find(allocation.quota, allocation.user)
        counted = self.usage.accounts.quotas.count_resources
        needs = self._guaranteed.get(allocation.template, NOTHING) if counted else NOTHING
        needs = needs._replace(units=allocation.total_units)
        reclaimable = allocation.template not in self._not_reclaimable
        self.usage.put(Charge(session, allocation.user, account, needs, allocation.opened_at, reclaimable))
