"""A session's share as text, for the status bar, its tooltip, the terminal and a notebook cell.

The texts also cover its device memory (refused allocations, processes with the most memory, suspended sessions), and
why its GPU work is currently slow. ``{time}`` in a text stands for an instant, because only the reader's browser or
terminal knows the reader's time zone. Notices are in `wording.notices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.model.layers import Layer
from gpushare_spawner.model.share import UNITS_PER_GPU, Tier
from gpushare_spawner.model.share_status import (
    CellsStatus,
    CellStatus,
    ControlsStatus,
    GpuStatus,
    LimitHit,
    ShareStatus,
)
from gpushare_spawner.wording.amounts import (
    clock,
    elapsed,
    gpu_share,
    guarantee,
    latency,
    localised,
    memory,
    memory_of,
    near_clock,
    plural,
    share_of,
    time_limit,
)
from gpushare_spawner.wording.layers import NOT_MEASURED, kept_within, other_layer, when_idle
from gpushare_spawner.wording.notices import USED_UP, WAITS, notice, while_idle

LACKING = (
    "This server has less guaranteed CPU and memory at the moment. They were lowered while its GPU share was released, "
    "and its machine has not granted them again yet, most likely because it is full. They are restored when capacity "
    "is free. Tell the admin if this persists."
)
"""Text for the user, in JupyterLab and on the dashboard."""


SUSPENDED = (
    "This session is suspended: its GPU memory is in host memory, because other sessions need the GPU's memory. Its "
    "next GPU work resumes it."
)
"""Text for a session with the memory engine `suspend`."""


def limit_hit(status: ShareStatus, hit: LimitHit) -> str:
    """Return which limit refused the last allocation that failed, and the remedy."""
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
            why = "the machine's host memory for paged-out GPU memory is used up, or reserved for other sessions."
            helps = _advice(restart, "try again when other sessions use less.")
    return f"{failed}{why} {helps}"


def _advice(first: list[str], last: str) -> str:
    """Return the remedies that the user can try, with ``last`` as the alternative."""
    return " ".join([*first, f"Or {last}" if first else f"{last[0].upper()}{last[1:]}"])


def refused(status: ShareStatus, hit: LimitHit) -> str:
    """Return the refused allocation and its limit, short enough for a notice; `limit_hit` adds the remedy."""
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
    """Return advice to restart the fewest processes that would free the `lacking` bytes.

    The advice is empty if all processes together hold fewer bytes.
    """
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
    """Return the bytes that each process has allocated on all GPUs, by process name."""
    names = {process.pid: process.name or f"process {process.pid}" for process in status.processes}
    sums = dict.fromkeys(names.values(), 0)
    for process in status.processes:
        sums[names[process.pid]] += process.memory_bytes
    return sums


def holders(status: ShareStatus) -> str:
    """Return the processes that allocated the session's GPU memory, largest first; empty for fewer than two."""
    by_pid: dict[int, int] = {}
    for process in status.processes:
        by_pid[process.pid] = by_pid.get(process.pid, 0) + process.memory_bytes
    names = {process.pid: process.name or f"process {process.pid}" for process in status.processes}
    largest = sorted(((held, pid) for pid, held in by_pid.items() if held), reverse=True)
    if len(largest) < 2:
        return ""
    more = f", and {len(largest) - 4} more" if len(largest) > 4 else ""
    return ", ".join(f"{names[pid]} {memory(held)}" for held, pid in largest[:4]) + more


_NO_TIME = 0.005
"""Seconds below which a time is not shown: a burst's end is reported a few milliseconds later."""


def cell_cost(cell: CellStatus) -> str:
    """Return the GPU time, the peak of memory and the waits of a cell in one line; empty without GPU work."""
    if max(cell.gpu_seconds, cell.lease_seconds, cell.memory_seconds) < _NO_TIME:
        return ""
    parts = [f"GPU time {latency(cell.gpu_seconds)}"]
    peaks = [(cell.on_gpu_bytes, "on the GPU"), (cell.paged_out_bytes, "paged out")]
    peak = " and ".join(f"{memory(size)} {where}" for size, where in peaks if size)
    waits = [(cell.lease_seconds, "the GPU"), (cell.memory_seconds, "memory")]
    wait = " and ".join(f"{latency(seconds)} for {what}" for seconds, what in waits if seconds >= _NO_TIME)
    parts += [f"at most {peak}"] if peak else []
    parts += [f"waited {wait}"] if wait else []
    if cell.divided_seconds >= _NO_TIME:
        parts.append(f"{latency(cell.divided_seconds)} of the GPU time divided evenly with cells that ran meanwhile")
    return " · ".join(parts)


