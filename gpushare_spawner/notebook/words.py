"""A share's status in words: for the status bar, its tooltip, announcements and the terminal. Pure functions.

Where an instant is meant the text has ``{time}`` in it: only the reader's browser or terminal knows the reader's
time zone.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.quantity import format_wait
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.notebook.share_status import GpuStatus, LimitHit, ShareStatus, Step

GIB = 2**30
TOAST_LETTERS = 140
"""JupyterLab cuts longer notifications."""


def clock(at: float) -> str:
    """The instant (seconds since the epoch) as local time: 14:05."""
    return datetime.fromtimestamp(at).strftime("%H:%M")


def amount(units: int, gpus: int = 1) -> str:
    """25 -> "0.25 GPU"; 100 units on each of 2 -> "2 GPUs"."""
    count = units * gpus / 100
    if count == round(count):
        return f"{count:.0f} GPU" if count <= 1 else f"{count:.0f} GPUs"
    return f"{count:.2f} GPU"


def gibibytes(size: int) -> str:
    """3.1 GiB in bytes -> "3.1"; whole numbers without the point, and what is small with two digits."""
    number = size / GIB
    if number and number < 0.1:
        return f"{max(number, 0.01):.2f}"
    return f"{number:.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """75 -> "1 min", 4000 -> "1 h 6 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes or not hours))


def line(status: ShareStatus) -> str:
    """One line for the status bar: "0.25 GPU · active · 3.1 of 16 GiB"; empty without a share."""
    if not status.shared:
        return ""
    if not status.known:
        return "GPU share: unknown"
    gpus = len(status.gpus)
    parts = [amount(status.share_units, gpus), _state(status)]
    if status.tier is not Tier.RELEASED and status.lease == "waiting":
        parts.append("waiting")
    if status.borrowed_units:
        parts.append(f"{amount(status.borrowed_units, gpus)} borrowed")
    parts.append(f"{gibibytes(status.memory_bytes)} of {gibibytes(status.limit_bytes)} GiB")
    return " · ".join(parts)


def _state(status: ShareStatus) -> str:
    match status.tier:
        case Tier.DOWNGRADED:
            return f"shrunk to {amount(status.effective_units, len(status.gpus))}"
        case Tier.RELEASED:
            return "waiting to come back" if status.lease == "waiting" else "released"
        case _:
            return str(status.tier)


def explanation(status: ShareStatus) -> str:
    """Some sentences for the tooltip; one a line. May have ``{time}`` in it."""
    if not status.shared:
        return "This server has no share of a GPU."
    if not status.known:
        return status.problem
    gpus = len(status.gpus)
    share = amount(status.share_units, gpus)
    said = [tier_now(status)]
    if status.announced is not None:
        said.append(announcement(status, status.announced))
    if status.lease == "waiting":
        said.append("Its GPU work waits: neighbours have the GPU at the moment. It is served in turn.")
    if status.borrowed_units:
        said.append(
            f"{amount(status.borrowed_units, gpus)} of {share} are borrowed from idle neighbours, "
            f"and go back when they return. {amount(status.guaranteed_units, gpus)} is guaranteed now."
        )
    said.append(f"Memory: {_memory(status)}.")
    if held := holders(status):
        said.append(f"Allocated by {held}.")
    if status.limit_hit is not None:
        said.append(limit_hit(status, status.limit_hit))
    said += [f"{name[0].upper()}{name[1:]}: {text}." for name, text in delivered(status)]
    others = status.neighbours
    said.append(
        f"{others} {'neighbour shares' if others == 1 else 'neighbours share'} the GPU." if others else "No neighbours."
    )
    return "\n".join(said)


def delivered(status: ShareStatus) -> list[tuple[str, str]]:
    """GPU time and waits as (name, text); empty while nobody has competed for the GPU."""
    got = status.delivered
    said = []
    if got is not None and got.entitled_seconds >= 1:
        received, entitled = duration(got.delivered_seconds), duration(got.entitled_seconds)
        said.append(
            ("GPU time", f"received {received} of the {entitled} that it was entitled to while others competed")
        )
    if got is not None and got.waits:
        half, most = format_wait(got.wait_p50_seconds), format_wait(got.wait_p95_seconds)
        said.append(("waits", f"{got.waits}, half of them under {half}, 95 % under {most}"))
    return said


