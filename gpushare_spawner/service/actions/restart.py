"""Actions through the hub: restart or stop a session's server, cancel a spawn or put it at the end of the queue.

A restart stops the server, then starts it with the options of the same or another template. All checks that are
possible come first: a server is not stopped for a template that its user may not use, or that no GPU can take. The
agents' reports name models, units and number of GPUs. The spawner also checks CPU, memory, taints and labels of nodes;
the service has no right to read nodes. A restart is stored before the server is stopped: if the service is killed, the
next service starts the server.

The queue is in the hub's process (`spawner.queue`). To requeue a spawn, the service stops the starting server and
starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpushare_spawner.model.controls import MAX_LETTERS, SpawnNote
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.request import PlacementRequest, suitable_models
from gpushare_spawner.quota.accounts import Account
from gpushare_spawner.quota.order import admit
from gpushare_spawner.service.actions.outcome import (
    ActionLog,
    ActionOutcome,
    ActionRefused,
    Actor,
    First,
    RefusalCode,
    Target,
    check_admin,
    check_own,
    harmless,
    hub_refused,
    nothing_first,
    refusals,
)
from gpushare_spawner.service.history.queries import group_of_session
from gpushare_spawner.service.history.store import BegunRestart
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer, ServerNotes
from gpushare_spawner.service.reports import Agent, NodeSnapshot, ask_all
from gpushare_spawner.service.waiting import quota_use
from gpushare_spawner.wording import actions as words
from gpushare_spawner.wording import service as quota_words
from gpushare_spawner.wording import spawn_failures, spawn_form


class RestartJournal(Protocol):
    """Storage of begun restarts. Methods raise nothing: a restart does not need the journal."""

    async def begin_restart(self, restart: BegunRestart) -> None:
        """Store a restart before its server is stopped. It replaces a stored restart of the same server."""

    async def end_restart(self, user: str, server: str) -> None:
        """Delete a restart: the server has been started, or was not stopped."""

    async def begun_restarts(self) -> Sequence[BegunRestart]:
        """Return the stored restarts."""


class NoJournal:
    """A journal without storage, if there is no history."""

    async def begin_restart(self, restart: BegunRestart) -> None:
        pass

    async def end_restart(self, user: str, server: str) -> None:
        pass

    async def begun_restarts(self) -> Sequence[BegunRestart]:
        return ()


log = logging.getLogger("gpushare.service.actions")


def never_placed(template: Template, snapshots: Sequence[NodeSnapshot]) -> str:
    """Return why no node can take the template's share even without sessions, as a sentence; empty: a node can.

    Also empty while an agent does not answer, since its node might, and after an error in placement, which is logged.
    """
    if template.gpu is None:
        return ""
    # sessions end: only the GPUs count
    reports = [
        snapshot.report.model_copy(update={"sessions": ()}) for snapshot in snapshots if snapshot.report is not None
    ]
    if len(reports) < len(snapshots):
        return ""
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    request = PlacementRequest(template.gpu.share, models=suitable_models(template.gpu, kinds), template=template.name)
    try:
        why = LedgerFeed().follow(reports).why_unplaceable(request)
    except Exception:
        log.exception("Whether a GPU will ever do for template %s is unknown", template.name)
        return ""
    return "" if why.may_pass else spawn_failures.capacity(why)


PATIENCE = 60.0
"""Seconds that a server has to stop, as the hub's own setting `slow_stop_timeout` and `poll_interval` together."""
FINISHED_WITHIN = 600.0
"""Seconds from the stop of a server within which the next service finishes its restart. Our value: as long as a spawn
waits in the queue by default; after that its user has begun something else."""
RETRY_PAUSE = 5.0
"""Seconds between two requests to a hub that does not answer."""


@dataclass(frozen=True)
class _Running:
    template: str
    task: asyncio.Task[ActionOutcome]