def cells_page(cells: CellsStatus, kernels: Mapping[int, str], now: float) -> str:
    """Return the cells of a session with their sums, for a terminal. ``kernels``: names by pid."""
    lines = []
    for cell in cells.cells:
        count = f" [{cell.count}]" if cell.count else ""
        took = f"{'runs for' if cell.running else 'took'} {latency(cell.seconds)}"
        cost = cell_cost(cell) or (f"GPU time below {latency(_NO_TIME)}" if cell.gpu_seconds else "no GPU work")
        lines.append(f"{near_clock(cell.at, now)}  {kernels.get(cell.pid, 'a kernel')}{count} {took}: {cost}")
    sums = [(sum(cell.gpu_seconds for cell in cells.cells), f"in {plural(len(cells.cells), 'cell')}")]
    sums += [(cells.earlier_seconds, f"in {plural(cells.earlier, 'earlier cell')}")] if cells.earlier else []
    sums.append((cells.outside_seconds, "outside of cells"))
    parts = ", ".join(f"{latency(seconds)} {where}" for seconds, where in sums)
    return "\n".join([*lines, f"GPU time {latency(cells.gpu_seconds)}: {parts}."])


def stays(reason: str, suspended: bool = False) -> str:
    """Return that a session cannot be suspended or, if it is suspended, cannot be resumed; empty without a reason."""
    if not reason:
        return ""
    if suspended:
        return f"This session cannot be resumed for now: {reason}"
    return f"This session cannot be suspended and keeps its GPU memory: {reason}"


def line(status: ShareStatus) -> str:
    """Return one line for the status bar: "0.25 GPU · active · 3.1 of 16 GiB"; empty without a share."""
    if not status.shared:
        return ""
    if not status.known:
        return "GPU share: unknown"
    gpus, layer = status.gpu_count, other_layer(status.layer)
    parts = [
        gpu_share(status.share_units, gpus, status.last_units),
        _tier_in_short(status) if layer is None else layer.title,
    ]
    if status.layer_trouble:
        parts.append("GPU problem")
    if status.lease == "waiting":
        parts.append("waiting for the GPU")
    if status.borrowed_now:
        parts.append(f"{borrowed_now(status)} borrowed")
    if status.controls is not None and status.controls.keep_until is not None:
        parts.append("kept")
    if status.measured:
        parts.append(memory_of(status.memory_bytes, status.limit_bytes))
    return " · ".join(parts)


def borrowed_now(status: ShareStatus) -> str:
    """Return the borrowed units that the session still has."""
    return share_of(borrowed for _, borrowed in status.units_now)


def _tier_in_short(status: ShareStatus) -> str:
    if status.tier is Tier.DOWNGRADED:
        return f"downgraded to {gpu_share(status.effective_units, status.gpu_count, status.last_units)}"
    return str(status.tier)


def explanation(status: ShareStatus) -> str:
    """Return the sentences for the tooltip, one per line. The text can contain ``{time}``."""
    if not status.shared:
        return "This server has no GPU share."
    if not status.known:
        return status.problem
    gpus = status.gpu_count
    share = gpu_share(status.share_units, gpus, status.last_units)
    sentences = summary(status)
    if status.notice is not None:
        sentences.append(notice(status, status.notice))
    if status.lease == "waiting":
        sentences.append(
            "Your GPU work is waiting: other sessions are using the GPU. It continues when this session gets the GPU."
        )
    if status.borrowed_now:
        sentences.append(
            f"{borrowed_now(status)} of {share} is borrowed from idle sessions and is reclaimed when they work again."
        )
    if _on_lent_units(status):
        sentences.append(f"Guaranteed: {guaranteed(status)}.")
    if status.lacks_requests:
        sentences.append(LACKING)
    if status.suspended:
        sentences.append(SUSPENDED)
    if status.not_suspendable:
        sentences.append(stays(status.not_suspendable, status.suspended))
    if not status.measured:
        return "\n".join([*sentences, NOT_MEASURED])
    sentences.append(f"Memory: {_memory(status)}.")
    if held := holders(status):
        sentences.append(f"Allocated by {held}.")
    if status.limit_hit is not None:
        sentences.append(limit_hit(status, status.limit_hit))
    sentences += [f"{name[0].upper()}{name[1:]}: {text}." for name, text in delivered(status)]
    others = status.neighbours
    sentences.append(
        f"{plural(others, 'other session shares', 'other sessions share')} the GPU."
        if others
        else "No other session shares the GPU."
    )
    return "\n".join(sentences)


