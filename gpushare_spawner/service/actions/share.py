"""Changes of a running session's share and tier, by its user or by an admin.

A user can change the share within the limits of templates and quota, and can release it; an admin can set any share and
any tier. Only the agent decides whether units are free, because a spawn or another change can take them at the same
time. Idle actions are in `service.culler`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpushare_spawner.idle.use import Observation, use_rule
from gpushare_spawner.model.control import ControlRefused, ResizeRequest, TierRequest
from gpushare_spawner.model.quota import ResourceAmounts
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import Share, Tier, UseRule
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.request import suits
from gpushare_spawner.quota.order import beyond_guarantee, exceeded_amounts
from gpushare_spawner.service.actions.context import (
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    ReceivedAsk,
    RefusalCode,
    Target,
    current,
    harmless,
    refusals,
)
from gpushare_spawner.service.actions.keeps import explain
from gpushare_spawner.service.templates import allowed, other_units, templates_of_kind
from gpushare_spawner.service.waiting import quota_use, waiting_spawns
from gpushare_spawner.wording import actions as words
from gpushare_spawner.wording import service as quota_words

log = logging.getLogger("gpushare.service.actions")

SHARE = "share"
"""The name of a share change in the history."""
FOLLOWED_FOR = 600.0
"""Seconds for which the service waits for an agent's decision after answering that the change is in progress. An agent
that restarts answers again within a minute."""
YIELD_SECONDS = 600.0
"""Seconds for which the agent reserves units for spawns in quota without another request from the service. Equals the
time that it waits for the server of an opened session (`OpenRequest.confirm_within`). A running service ends this
earlier, or repeats the request in time."""


async def change_share(
    context: ActionContext, target: Target, actor: Actor, fraction: float, why: str = ""
) -> ActionOutcome:
    """Change the share to a fraction of each of its GPUs, like 0.5. Kernels keep running, on the same GPUs.

    The memory limit is that of the user's template with this share. ``why``, here and below: the actor's comment, or
    empty. It is shown to the session's user if another person acts.
    """
    try:
        written = Share.from_fraction(fraction)
    except ValueError as error:
        raise ActionRefused(words.NO_FRACTION, RefusalCode.BAD_REQUEST) from error
    async with context.share_lock:
        session = await current(target)
        if not session.gpus:
            raise ActionRefused(words.NO_GPU, RefusalCode.BAD_REQUEST)
        share = replace(written, count=len(session.gpus)) if written.count == 1 else written
        if share == session.share:
            return ActionOutcome(False, words.same(share))
        if share.count != len(session.gpus):
            raise ActionRefused(words.other_gpus(share, len(session.gpus)), RefusalCode.BAD_REQUEST)
        if session.yields:
            raise ActionRefused(words.MAKES_WAY, RefusalCode.CAPACITY)
        # admins are not limited by templates, quotas or the queue
        template = None if actor.is_admin else await _template_for(context, session, share)
        await _resize(target, session, share, template, words.changed_by(actor.name, session.share, share))
        after = await current(target)
    reason = words.changed_by(actor.name, session.share, share, harmless(why))
    context.log.session(after, target.node, SHARE, actor.name, units=after.effective_units, reason=reason)
    memory = after.memory_limit_bytes if after.memory_limit_bytes != session.memory_limit_bytes else None
    text = words.changed(session.share, share, after.borrowed_units, after.tier, memory)
    return await _explained(context, target, actor, reason, text)


async def other_shares(context: ActionContext, target: Target) -> tuple[int, ...]:
    """Return the shares that the user's templates allow, smallest first, as `choice_of` writes them; never empty.

    This changes nothing, and does not check whether the units are free and within the quota.
    """
    session = await current(target)
    if not session.gpus:
        raise ActionRefused(words.NO_GPU, RefusalCode.BAD_REQUEST)
    choices = other_units(session, await templates_for(context, session, await context.reports()))
    if not choices:
        raise ActionRefused(words.not_allowed(()), RefusalCode.LIMIT)
    return choices


async def _explained(context: ActionContext, target: Target, actor: Actor, reason: str, text: str) -> ActionOutcome:
    """Show the session's user another person's action, and return the outcome."""
    shown = await explain(context, target, actor, reason)
    return ActionOutcome(True, text if shown else f"{text} {words.NOT_NOTIFIED}")


async def _resize(target: Target, session: SessionReport, share: Share, template: Template | None, reason: str) -> None:
    limit = template.gpu.memory.limit if template is not None and template.gpu is not None else None
    request = ResizeRequest(
        id=session.id, share_units=share.units, last_units=share.last_units, memory_limit=limit, reason=reason
    )
    with refusals():
        try:
            await target.agent.send(request)
        except ControlRefused as error:
            if error.code != "no-capacity":
                raise
            more = max(units - before for units, before in zip(share.each, session.share.each, strict=True))
            title = template.display_name if template is not None else None
            raise ActionRefused(words.no_capacity(more, title), RefusalCode.CAPACITY) from error


async def _template_for(context: ActionContext, session: SessionReport, share: Share) -> Template:
    """Return the template that allows the user the share. Raises ActionRefused, also for a quota or the queue."""
    reports = await context.reports()
    choices = await templates_for(context, session, reports)
    matching = [template for template in choices if template.share == share]
    if not matching:
        raise ActionRefused(words.not_allowed(other_units(session, choices), share.count), RefusalCode.LIMIT)
    template = next((template for template in matching if not _is_full(template, session, reports)), None)
    if template is None:
        full = matching[0]
        raise ActionRefused(words.too_many(full.display_name, full.limits.per_user or 0), RefusalCode.LIMIT)
    if any(units > before for units, before in zip(share.each, session.share.each, strict=True)):
        _check_quota(context, session, share.total_units, reports)
        await _check_queue(context, session, template, reports)
    return template


async def templates_for(context: ActionContext, session: SessionReport, reports: Iterable[Report]) -> list[Template]:
    """Return the templates with shares that the session's user may have on its GPU."""
    with refusals():
        server = await context.hub.server(session.user, session.server)
    gpus = [gpu for report in reports for gpu in report.gpus]
    of_kind = templates_of_kind(session, gpus, context.templates())
    return allowed(of_kind, session.user, server.groups if server is not None else None)


