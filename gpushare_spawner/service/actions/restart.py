"""Actions through the hub: restart or stop a session's server, and cancel or requeue a spawn.

A restart stops the server, then starts it with the options of the same or another template. All possible checks come
first, so that a server is not stopped for a template that its user may not use or that no GPU can take. The agents'
reports provide the models, units and number of GPUs. The spawner also checks CPU, memory, taints and labels of nodes,
which the service may not read. A restart is stored before the server is stopped: if the service is killed, the next
service starts the server.

The queue is in the hub's process (`spawner.queue`). To requeue a spawn, the service stops the starting server and
starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence

from gpushare_spawner.model.controls import MAX_LETTERS, SpawnNote
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.request import Conditions, PlacementRequest, suitable_models
from gpushare_spawner.quota.accounts import Account, needs_of
from gpushare_spawner.quota.order import admit
from gpushare_spawner.service.actions.context import (
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    RefusalCode,
    RunningRestart,
    Target,
    harmless,
    hub_refused,
    refusals,
)
from gpushare_spawner.service.actions.keeps import explained_before
from gpushare_spawner.service.history.queries import group_of_session
from gpushare_spawner.service.history.store import BegunRestart
from gpushare_spawner.service.hub.client import HubFailed, HubServer, ServerNotes
from gpushare_spawner.service.reports import NodeSnapshot, answered, ask_all
from gpushare_spawner.service.waiting import quota_use
from gpushare_spawner.wording import actions as words
from gpushare_spawner.wording import service as quota_words
from gpushare_spawner.wording import spawn_failures, spawn_form

log = logging.getLogger("gpushare.service.actions")

FINISHED_WITHIN = 600.0
"""Maximum seconds between the stop of a server and the completion of its restart by the next service. Our choice: the
default wait of a spawn in the queue; after that, its user has probably turned to other work."""
RETRY_PAUSE = 5.0
"""Seconds between requests to a hub that does not answer."""
CANCEL, REQUEUE = "cancel", "requeue"
"""Names of these actions in the history."""
SPAWN_PATIENCE = 30.0
"""Maximum seconds to wait for a spawn to end."""


def never_placed(template: Template, snapshots: Sequence[NodeSnapshot]) -> str:
    """Return the sentence why no node could take the template's share even without sessions; empty if one could.

    The result is also empty while an agent does not answer, because its node might, and after an error in placement,
    which is logged.
    """
    if template.gpu is None:
        return ""
    # sessions end, so only the GPUs count
    reports = [report.model_copy(update={"sessions": ()}) for report in answered(snapshots)]
    if len(reports) < len(snapshots):
        return ""
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    request = PlacementRequest(
        template.gpu.share,
        models=suitable_models(template.gpu, kinds),
        template=template.name,
        conditions=Conditions.of(template),
    )
    try:
        why = LedgerFeed().follow(reports).why_unplaceable(request)
    except Exception:
        log.exception("Cannot determine whether any GPU can take template %s", template.name)
        return ""
    return "" if why.may_pass else spawn_failures.capacity(why)


async def restart(context: ActionContext, target: Target, actor: Actor, template: str, why: str = "") -> ActionOutcome:
    """Stop a server, and start it with a template. Repeating the request while the restart runs changes nothing.

    ``why``: the actor's comment. If another person acts, the session's user sees it before the stop and on the hub's
    page for the new server.
    """
    server = (target.session.user, target.session.server)
    running = context.restarts.get(server)
    if running is not None:
        if running.template != template:
            raise ActionRefused(words.RESTARTS_ALREADY, RefusalCode.BUSY)
        return ActionOutcome(False, (await asyncio.shield(running.task)).text)
    # a client that disconnects must not leave a server stopped
    return await asyncio.shield(_run(context, server, template, _restart(context, target, actor, template, why)))


async def finish_restarts(context: ActionContext) -> None:
    """Finish the restarts of a service that was killed between the stop and the start of a server."""
    begun = await context.journal.begun_restarts() if context.journal is not None else ()
    tasks = [
        _run(context, (restart.user, restart.server), restart.template, _finish(context, restart)) for restart in begun
    ]
    for restart, result in zip(begun, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        if isinstance(result, BaseException):
            why = result.to_admins if isinstance(result, ActionRefused) else repr(result)
            log.error("The restart of a server of %s failed. %s", restart.user, why)


def _run(
    context: ActionContext, server: tuple[str, str], template: str, work: Coroutine[None, None, ActionOutcome]
) -> asyncio.Task[ActionOutcome]:
    task = asyncio.create_task(work)
    context.restarts[server] = RunningRestart(template, task)
    task.add_done_callback(lambda _: context.restarts.pop(server, None))
    return task


async def _restart(context: ActionContext, target: Target, actor: Actor, name: str, why: str) -> ActionOutcome:
    session = target.session
    with refusals():
        servers = await context.hub.servers(session.user)
    old = next((server for server in servers if server.name == session.server), None)
    if old is None or not old.not_pending:
        raise ActionRefused(words.NOT_SETTLED, RefusalCode.BUSY)
    others = [server for server in servers if server.name != session.server]
    options = await _options(context, session, old, others, name, actor)
    reason, old_options = words.restarted_by(actor.name, context.title(name), harmless(why)), old.options
    if actor.name != session.user:
        note = SpawnNote(text=reason[:MAX_LETTERS])
        options, old_options = note.within(options), note.within(old_options)
    begun = BegunRestart(
        at=context.clock(),
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
    if context.journal is not None:
        await context.journal.begin_restart(begun)
    async with _stored(context, begun), explained_before(context, target, actor, reason):
        with refusals():
            await context.hub.stop(begun.user, begun.server)
            if not await context.hub.stopped(begun.user, begun.server, context.patience):
                raise ActionRefused(words.STOP_TAKES_LONG, RefusalCode.HUB_UNAVAILABLE)
        return await _start(context, begun, reason)


@contextlib.asynccontextmanager
async def _stored(context: ActionContext, begun: BegunRestart) -> AsyncIterator[None]:
    """Delete the stored restart when it is finished. A shutdown of the service does not finish a restart."""
    try:
        yield
    except ActionRefused:
        await _forget(context, begun)
        raise
    await _forget(context, begun)


async def _forget(context: ActionContext, begun: BegunRestart) -> None:
    if context.journal is not None:
        await context.journal.end_restart(begun.user, begun.server)


async def _start(context: ActionContext, begun: BegunRestart, reason: str) -> ActionOutcome:
    """Start the server with the new options, or else with its old options, and record it in the history."""
    title = context.title(begun.template)
    try:
        await context.hub.start(begun.user, begun.server, begun.options)
    except HubFailed as error:
        context.log.restart(begun, f"{reason} {error.to_users}")
        try:
            await context.hub.start(begun.user, begun.server, begun.old_options)
        except HubFailed:
            raise hub_refused(error, lambda why: words.not_started(title, why)) from error
        raise hub_refused(error, lambda why: words.started_as_before(title, why)) from error
    context.log.restart(begun, reason)
    return ActionOutcome(True, words.restarts(title))


async def _finish(context: ActionContext, begun: BegunRestart) -> ActionOutcome:
    """Start the server of an interrupted restart, unless it runs or too much time has passed."""
    reason = words.restarted_by(begun.actor, context.title(begun.template))
    async with _stored(context, begun):
        while True:
            # By now the user has probably turned to other work. abs() covers a clock that was set back.
            if abs(context.clock() - begun.at) > FINISHED_WITHIN:
                context.log.restart(begun, f"{reason} {words.RESTART_TOO_LATE}")
                return ActionOutcome(False, words.RESTART_TOO_LATE)
            try:
                server = await context.hub.server(begun.user, begun.server)
            except HubFailed as error:
                log.info("The restart of a server of %s will be finished later. %s", begun.user, error)
            else:
                if server is None or not (server.ready or server.pending):
                    return await _start(context, begun, f"{reason} {words.RESTART_FINISHED}")
                if server.pending != "stop":
                    # the server was not stopped, or has already been started
                    return ActionOutcome(False, words.restarts(context.title(begun.template)))
            await asyncio.sleep(RETRY_PAUSE)


async def _options(
    context: ActionContext, session: SessionReport, old: HubServer, others: list[HubServer], name: str, actor: Actor
) -> Mapping[str, object]:
    """Return the options to start with. Raises ActionRefused if the spawner would refuse them."""
    groups = frozenset(old.groups) if old.groups is not None else None
    try:
        template = _allowed(context.templates(), name, session.user, groups)
        most = template.limits.per_user
        if most is not None and sum(server.profile == template.name for server in others) >= most:
            raise ActionRefused(spawn_form.limit_reached(most, template.display_name), RefusalCode.LIMIT)
        snapshots = await ask_all(context.agents)
        # nodes that are added later can take shares that no current node can
        if not context.nodes_are_added and (why := never_placed(template, snapshots)):
            raise ActionRefused(why, RefusalCode.CAPACITY)
        account = _account(context, session, template, groups, snapshots)
    except ActionRefused as refused:
        if actor.name == session.user:
            raise
        raise ActionRefused(words.would_refuse(session.user, refused.text), refused.code) from None
    if name == old.profile:
        # including other choices on the card
        return old.options
    return {"profile": name} | ({"quota": account.name} if account is not None and old.quota else {})


def _account(
    context: ActionContext,
    session: SessionReport,
    template: Template,
    groups: frozenset[str] | None,
    snapshots: Sequence[NodeSnapshot],
) -> Account | None:
    """Return the account for the new share: the session's own if its user still has it.

    Return None if there are no quotas.
    """
    quotas = context.quotas()
    if quotas is None or template.gpu is None:
        return None
    usage = quota_use(quotas, answered(snapshots), context.templates(), context.servers())
    usage.drop(session.id)
    account = usage.accounts.find(session.quota, session.user)
    if groups is not None:
        choices = usage.accounts.of_user(session.user, groups)
        account = next((choice for choice in choices if choice.key == account.key), choices[0])
    needs = needs_of(template, quotas)
    refused = admit(usage, account, session.user, needs).refused
    if refused is not None:
        raise ActionRefused(quota_words.exceeded(refused, needs), RefusalCode.LIMIT)
    return account


def _allowed(templates: Mapping[str, Template], name: str, user: str, groups: frozenset[str] | None) -> Template:
    """Return the template with that name. ``groups``: the user's groups; None: unknown."""
    allowed = [choice for choice in templates.values() if choice.access.allows(user, groups or frozenset())]
    names = [spawn_form.named(choice.display_name, choice.name) for choice in allowed]
    template = templates.get(name)
    if template is None:
        raise ActionRefused(spawn_form.unknown_template(name, names), RefusalCode.BAD_REQUEST)
    if template in allowed:
        return template
    if groups is None and template.access.groups:
        raise ActionRefused(words.GROUPS_UNKNOWN, RefusalCode.HUB_UNAVAILABLE)
    title = spawn_form.named(template.display_name, name)
    raise ActionRefused(spawn_form.not_allowed(title, names), RefusalCode.LIMIT)


