"""The operations that act on a session, on a waiting spawn, or on GPUs and nodes (cordon, drain).

Each declares the right that it needs; `router.Needs.check` checks it. They convert refusals to HTTP errors.
`service.actions` carries out the actions; `reading` has the operations that only return data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Concatenate, Literal, ParamSpec

from pydantic import Field, FiniteFloat, model_validator

from gpushare_spawner.model.controls import MAX_REASON, MessageCause
from gpushare_spawner.model.frames import MAX_TEXT_LETTERS
from gpushare_spawner.model.share import MOST_GPUS, Tier
from gpushare_spawner.service.actions import drains, keeps
from gpushare_spawner.service.actions import restart as servers
from gpushare_spawner.service.actions import share as shares
from gpushare_spawner.service.actions.context import (
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    RefusalCode,
    Target,
)
from gpushare_spawner.service.actions.drains import CordonTarget
from gpushare_spawner.service.api.answers import Done
from gpushare_spawner.service.api.entries import server_of
from gpushare_spawner.service.api.reading import visible_session
from gpushare_spawner.service.api.router import ApiError, Arguments, Call, Needs, Nothing, Operation
from gpushare_spawner.service.budgets import Budgets
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording import service as words

_STATUSES = {
    RefusalCode.BAD_REQUEST: 400,
    RefusalCode.UNKNOWN_SESSION: 404,
    RefusalCode.AGENT_UNAVAILABLE: 502,
    RefusalCode.HUB_UNAVAILABLE: 502,
}
"""HTTP statuses of refusals. All other refusals have status 409."""

_HALF_WAY = (RefusalCode.HUB_UNAVAILABLE, RefusalCode.AGENT_UNAVAILABLE)
"""Refusals after which a restart or change may be partly done. After all others, nothing has changed, and the agents
are not queried again; otherwise any user could keep the service busy with refused requests."""

OPERATIONS: list[Operation] = []
operation = partial(Operation, OPERATIONS)
P = ParamSpec("P")

_NODE, _GPU = "nodes/{node}", "nodes/{node}/gpus/{uuid}"
_REASON = {"reason": "The fan is replaced."}
_DRAIN = _REASON | {"stop_after": 7200}
_EXEMPTION = {"until": 1798761600, "reason": "Paper deadline"}
_MESSAGE = {"text": "The GPU is replaced at 18:00. Please save your work."}

At = Annotated[FiniteFloat, Field(ge=0)]
"""Seconds since the epoch (UTC)."""


class KeepBody(Arguments):
    """The end of a keep: either `hours` or `until`."""

    hours: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Hours from now."""
    until: At | None = None
    """The end, in seconds since the epoch."""

    @model_validator(mode="after")
    def _either(self) -> KeepBody:
        if (self.hours is None) == (self.until is None):
            raise ValueError("give either hours or until")
        return self


class ReasonBody(Arguments):
    """The reason of an action."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """A sentence for the users affected by the action, and for the history."""


class RestartBody(ReasonBody):
    """The template of a restart."""

    template: Annotated[str, Field(min_length=1, max_length=100)]
    """The name of a compute template."""


class TierBody(ReasonBody):
    """The new tier."""

    tier: Literal["active", "downgraded", "released"]


class ShareBody(ReasonBody):
    """The new share."""

    fraction: Annotated[FiniteFloat, Field(gt=0, le=MOST_GPUS)]
    """Fraction of each of the session's GPUs, in steps of 0.01; above 1: whole GPUs and a part of the last."""


class ExemptionBody(Arguments):
    """The end and the reason of an exemption."""

    until: At | None = None
    """The end, in seconds since the epoch; not given: indefinitely."""
    reason: Annotated[str, Field(max_length=MAX_TEXT_LETTERS)] = ""


class MessageBody(Arguments):
    """A message to the session's user."""

    text: Annotated[str, Field(max_length=MAX_TEXT_LETTERS)]


@operation("POST", "sessions/{id}/keep", "Keep a share", Needs.OWN, example={"hours": 4})
async def keep(call: Call[Nothing, KeepBody]) -> Done:
    """Keep the share against idle actions, within the limits of the template.

    A keep in force is extended or shortened. The limits do not apply to admins.
    """
    seconds = (call.body.hours or 0.0) * 3600
    return await on_session(call, keeps.keep, seconds=seconds, until=call.body.until)


