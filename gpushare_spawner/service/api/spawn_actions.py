"""The operations that act on a spawn that waits."""

from __future__ import annotations

from gpushare_spawner.service.api.acting import actor_of, done
from gpushare_spawner.service.api.answers import Done
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Call, Needs, Nothing, Operation
from gpushare_spawner.service.api.spawn_address import server_of
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording import api as words


async def cancel(call: Call[Nothing, Nothing]) -> Done:
    """Cancel a spawn. Nothing stays reserved."""
    spawn = _visible(call)
    if not call.caller.may_act_on(spawn):
        raise ApiError(403, "forbidden", words.not_your_session(Needs.OWN.scopes))
    return await done(call, lambda: call.services.actions.spawns.cancel(spawn.user, spawn.name, actor_of(call)))


async def requeue(call: Call[Nothing, Nothing]) -> Done:
    """Put a spawn at the end of the queue: it is cancelled, and started anew with the same options."""
    spawn = _visible(call)
    return await done(call, lambda: call.services.actions.spawns.requeue(spawn.user, spawn.name, actor_of(call)))


def _visible(call: Call[Nothing, Nothing]) -> HubServer:
    """Return the server that the address names. Raises ApiError if the caller may not see it."""
    server = HubServer(call.path["user"], server_of(call.path["server"]))
    if not call.caller.viewer.may_see(server):
        raise ApiError(404, "unknown", words.unknown_spawn(server.label))
    return server


OPERATIONS: list[AnyOperation] = [
    Operation("DELETE", "queue/{user}/{server}", cancel, "Cancel a spawn", Done, Nothing, Nothing, Needs.OWN),
    Operation("POST", "queue/{user}/{server}/requeue", requeue, "Requeue a spawn", Done, Nothing, Nothing, Needs.ACT),
]
