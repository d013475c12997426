"""Changes of a running session's share and tier, by its user or by an admin.

A user changes the share within templates and quota, and can release it; an admin can set any share and any tier. Only
the agent decides whether units are free: a spawn or another change can take them at the same time. Idle actions: see
`service.culler`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.control import ControlRefused, ResizeRequest, TierRequest
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import Tier, UseRule, units_from_fraction
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.placement.request import suits
from gpushare_spawner.quota.order import exceeded_units
from gpushare_spawner.service.actions.outcome import (
    ActionLog,
    ActionOutcome,
    ActionRefused,
    Actor,
    ReceivedAsk,
    RefusalCode,
    Target,
    check_admin,
    check_own,
    current,
    refusals,
)
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import Agent, ask_all
from gpushare_spawner.service.templates import SessionTemplates, allowed, other_units, templates_of_kind, units_of
from gpushare_spawner.service.waiting import quota_use, waiting_spawns
from gpushare_spawner.wording import actions as words
from gpushare_spawner.wording import service as quota_words

log = logging.getLogger("gpushare.service.actions")

SHARE = "share"
"""The name of a change in the history."""


class ShareActions:
    """Changes of shares. Each method raises ActionRefused."""

    def __init__(
        self,
        agents: Iterable[Agent],
        hub: Hub,
        templates: Callable[[], Mapping[str, Template]],
        quotas: Callable[[], Quotas | None],
        pending: Callable[[], Awaitable[Sequence[HubServer] | None]],
        log: ActionLog,
    ) -> None:
        """Create the actions.

        ``agents`` is iterated over anew each time; ``quotas`` returns the quotas in force; ``pending`` the servers that
        the hub is starting, None: unknown.
        """
        self._agents = agents
        self._hub = hub
        self._templates = templates
        self._quotas = quotas
        self._pending = pending
        self._log = log
        self._changing = asyncio.Lock()
        """One change at a time: two sessions of an account must not grow beyond its quota together."""

    async def share(self, target: Target, actor: Actor, fraction: float, why: str = "") -> ActionOutcome:
        """Change the share to a fraction of its GPU. Kernels keep running.

        The memory limit is that of the user's template with this share. ``why``: the actor's comment.
        """
        check_own(target, actor)
        try:
            units = units_from_fraction(fraction)
        except ValueError as error:
            raise ActionRefused(words.NO_FRACTION, RefusalCode.BAD_REQUEST) from error
        async with self._changing:
            session = await current(target)
            if units == session.share_units:
                return ActionOutcome(False, words.same(units))
            if len(session.gpus) != 1:
                raise ActionRefused(words.WHOLE_GPUS, RefusalCode.BAD_REQUEST)
            if session.yields:
                raise ActionRefused(words.MAKES_WAY, RefusalCode.CAPACITY)
            reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
            template = await self._template(session, units, actor, reports)
            if not actor.is_admin and units > session.share_units:
                self._check_quota(session, units, reports)
                await self._check_queue(session, template, reports)
            await self._resize(target, session, units, template, actor)
            after = await current(target)
        self._log.session(
            after,
            target.node,
            SHARE,
            actor.name,
            units=after.effective_units,
            reason=words.changed_by(actor.name, session.share_units, units, why),
        )
        memory = after.memory_limit_bytes if after.memory_limit_bytes != session.memory_limit_bytes else None
        text = words.changed(session.share_units, units, after.borrowed_units, after.tier, memory)
        return ActionOutcome(True, text)

    async def others(self, target: Target, actor: Actor) -> tuple[int, ...]:
        """Return the shares in units that `share` accepts by the user's templates, the smallest first; never empty.

        Does not check whether the units are free and within the quota.
        """
        check_own(target, actor)
        session = await current(target)
        if len(session.gpus) != 1:
            raise ActionRefused(words.WHOLE_GPUS, RefusalCode.BAD_REQUEST)
        reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
        units = other_units(session, await self._choices(session, reports))
        if not units:
            raise ActionRefused(words.not_allowed(()), RefusalCode.LIMIT)
        return units

    async def _resize(
        self,
        target: Target,
        session: SessionReport,
        units: int,
        template: Template | None,
        actor: Actor,
    ) -> None:
        more = units - session.share_units
        limit = template.gpu.memory.limit if template is not None and template.gpu is not None else None
        request = ResizeRequest(
            id=session.id,
            share_units=units,
            memory_limit=limit,
            reason=words.changed_by(actor.name, session.share_units, units),
        )
        with refusals():
            try:
                await target.agent.resize(request)
            except ControlRefused as error:
                if error.code != "no-capacity":
                    raise
                raise ActionRefused(words.no_capacity(more, _title(template)), RefusalCode.CAPACITY) from error

    async def _template(
        self, session: SessionReport, units: int, actor: Actor, reports: Sequence[Report]
    ) -> Template | None:
        """Return the template that allows the share; None for an admin's choice."""
        if actor.is_admin:
            return None
        choices = await self._choices(session, reports)
        matching = [template for template in choices if units_of(template) == units]
        if not matching:
            raise ActionRefused(words.not_allowed(other_units(session, choices)), RefusalCode.LIMIT)
        free = [template for template in matching if not _is_full(template, session, reports)]
        if not free:
            full = matching[0]
            raise ActionRefused(words.too_many(full.display_name, full.limits.per_user or 0), RefusalCode.LIMIT)
        return free[0]

    async def _choices(self, session: SessionReport, reports: Iterable[Report]) -> list[Template]:
        """Return the templates with shares that the session's user may have on its GPU."""
        with refusals():
            server = await self._hub.server(session.user, session.server)
        gpus = [gpu for report in reports for gpu in report.gpus]
        of_kind = templates_of_kind(session, gpus, self._templates())
        return allowed(of_kind, session.user, server.groups if server is not None else None)

    def _check_quota(self, session: SessionReport, units: int, reports: Sequence[Report]) -> None:
        quotas = self._quotas()
        if quotas is None:
            return
        usage = quota_use(quotas, reports)
        account = usage.accounts.find(session.quota, session.user)
        usage.drop(session.id)
        refused = exceeded_units(usage, account, units)
        if refused is not None:
            raise ActionRefused(quota_words.exceeded(account, refused, units), RefusalCode.LIMIT)

    async def _check_queue(self, session: SessionReport, template: Template | None, reports: Sequence[Report]) -> None:
        """Raise ActionRefused if spawns wait for the units: free units go to them."""
        pending = await self._pending()
        if not pending:
            return
        on = [gpu for report in reports for gpu in report.gpus if gpu.uuid in session.gpus]
        waiting = [
            spawn
            for spawn in waiting_spawns(pending, reports, self._templates())
            if spawn.template.gpu is not None
            and any(suits(spawn.template.gpu, gpu.model, gpu.memory_bytes) for gpu in on)
        ]
        if waiting:
            raise ActionRefused(words.others_wait(len(waiting), _title(template)), RefusalCode.CAPACITY)


