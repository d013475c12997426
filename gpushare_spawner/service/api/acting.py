"""The operations that act on a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.cordon import MAX_REASON
from gpushare_spawner.model.protocol.frames import MAX_TEXT_LETTERS
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.actions.outcome import ActionRefused, Actor, Outcome, RefusalCode, Target
from gpushare_spawner.service.api.answers import Done
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Arguments, Call, Needs, Nothing, Operation
from gpushare_spawner.service.api.reading import visible_session
from gpushare_spawner.wording import api as words

_STATUSES = {
    RefusalCode.FORBIDDEN: 403,
    RefusalCode.BAD_REQUEST: 400,
    RefusalCode.UNKNOWN_SESSION: 404,
    RefusalCode.AGENT_UNAVAILABLE: 502,
    RefusalCode.HUB_UNAVAILABLE: 502,
}
"""All others are 409."""

_HALF_WAY = (RefusalCode.HUB_UNAVAILABLE, RefusalCode.AGENT_UNAVAILABLE)
"""With these a restart or a change can have got half way. After others nothing is new, and to ask all agents again for
each refused request would let any user keep the service busy."""

At = Annotated[FiniteFloat, Field(ge=0)]
"""Seconds since the epoch (UTC)."""


class KeepBody(Arguments):
    """How long: either of both."""

    hours: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """From now on."""
    until: At | None = None
    """An instant, in seconds since the epoch."""

    @model_validator(mode="after")
    def _either(self) -> KeepBody:
        if (self.hours is None) == (self.until is None):
            raise ValueError("give either hours or until")
        return self


class ReasonBody(Arguments):
    """Why."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """For the user of the session, where somebody else acts; and for the history."""


class RestartBody(ReasonBody):
    """What the server is started with."""

    template: Annotated[str, Field(min_length=1, max_length=100)]
    """The name of a compute template."""


class TierBody(ReasonBody):
    """The tier."""

    tier: Literal["active", "downgraded", "released"]


class ShareBody(ReasonBody):
    """The new share."""

    fraction: Annotated[FiniteFloat, Field(gt=0, le=1)]
    """Of one GPU, in steps of 0.01."""


class ExemptionBody(Arguments):
    """Until when, and why."""

    until: At | None = None
    """An instant, in seconds since the epoch; not given: without end."""
    reason: Annotated[str, Field(max_length=MAX_TEXT_LETTERS)] = ""


class MessageBody(Arguments):
    """What the session's user is told."""

    text: Annotated[str, Field(max_length=MAX_TEXT_LETTERS)]


async def keep(call: Call[Nothing, KeepBody]) -> Done:
    """Keep the share against idle actions, within the limits of the template. A keep that stands is extended, or ends
    sooner. Admins are bound by no limit."""
    body = call.body
    seconds = body.hours * 3600 if body.hours is not None else None
    return await on_session(
        call, lambda one, actor: call.services.actions.keep(one, actor, seconds=seconds, until=body.until)
    )


async def end_keep(call: Call[Nothing, Nothing]) -> Done:
    """End the keep of a share."""
    return await on_session(call, call.services.actions.end_keep)


async def release(call: Call[Nothing, ReasonBody]) -> Done:
    """Release the share of a session that does no GPU work now. Kernels keep running; GPU work that lasts restores the
    share. On a cluster the answer waits up to 10 s for the node's agent. The user reads in JupyterLab if somebody else
    did it, with the reason."""
    why = call.body.reason
    return await on_session(call, lambda one, actor: call.services.actions.release(one, actor, why=why))


async def stop(call: Call[Nothing, ReasonBody]) -> Done:
    """Stop the server of a session. Its kernels end. A named server stays in its user's list. JupyterLab says right
    before who stops it, if that is not its user, and the reason."""
    why = call.body.reason
    return await on_session(call, lambda one, actor: call.services.actions.stop(one, actor, why))


async def restart(call: Call[Nothing, RestartBody]) -> Done:
    """Stop the server of a session and start it with a template. Its kernels end.

    Nothing is stopped where the user may not use the template, a limit or quota refuses the new share, or no node has
    GPUs that could take it even if nothing ran there. If the hub refuses the start all the same, the server is started
    with its old template, and the answer is 502. The new server waits in the queue while no GPU is free for it. The
    answer comes when the hub has begun to start it, which can take a minute. A service that is stopped in between
    finishes the restart when it starts again within 10 minutes, if the hub has a history. JupyterLab says right before
    who restarts it, if that is not its user, and the reason; so does the hub's page while the new server starts.
    """
    body = call.body
    return await on_session(
        call, lambda one, actor: call.services.actions.restart(one, body.template, actor, body.reason)
    )


async def tier(call: Call[Nothing, TierBody]) -> Done:
    """Change the tier of a session. GPU work that lasts restores the share."""
    body = call.body
    return await on_session(
        call, lambda one, actor: call.services.actions.tier(one, Tier(body.tier), actor, body.reason)
    )