def delivered(status: ShareStatus) -> list[tuple[str, str]]:
    """Return GPU time and waits as (name, text); empty until another session has competed for the GPU."""
    got = status.delivered
    rows = []
    if got is not None and got.entitled_seconds >= 1:
        time = received_time(got.delivered_seconds, got.entitled_seconds)
        rows.append(("GPU time", f"received {time} while other sessions competed"))
    for number, gpu in enumerate(got.gpus if rows and got is not None else ()):
        rows.append((f"GPU {number}: GPU time", on_gpu(gpu.delivered_seconds, gpu.entitled_seconds)))
    if got is not None and got.waits:
        half, most = latency(got.wait_p50_seconds), latency(got.wait_p95_seconds)
        rows.append(("waits", f"{got.waits}: half under {half}, 95 % under {most}"))
    return rows


def received_time(received: float, entitled: float) -> str:
    """Return the received part of the entitled GPU time, both in seconds, as the object of "received"."""
    if received >= entitled or elapsed(received) == elapsed(entitled):
        return f"all that it was entitled to ({elapsed(entitled)})"
    return f"{elapsed(received)} of the {elapsed(entitled)} that it was entitled to"


def on_gpu(received: float, entitled: float) -> str:
    """Return the received and entitled time on one of several GPUs, both in seconds."""
    return f"received {received_time(received, entitled)}" if entitled >= 1 else "no competition yet"


def _memory(of: ShareStatus | GpuStatus) -> str:
    """Return allocated memory, its limit, and the part that is on the GPU.

    Memory that no CUDA kernel has touched yet is neither on the GPU nor in host memory.
    """
    return f"{memory_of(of.memory_bytes, of.limit_bytes)} allocated, {memory(of.resident_bytes)} of it on the GPU"


def summary(status: ShareStatus) -> list[str]:
    """Return what the share currently means for the user, and its problems; empty if the share is unknown.

    A refused allocation comes first, because the user has just seen the error.
    """
    if not status.known:
        return []
    out_of_memory = limit_hit(status, status.limit_hit) if status.limit_hit is not None else ""
    return [sentence for sentence in (out_of_memory, status.layer_trouble, tier_now(status)) if sentence]


def tier_now(status: ShareStatus) -> str:
    """Return, in a few sentences, what the tier or another sharing layer means for the user."""
    gpus, layer = status.gpu_count, other_layer(status.layer)
    share = gpu_share(status.share_units, gpus, status.last_units)
    if layer is not None:
        return f"You have {share} by {layer.title}. {kept_within(layer)} {when_idle(layer)}"
    kept = "Variables and GPU memory are kept. GPU cells run at once; some seconds of GPU time restore the share."
    if status.yields:
        if status.effective_units:
            now = gpu_share(status.effective_units, gpus, status.last_units)
            change = f"Your GPU share is downgraded from {share} to {now}: {WAITS}."
        else:
            why = USED_UP if status.background else WAITS
            change = f"Your GPU share ({share}) is released: {why}. GPU cells use what others leave."
        back = "when hours are left again" if status.background else "when the units are free"
        return f"{change} Variables and GPU memory are kept. You get the share back {back}."
    match status.tier:
        case Tier.DOWNGRADED:
            now = gpu_share(status.effective_units, gpus, status.last_units)
            return f"Your GPU share is downgraded from {share} to {now}{while_idle(status)}. {kept}"
        case Tier.RELEASED:
            return f"Your GPU share ({share}) is released{while_idle(status)}. {kept}"
        case _ if status.borrowed_now and status.guaranteed_units >= status.share_units:
            return f"You have {share} now, {_at_most(status)}."
        case _ if status.borrowed_units:
            now = share_of(units for units, _ in status.units_now)
            left = f"you have {now} now" if status.borrowed_now else f"{now} is guaranteed now"
            return (
                f"Of your {share}, {left}: the owners of the lent units have reclaimed the rest. "
                "The dashboard says whether the full share is free elsewhere. If it is, restart the server to get it."
            )
        case _:
            return f"You have {share}: guaranteed while others work, {_at_most(status)}."


def _at_most(status: ShareStatus) -> str:
    limit = status.time_limit_units
    if limit >= UNITS_PER_GPU:
        return "up to 100 % while others are idle"
    return f"{time_limit(limit)}, also while others are idle"


def guaranteed(status: ShareStatus) -> str:
    """Return the currently guaranteed units and, on lent units, when the session gets the rest, as on its card."""
    now = _owned_now(status)
    owned = share_of(now)
    if not _on_lent_units(status):
        return owned
    full = gpu_share(status.share_units, status.gpu_count, status.last_units)
    return guarantee(owned if any(now) else "", full, reclaimed=not status.borrowed_now)