def _title(template: Template | None) -> str | None:
    return template.display_name if template is not None else None


def _is_full(template: Template, session: SessionReport, reports: Sequence[Report]) -> bool:
    """Return whether the user has as many servers with the template, or with its share, as it allows."""
    most = template.limits.per_user
    if most is None:
        return False
    others = [
        other
        for report in reports
        for other in report.sessions
        if other.user == session.user
        and other.id != session.id
        and (other.template == template.name or other.share_units == units_of(template))
    ]
    return len(others) >= most


FOLLOWED_FOR = 600.0
"""Seconds for which the service waits for an agent's decision after the answer that the change is under way. An agent
that restarts answers again within a minute."""
YIELD_SECONDS = 600.0
"""Seconds for which the agent keeps units for spawns in quota without a further request of the service: as long as it
waits for the server of a session that was opened (`OpenRequest.confirm_within`). A running service ends this sooner,
or repeats the request in time."""


Notify = Callable[[], Awaitable[bool]]
"""Function that notifies the session's user of the change; returns whether that worked."""


async def no_notification() -> bool:
    """Notify no user. Returns True."""
    return True


@dataclass(frozen=True)
class _Change:
    """A change of a session's tier that its agent was asked for, and the steps after it."""

    target: Target
    request: TierRequest
    record: Callable[[], object]
    notify: Notify

    async def decided(self) -> bool:
        """Return whether the agent has reported the new tier in time.

        Raises ActionRefused if the agent has undone the change.
        """
        with refusals():
            return await self.target.agent.carried_out(self.request)

    async def done(self) -> bool:
        """Record the change and notify the session's user. Returns whether the notification worked."""
        self.record()
        return await self.notify()


