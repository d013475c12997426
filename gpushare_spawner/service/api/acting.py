"""The operations that act on a session.

The operations that act on a spawn that waits.

The operations that cordon and drain GPUs and nodes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from gpushare_spawner.model.controls import MAX_REASON, MessageCause
from gpushare_spawner.model.frames import MAX_TEXT_LETTERS
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.actions.drains import CordonTarget
from gpushare_spawner.service.actions.outcome import ActionOutcome, ActionRefused, Actor, RefusalCode, Target
from gpushare_spawner.service.api.answers import Done
from gpushare_spawner.service.api.reading import server_of, visible_session
from gpushare_spawner.service.api.router import AnyOperation, ApiError, Arguments, Call, Needs, Nothing, Operation
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording import service as words

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


async def on_session(call: Call[Any, Any], act: Callable[[Target, Actor], Awaitable[ActionOutcome]]) -> Done:
    """Act on the session that the address names. Raises ApiError."""
    row = visible_session(await call.services.snapshots.current(), call)
    if not call.caller.may_act_on(row.session):
        raise ApiError(403, "forbidden", words.not_your_session(Needs.OWN.scopes))
    return await done(call, lambda: act(row.decision, actor_of(call)))


async def done(call: Call[Any, Any], act: Callable[[], Awaitable[ActionOutcome]]) -> Done:
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


class SpawnReason(Arguments):
    """Why, for the user of the server."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """Shown on the hub's page of the spawn."""


async def cancel(call: Call[SpawnReason, Nothing]) -> Done:
    """Cancel a spawn. Nothing stays reserved. The hub's page says who cancelled it, and the reason."""
    spawn = _visible(call)
    if not call.caller.may_act_on(spawn):
        raise ApiError(403, "forbidden", words.not_your_session(Needs.OWN.scopes))
    why = call.query.reason
    return await done(call, lambda: call.services.actions.spawns.cancel(spawn.user, spawn.name, actor_of(call), why))


async def requeue(call: Call[Nothing, SpawnReason]) -> Done:
    """Put a spawn at the end of the queue: it is cancelled, and started anew with the same options.

    The hub's page says who did it, and the reason.
    """
    spawn = _visible(call)
    why = call.body.reason
    return await done(call, lambda: call.services.actions.spawns.requeue(spawn.user, spawn.name, actor_of(call), why))


def _visible(call: Call[Any, Any]) -> HubServer:
    """Return the server that the address names. Raises ApiError if the caller may not see it."""
    server = HubServer(call.path["user"], server_of(call.path["server"]))
    if not call.caller.viewer.may_see(server):
        raise ApiError(404, "unknown", words.unknown_spawn(server.label))
    return server


SPAWN_OPERATIONS: list[AnyOperation] = [
    Operation("DELETE", "queue/{user}/{server}", cancel, "Cancel a spawn", Done, SpawnReason, Nothing, Needs.OWN),
    Operation(
        "POST", "queue/{user}/{server}/requeue", requeue, "Requeue a spawn", Done, Nothing, SpawnReason, Needs.ACT
    ),
]