class RestartActions:
    """Restarts of servers. Each method raises ActionRefused."""

    def __init__(
        self,
        agents: Iterable[Agent],
        hub: Hub,
        templates: Callable[[], Mapping[str, Template]],
        quotas: Callable[[], Quotas | None],
        log: ActionLog,
        journal: RestartJournal,
        clock: Callable[[], float],
        nodes_are_added: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        """Create the actions.

        ``nodes_are_added``: later nodes can take shares that no present node can; ``patience``: seconds that a server
        has to stop.
        """
        self._journal = journal
        self._clock = clock
        self._nodes_are_added = nodes_are_added
        self._agents = agents
        self._hub = hub
        self._templates = templates
        self._quotas = quotas
        self._log = log
        self._patience = patience
        self._running: dict[tuple[str, str], _Running] = {}

    async def restart(
        self, target: Target, actor: Actor, template: str, why: str = "", first: First = nothing_first
    ) -> ActionOutcome:
        """Restart a server with a template. The same restart again, while it runs, changes nothing.

        ``why``: the actor's comment; the hub's page of the new server shows it unless its user is the actor. ``first``
        is awaited after all checks.
        """
        check_own(target, actor)
        server = (target.session.user, target.session.server)
        running = self._running.get(server)
        if running is not None:
            if running.template != template:
                raise ActionRefused(words.RESTARTS_ALREADY, RefusalCode.BUSY)
            return ActionOutcome(False, (await asyncio.shield(running.task)).text)
        # a client that disconnects leaves no server stopped
        return await asyncio.shield(self._run(server, template, self._restart(target, actor, template, why, first)))

    async def finish(self) -> None:
        """Finish the restarts of a service that was killed between the stop of a server and its start."""
        begun = await self._journal.begun_restarts()
        tasks = [
            self._run((restart.user, restart.server), restart.template, self._finish(restart)) for restart in begun
        ]
        for restart, result in zip(begun, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if isinstance(result, BaseException):
                why = result.to_admins if isinstance(result, ActionRefused) else repr(result)
                log.error("The restart of a server of %s failed. %s", restart.user, why)

    def _run(
        self, server: tuple[str, str], template: str, work: Coroutine[None, None, ActionOutcome]
    ) -> asyncio.Task[ActionOutcome]:
        task = asyncio.create_task(work)
        self._running[server] = _Running(template, task)
        task.add_done_callback(lambda _: self._running.pop(server, None))
        return task

    async def _restart(self, target: Target, actor: Actor, name: str, why: str, first: First) -> ActionOutcome:
        session = target.session
        with refusals():
            servers = await self._hub.servers(session.user)
        old = next((server for server in servers if server.name == session.server), None)
        if old is None or not old.settled:
            raise ActionRefused(words.NOT_SETTLED, RefusalCode.BUSY)
        others = [server for server in servers if server.name != session.server]
        options = await self._options(session, old, others, name, actor)
        reason, old_options = words.restarted_by(actor.name, self._title(name), why), old.options
        if actor.name != session.user:
            note = SpawnNote(text=reason[:MAX_LETTERS])
            options, old_options = note.within(options), note.within(old_options)
        begun = BegunRestart(
            at=self._clock(),
            user=session.user,
            server=session.server,
            node=target.node,
            group=group_of_session(session, {}),
            old_template=session.template,
            template=name,
            actor=actor.name,
            options=options,
            old_options=old_options,
        )
        await self._journal.begin_restart(begun)
        async with self._under_way(begun):
            with refusals():
                await first()
                await self._hub.stop(begun.user, begun.server)
                if not await self._hub.stopped(begun.user, begun.server, self._patience):
                    raise ActionRefused(words.STOP_TAKES_LONG, RefusalCode.HUB_UNAVAILABLE)
            return await self._start(begun, reason)

    @contextlib.asynccontextmanager
    async def _under_way(self, begun: BegunRestart) -> AsyncIterator[None]:
        """Delete the stored restart when it is over. A restart that the end of the service cancels is not over."""
        try:
            yield
        except ActionRefused:
            await self._journal.end_restart(begun.user, begun.server)
            raise
        await self._journal.end_restart(begun.user, begun.server)

    async def _start(self, begun: BegunRestart, reason: str) -> ActionOutcome:
        """Start the server with the new options, or else with its old options, and enter it in the history."""
        try:
            await self._hub.start(begun.user, begun.server, begun.options)
        except HubFailed as error:
            self._log.restart(begun, f"{reason} {error.to_users}")
            raise await self._with_old_options(begun, error) from error
        self._log.restart(begun, reason)
        return ActionOutcome(True, words.restarts(self._title(begun.template)))

    async def _finish(self, begun: BegunRestart) -> ActionOutcome:
        """Start the server of a restart that was interrupted, unless it runs, or too much time has passed."""
        reason = words.restarted_by(begun.actor, self._title(begun.template))
        async with self._under_way(begun):
            while True:
                # This applies even if the clock was set back. By now the user has begun something else.
                if abs(self._clock() - begun.at) > FINISHED_WITHIN:
                    self._log.restart(begun, f"{reason} {words.RESTART_TOO_LATE}")
                    return ActionOutcome(False, words.RESTART_TOO_LATE)
                try:
                    server = await self._hub.server(begun.user, begun.server)
                except HubFailed as error:
                    log.info("The restart of a server of %s is finished later. %s", begun.user, error)
                else:
                    if server is None or not (server.ready or server.pending):
                        return await self._start(begun, f"{reason} {words.RESTART_FINISHED}")
                    if server.pending != "stop":
                        # the server was not stopped, or it has been started
                        return ActionOutcome(False, words.restarts(self._title(begun.template)))
                await asyncio.sleep(RETRY_PAUSE)

    def _title(self, template: str) -> str:
        """Return the display name of a template; its name if it is gone."""
        match = self._templates().get(template)
        return match.display_name if match is not None else template

    async def _with_old_options(self, begun: BegunRestart, error: HubFailed) -> ActionRefused:
        """Start a server with its old options, and return the refusal."""
        name = self._title(begun.template)
        try:
            await self._hub.start(begun.user, begun.server, begun.old_options)
        except HubFailed:
            return hub_refused(error, lambda why: words.not_started(name, why))
        return hub_refused(error, lambda why: words.started_as_before(name, why))

    async def _options(
        self, session: SessionReport, old: HubServer, others: list[HubServer], name: str, actor: Actor
    ) -> Mapping[str, object]:
        """Return the options to start with. Raises ActionRefused if the spawner would refuse them."""
        templates = self._templates()
        groups = frozenset(old.groups) if old.groups is not None else None
        try:
            template = _allowed(templates, name, session.user, groups)
            _check_limit(template, others)
            await self._check_gpus(template)
            account = await self._account(session, template, groups)
        except _WouldRefuse as refused:
            text = refused.text if actor.name == session.user else words.would_refuse(session.user, refused.text)
            raise ActionRefused(text, refused.code) from None
        if name == old.profile:
            # other choices on the card too
            return old.options
        return {"profile": name} | ({"quota": account.name} if account is not None and old.quota else {})

    async def _check_gpus(self, template: Template) -> None:
        """Raise _WouldRefuse if no node could take the template's share even without sessions."""
        if not self._nodes_are_added and (why := never_placed(template, await ask_all(self._agents))):
            raise _WouldRefuse(why, RefusalCode.CAPACITY)

    async def _account(
        self, session: SessionReport, template: Template, groups: frozenset[str] | None
    ) -> Account | None:
        """Return the account of the new share, the session's own if its user still has it.

        None if there are no quotas.
        """
        quotas = self._quotas()
        if quotas is None or template.gpu is None:
            return None
        reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
        usage = quota_use(quotas, reports)
        usage.drop(session.id)
        account = usage.accounts.find(session.quota, session.user)
        if groups is not None:
            choices = usage.accounts.of_user(session.user, groups)
            account = next((choice for choice in choices if choice.key == account.key), choices[0])
        units = template.gpu.share.total_units
        refused = admit(usage, account, session.user, units).refused
        if refused is not None:
            raise _WouldRefuse(quota_words.exceeded(account, refused, units), RefusalCode.LIMIT)
        return account


class _WouldRefuse(Exception):
    """The spawner would refuse a server; the text is its message to the user."""

    def __init__(self, text: str, code: RefusalCode) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def _allowed(templates: Mapping[str, Template], name: str, user: str, groups: frozenset[str] | None) -> Template:
    """Return the template of that name. ``groups``: of the user; None: unknown."""
    allowed = [choice for choice in templates.values() if choice.access.allows(user, groups or frozenset())]
    names = [spawn_form.named(choice.display_name, choice.name) for choice in allowed]
    template = templates.get(name)
    if template is None:
        raise _WouldRefuse(spawn_form.unknown_template(name, names), RefusalCode.BAD_REQUEST)
    if template in allowed:
        return template
    if groups is None and template.access.groups:
        raise _WouldRefuse(words.GROUPS_UNKNOWN, RefusalCode.HUB_UNAVAILABLE)
    raise _WouldRefuse(spawn_form.not_allowed(spawn_form.named(template.display_name, name), names), RefusalCode.LIMIT)


def _check_limit(template: Template, others: Iterable[HubServer]) -> None:
    most = template.limits.per_user
    if most is not None and sum(server.profile == template.name for server in others) >= most:
        raise _WouldRefuse(spawn_form.limit_reached(most, template.display_name), RefusalCode.LIMIT)


class ServerActions:
    """Actions on a session's server. Each method raises ActionRefused."""

    def __init__(self, hub: Hub, log: ActionLog) -> None:
        self._hub = hub
        self._log = log
        self._notes = ServerNotes(hub)

    async def stop(self, target: Target, actor: Actor, why: str = "", first: First = nothing_first) -> ActionOutcome:
        """Stop the server of a session. A named server stays in its user's list.

        ``why``: the actor's comment; the hub's pages show it unless the server's user is the actor. ``first`` is
        awaited after all checks.
        """
        check_own(target, actor)
        session = target.session
        with refusals():
            server = await self._hub.server(session.user, session.server)
            if server is None or not (server.ready or server.pending):
                return ActionOutcome(False, words.NOT_RUNNING)
            if server.pending == "stop":
                return ActionOutcome(False, words.STOPS_ALREADY)
            await first()
            await self._hub.stop(session.user, session.server)
        reason = words.stopped_by(actor.name, why)
        at = self._log.session(session, target.node, Tier.STOPPED, actor.name, units=0, reason=reason)
        if actor.name != session.user:
            self._notes.stopped(server, reason, at)
        return ActionOutcome(True, words.STOPS)


CANCEL, REQUEUE = "cancel", "requeue"
"""Names of these actions in the history."""
SPAWN_PATIENCE = 30.0
"""Seconds that a spawn has to end."""


class SpawnActions:
    """Actions on waiting spawns. Each method raises ActionRefused."""

    def __init__(self, hub: Hub, log: ActionLog, patience: float = SPAWN_PATIENCE) -> None:
        self._hub = hub
        self._log = log
        self._patience = patience
        self._notes = ServerNotes(hub, patience)

    async def cancel(self, user: str, name: str, actor: Actor, why: str = "") -> ActionOutcome:
        """End a spawn. ``name``: of the server. ``why``: the comment for its user, unless the user is the actor."""
        if not actor.is_admin and actor.name != user:
            raise ActionRefused(words.NOT_YOURS, RefusalCode.FORBIDDEN)
        with refusals():
            server = await self._waiting(user, name)
            if server is None:
                return ActionOutcome(False, words.NOT_STARTING)
            await self._hub.stop(user, name)
        reason = words.cancelled_by(actor.name, harmless(why))
        self._log.server(server, CANCEL, actor.name, reason=reason)
        if actor.name != user:
            await self._notes.cancelled(server, reason)
        return ActionOutcome(True, words.CANCELLED)

    async def requeue(self, user: str, name: str, actor: Actor, why: str = "") -> ActionOutcome:
        """Put a spawn at the end of the queue. For admins. ``why``: the comment for its user."""
        check_admin(actor)
        with refusals():
            server = await self._waiting(user, name)
            if server is None:
                raise ActionRefused(words.NOT_STARTING, RefusalCode.UNKNOWN_SESSION)
            await self._hub.stop(user, name)
            if not await self._hub.stopped(user, name, self._patience):
                raise ActionRefused(words.STOP_TAKES_LONG, RefusalCode.HUB_UNAVAILABLE)
        reason = words.requeued_by(actor.name, harmless(why))
        try:
            await self._hub.start(user, name, SpawnNote(text=reason[:MAX_LETTERS]).within(server.options))
        except HubFailed as error:
            self._log.server(server, CANCEL, actor.name, reason=f"{reason} {error.to_users}")
            raise hub_refused(error, words.not_queued_again) from error
        self._log.server(server, REQUEUE, actor.name, reason=reason)
        return ActionOutcome(True, words.REQUEUED)

    async def _waiting(self, user: str, name: str) -> HubServer | None:
        """Return the server if it is starting, or else None."""
        server = await self._hub.server(user, name)
        if server is not None and server.ready and not server.pending:
            raise ActionRefused(words.RUNS_ALREADY, RefusalCode.BUSY)
        return server if server is not None and server.pending == "spawn" else None
