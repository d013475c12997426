"""Why GPU work of a session is slow now: who computes on its GPUs, and which of its memory is not on the GPU."""

from __future__ import annotations

from gpushare_spawner.model.layers import Layer
from gpushare_spawner.model.share_status import GpuStatus, ShareStatus
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.wording.amounts import gpu_share, memory, plural
from gpushare_spawner.wording.layers import NOT_MEASURED, kept_within, other_layer
from gpushare_spawner.wording.pod_requests import LACKING
from gpushare_spawner.wording.share_status import tier_now

_SHORT = 0.95
"""The user reads of less than this part of the entitled GPU time; the agent's samples are that exact."""
_LITTLE = 64 * 2**20
"""Bytes: less memory than this is paged in within milliseconds."""


def why_slow(status: ShareStatus) -> list[str]:
    """Return the reasons that hold now, in sentences, the strongest first; nothing where the share is unknown."""
    if not status.known:
        return []
    layer = other_layer(status.layer)
    if layer is not None:
        return _beside_layer(status, layer)
    # GPU work weighs what its share does before it waits, so only units that others keep are a reason
    lost = status.yields or (status.tier is Tier.ACTIVE and status.borrowed_now < status.borrowed_units)
    said = [tier_now(status)] if lost else []
    for number, gpu in enumerate(status.gpus):
        where = f"GPU {number}" if len(status.gpus) > 1 else "the GPU"
        said += _from_others(status, gpu, where) + _from_memory(gpu, where)
    if status.lacks_requests:
        said.append(LACKING)
    return said + _from_delivered(status) or [_from_the_program(status)]


def _beside_layer(status: ShareStatus, layer: Layer) -> list[str]:
    """Where another layer shares the GPU: what is wrong with it, who else computes, and what keeps sessions apart."""
    said = [status.layer_trouble] if status.layer_trouble else []
    for number, gpu in enumerate(status.gpus):
        where = f"GPU {number}" if len(status.gpus) > 1 else "the GPU"
        # the figure includes this session, which has work while its last work has just ended
        working = gpu.sessions_with_work - status.works_now
        if working > 0:
            said.append(_computing(working, where))
    if not status.measured:
        said.append(f"{NOT_MEASURED} It is unknown here whether other sessions compute on the GPU.")
    return [*said, kept_within(layer)]


def _from_others(status: ShareStatus, gpu: GpuStatus, where: str) -> list[str]:
    """Other sessions that compute. This session counts among those with work while it has a lease or waits for one."""
    working = gpu.sessions_with_work - (gpu.lease != "none")
    if working < 1:
        return []
    guaranteed = f"You are guaranteed {gpu_share(status.guaranteed_now)} meanwhile."
    if gpu.lease == "waiting":
        others = plural(working, "other session computes", "other sessions compute")
        return [f"Your GPU work waits for {where}: {others} there now. {guaranteed}"]
    return [f"{_computing(working, where)} {guaranteed}"]


def _computing(working: int, where: str) -> str:
    return f"{plural(working, 'other session computes', 'other sessions compute')} on {where} now."


def _from_memory(gpu: GpuStatus, where: str) -> list[str]:
    """Memory that is not on the GPU. It can also be memory that no kernel has touched yet."""
    away = gpu.memory_bytes - gpu.resident_bytes
    if away < _LITTLE:
        return []
    return [
        f"{memory(away)} of your {memory(gpu.memory_bytes)} is not on {where}: it is paged out, or not used yet. "
        "Work that needs it waits until it is paged in."
    ]


def _from_delivered(status: ShareStatus) -> list[str]:
    got = status.delivered
    if got is None or got.entitled_seconds < 1 or got.delivered_seconds >= _SHORT * got.entitled_seconds:
        return []
    part = 100 * got.delivered_seconds / got.entitled_seconds
    return [
        f"So far you received {part:.0f} % of the GPU time that you were entitled to while others competed. "
        "Tell the admin if that lasts."
    ]


def _from_the_program(status: ShareStatus) -> str:
    if status.lease == "none":
        return (
            "You have no GPU work now, and no other session has: your program computes on the CPU, or waits for data."
        )
    return "No other session computes, and your memory is on the GPU: the speed depends on your program alone."