def _check_quota(context: ActionContext, session: SessionReport, units: int, reports: Sequence[Report]) -> None:
    quotas = context.quotas()
    if quotas is None:
        return
    usage = quota_use(quotas, reports)
    account = usage.accounts.find(session.quota, session.user)
    usage.drop(session.id)
    needs = ResourceAmounts(units)  # CPU and memory stay
    refused = exceeded_amounts(usage, account, needs)
    own = context.templates().get(session.template)
    if refused is None and own is not None and not own.reclaimable:
        refused = beyond_guarantee(usage, account, needs)
    if refused is not None:
        raise ActionRefused(quota_words.exceeded(refused, needs), RefusalCode.LIMIT)


async def _check_queue(
    context: ActionContext, session: SessionReport, template: Template, reports: Sequence[Report]
) -> None:
    """Raise ActionRefused if spawns wait for the units, because free units go to them first."""
    pending = await context.pending()
    if not pending:
        return
    on = [gpu for report in reports for gpu in report.gpus if gpu.uuid in session.gpus]
    waiting = [
        spawn
        for spawn in waiting_spawns(pending, reports, context.templates())
        if spawn.template.gpu is not None and any(suits(spawn.template.gpu, gpu.model, gpu.memory_bytes) for gpu in on)
    ]
    if waiting:
        raise ActionRefused(words.others_wait(len(waiting), template.display_name), RefusalCode.CAPACITY)


def _is_full(template: Template, session: SessionReport, reports: Sequence[Report]) -> bool:
    """Return whether the user already has the template's maximum number of servers, with it or with its share."""
    most = template.limits.per_user
    if most is None:
        return False
    others = [
        other
        for report in reports
        for other in report.sessions
        if other.user == session.user
        and other.id != session.id
        and (other.template == template.name or other.share == template.share)
    ]
    return len(others) >= most


async def release(
    context: ActionContext, target: Target, actor: Actor, why: str = "", received: ReceivedAsk | None = None
) -> ActionOutcome:
    """Release an idle session's share. Sustained GPU work restores it.

    ``received``: the ask that requested this. GPU work since then prevents the release.
    """
    session = await current(target)
    if session.tier is Tier.RELEASED:
        return ActionOutcome(False, words.RELEASED_ALREADY)
    if received is not None and (session.last_gpu_activity or 0.0) > received.ask.at:
        raise ActionRefused(words.WORKED_MEANWHILE, RefusalCode.BUSY)
    request = _request(context, session, Tier.RELEASED, 0, words.released_by(actor.name))
    reason = words.released_by(actor.name, harmless(why))
    return await _Change(context, target, actor, session, request, reason).carry_out(words.RELEASED)


