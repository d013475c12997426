"""A session's device memory in words: refused allocations, who holds the memory, what helps; suspended sessions."""

from __future__ import annotations

from gpushare_spawner.model.share_status import LimitHit, ShareStatus
from gpushare_spawner.wording.amounts import elapsed, memory

SUSPENDED = (
    "This session is suspended: its GPU memory is in host memory, because other sessions need the GPU's memory. Its "
    "next GPU work resumes it."
)
"""Of a session of the memory engine `suspend`."""


def limit_hit(status: ShareStatus, hit: LimitHit) -> str:
    """Return which limit refused the last failed allocation, and what helps."""
    ago = "just now" if hit.seconds_ago < 1 else f"{elapsed(hit.seconds_ago)} ago"
    failed = f"An allocation of {memory(hit.requested_bytes)} failed {ago} (CUDA out of memory): "
    most = max((gpu.limit_bytes for gpu in status.gpus), default=0)
    lacking = hit.requested_bytes + hit.allocated_bytes - most if hit.limit == "session" else hit.requested_bytes
    restart = [advice for advice in [_restart(status, lacking)] if advice and not hit.requested_bytes > most > 0]
    match hit.limit:
        case "session":
            limit = memory(most)
            each = " on each GPU" if len(status.gpus) > 1 else ""
            why = (
                f"this session may allocate {limit}{each}, all its kernels together, "
                f"and had allocated {memory(hit.allocated_bytes)}."
            )
            larger = f" (at least {memory(hit.requested_bytes)})" if hit.requested_bytes > most else ""
            helps = _advice(restart, f"choose a template with a larger GPU memory limit{larger}.")
        case "session_host_memory":
            why = (
                "this server's memory limit leaves too little host memory for GPU memory that is paged out while other "
                "sessions use the GPU."
            )
            free = "Free host memory, for example large variables."
            helps = _advice([free, *restart], "choose a template with more memory.")
        case _:
            why = "the machine's host memory for paged-out GPU memory is used, or kept for other sessions."
            helps = _advice(restart, "try again when other sessions use less.")
    return f"{failed}{why} {helps}"


def _advice(first: list[str], last: str) -> str:
    """What the user can try, the last of it as the alternative."""
    return " ".join([*first, f"Or {last}" if first else f"{last[0].upper()}{last[1:]}"])


def refused(status: ShareStatus, hit: LimitHit) -> str:
    """Return the refused allocation and its limit, as short as a notice must be; `limit_hit` says what helps."""
    more = memory(hit.requested_bytes)
    match hit.limit:
        case "session":
            limit = memory(max((gpu.limit_bytes for gpu in status.gpus), default=0))
            return f"Out of GPU memory: {more} more would exceed the {limit} that this session may allocate."
        case "session_host_memory":
            return f"Out of memory: this server has too little host memory for {more} more GPU memory."
        case _:
            return f"Out of memory: this machine has too little host memory for {more} more GPU memory."


def _restart(status: ShareStatus, lacking: int) -> str:
    """Return advice to restart the fewest processes that hold what an allocation lacked, in bytes; empty where all of
    them hold less: to restart them would not help."""
    if not status.processes:
        return "Restart a kernel that you no longer need: that frees its GPU memory."
    held = sorted(_by_process(status).items(), key=lambda entry: -entry[1])
    freed, names = 0, []
    for name, size in held:
        freed += size
        names.append(name)
        if freed and freed >= lacking:
            return f"Restart {' and '.join(names)} to free {memory(freed)}."
    return ""


def _by_process(status: ShareStatus) -> dict[str, int]:
    """Return the bytes that each process has allocated on all GPUs, by its name."""
    names = {process.pid: process.name or f"process {process.pid}" for process in status.processes}
    sums = dict.fromkeys(names.values(), 0)
    for process in status.processes:
        sums[names[process.pid]] += process.memory_bytes
    return sums


def holders(status: ShareStatus) -> str:
    """Return the processes that allocated the session's GPU memory, the largest first; empty for fewer than two."""
    by_pid: dict[int, int] = {}
    for process in status.processes:
        by_pid[process.pid] = by_pid.get(process.pid, 0) + process.memory_bytes
    names = {process.pid: process.name or f"process {process.pid}" for process in status.processes}
    largest = sorted(((held, pid) for pid, held in by_pid.items() if held), reverse=True)
    if len(largest) < 2:
        return ""
    more = f", and {len(largest) - 4} more" if len(largest) > 4 else ""
    return ", ".join(f"{names[pid]} {memory(held)}" for held, pid in largest[:4]) + more


def stays(reason: str, suspended: bool = False) -> str:
    """Return what it means that a session cannot be suspended, or, if it is suspended, that it cannot be resumed;
    nothing without a reason."""
    if not reason:
        return ""
    if suspended:
        return f"This session cannot be resumed for now: {reason}"
    return f"This session cannot be suspended and keeps its GPU memory: {reason}"