class TierActions:
    """Changes of tiers. Each method raises ActionRefused.

    A change that the agent can still undo is neither recorded nor shown to the user.
    """

    def __init__(
        self,
        templates: Callable[[], Mapping[str, Template]],
        use_rule: Callable[[Idle], UseRule],
        log: ActionLog,
        clock: Callable[[], float],
    ) -> None:
        self._templates = templates
        self._use_rule = use_rule
        self._log = log
        self._clock = clock
        self._followed: set[asyncio.Task[None]] = set()

    async def release(
        self,
        target: Target,
        actor: Actor,
        received: ReceivedAsk | None = None,
        why: str = "",
        notify: Notify = no_notification,
    ) -> ActionOutcome:
        """Release the share of an idle session.

        ``received``: the ask behind this action; GPU work since then prevents it. ``why``: the actor's comment.
        ``notify`` is called when the share is released.
        """
        check_own(target, actor)
        session = await current(target)
        if session.tier is Tier.RELEASED:
            return ActionOutcome(False, words.RELEASED_ALREADY)
        if received is not None and (session.last_gpu_activity or 0.0) > received.ask.at:
            raise ActionRefused(words.WORKED_MEANWHILE, RefusalCode.BUSY)
        reason = words.released_by(actor.name, why)
        request = self._request(session, Tier.RELEASED, 0, words.released_by(actor.name))
        record = partial(self._log.session, session, target.node, Tier.RELEASED, actor.name, units=0, reason=reason)
        return await self._carry_out(_Change(target, request, record, notify), words.RELEASED)

    async def tier(
        self, target: Target, tier: Tier, actor: Actor, why: str = "", notify: Notify = no_notification
    ) -> ActionOutcome:
        """Change the tier of a session to active, downgraded or released, by an admin's decision.

        GPU work that lasts restores the share, and a session that becomes active counts as idle from now on.
        """
        check_admin(actor)
        session = await current(target)
        units = self._units(session, tier)
        if (session.tier, session.effective_units) == (tier, units):
            return ActionOutcome(False, words.tier_already(tier))
        reason = words.tier_set_by(tier, actor.name, why)
        request = self._request(session, tier, units, words.tier_set_by(tier, actor.name))
        record = partial(self._log.session, session, target.node, tier, actor.name, units=units, reason=reason)
        return await self._carry_out(_Change(target, request, record, notify), words.tier_set(tier, units))

    def _units(self, session: SessionReport, tier: Tier) -> int:
        if tier is Tier.STOPPED:
            raise ActionRefused(words.STOP_IS_NO_TIER, RefusalCode.BAD_REQUEST)
        if tier is not Tier.DOWNGRADED:
            return session.share_units if tier is Tier.ACTIVE else 0
        template = self._template(session)
        units = template.idle.units(tier, session.share) if template is not None else 0
        if not 0 < units < session.share_units:
            title = template.display_name if template is not None else None
            raise ActionRefused(words.no_downgrade(title), RefusalCode.BAD_REQUEST)
        return units

    def _template(self, session: SessionReport) -> Template | None:
        return SessionTemplates.of(self._templates()).of_user(session.template, session.user)

    def _request(self, session: SessionReport, tier: Tier, units: int, reason: str) -> TierRequest:
        """Return the request to the agent. Units are taken only from an idle session, since work restores them."""
        taken = units < session.effective_units
        if taken and (session.gpu_busy or session.waiting):
            raise ActionRefused(words.GPU_BUSY, RefusalCode.BUSY)
        yields = session.yields and tier is not Tier.ACTIVE
        template = self._template(session)
        rule = self._use_rule(template.idle) if template is not None and tier is not Tier.ACTIVE else UseRule()
        return TierRequest(
            id=session.id,
            tier=tier,
            effective_units=units,
            reason=reason,
            if_idle_since=max(0.0, Observation.of(session).gpu_quiet_since) if taken else None,
            use=rule if rule.min_use > 0 else None,
            yields_until=self._clock() + YIELD_SECONDS if yields else None,
        )

    async def _carry_out(self, change: _Change, text: str) -> ActionOutcome:
        """Have the agent change the tier. ``text``: the answer if the agent has done so in time."""
        with refusals():
            await change.target.agent.tier(change.request)
        if not await change.decided():
            self._follow(change)
            return ActionOutcome(True, words.TIER_UNDER_WAY)
        return ActionOutcome(True, text if await change.done() else f"{text} {words.NOT_NOTIFIED}")

    def _follow(self, change: _Change) -> None:
        """Wait in the background for the agent's decision: the actor has an answer already."""
        task = asyncio.create_task(self._follow_to_the_end(change))
        # asyncio keeps only weak references to tasks
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)

    async def _follow_to_the_end(self, change: _Change) -> None:
        what = f"The change of session {change.request.id} to the tier {change.request.tier}"
        until = time.monotonic() + FOLLOWED_FOR
        try:
            while not await change.decided():
                if time.monotonic() > until:
                    log.warning("%s is not confirmed by its agent, and is not in the history", what)
                    return
            await change.done()
        except ActionRefused as error:
            log.info("%s was undone: %s", what, error.to_admins)
        except Exception:
            log.exception("%s: its end is not known", what)