class CordonBody(Arguments):
    """Why."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """A sentence; the users of sessions on a drained GPU see it."""


class DrainBody(CordonBody):
    """Why, and whether servers are stopped."""

    stop_after: Annotated[FiniteFloat, Field(ge=0, le=366 * 86400)] | None = None
    """Seconds from now on, after which servers that are still there are stopped; not given: never. Each user has at
    least the notice period of the template (`idle.warn_before`) after being told."""


async def cordon_node(call: Call[Nothing, CordonBody]) -> Done:
    """Keep new sessions away from all GPUs of a node. Sessions that run keep their shares. A drain becomes a cordon."""
    return await _cordon(call)


async def uncordon_node(call: Call[Nothing, Nothing]) -> Done:
    """Let new sessions come to a node again. Cordons of single GPUs stay."""
    return await _uncordon(call)


async def drain_node(call: Call[Nothing, DrainBody]) -> Done:
    """Cordon a node, and tell the users of its sessions. A session that is exempt from idle actions is not stopped."""
    return await _drain(call)


async def end_drain_of_node(call: Call[Nothing, Nothing]) -> Done:
    """End the drain of a node, and its cordon."""
    return await _uncordon(call)


async def cordon_gpu(call: Call[Nothing, CordonBody]) -> Done:
    """Keep new sessions away from one GPU. Sessions that run keep their shares. A drain becomes a cordon."""
    return await _cordon(call)


async def uncordon_gpu(call: Call[Nothing, Nothing]) -> Done:
    """Let new sessions come to a GPU again, unless its node is cordoned."""
    return await _uncordon(call)


async def drain_gpu(call: Call[Nothing, DrainBody]) -> Done:
    """Cordon a GPU, and tell the users of its sessions. A session that is exempt from idle actions is not stopped."""
    return await _drain(call)


async def end_drain_of_gpu(call: Call[Nothing, Nothing]) -> Done:
    """End the drain of a GPU, and its cordon."""
    return await _uncordon(call)


async def _cordon(call: Call[Any, CordonBody]) -> Done:
    place, drains = await _place(call), call.services.actions.drains
    return await done(call, lambda: drains.cordon(place, actor_of(call), call.body.reason))


async def _drain(call: Call[Any, DrainBody]) -> Done:
    place, drains, body = await _place(call), call.services.actions.drains, call.body
    return await done(call, lambda: drains.drain(place, actor_of(call), body.reason, body.stop_after))


async def _uncordon(call: Call[Any, Any]) -> Done:
    place, drains = await _place(call), call.services.actions.drains
    return await done(call, lambda: drains.uncordon(place, actor_of(call)))


async def _place(call: Call[Any, Any]) -> CordonTarget:
    """Return what the address names. Raises ApiError if there is no such thing."""
    node, gpu = call.path["node"], call.path.get("uuid", "")
    snapshot = await call.services.snapshots.current()
    found = next((one for one in snapshot.snapshots if one.report is not None and one.report.node == node), None)
    if found is None or found.report is None:
        raise ApiError(404, "unknown", words.unknown_node(node))
    if gpu and gpu not in {one.uuid for one in found.report.gpus}:
        raise ApiError(404, "unknown", words.unknown_gpu(gpu, node))
    return CordonTarget(found.agent, node, gpu)


_NODE, _GPU = "nodes/{node}", "nodes/{node}/gpus/{uuid}"
_REASON = {"reason": "The fan is replaced."}
_DRAIN = _REASON | {"stop_after": 7200}

DRAIN_OPERATIONS: list[AnyOperation] = [
    Operation(
        "PUT", f"{_NODE}/cordon", cordon_node, "Cordon a node", Done, Nothing, CordonBody, Needs.DRAIN, example=_REASON
    ),
    Operation("DELETE", f"{_NODE}/cordon", uncordon_node, "End a node's cordon", Done, Nothing, Nothing, Needs.DRAIN),
    Operation(
        "PUT", f"{_NODE}/drain", drain_node, "Drain a node", Done, Nothing, DrainBody, Needs.DRAIN, example=_DRAIN
    ),
    Operation("DELETE", f"{_NODE}/drain", end_drain_of_node, "End a node's drain", Done, Nothing, Nothing, Needs.DRAIN),
    Operation(
        "PUT", f"{_GPU}/cordon", cordon_gpu, "Cordon a GPU", Done, Nothing, CordonBody, Needs.DRAIN, example=_REASON
    ),
    Operation("DELETE", f"{_GPU}/cordon", uncordon_gpu, "End a GPU's cordon", Done, Nothing, Nothing, Needs.DRAIN),
    Operation("PUT", f"{_GPU}/drain", drain_gpu, "Drain a GPU", Done, Nothing, DrainBody, Needs.DRAIN, example=_DRAIN),
    Operation("DELETE", f"{_GPU}/drain", end_drain_of_gpu, "End a GPU's drain", Done, Nothing, Nothing, Needs.DRAIN),
]
