"""Restart a server, also with another template: stop it, then start it with the template's options.

What can be known before is checked before: a server is not stopped for a template that its user may not use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota import Account, admit
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.outcome import (
    ActionRefused,
    Actor,
    Outcome,
    RefusalCode,
    Target,
    check_own,
    hub_refused,
    refusals,
)
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer
from gpushare_spawner.service.quota_use import quota_use
from gpushare_spawner.service.reports import Agent, ask_all
from gpushare_spawner.wording import quotas as quota_words
from gpushare_spawner.wording import session_controls as words
from gpushare_spawner.wording.spawn import options

RESTART = "restart"
"""What the history calls the action."""
PATIENCE = 60.0
"""Seconds that a server has to stop, as the hub's own setting `slow_stop_timeout` and `poll_interval` together."""


@dataclass(frozen=True)
class _Running:
    template: str
    task: asyncio.Task[Outcome]


class RestartActions:
    """Each method raises ActionRefused."""

    def __init__(
        self,
        agents: Iterable[Agent],
        hub: Hub,
        templates: Callable[[], Mapping[str, Template]],
        quotas: Callable[[], Quotas | None],
        log: ActionLog,
        patience: float = PATIENCE,
    ) -> None:
        self._agents = agents
        self._hub = hub
        self._templates = templates
        self._quotas = quotas
        self._log = log
        self._patience = patience
        self._running: dict[tuple[str, str], _Running] = {}

    async def restart(self, one: Target, actor: Actor, template: str) -> Outcome:
        """Restart a server with a template. The same restart once more, while it runs, changes nothing."""
        check_own(one, actor)
        server = (one.session.user, one.session.server)
        running = self._running.get(server)
        if running is not None:
            if running.template != template:
                raise ActionRefused(words.RESTARTS_ALREADY, RefusalCode.BUSY)
            return Outcome(False, (await asyncio.shield(running.task)).text)
        task = asyncio.create_task(self._restart(one, actor, template))
        self._running[server] = _Running(template, task)
        task.add_done_callback(lambda _: self._running.pop(server, None))
        # a client that is gone leaves no server stopped
        return await asyncio.shield(task)

    async def _restart(self, one: Target, actor: Actor, name: str) -> Outcome:
        session = one.session
        with refusals():
            servers = await self._hub.servers(session.user)
        old = next((server for server in servers if server.name == session.server), None)
        if old is None or not old.settled:
            raise ActionRefused(words.NOT_SETTLED, RefusalCode.BUSY)
        others = [server for server in servers if server.name != session.server]
        options = await self._options(session, old, others, name, actor)
        with refusals():
            await self._hub.stop(session.user, session.server)
            if not await self._hub.stopped(session.user, session.server, self._patience):
                raise ActionRefused(words.STOP_TAKES_LONG, RefusalCode.HUB_UNAVAILABLE)
        reason = words.restarted_by(actor.name, name)
        try:
            await self._hub.start(session.user, session.server, options)
        except HubFailed as error:
            self._log.session(session, one.node, RESTART, actor.name, units=0, reason=f"{reason} {error.to_users}")
            raise await self._with_old_options(old, name, error) from error
        self._log.session(session, one.node, RESTART, actor.name, units=0, reason=reason)
        return Outcome(True, words.restarts(name))

    async def _with_old_options(self, old: HubServer, name: str, error: HubFailed) -> ActionRefused:
        """Start a server as it was, and return what to say."""
        try:
            await self._hub.start(old.user, old.name, old.options)
        except HubFailed:
            return hub_refused(error, lambda why: words.not_started(name, why))
        return hub_refused(error, lambda why: words.started_as_before(name, why))

    async def _options(
        self, session: SessionReport, old: HubServer, others: list[HubServer], name: str, actor: Actor
    ) -> Mapping[str, object]:
        """Return the options to start with. Raises ActionRefused where the spawner would refuse them."""
        templates = self._templates()
        groups = frozenset(old.groups) if old.groups is not None else None
        try:
            template = _allowed(templates, name, session.user, groups)
            _check_limit(template, others)
            account = await self._account(session, template, groups)
        except _WouldRefuse as refused:
            text = refused.text if actor.name == session.user else words.would_refuse(session.user, refused.text)
            raise ActionRefused(text, refused.code) from None
        if name == old.profile:
            # other choices on the card too
            return old.options
        return {"profile": name} | ({"quota": account.name} if account is not None and old.quota else {})

    async def _account(
        self, session: SessionReport, template: Template, groups: frozenset[str] | None
    ) -> Account | None:
        """Return the quota that the new share is charged to, the session's own if its user still has it; None: none."""
        quotas = self._quotas()
        if quotas is None or template.gpu is None:
            return None
        reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
        usage = quota_use(quotas, reports)
        usage.drop(session.id)
        account = usage.accounts.find(session.quota, session.user)
        if groups is not None:
            choices = usage.accounts.of_user(session.user, groups)
            account = next((one for one in choices if one.key == account.key), choices[0])
        units = template.gpu.share.total_units
        refused = admit(usage, account, session.user, units).refused
        if refused is not None:
            raise _WouldRefuse(quota_words.exceeded(account, refused, units), RefusalCode.LIMIT)
        return account


class _WouldRefuse(Exception):
    """The spawner would refuse a server; the text is what it would say to its user."""

    def __init__(self, text: str, code: RefusalCode) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def _allowed(templates: Mapping[str, Template], name: str, user: str, groups: frozenset[str] | None) -> Template:
    """Return the template of that name. ``groups``: of the user; None: unknown."""
    allowed = [one.name for one in templates.values() if one.access.allows(user, groups or frozenset())]
    template = templates.get(name)
    if template is None:
        raise _WouldRefuse(options.unknown_template(name, allowed), RefusalCode.BAD_REQUEST)
    if name in allowed:
        return template
    if groups is None and template.access.groups:
        raise _WouldRefuse(words.GROUPS_UNKNOWN, RefusalCode.HUB_UNAVAILABLE)
    raise _WouldRefuse(options.not_allowed(name, allowed), RefusalCode.LIMIT)


def _check_limit(template: Template, others: Iterable[HubServer]) -> None:
    most = template.limits.per_user
    if most is not None and sum(server.profile == template.name for server in others) >= most:
        raise _WouldRefuse(options.limit_reached(most, template.display_name), RefusalCode.LIMIT)