@operation("DELETE", "sessions/{id}/keep", "End a keep", Needs.OWN)
async def end_keep(call: Call[Nothing, Nothing]) -> Done:
    """End the keep of a share."""
    return await on_session(call, keeps.end_keep)


@operation("POST", "sessions/{id}/release", "Release a share", Needs.OWN)
async def release(call: Call[Nothing, ReasonBody]) -> Done:
    """Release the share of a session that is doing no GPU work.

    Kernels keep running, and sustained GPU work restores the share. On a cluster, the answer can take up to 10 s, until
    the node's agent has confirmed. If another person releases the share, JupyterLab shows the user that person's name
    and the reason.
    """
    return await on_session(call, shares.release, call.body.reason)


@operation("POST", "sessions/{id}/stop", "Stop a server", Needs.OWN)
async def stop(call: Call[Nothing, ReasonBody]) -> Done:
    """Stop a session's server.

    Its kernels end. A named server stays in its user's list. If another person stops the server, JupyterLab shows that
    person's name and the reason immediately before the stop.
    """
    return await on_session(call, servers.stop, call.body.reason)


@operation("POST", "sessions/{id}/restart", "Restart with a template", Needs.OWN, example={"template": "half-gpu"})
async def restart(call: Call[Nothing, RestartBody]) -> Done:
    """Stop a session's server and start it with a template. Its kernels end.

    The server is not stopped if the user may not use the template, if a limit or quota refuses the new share, or if no
    node has GPUs that could take it when empty. If the hub still refuses the start, the server is started with its old
    template, and the answer is 502. The new server waits in the queue while no GPU is free for it. The answer is sent
    when the hub has begun to start the server, which can take a minute. If the service stops during the restart, it
    finishes the restart when it starts again within 10 minutes, provided that the history is enabled. If another person
    restarts the server, JupyterLab shows that person's name and the reason immediately before the stop, and the hub's
    page shows them while the new server starts.
    """
    return await on_session(call, servers.restart, call.body.template, call.body.reason)


@operation("PUT", "sessions/{id}/tier", "Change the tier", Needs.ACT, example={"tier": "downgraded"})
async def tier(call: Call[Nothing, TierBody]) -> Done:
    """Change a session's tier. Sustained GPU work restores the share."""
    return await on_session(call, shares.change_tier, Tier(call.body.tier), call.body.reason)


@operation("PUT", "sessions/{id}/share", "Change the share", Needs.OWN, example={"fraction": 0.5})
async def share(call: Call[Nothing, ShareBody]) -> Done:
    """Change the share of a running session on its GPU. Kernels keep running.

    Users can choose among the shares of templates that they may use. Admins are not limited by templates, quotas or the
    queue. If the GPU has too few free units, the answer is 409.
    """
    return await on_session(call, shares.change_share, call.body.fraction, call.body.reason)


@operation("PUT", "sessions/{id}/exemption", "Exempt from idle actions", Needs.ACT, example=_EXEMPTION)
async def exempt(call: Call[Nothing, ExemptionBody]) -> Done:
    """Exempt a session from all idle actions."""
    return await on_session(call, keeps.exempt, call.body.until, call.body.reason)


@operation("DELETE", "sessions/{id}/exemption", "End an exemption", Needs.ACT)
async def end_exemption(call: Call[Nothing, Nothing]) -> Done:
    """Allow idle actions on a session again, each after a notice."""
    return await on_session(call, keeps.end_exemption)


@operation("POST", "sessions/{id}/message", "Send a message", Needs.ACT, example=_MESSAGE)
async def message(call: Call[Nothing, MessageBody]) -> Done:
    """Show the session's user a text in JupyterLab and in `gpushare status`.

    The last message is shown until it is withdrawn.
    """
    return await on_session(call, keeps.message, call.body.text)


@operation("DELETE", "sessions/{id}/message", "Withdraw a message", Needs.ACT)
async def withdraw_message(call: Call[Nothing, Nothing]) -> Done:
    """Withdraw the admins' message to the session's user, and the reason for an admin's last action.

    The message of a drain ends with the drain.
    """
    return await on_session(call, keeps.withdraw_messages, MessageCause.ADMIN, MessageCause.ACTION)


def actor_of(call: Call[Any, Any]) -> Actor:
    """Return the caller as the actor of an action, for the log and the history."""
    return Actor(call.caller.label, is_admin=call.caller.acts_on_all)


