"""The operations that act: on a session, on a spawn that waits, and on GPUs and nodes (cordon, drain).

Checks that the caller may act on the target, and turns refusals into HTTP errors. `service.actions` does the work;
`reading` has the operations that only show something.
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
"""HTTP statuses of refusals. All others are 409."""

_HALF_WAY = (RefusalCode.HUB_UNAVAILABLE, RefusalCode.AGENT_UNAVAILABLE)
"""Refusals after which a restart or a change can be half done. After all others nothing has changed, so the agents are
not asked again: otherwise any user could keep the service busy with refused requests."""

At = Annotated[FiniteFloat, Field(ge=0)]
"""Seconds since the epoch (UTC)."""


class KeepBody(Arguments):
    """How long the share is kept: either `hours` or `until`."""

    hours: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Hours from now on."""
    until: At | None = None
    """An instant, in seconds since the epoch."""

    @model_validator(mode="after")
    def _either(self) -> KeepBody:
        if (self.hours is None) == (self.until is None):
            raise ValueError("give either hours or until")
        return self


class ReasonBody(Arguments):
    """The reason of an action."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """For the session's user, if another person acts, and for the history."""


class RestartBody(ReasonBody):
    """The template of a restart."""

    template: Annotated[str, Field(min_length=1, max_length=100)]
    """The name of a compute template."""


class TierBody(ReasonBody):
    """The new tier."""

    tier: Literal["active", "downgraded", "released"]


class ShareBody(ReasonBody):
    """The new share."""

    fraction: Annotated[FiniteFloat, Field(gt=0, le=1)]
    """Of one GPU, in steps of 0.01."""


class ExemptionBody(Arguments):
    """The end and the reason of an exemption."""

    until: At | None = None
    """An instant, in seconds since the epoch; not given: without end."""
    reason: Annotated[str, Field(max_length=MAX_TEXT_LETTERS)] = ""


class MessageBody(Arguments):
    """A message to the session's user."""

    text: Annotated[str, Field(max_length=MAX_TEXT_LETTERS)]


async def keep(call: Call[Nothing, KeepBody]) -> Done:
    """Keep the share against idle actions, within the limits of the template.

    A keep in force is extended or shortened. No limit applies to admins.
    """
    body = call.body
    seconds = body.hours * 3600 if body.hours is not None else None
    return await on_session(
        call, lambda target, actor: call.services.actions.keep(target, actor, seconds=seconds, until=body.until)
    )


async def end_keep(call: Call[Nothing, Nothing]) -> Done:
    """End the keep of a share."""
    return await on_session(call, call.services.actions.end_keep)


async def release(call: Call[Nothing, ReasonBody]) -> Done:
    """Release the share of a session that does no GPU work now.

    Kernels keep running; GPU work that lasts restores the share. On a cluster the answer waits up to 10 s for the
    node's agent. If another person releases the share, JupyterLab shows the user that person and the reason.
    """
    why = call.body.reason
    return await on_session(call, lambda target, actor: call.services.actions.release(target, actor, why=why))


async def stop(call: Call[Nothing, ReasonBody]) -> Done:
    """Stop the server of a session.

    Its kernels end. A named server stays in its user's list. If another person stops the server, JupyterLab shows that
    person and the reason immediately before.
    """
    why = call.body.reason
    return await on_session(call, lambda target, actor: call.services.actions.stop(target, actor, why))


async def restart(call: Call[Nothing, RestartBody]) -> Done:
    """Stop the server of a session and start it with a template. Its kernels end.

    The server is not stopped if the user may not use the template, if a limit or quota refuses the new share, or if no
    node has GPUs that could take it when empty. If the hub still refuses the start, the server is started with its old
    template, and the answer is 502. The new server waits in the queue while no GPU is free for it. The answer comes
    when the hub has begun to start it, which can take a minute. If the service stops meanwhile, it finishes the restart
    when it starts again within 10 minutes, provided that there is a history. If another person restarts the server,
    JupyterLab shows that person and the reason immediately before; so does the hub's page while the new server starts.
    """
    body = call.body
    return await on_session(
        call, lambda target, actor: call.services.actions.restart(target, body.template, actor, body.reason)
    )


async def tier(call: Call[Nothing, TierBody]) -> Done:
    """Change the tier of a session. GPU work that lasts restores the share."""
    body = call.body
    return await on_session(
        call, lambda target, actor: call.services.actions.tier(target, Tier(body.tier), actor, body.reason)
    )


async def share(call: Call[Nothing, ShareBody]) -> Done:
    """Change the share of a running session on its GPU; kernels keep running.

    Users can choose among the shares of templates that they may use. No template, quota or queue limits an admin.
    Without free units on that GPU the answer is 409.
    """
    body = call.body
    return await on_session(
        call, lambda target, actor: call.services.actions.share(target, actor, body.fraction, body.reason)
    )


async def exempt(call: Call[Nothing, ExemptionBody]) -> Done:
    """Exempt a session from all idle actions."""
    body = call.body
    return await on_session(
        call, lambda target, actor: call.services.actions.exempt(target, actor, until=body.until, reason=body.reason)
    )


async def end_exemption(call: Call[Nothing, Nothing]) -> Done:
    """Allow idle actions on a session again, each after a notice."""
    return await on_session(call, call.services.actions.end_exemption)


