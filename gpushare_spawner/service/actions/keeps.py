"""Actions that change no share: users' keeps, and admins' exemptions and messages.

Changes of shares and tiers are in `share`, stops and restarts in `restart`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from gpushare_spawner.idle.keep import (
    CLOCKS_DIFFER,
    DAY,
    KeepRule,
    KeepsLeft,
    in_force,
    keep_in_force,
    keep_refused,
    keeps_left,
)
from gpushare_spawner.model.control import MessageRequest
from gpushare_spawner.model.controls import ASK_SECONDS, MOST_KEEPS, Controls, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.frames import MAX_TEXT_LETTERS
from gpushare_spawner.model.quantity import LATEST
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.service.actions.context import (
    CULLER,
    SAME,
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    ReceivedAsk,
    RefusalCode,
    Target,
    answer_to,
    harmless,
    refusals,
    same_instant,
)
from gpushare_spawner.wording import actions as words

log = logging.getLogger("gpushare.service.actions")

KEEP, KEEP_ENDED = "keep", "keep-ended"
EXEMPT, EXEMPTION_ENDED = "exempt", "exempt-ended"
MESSAGE, MESSAGE_WITHDRAWN = "message", "message-withdrawn"
"""Names of these actions in the history."""
SAME_MESSAGE = 60.0
"""Seconds. A message with the same text within this time is treated as the same message."""


async def keep(
    context: ActionContext,
    target: Target,
    actor: Actor,
    *,
    seconds: float = 0.0,
    until: float | None = None,
    received: ReceivedAsk | None = None,
) -> ActionOutcome:
    """Keep a share, or extend or shorten a keep. The limits do not apply if it is shortened.

    ``seconds``: the length, or ``until``: the end in seconds since the epoch. ``received``: the ask that requested
    this; repeating the same ask gives the same end of the keep.
    """
    async with context.controls_of(target) as (session, controls):
        now = context.clock()
        begin = now if received is None else min(now, max(received.at, now - ASK_SECONDS))
        until = until if until is not None else begin + seconds
        if not math.isfinite(until) or not now < until <= LATEST:
            raise ActionRefused(words.KEEP_NOT_IN_FUTURE, RefusalCode.BAD_REQUEST)
        standing = controls.keep
        if standing is not None and abs(standing.until - until) <= SAME:
            return ActionOutcome(False, words.kept_already(standing.until - now))
        if standing is not None and until < standing.until:
            sooner = Keep(until=until, since=standing.since, by=actor.name)
            changed = controls.model_copy(update={"keep": sooner})
        else:
            changed = await _extended(context, session, controls, actor, until, until - begin)
        text = words.kept(until - begin, session.tier)
        await context.write_controls(target, changed, answer_to(received, text, now))
        _remember(context, session, target.node, changed, now)
    context.log.session(session, target.node, KEEP, actor.name, reason=text)
    return ActionOutcome(True, text)


async def end_keep(
    context: ActionContext, target: Target, actor: Actor, received: ReceivedAsk | None = None
) -> ActionOutcome:
    """End a keep. Idle actions apply again, each after its notice."""
    async with context.controls_of(target) as (session, controls):
        if controls.keep is None:
            return ActionOutcome(False, words.NO_KEEP)
        answer = answer_to(received, words.KEEP_ENDED, context.clock())
        await context.write_controls(target, controls.model_copy(update={"keep": None}), answer)
        context.standing_keeps.pop(session.id, None)
    context.log.session(session, target.node, KEEP_ENDED, actor.name, reason=words.KEEP_ENDED)
    return ActionOutcome(True, words.KEEP_ENDED)


async def ask_left(context: ActionContext, target: Target) -> ActionOutcome:
    """Return the remaining keeps of the session's user, as a sentence. Changes nothing."""
    session, controls = await context.read_controls(target)
    others, _ = await controls_of_others(context, session)
    now = context.clock()
    return ActionOutcome(False, words.keeps_left(left(context, session, others | {session.id: controls}, now), now))


def left(context: ActionContext, session: SessionReport, controls: Mapping[str, Controls], now: float) -> KeepsLeft:
    """Return the remaining keeps of the session's user, and the limits.

    ``controls``: those in force for all of the user's sessions, by id.
    """
    return keeps_left(_rule(context, session), _begun(context, session.user, controls, now), now)


def _rule(context: ActionContext, session: SessionReport) -> KeepRule:
    template = context.template_of(session)
    return KeepRule.of(template.idle if template is not None else None)