async def share(call: Call[Nothing, ShareBody]) -> Done:
    """Change the share of a running session on its GPU; kernels keep running. Users can choose among the shares of
    templates that they may use; admins are bound by no template, quota or queue. Without free units on that GPU the
    answer is 409."""
    body = call.body
    return await on_session(
        call, lambda one, actor: call.services.actions.share(one, actor, body.fraction, body.reason)
    )


async def exempt(call: Call[Nothing, ExemptionBody]) -> Done:
    """Let no idle action at all come to a session."""
    body = call.body
    return await on_session(
        call, lambda one, actor: call.services.actions.exempt(one, actor, until=body.until, reason=body.reason)
    )


async def end_exemption(call: Call[Nothing, Nothing]) -> Done:
    """Let idle actions come to a session again, each with a notice before."""
    return await on_session(call, call.services.actions.end_exemption)


async def message(call: Call[Nothing, MessageBody]) -> Done:
    """Show the session's user a text in JupyterLab and in `gpushare status`. The last one stands until it is
    withdrawn."""
    return await on_session(call, lambda one, actor: call.services.actions.message(one, actor, call.body.text))


async def withdraw_message(call: Call[Nothing, Nothing]) -> Done:
    """Withdraw what admins have told the session's user: the message, and the reason of an admin's last action. What a
    drain tells ends with the drain."""
    causes = (MessageCause.ADMIN, MessageCause.ACTION)
    return await on_session(call, lambda one, actor: call.services.actions.withdraw_messages(one, actor, *causes))


def actor_of(call: Call[Any, Any]) -> Actor:
    """Return the caller as who acts, for the log and the history."""
    return Actor(call.caller.label, is_admin=call.caller.acts_on_all)


async def on_session(call: Call[Any, Any], act: Callable[[Target, Actor], Awaitable[Outcome]]) -> Done:
    """Act on the session that the address names. Raises ApiError."""
    row = visible_session(await call.services.snapshots.current(), call)
    if not call.caller.may_act_on(row.session):
        raise ApiError(403, "forbidden", words.not_your_session(Needs.OWN.scopes))
    return await done(call, lambda: act(row.decision, actor_of(call)))


async def done(call: Call[Any, Any], act: Callable[[], Awaitable[Outcome]]) -> Done:
    """Return what an action did, and have pages show it. Raises ApiError."""
    try:
        outcome = await act()
    except ActionRefused as error:
        if error.code in _HALF_WAY:
            call.services.changed()
        text = error.to_admins if call.caller.sees_all else error.text
        raise ApiError(_STATUSES.get(error.code, 409), error.code.value, text) from None
    if outcome.changed:
        call.services.changed()
    return Done(changed=outcome.changed, message=outcome.text)


OPERATIONS: list[AnyOperation] = [
    Operation(
        "POST", "sessions/{id}/keep", keep, "Keep a share", Done, Nothing, KeepBody, Needs.OWN, example={"hours": 4}
    ),
    Operation("DELETE", "sessions/{id}/keep", end_keep, "End a keep", Done, Nothing, Nothing, Needs.OWN),
    Operation("POST", "sessions/{id}/release", release, "Release a share", Done, Nothing, ReasonBody, Needs.OWN),
    Operation("POST", "sessions/{id}/stop", stop, "Stop a server", Done, Nothing, ReasonBody, Needs.OWN),
    Operation(
        "POST",
        "sessions/{id}/restart",
        restart,
        "Restart with a template",
        Done,
        Nothing,
        RestartBody,
        Needs.OWN,
        example={"template": "half-gpu"},
    ),
    Operation(
        "PUT",
        "sessions/{id}/tier",
        tier,
        "Change the tier",
        Done,
        Nothing,
        TierBody,
        Needs.ACT,
        example={"tier": "downgraded"},
    ),
    Operation(
        "PUT",
        "sessions/{id}/share",
        share,
        "Change the share",
        Done,
        Nothing,
        ShareBody,
        Needs.OWN,
        example={"fraction": 0.5},
    ),
    Operation(
        "PUT",
        "sessions/{id}/exemption",
        exempt,
        "Exempt from idle actions",
        Done,
        Nothing,
        ExemptionBody,
        Needs.ACT,
        example={"until": 1798761600, "reason": "Paper deadline"},
    ),
    Operation(
        "DELETE",
        "sessions/{id}/exemption",
        end_exemption,
        "End an exemption",
        Done,
        Nothing,
        Nothing,
        Needs.ACT,
    ),
    Operation(
        "POST",
        "sessions/{id}/message",
        message,
        "Send a message",
        Done,
        Nothing,
        MessageBody,
        Needs.ACT,
        example={"text": "The GPU is replaced at 18:00. Please save your work."},
    ),
    Operation(
        "DELETE", "sessions/{id}/message", withdraw_message, "Withdraw a message", Done, Nothing, Nothing, Needs.ACT
    ),
]