async def stop(context: ActionContext, target: Target, actor: Actor, why: str = "") -> ActionOutcome:
    """Stop a session's server. A named server stays in its user's list.

    ``why``: the actor's comment. If another person acts, the session's user sees it before the stop and on the hub's
    pages.
    """
    session, reason = target.session, words.stopped_by(actor.name, harmless(why))
    with refusals():
        server = await context.hub.server(session.user, session.server)
    if server is None or not (server.ready or server.pending):
        return ActionOutcome(False, words.NOT_RUNNING)
    if server.pending == "stop":
        return ActionOutcome(False, words.STOPS_ALREADY)
    async with explained_before(context, target, actor, reason):
        with refusals():
            await context.hub.stop(session.user, session.server)
    at = context.log.session(session, target.node, Tier.STOPPED, actor.name, units=0, reason=reason)
    if actor.name != session.user:
        context.notes.stopped(server, reason, at)
    return ActionOutcome(True, words.STOPS)


async def cancel(context: ActionContext, user: str, name: str, actor: Actor, why: str = "") -> ActionOutcome:
    """Cancel a spawn. ``name``: the server's name. ``why``: the comment for its user, unless the user is the actor."""
    with refusals():
        server = await _waiting(context, user, name)
        if server is None:
            return ActionOutcome(False, words.NOT_STARTING)
        await context.hub.stop(user, name)
    reason = words.cancelled_by(actor.name, harmless(why))
    context.log.server(server, CANCEL, actor.name, reason=reason)
    if actor.name != user:
        await ServerNotes(context.hub, SPAWN_PATIENCE).cancelled(server, reason)
    return ActionOutcome(True, words.CANCELLED)