async def change_tier(context: ActionContext, target: Target, actor: Actor, tier: Tier, why: str = "") -> ActionOutcome:
    """Change a session's tier to active, downgraded or released, as an admin decided.

    Sustained GPU work restores the share. A session that becomes active counts as idle from now on.
    """
    session = await current(target)
    units = _units(context, session, tier)
    if (session.tier, session.effective_units) == (tier, units):
        return ActionOutcome(False, words.tier_already(tier))
    request = _request(context, session, tier, units, words.tier_set_by(tier, actor.name))
    reason = words.tier_set_by(tier, actor.name, harmless(why))
    return await _Change(context, target, actor, session, request, reason).carry_out(
        words.tier_set(tier, units, len(session.gpus))
    )


def _units(context: ActionContext, session: SessionReport, tier: Tier) -> int:
    if tier is Tier.STOPPED:
        raise ActionRefused(words.STOP_IS_NO_TIER, RefusalCode.BAD_REQUEST)
    if tier is not Tier.DOWNGRADED:
        return session.share_units if tier is Tier.ACTIVE else 0
    template = context.template_of(session)
    units = template.idle.units(tier, session.share) if template is not None else 0
    if not 0 < units < session.share_units:
        title = template.display_name if template is not None else None
        raise ActionRefused(words.no_downgrade(title), RefusalCode.BAD_REQUEST)
    return units


def _request(context: ActionContext, session: SessionReport, tier: Tier, units: int, reason: str) -> TierRequest:
    """Return the request to the agent. Units are taken only from an idle session, because work restores them."""
    taken = units < session.effective_units
    if taken and (session.gpu_busy or session.waiting):
        raise ActionRefused(words.GPU_BUSY, RefusalCode.BUSY)
    yields = session.yields and tier is not Tier.ACTIVE
    template = context.template_of(session)
    rule = use_rule(template.idle) if template is not None and tier is not Tier.ACTIVE else UseRule()
    return TierRequest(
        id=session.id,
        tier=tier,
        effective_units=units,
        reason=reason,
        if_idle_since=max(0.0, Observation.of(session).gpu_quiet_since) if taken else None,
        use=rule if rule.min_use > 0 else None,
        yields_until=context.clock() + YIELD_SECONDS if yields else None,
    )


@dataclass(frozen=True)
class _Change:
    """A change of a session's tier, and the follow-up steps.

    A change is recorded and shown to the user only when the agent can no longer undo it.
    """

    context: ActionContext
    target: Target
    actor: Actor
    session: SessionReport
    request: TierRequest
    reason: str
    """Reason for the history and the session's user."""

    async def carry_out(self, text: str) -> ActionOutcome:
        """Have the agent change the tier. ``text``: the answer if the agent does so in time."""
        with refusals():
            await self.target.agent.send(self.request)
        if await self._decided():
            return await self._done(text)
        # the actor already has an answer; asyncio keeps only weak references to tasks
        task = asyncio.create_task(self._follow())
        self.context.followed.add(task)
        task.add_done_callback(self.context.followed.discard)
        return ActionOutcome(True, words.TIER_UNDER_WAY)

    async def _decided(self) -> bool:
        """Return whether the agent reports the new tier in time.

        Raises ActionRefused if the agent has undone the change.
        """
        with refusals():
            return await self.target.agent.carried_out(self.request)

    async def _done(self, text: str) -> ActionOutcome:
        """Record the change and show it to the session's user."""
        tier, units = self.request.tier, self.request.effective_units
        self.context.log.session(self.session, self.target.node, tier, self.actor.name, units=units, reason=self.reason)
        return await _explained(self.context, self.target, self.actor, self.reason, text)

    async def _follow(self) -> None:
        """Wait for the agent's decision in the background."""
        what = f"The change of session {self.request.id} to the tier {self.request.tier}"
        until = time.monotonic() + FOLLOWED_FOR
        try:
            while not await self._decided():
                if time.monotonic() > until:
                    log.warning("%s is not confirmed by its agent, and is not in the history", what)
                    return
            await self._done("")
        except ActionRefused as error:
            log.info("%s was undone: %s", what, error.to_admins)
        except Exception:
            log.exception("%s: its outcome is unknown", what)