def limit_hit(status: ShareStatus, hit: LimitHit) -> str:
    """The limit that refused the last failed allocation, and what helps."""
    ago = "just now" if hit.seconds_ago < 1 else f"{duration(hit.seconds_ago)} ago"
    failed = f"An allocation of {size(hit.requested_bytes)} failed {ago} (CUDA out of memory): "
    restart = [advice for advice in [_restart(status)] if advice]
    match hit.limit:
        case "session":
            limit = size(max((gpu.limit_bytes for gpu in status.gpus), default=0))
            each = " on each GPU" if len(status.gpus) > 1 else ""
            why = (
                f"this session may allocate {limit}{each}, all its kernels together, "
                f"and had allocated {size(hit.allocated_bytes)}."
            )
            helps = _advice(restart, "choose a template with a larger GPU memory limit.")
        case "session_host_memory":
            why = (
                "this server's memory limit leaves too little host memory, and GPU memory has to move there "
                "while neighbours use the GPU."
            )
            free = "Free host memory, for example large variables."
            helps = _advice([free, *restart], "choose a template with more memory.")
        case _:
            why = "all sessions together have used up the machine's host memory for data that moves off its GPUs."
            helps = _advice(restart, "try again when neighbours use less.")
    return f"{failed}{why} {helps}"


def _advice(first: list[str], last: str) -> str:
    """What the user can try, the last of it as the alternative."""
    return " ".join([*first, f"Or {last}" if first else f"{last[0].upper()}{last[1:]}"])


def _memory(of: ShareStatus | GpuStatus) -> str:
    """Allocated memory, its limit and what of it is on the GPU.

    Memory that no kernel has touched yet is nowhere, so what is not on the GPU is not all in host memory.
    """
    allocated, limit, resident = (gibibytes(part) for part in (of.memory_bytes, of.limit_bytes, of.resident_bytes))
    return f"{allocated} of {limit} GiB allocated, {resident} GiB of that on the GPU"


def refused(status: ShareStatus, hit: LimitHit) -> str:
    """The refused allocation and its limit; at most TOAST_LETTERS long, so `limit_hit` says what helps."""
    more = size(hit.requested_bytes)
    match hit.limit:
        case "session":
            limit = size(max((gpu.limit_bytes for gpu in status.gpus), default=0))
            return f"Out of GPU memory: {more} more would exceed the {limit} that this session may allocate."
        case "session_host_memory":
            return f"Out of memory: for {more} more GPU memory this server has too little host memory."
        case _:
            return f"Out of memory: for {more} more GPU memory this machine has too little host memory."


def _restart(status: ShareStatus) -> str:
    """The process whose restart frees most memory, as advice; empty where no process has any."""
    if not status.processes:
        return "Restart a kernel that you no longer need: that frees its GPU memory."
    largest = max(status.processes, key=lambda process: process.memory_bytes)
    if not largest.memory_bytes:
        return ""
    return f"Restart {largest.name or f'process {largest.pid}'} to free {size(largest.memory_bytes)}."


def size(amount: int) -> str:
    """Bytes in the unit that is easiest to read: "3.1 GiB", "20 MiB"."""
    return f"{gibibytes(amount)} GiB" if amount >= GIB // 2 else f"{max(round(amount / 2**20), 1 if amount else 0)} MiB"


def holders(status: ShareStatus) -> str:
    """The processes that allocated the session's GPU memory, the largest first; empty for fewer than two."""
    memory: dict[int, int] = {}
    for process in status.processes:
        memory[process.pid] = memory.get(process.pid, 0) + process.memory_bytes
    names = {process.pid: process.name or f"process {process.pid}" for process in status.processes}
    largest = sorted(((amount, pid) for pid, amount in memory.items() if amount), reverse=True)
    if len(largest) < 2:
        return ""
    more = f", and {len(largest) - 4} more" if len(largest) > 4 else ""
    return ", ".join(f"{names[pid]} {size(amount)}" for amount, pid in largest[:4]) + more


def tier_now(status: ShareStatus) -> str:
    """What the tier means to the user, in a sentence or two."""
    gpus = len(status.gpus)
    share = amount(status.share_units, gpus)
    kept = "Variables and GPU memory are kept, and the next cell that uses the GPU brings it back."
    match status.tier:
        case Tier.DOWNGRADED:
            now = amount(status.effective_units, gpus)
            return f"Your GPU share has shrunk from {share} to {now}, because the GPU was idle. {kept}"
        case Tier.RELEASED:
            return f"Your GPU share ({share}) was given back, because the GPU was idle. {kept}"
        case _:
            return f"You have {share}: guaranteed when neighbours are busy, more when they are not."