def _begun(context: ActionContext, user: str, controls: Mapping[str, Controls], now: float) -> list[float]:
    """Return the start times of all keeps of a user's sessions, including ended ones."""
    began = _counted(controls)
    # keeps after now are from before the clock was set back, and the reports date them as now
    began |= _filtered(context.keeps_began.get(user, Counter()), lambda begin: begin <= now)
    return [begin for _, begin in began.elements()]


async def clean_up(context: ActionContext, target: Target) -> bool:
    """Remove expired controls, and let keeps with a start in the future start now. Return whether that was necessary.

    Otherwise, a clock that is set back would restore an expired keep, and keeps would count as today's until the clock
    has caught up.
    """
    async with context.controls_of(target) as (session, controls):
        before = session.controls
        if not needs_cleanup(session, context.clock()):
            return False
        await context.write_controls(target, controls)
    if before.keep is not None and controls.keep is None:
        context.log.session(session, target.node, KEEP_ENDED, CULLER, reason=words.KEEP_WAS_OVER)
    if before.exemption is not None and controls.exemption is None:
        context.log.session(session, target.node, EXEMPTION_ENDED, CULLER, reason=words.EXEMPTION_WAS_OVER)
    return True


async def controls_of_others(
    context: ActionContext, session: SessionReport
) -> tuple[dict[str, Controls], frozenset[str]]:
    """Return the controls in force for the user's other sessions, by id, and the nodes with available agents."""
    reports, now = await context.reports(), context.clock()
    controls = {
        other.id: in_force(other.controls, now)
        for report in reports
        for other in report.sessions
        if other.user == session.user and other.id != session.id
    }
    return controls, frozenset(report.node for report in reports)


async def _extended(
    context: ActionContext, session: SessionReport, controls: Controls, actor: Actor, until: float, seconds: float
) -> Controls:
    now = context.clock()
    keep = Keep(until=until, since=now, by=actor.name)
    if actor.is_admin:
        # an admin's keep does not count against the user's limits
        return controls.model_copy(update={"keep": keep})
    others, nodes = await controls_of_others(context, session)
    began = _begun(context, session.user, others | {session.id: controls}, now)
    kept = sum(keep_in_force(other.keep, now) for other in others.values())
    # sessions on nodes with unavailable agents, with keeps from this service
    kept += sum(
        user == session.user and node not in nodes and keep_in_force(standing, now)
        for name, (user, node, standing) in context.standing_keeps.items()
        if name != session.id and name not in others
    )
    refusal = keep_refused(_rule(context, session), seconds, began, kept, now)
    if refusal is not None:
        raise ActionRefused(words.keep_refused(refusal, now), RefusalCode.LIMIT)
    return controls.model_copy(update={"keep": keep, "keeps": (*controls.keeps, now)[-MOST_KEEPS:]})


def _remember(context: ActionContext, session: SessionReport, node: str, controls: Controls, now: float) -> None:
    """Record the keep and the start times of keeps, for as long as they count."""
    standing = {name: entry for name, entry in context.standing_keeps.items() if keep_in_force(entry[2], now)}
    if controls.keep is not None:
        standing[session.id] = session.user, node, controls.keep
    context.standing_keeps = standing
    began = context.keeps_began.get(session.user, Counter()) | _counted({session.id: controls})
    counts = {
        user: _filtered(begun, lambda begin: begin > now - DAY)
        for user, begun in {**context.keeps_began, session.user: began}.items()
    }
    context.keeps_began = {user: begun for user, begun in counts.items() if begun}


def _counted(controls: Mapping[str, Controls]) -> Counter[tuple[str, float]]:
    return Counter((session, begin) for session, state in controls.items() for begin in state.keeps)


def _filtered(began: Counter[tuple[str, float]], counts: Callable[[float], bool]) -> Counter[tuple[str, float]]:
    return Counter({entry: number for entry, number in began.items() if counts(entry[1])})


def needs_cleanup(session: SessionReport, now: float) -> bool:
    """Return whether `clean_up` would change something."""
    if any(began > now + CLOCKS_DIFFER for began in session.keeps):
        return True
    if session.keep is None and session.exemption is None:
        return False
    current = in_force(session.controls, now)
    return (current.keep, current.exemption) != (session.keep, session.exemption)


