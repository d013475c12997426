"""The operations that act on a spawn that waits."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gpushare_spawner.model.cordon import MAX_REASON
from gpushare_spawner.service.api.acting import actor_of, done
from gpushare_spawner.service.api.answers import Done
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Arguments, Call, Needs, Nothing, Operation
from gpushare_spawner.service.api.spawn_address import server_of
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording import api as words


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


OPERATIONS: list[AnyOperation] = [
    Operation("DELETE", "queue/{user}/{server}", cancel, "Cancel a spawn", Done, SpawnReason, Nothing, Needs.OWN),
    Operation(
        "POST", "queue/{user}/{server}/requeue", requeue, "Requeue a spawn", Done, Nothing, SpawnReason, Needs.ACT
    ),
]