def _owned_now(status: ShareStatus) -> list[int]:
    """Return the guaranteed units on each GPU that no other session can reclaim."""
    return [units - borrowed for units, borrowed in status.units_now]


def _on_lent_units(status: ShareStatus) -> bool:
    """Return whether other sessions own some of the session's units."""
    return status.tier is Tier.ACTIVE and status.borrowed_units > 0


@dataclass(frozen=True)
class Term:
    """One row of a share's terms."""

    name: str
    text: str
    """The text, in which ``{time}`` stands for the instant `at`."""
    at: float | None = None
    """Seconds since the epoch."""


def page(status: ShareStatus, now: float) -> str:
    """Return the whole status for a terminal or a cell. ``now``: seconds since the epoch."""
    if not status.shared:
        return "This server has no GPU share: it was started without one."
    if not status.known:
        return f"The GPU share is unknown: {status.problem}"
    rows = [(term.name, _at_local_time(term, now)) for term in terms(status)]
    if status.limit_hit is not None:
        rows.append(("memory limit", limit_hit(status, status.limit_hit)))
    for message in status.controls.messages if status.controls is not None else ():
        # on one line, because a second line of the message would look like one of the service's rows
        text = localised(" ".join(message.text.split()), now)
        rows.append(("message", f"{text} (an admin, {clock(message.at, now)})"))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in rows)


def _at_local_time(term: Term, now: float) -> str:
    text = localised(term.text, now)
    return text if term.at is None else text.replace("{time}", near_clock(term.at, now))


def terms(status: ShareStatus) -> list[Term]:
    """Return the rows of the share's terms, without a refused allocation; empty if the share is unknown."""
    if not status.known:
        return []
    gpus, layer = status.gpu_count, other_layer(status.layer)
    borrowed = f", {borrowed_now(status)} of it borrowed" if status.borrowed_now else ""
    rows = [Term("share", gpu_share(status.share_units, gpus, status.last_units) + borrowed)]
    if layer is None:
        rows += [Term("tier", _tier(status)), Term("guaranteed now", guaranteed(status))]
        if status.time_limit_units < UNITS_PER_GPU:
            rows.append(Term("maximum", time_limit(status.time_limit_units)))
    else:
        rows += [Term("shared by", f"{layer.title}. {kept_within(layer)}"), Term("idle actions", when_idle(layer))]
    if status.layer_trouble:
        rows.append(Term("GPU problem", status.layer_trouble))
    rows.append(Term("GPU work", _gpu_work(status)))
    if status.lacks_requests:
        rows.append(Term("CPU and memory", LACKING))
    if status.suspended or status.not_suspendable:
        why = stays(status.not_suspendable, status.suspended)
        rows.append(Term("suspended", " ".join([*([SUSPENDED] if status.suspended else []), *([why] if why else [])])))
    if status.notice is not None:
        rows.append(Term("notice", notice(status, status.notice), status.notice.at))
    if status.controls is not None:
        rows += _decided(status.controls)
    rows += [Term(name, text) for name, text in delivered(status)]
    for number, gpu in enumerate(status.gpus):
        prefix = f"GPU {number}: " if gpus > 1 else ""
        others = f"{gpu.sessions - 1}" if gpu.sessions > 1 else "none"
        # the count includes this session
        count = gpu.sessions_with_work if gpu.sessions > 1 else 0
        verb = "has" if count == 1 else "have"
        working = f"; {count} of {gpu.sessions} sessions on the GPU {verb} work now" if count else ""
        rows.append(Term(f"{prefix}memory", _memory(gpu)))
        if layer is None:
            rows.append(Term(f"{prefix}lease", {"none": "none: no GPU work"}.get(gpu.lease, gpu.lease)))
        rows.append(Term(f"{prefix}other sessions", others + working))
    if held := holders(status):
        rows.append(Term("allocated by", held))
    return rows


def _decided(controls: ControlsStatus) -> list[Term]:
    """Return the rows about a keep, an exemption and budgets."""
    rows = []
    if controls.budget:
        rows.append(Term("budget", controls.budget))
    if controls.keep_until is not None:
        rows.append(Term("kept", "until {time}: no idle action", controls.keep_until))
    if controls.exempt:
        until = "until {time}" if controls.exempt_until is not None else "indefinitely"
        rows.append(Term("exempt", f"{until}: no idle action, by an admin's decision", controls.exempt_until))
    return rows