async def requeue(context: ActionContext, user: str, name: str, actor: Actor, why: str = "") -> ActionOutcome:
    """Put a spawn at the end of the queue. ``why``: the comment for its user."""
    with refusals():
        server = await _waiting(context, user, name)
        if server is None:
            raise ActionRefused(words.NOT_STARTING, RefusalCode.UNKNOWN_SESSION)
        await context.hub.stop(user, name)
        if not await context.hub.stopped(user, name, SPAWN_PATIENCE):
            raise ActionRefused(words.STOP_TAKES_LONG, RefusalCode.HUB_UNAVAILABLE)
    reason = words.requeued_by(actor.name, harmless(why))
    try:
        await context.hub.start(user, name, SpawnNote(text=reason[:MAX_LETTERS]).within(server.options))
    except HubFailed as error:
        context.log.server(server, CANCEL, actor.name, reason=f"{reason} {error.to_users}")
        raise hub_refused(error, words.not_queued_again) from error
    context.log.server(server, REQUEUE, actor.name, reason=reason)
    return ActionOutcome(True, words.REQUEUED)


async def _waiting(context: ActionContext, user: str, name: str) -> HubServer | None:
    """Return the server if it is starting, otherwise None."""
    server = await context.hub.server(user, name)
    if server is not None and server.ready and not server.pending:
        raise ActionRefused(words.RUNS_ALREADY, RefusalCode.BUSY)
    return server if server is not None and server.pending == "spawn" else None
