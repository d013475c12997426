"""The operations that cordon and drain GPUs and nodes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from gpushare_spawner.model.cordon import MAX_REASON
from gpushare_spawner.service.actions.drains import Place
from gpushare_spawner.service.api.acting import actor_of, done
from gpushare_spawner.service.api.answers import Done
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Arguments, Call, Needs, Nothing, Operation
from gpushare_spawner.wording import api as words


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


async def _place(call: Call[Any, Any]) -> Place:
    """Return what the address names. Raises ApiError if there is no such thing."""
    node, gpu = call.path["node"], call.path.get("uuid", "")
    snapshot = await call.services.snapshots.current()
    found = next((one for one in snapshot.snapshots if one.report is not None and one.report.node == node), None)
    if found is None or found.report is None:
        raise ApiError(404, "unknown", words.unknown_node(node))
    if gpu and gpu not in {one.uuid for one in found.report.gpus}:
        raise ApiError(404, "unknown", words.unknown_gpu(gpu, node))
    return Place(found.agent, node, gpu)


_NODE, _GPU = "nodes/{node}", "nodes/{node}/gpus/{uuid}"
_REASON = {"reason": "The fan is replaced."}
_DRAIN = _REASON | {"stop_after": 7200}

OPERATIONS: list[AnyOperation] = [
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