async def exempt(
    context: ActionContext, target: Target, actor: Actor, until: float | None = None, reason: str = ""
) -> ActionOutcome:
    """Exempt a session from idle actions until an instant (seconds since the epoch); None: indefinitely."""
    reason = harmless(reason)
    async with context.controls_of(target) as (session, controls):
        now = context.clock()
        if until is not None and not now < until <= LATEST:
            raise ActionRefused(words.EXEMPTION_NOT_IN_FUTURE, RefusalCode.BAD_REQUEST)
        seconds = None if until is None else until - now
        standing = controls.exemption
        if standing is not None and same_instant(standing.until, until) and standing.reason == reason:
            return ActionOutcome(False, words.exempt_already(seconds))
        exemption = Exemption(until=until, by=actor.name, reason=reason)
        await context.write_controls(target, controls.model_copy(update={"exemption": exemption}))
    text = words.exempted(seconds)
    context.log.session(session, target.node, EXEMPT, actor.name, reason=f"{text} {reason}".strip())
    return ActionOutcome(True, text)


async def end_exemption(context: ActionContext, target: Target, actor: Actor) -> ActionOutcome:
    """End an exemption. Idle actions apply again, each after its notice."""
    async with context.controls_of(target) as (session, controls):
        if controls.exemption is None:
            return ActionOutcome(False, words.NOT_EXEMPT)
        await context.write_controls(target, controls.model_copy(update={"exemption": None}))
    context.log.session(session, target.node, EXEMPTION_ENDED, actor.name, reason=words.EXEMPTION_ENDED)
    return ActionOutcome(True, words.EXEMPTION_ENDED)


async def message(
    context: ActionContext, target: Target, actor: Actor, text: str, cause: MessageCause = MessageCause.ADMIN
) -> ActionOutcome:
    """Show the session's user a text in JupyterLab and in `gpushare status`.

    It replaces the message of the same cause.
    """
    text = harmless(text)
    if not text:
        raise ActionRefused(words.NO_TEXT, RefusalCode.BAD_REQUEST)
    if len(text) > MAX_TEXT_LETTERS:
        raise ActionRefused(words.message_too_long(len(text), MAX_TEXT_LETTERS), RefusalCode.BAD_REQUEST)
    async with context.controls_of(target) as (session, _):
        now, last = context.clock(), session.message_of(cause)
        if last is not None and (last.text, last.by) == (text, actor.name) and abs(now - last.at) < SAME_MESSAGE:
            return ActionOutcome(False, words.MESSAGE_SENT_ALREADY)
        with refusals():
            new = Message(text=text, by=actor.name, at=now, cause=cause)
            await target.agent.send(MessageRequest(id=session.id, message=new))
    context.log.session(session, target.node, MESSAGE, actor.name, reason=text)
    return ActionOutcome(True, words.MESSAGE_SENT)


async def explain(context: ActionContext, target: Target, actor: Actor, text: str) -> bool:
    """Show the session's user another person's action and its reason. Return False if that failed.

    The action is carried out in any case, and has a separate entry in the history.
    """
    if actor.name == target.session.user:
        return True
    new = Message(text=text[:MAX_TEXT_LETTERS], by=actor.name, at=context.clock(), cause=MessageCause.ACTION)
    try:
        async with context.controls_of(target) as (session, _):
            with refusals():
                await target.agent.send(MessageRequest(id=session.id, message=new))
    except ActionRefused as error:
        log.info("The user of session %s was not notified of an action: %s", target.session.id, error.to_admins)
        return False
    return True


@contextlib.asynccontextmanager
async def explained_before(context: ActionContext, target: Target, actor: Actor, text: str) -> AsyncIterator[None]:
    """Show the session's user the stop of the server just before it, because JupyterLab is gone afterward.

    The message is withdrawn if the action fails.
    """
    shown = await explain(context, target, actor, text) and actor.name != target.session.user
    try:
        yield
    except ActionRefused:
        if shown:
            with contextlib.suppress(ActionRefused):
                await withdraw_messages(context, target, actor, MessageCause.ACTION)
        raise


async def withdraw_messages(
    context: ActionContext, target: Target, actor: Actor, *causes: MessageCause
) -> ActionOutcome:
    """Withdraw the session's messages of these causes."""
    async with context.controls_of(target) as (session, _):
        standing = [shown for cause in causes if (shown := session.message_of(cause)) is not None]
        if not standing:
            return ActionOutcome(False, words.NO_MESSAGE)
        for number, shown in enumerate(standing):
            if number:
                await context.read_controls(target)  # on Kubernetes, the pod has changed
            with refusals():
                await target.agent.send(MessageRequest.withdraw(session.id, shown.cause))
    reason = " ".join(shown.text for shown in standing)
    context.log.session(session, target.node, MESSAGE_WITHDRAWN, actor.name, reason=reason)
    return ActionOutcome(True, words.MESSAGE_WITHDRAWN)