async def message(call: Call[Nothing, MessageBody]) -> Done:
    """Show the session's user a text in JupyterLab and in `gpushare status`.

    The last text stands until it is withdrawn.
    """
    return await on_session(call, lambda target, actor: call.services.actions.message(target, actor, call.body.text))


async def withdraw_message(call: Call[Nothing, Nothing]) -> Done:
    """Withdraw the admins' message to the session's user, and the reason of an admin's last action.

    The message of a drain ends with the drain.
    """
    causes = (MessageCause.ADMIN, MessageCause.ACTION)
    return await on_session(call, lambda target, actor: call.services.actions.withdraw_messages(target, actor, *causes))


def actor_of(call: Call[Any, Any]) -> Actor:
    """Return the caller as the actor of an action, for the log and the history."""
    return Actor(call.caller.label, is_admin=call.caller.acts_on_all)


async def on_session(call: Call[Any, Any], act: Callable[[Target, Actor], Awaitable[ActionOutcome]]) -> Done:
    """Act on the session that the address names. Raises ApiError."""
    row = visible_session(await call.services.snapshots.current(), call)
    if not call.caller.may_act_on(row.session):
        raise ApiError(403, "forbidden", words.not_your_session(Needs.OWN.scopes))
    return await done(call, lambda: act(row.decision, actor_of(call)))


async def done(call: Call[Any, Any], act: Callable[[], Awaitable[ActionOutcome]]) -> Done:
    """Carry out an action, return its outcome, and have pages show the change. Raises ApiError."""
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


class SpawnReason(Arguments):
    """The reason, for the user of the server."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """Shown on the hub's page of the spawn."""


async def cancel(call: Call[SpawnReason, Nothing]) -> Done:
    """Cancel a spawn. Nothing stays reserved. The hub's page names the person and the reason."""
    spawn = _visible(call)
    if not call.caller.may_act_on(spawn):
        raise ApiError(403, "forbidden", words.not_your_session(Needs.OWN.scopes))
    why = call.query.reason
    return await done(call, lambda: call.services.actions.spawns.cancel(spawn.user, spawn.name, actor_of(call), why))


async def requeue(call: Call[Nothing, SpawnReason]) -> Done:
    """Put a spawn at the end of the queue: it is cancelled, and started anew with the same options.

    The hub's page names the person and the reason.
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


class CordonBody(Arguments):
    """The reason of a cordon or drain."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """A sentence; the users of sessions on a drained GPU see it."""


class DrainBody(CordonBody):
    """The reason of a drain, and whether servers are stopped."""

    stop_after: Annotated[FiniteFloat, Field(ge=0, le=366 * 86400)] | None = None
    """Seconds from now on, after which the remaining servers are stopped; not given: never. Each user has at least the
    notice period of the template (`idle.warn_before`) after the notice."""


async def cordon_node(call: Call[Nothing, CordonBody]) -> Done:
    """Keep new sessions away from all GPUs of a node. Running sessions keep their shares. A drain becomes a cordon."""
    return await _cordon(call)


async def uncordon_node(call: Call[Nothing, Nothing]) -> Done:
    """Allow new sessions on a node again. Cordons of single GPUs stay."""
    return await _uncordon(call)


async def drain_node(call: Call[Nothing, DrainBody]) -> Done:
    """Cordon a node and notify the users of its sessions. A session that is exempt from idle actions is not stopped."""
    return await _drain(call)


async def end_drain_of_node(call: Call[Nothing, Nothing]) -> Done:
    """End the drain and the cordon of a node."""
    return await _uncordon(call)


async def cordon_gpu(call: Call[Nothing, CordonBody]) -> Done:
    """Keep new sessions away from one GPU. Running sessions keep their shares. A drain becomes a cordon."""
    return await _cordon(call)


async def uncordon_gpu(call: Call[Nothing, Nothing]) -> Done:
    """Allow new sessions on a GPU again, unless its node is cordoned."""
    return await _uncordon(call)


async def drain_gpu(call: Call[Nothing, DrainBody]) -> Done:
    """Cordon a GPU and notify the users of its sessions. A session that is exempt from idle actions is not stopped."""
    return await _drain(call)


async def end_drain_of_gpu(call: Call[Nothing, Nothing]) -> Done:
    """End the drain and the cordon of a GPU."""
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
    """Return the GPU or node that the address names. Raises ApiError if there is none."""
    node, gpu = call.path["node"], call.path.get("uuid", "")
    snapshot = await call.services.snapshots.current()
    match = next(
        (
            node_snapshot
            for node_snapshot in snapshot.snapshots
            if node_snapshot.report is not None and node_snapshot.report.node == node
        ),
        None,
    )
    if match is None or match.report is None:
        raise ApiError(404, "unknown", words.unknown_node(node))
    if gpu and gpu not in {reported_gpu.uuid for reported_gpu in match.report.gpus}:
        raise ApiError(404, "unknown", words.unknown_gpu(gpu, node))
    return CordonTarget(match.agent, node, gpu)


_NODE, _GPU = "nodes/{node}", "nodes/{node}/gpus/{uuid}"
_REASON = {"reason": "The fan is replaced."}
_DRAIN = _REASON | {"stop_after": 7200}

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
    Operation("DELETE", "queue/{user}/{server}", cancel, "Cancel a spawn", Done, SpawnReason, Nothing, Needs.OWN),
    Operation(
        "POST", "queue/{user}/{server}/requeue", requeue, "Requeue a spawn", Done, Nothing, SpawnReason, Needs.ACT
    ),
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