def _tier(status: ShareStatus) -> str:
    if status.tier is Tier.ACTIVE:
        return "active"
    restored = "some seconds of GPU time restore the full share"
    until = "others get the rest, by their quotas" if status.yields else restored
    until = USED_UP if status.background else until
    return f"{_tier_in_short(status)}; {until}"


def _gpu_work(status: ShareStatus) -> str:
    if not status.measured:
        return "not measured"
    if status.idle_seconds is None:
        return "none yet"
    return "running now" if status.works_now else f"none for {elapsed(status.idle_seconds)}"


_SHORT = 0.95
"""Fraction of the entitled GPU time below which the user is informed. The agent's samples are accurate to 5 %."""
_LITTLE = 64 * 2**20
"""Bytes. Less memory than this is paged in within milliseconds."""


def why_slow(status: ShareStatus) -> list[str]:
    """Return the sentences why GPU work is currently slow, main reason first; empty if the share is unknown."""
    if not status.known:
        return []
    layer = other_layer(status.layer)
    if layer is not None:
        return _beside_layer(status, layer)
    # GPU work has the weight of its full share before it waits, so only units held by others are a reason
    lost = status.yields or (status.tier is Tier.ACTIVE and status.borrowed_now < status.borrowed_units)
    reasons = [tier_now(status)] if lost else []
    for number, gpu in enumerate(status.gpus):
        where = f"GPU {number}" if len(status.gpus) > 1 else "the GPU"
        reasons += _from_others(status, gpu, where) + _from_memory(gpu, where)
    if status.time_limit_units < UNITS_PER_GPU and status.works_now:
        reasons.append(f"Your share has {time_limit(status.time_limit_units)}, also while no other session computes.")
    if status.lacks_requests:
        reasons.append(LACKING)
    return reasons + _from_delivered(status) or [_from_the_program(status)]


def _beside_layer(status: ShareStatus, layer: Layer) -> list[str]:
    """Return another sharing layer's problem, the number of other sessions that compute, and how it separates them."""
    reasons = [status.layer_trouble] if status.layer_trouble else []
    for number, gpu in enumerate(status.gpus):
        where = f"GPU {number}" if len(status.gpus) > 1 else "the GPU"
        # the figure includes this session, even if its last work has just ended
        working = gpu.sessions_with_work - status.works_now
        if working > 0:
            reasons.append(_computing(working, where))
    if not status.measured:
        reasons.append(f"{NOT_MEASURED} It is unknown here whether other sessions compute on the GPU.")
    return [*reasons, kept_within(layer)]


def _from_others(status: ShareStatus, gpu: GpuStatus, where: str) -> list[str]:
    """Return how many other sessions compute.

    `sessions_with_work` includes this session while it has a lease or waits for one.
    """
    working = gpu.sessions_with_work - (gpu.lease != "none")
    if working < 1:
        return []
    guaranteed = f"You are guaranteed {share_of(_owned_now(status))} meanwhile."
    if gpu.lease == "waiting":
        others = plural(working, "other session computes", "other sessions compute")
        return [f"Your GPU work waits for {where}: {others} there now. {guaranteed}"]
    return [f"{_computing(working, where)} {guaranteed}"]


def _computing(working: int, where: str) -> str:
    return f"{plural(working, 'other session computes', 'other sessions compute')} on {where} now."


def _from_memory(gpu: GpuStatus, where: str) -> list[str]:
    """Return how much memory is not on the GPU. Kernels may not have touched it yet."""
    away = gpu.memory_bytes - gpu.resident_bytes
    if away < _LITTLE:
        return []
    return [
        f"{memory(away)} of your {memory(gpu.memory_bytes)} is not on {where}: it is paged out, or not used yet. "
        "Work that needs it waits until it is paged in."
    ]


def _from_delivered(status: ShareStatus) -> list[str]:
    got = status.delivered
    if got is None:
        return []
    times = [(gpu, f" on GPU {number}") for number, gpu in enumerate(got.gpus)] or [(got, "")]
    parts = [(time.delivered_seconds / time.entitled_seconds, on) for time, on in times if time.entitled_seconds >= 1]
    part, on = min(parts, default=(1.0, ""))
    if part >= _SHORT:
        return []
    return [
        f"So far, you have received {100 * part:.0f} % of the GPU time that you were entitled to{on} while others "
        "competed. Tell the admin if this persists."
    ]


def _from_the_program(status: ShareStatus) -> str:
    if status.lease == "none":
        return (
            "You have no GPU work now, and no other session has: your program computes on the CPU, or waits for data."
        )
    return "No other session computes, and your memory is on the GPU: the speed depends on your program alone."