def changed(status: ShareStatus) -> str:
    """What to say when the tier has just become what it is; at most TOAST_LETTERS long."""
    gpus = len(status.gpus)
    kept = "Your data is kept; the next cell that uses the GPU brings it back."
    match status.tier:
        case Tier.DOWNGRADED:
            return f"Your GPU share shrank to {amount(status.effective_units, gpus)}: the GPU was idle. {kept}"
        case Tier.RELEASED:
            return f"Your GPU share was given back: the GPU was idle. {kept}"
        case _:
            return f"Your GPU share is back: {amount(status.share_units, gpus)}."


def announcement(status: ShareStatus, step: Step) -> str:
    """What happens at ``{time}``, and how to avert it; at most TOAST_LETTERS long."""
    keep = "Run a cell that uses it to keep it."
    match step.tier:
        case Tier.DOWNGRADED:
            smaller = amount(step.effective_units, len(status.gpus))
            return f"Your GPU share shrinks to {smaller} at {{time}}, because the GPU has been idle. {keep}"
        case Tier.RELEASED:
            return (
                f"Your GPU share is given back at {{time}}, because the GPU has been idle. Your kernel lives on. {keep}"
            )
        case Tier.STOPPED:
            return _stop_announcement(step)
        case _:
            return f"Your GPU share changes to {amount(step.effective_units, len(status.gpus))} at {{time}}."


def _stop_announcement(step: Step) -> str:
    match step.cause:
        case IdleCause.MAX_AGE:
            age = f"it has run for {duration(step.after_seconds)}, the limit here" if step.after_seconds else "its age"
            return f"Your server will stop at {{time}}: {age}. Save your work; you can start the server again."
        case IdleCause.IDLE:
            idle = f" for {duration(step.after_seconds)}" if step.after_seconds else ""
            advice = "Save your work, or run a cell to keep it."
            return f"Your server will stop at {{time}}: it has been idle{idle}. {advice}"
        case _:
            return "Your server will stop at {time}. Save your work."


def page(status: ShareStatus, at: Callable[[float], str] = clock) -> str:
    """The whole status for a terminal or a cell; ``at`` writes an instant."""
    if not status.shared:
        return "This is not a shared GPU session: the server was started without a share of a GPU."
    if not status.known:
        return f"The GPU share is not known: {status.problem}"
    gpus = len(status.gpus)
    borrowed = f", {amount(status.borrowed_units, gpus)} of it borrowed" if status.borrowed_units else ""
    rows = [
        ("share", amount(status.share_units, gpus) + borrowed),
        ("tier", _tier(status)),
        ("guaranteed now", amount(status.guaranteed_units, gpus)),
        ("idle", _idle(status)),
    ]
    if status.announced is not None:
        when = at(status.announced.at)
        rows.append(("announced", announcement(status, status.announced).replace("{time}", when)))
    rows += delivered(status)
    for number, gpu in enumerate(status.gpus):
        prefix = f"GPU {number}: " if gpus > 1 else ""
        neighbours = f"{gpu.sessions - 1}" if gpu.sessions > 1 else "none"
        working = f", sessions with work now: {gpu.sessions_with_work}" if gpu.sessions_with_work else ""
        rows += [
            (f"{prefix}memory", _memory(gpu)),
            (f"{prefix}lease", {"none": "none: no GPU work"}.get(gpu.lease, gpu.lease)),
            (f"{prefix}neighbours", neighbours + working),
        ]
    if held := holders(status):
        rows.append(("allocated by", held))
    if status.limit_hit is not None:
        rows.append(("memory limit", limit_hit(status, status.limit_hit)))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in rows)


def _tier(status: ShareStatus) -> str:
    if status.tier is Tier.ACTIVE:
        return "active"
    now = amount(status.effective_units, len(status.gpus))
    held = f" to {now}" if status.tier is Tier.DOWNGRADED else ""
    return f"{status.tier}{held}; the next GPU work brings the whole share back"


def _idle(status: ShareStatus) -> str:
    if status.idle_seconds is None:
        return "no GPU work yet"
    return "working now" if status.idle_seconds < 1 else f"for {duration(status.idle_seconds)}"
