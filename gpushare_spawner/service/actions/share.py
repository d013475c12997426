"""Change of a running session's share, by its user within templates and quota, or by an admin.

Whether the units are free is the agent's decision alone: a spawn or another change may take them at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from gpushare_spawner.model.protocol.control import ControlRefused, ResizeRequest
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import units_from_fraction
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import suits
from gpushare_spawner.quota import exceeded_units
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.outcome import (
    ActionRefused,
    Actor,
    Outcome,
    RefusalCode,
    Target,
    check_own,
    current,
    refusals,
)
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.quota_use import quota_use
from gpushare_spawner.service.reports import Agent, ask_all
from gpushare_spawner.service.share_choices import allowed, other_units, templates_of_kind, units_of
from gpushare_spawner.service.waiting_spawns import waiting_spawns
from gpushare_spawner.wording import quotas as quota_words
from gpushare_spawner.wording.controls import share_changes as words

SHARE = "share"
"""What the history calls it."""


class ShareActions:
    """Each method raises ActionRefused."""

    def __init__(
        self,
        agents: Iterable[Agent],
        hub: Hub,
        templates: Callable[[], Mapping[str, Template]],
        quotas: Callable[[], Quotas | None],
        pending: Callable[[], Awaitable[Sequence[HubServer] | None]],
        log: ActionLog,
    ) -> None:
        """``agents`` is iterated over anew each time; ``quotas``: those in force; ``pending``: servers that the hub is
        starting, None: unknown."""
        self._agents = agents
        self._hub = hub
        self._templates = templates
        self._quotas = quotas
        self._pending = pending
        self._log = log
        self._changing = asyncio.Lock()
        """One change at a time: two sessions of an account must not grow beyond its quota together."""

    async def share(self, one: Target, actor: Actor, fraction: float, why: str = "") -> Outcome:
        """Change the share to a fraction of its GPU. Kernels keep running; the memory limit is that of the user's
        template with this share. ``why``: what the actor says of it."""
        check_own(one, actor)
        try:
            units = units_from_fraction(fraction)
        except ValueError as error:
            raise ActionRefused(words.NO_FRACTION, RefusalCode.BAD_REQUEST) from error
        async with self._changing:
            session = await current(one)
            if units == session.share_units:
                return Outcome(False, words.same(units))
            if len(session.gpus) != 1:
                raise ActionRefused(words.WHOLE_GPUS, RefusalCode.BAD_REQUEST)
            if session.yields:
                raise ActionRefused(words.MAKES_WAY, RefusalCode.CAPACITY)
            reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
            template = await self._template(session, units, actor, reports)
            if not actor.is_admin and units > session.share_units:
                self._check_quota(session, units, reports)
                await self._check_queue(session, template, reports)
            await self._resize(one, session, units, template, actor)
            after = await current(one)
        self._log.session(
            after,
            one.node,
            SHARE,
            actor.name,
            units=after.effective_units,
            reason=words.changed_by(actor.name, session.share_units, units, why),
        )
        memory = after.memory_limit_bytes if after.memory_limit_bytes != session.memory_limit_bytes else None
        text = words.changed(session.share_units, units, after.borrowed_units, after.tier, memory)
        return Outcome(True, text)

    async def others(self, one: Target, actor: Actor) -> tuple[int, ...]:
        """Return the shares in units that `share` accepts by the user's templates, the smallest first; never empty.

        Whether the units are free and within the quota is not looked at.
        """
        check_own(one, actor)
        session = await current(one)
        if len(session.gpus) != 1:
            raise ActionRefused(words.WHOLE_GPUS, RefusalCode.BAD_REQUEST)
        reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
        units = other_units(session, await self._choices(session, reports))
        if not units:
            raise ActionRefused(words.not_allowed(()), RefusalCode.LIMIT)
        return units

    async def _resize(
        self,
        one: Target,
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
                await one.agent.resize(request)
            except ControlRefused as error:
                if error.code != "no-capacity":
                    raise
                raise ActionRefused(words.no_capacity(more, _title(template)), RefusalCode.CAPACITY) from error

    async def _template(
        self, session: SessionReport, units: int, actor: Actor, reports: Sequence[Report]
    ) -> Template | None:
        """Return the template that allows the share; None for an admin's choice that no template has."""
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
        """Return the templates whose shares the session's user may have on its GPU."""
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
        """Free units go to the spawns that wait for them."""
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
    """Whether the user has as many servers with the template, or with its share, as it allows."""
    most = template.limits.per_user
    if most is None:
        return False
    others = [
        one
        for report in reports
        for one in report.sessions
        if one.user == session.user
        and one.id != session.id
        and (one.template == template.name or one.share_units == units_of(template))
    ]
    return len(others) >= most