async def on_session(
    call: Call[Any, Any],
    act: Callable[Concatenate[ActionContext, Target, Actor, P], Awaitable[ActionOutcome]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Done:
    """Act on the session in the request's path. Raises ApiError."""
    row = visible_session(await call.services.snapshots.current(), call)
    call.needs.check(call.caller, row.session)
    return await done(call, act(call.services.actions, row, actor_of(call), *args, **kwargs))


async def done(call: Call[Any, Any], action: Awaitable[ActionOutcome]) -> Done:
    """Carry out an action, update the pages, and return its outcome. Raises ApiError."""
    try:
        outcome = await action
    except ActionRefused as error:
        if error.code in _HALF_WAY:
            call.services.changed()
        text = error.to_admins if call.caller.sees_all else error.text
        raise ApiError(_STATUSES.get(error.code, 409), error.code.value, text) from None
    if outcome.changed:
        call.services.changed()
    return Done(changed=outcome.changed, message=outcome.text)


@operation("DELETE", "queue/{user}/{server}", "Cancel a spawn", Needs.OWN)
async def cancel(call: Call[ReasonBody, Nothing]) -> Done:
    """Cancel a spawn. Nothing stays reserved. The hub's page shows the person's name and the reason."""
    return await _on_spawn(call, servers.cancel, call.query.reason)


@operation("POST", "queue/{user}/{server}/requeue", "Requeue a spawn", Needs.ACT)
async def requeue(call: Call[Nothing, ReasonBody]) -> Done:
    """Put a spawn at the end of the queue: cancel it, and start it again with the same options.

    The hub's page names the person and the reason.
    """
    return await _on_spawn(call, servers.requeue, call.body.reason)


async def _on_spawn(
    call: Call[Any, Any], act: Callable[[ActionContext, str, str, Actor, str], Awaitable[ActionOutcome]], why: str
) -> Done:
    """Act on the spawn of the server in the request's path. Raises ApiError, also if the caller may not see it."""
    server = HubServer(call.path["user"], server_of(call.path["server"]))
    if not call.caller.may_see(server):
        raise ApiError(404, "unknown", words.unknown_spawn(server.label))
    call.needs.check(call.caller, server)
    return await done(call, act(call.services.actions, server.user, server.name, actor_of(call), why))


class GrantBody(ReasonBody):
    """GPU-hours beyond a budget, for a time."""

    hours: Annotated[FiniteFloat, Field(gt=0, le=1_000_000_000)]
    """GPU-hours in addition to the budget."""
    until: At
    """The end of the grant, in seconds since the epoch."""


_BUDGET, _USER = "budgets/{account}/grant", "budgets/{account}/users/{user}/grant"
_GRANT = {"hours": 20, "until": 1798761600, "reason": "Paper deadline"}


@operation("PUT", _BUDGET, "Grant GPU-hours", Needs.ACT, example=_GRANT)
async def grant(call: Call[Nothing, GrantBody]) -> Done:
    """Grant GPU-hours in addition to the budgets of a quota, for a time. It replaces an earlier grant.

    `account` is that of the budget in the answer to `GET quotas`, like `group:optics`.
    """
    budgets = _budgets(call)
    owner, body = (call.path["account"], ""), call.body
    return await done(call, budgets.grant(owner, actor_of(call), body.hours, body.until, body.reason))


@operation("DELETE", _BUDGET, "End a grant", Needs.ACT)
async def end_grant(call: Call[Nothing, Nothing]) -> Done:
    """End the grant of GPU-hours to a quota."""
    return await done(call, _budgets(call).end_grant((call.path["account"], ""), actor_of(call)))


@operation("PUT", _USER, "Grant a user GPU-hours", Needs.ACT, example=_GRANT)
async def grant_to_user(call: Call[Nothing, GrantBody]) -> Done:
    """Grant a user GPU-hours in addition to the budget that each user in a quota has (`per_user.budget`)."""
    budgets = _budgets(call)
    owner, body = (call.path["account"], call.path["user"]), call.body
    return await done(call, budgets.grant(owner, actor_of(call), body.hours, body.until, body.reason))


@operation("DELETE", _USER, "End a user's grant", Needs.ACT)
async def end_grant_to_user(call: Call[Nothing, Nothing]) -> Done:
    """End the grant of GPU-hours to a user in a quota."""
    return await done(call, _budgets(call).end_grant((call.path["account"], call.path["user"]), actor_of(call)))


def _budgets(call: Call[Any, Any]) -> Budgets:
    call.needs.check(call.caller)
    if call.services.budgets is None:
        raise ApiError(404, "unknown", words.BUDGETS_NEED_HISTORY)
    return call.services.budgets


class DrainBody(ReasonBody):
    """The reason of a drain, and whether servers are stopped."""

    stop_after: Annotated[FiniteFloat, Field(ge=0, le=366 * 86400)] | None = None
    """Seconds from now after which the remaining servers are stopped; not given: never. Each user has at least the
    template's notice period (`idle.warn_before`) after the notice."""


@operation("PUT", f"{_NODE}/cordon", "Cordon a node", Needs.DRAIN, example=_REASON)
async def cordon_node(call: Call[Nothing, ReasonBody]) -> Done:
    """Exclude all GPUs of a node from new sessions. Running sessions keep their shares. A drain becomes a cordon."""
    return await _on_place(call, drains.cordon, call.body.reason)


@operation("DELETE", f"{_NODE}/cordon", "End a node's cordon", Needs.DRAIN)
async def uncordon_node(call: Call[Nothing, Nothing]) -> Done:
    """Allow new sessions on a node again. Cordons of individual GPUs remain."""
    return await _on_place(call, drains.uncordon)


@operation("PUT", f"{_NODE}/drain", "Drain a node", Needs.DRAIN, example=_DRAIN)
async def drain_node(call: Call[Nothing, DrainBody]) -> Done:
    """Cordon a node and notify the users of its sessions. A session that is exempt from idle actions is not stopped."""
    return await _on_place(call, drains.drain, call.body.reason, call.body.stop_after)


@operation("DELETE", f"{_NODE}/drain", "End a node's drain", Needs.DRAIN)
async def end_drain_of_node(call: Call[Nothing, Nothing]) -> Done:
    """End the drain and the cordon of a node."""
    return await _on_place(call, drains.uncordon)


@operation("PUT", f"{_GPU}/cordon", "Cordon a GPU", Needs.DRAIN, example=_REASON)
async def cordon_gpu(call: Call[Nothing, ReasonBody]) -> Done:
    """Exclude one GPU from new sessions. Running sessions keep their shares. A drain becomes a cordon."""
    return await _on_place(call, drains.cordon, call.body.reason)


@operation("DELETE", f"{_GPU}/cordon", "End a GPU's cordon", Needs.DRAIN)
async def uncordon_gpu(call: Call[Nothing, Nothing]) -> Done:
    """Allow new sessions on a GPU again, unless its node is cordoned."""
    return await _on_place(call, drains.uncordon)


@operation("PUT", f"{_GPU}/drain", "Drain a GPU", Needs.DRAIN, example=_DRAIN)
async def drain_gpu(call: Call[Nothing, DrainBody]) -> Done:
    """Cordon a GPU and notify the users of its sessions. A session that is exempt from idle actions is not stopped."""
    return await _on_place(call, drains.drain, call.body.reason, call.body.stop_after)


@operation("DELETE", f"{_GPU}/drain", "End a GPU's drain", Needs.DRAIN)
async def end_drain_of_gpu(call: Call[Nothing, Nothing]) -> Done:
    """End the drain and the cordon of a GPU."""
    return await _on_place(call, drains.uncordon)


async def _on_place(
    call: Call[Any, Any],
    act: Callable[Concatenate[ActionContext, CordonTarget, Actor, P], Awaitable[ActionOutcome]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Done:
    """Act on the GPU or node in the request's path. Raises ApiError if it does not exist."""
    node, gpu = call.path["node"], call.path.get("uuid", "")
    snapshots = (await call.services.snapshots.current()).snapshots
    nodes = [(seen.agent, seen.report) for seen in snapshots if seen.report is not None and seen.report.node == node]
    if not nodes:
        raise ApiError(404, "unknown", words.unknown_node(node))
    agent, report = nodes[0]
    if gpu and gpu not in {reported_gpu.uuid for reported_gpu in report.gpus}:
        raise ApiError(404, "unknown", words.unknown_gpu(gpu, node))
    place = CordonTarget(agent, node, gpu)
    return await done(call, act(call.services.actions, place, actor_of(call), *args, **kwargs))
