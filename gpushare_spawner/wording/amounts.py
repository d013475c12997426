"""Amounts as text: GPU shares, memory, durations, instants. Also short error texts that several parts use.

No other module formats amounts. `model.quantity` does the reverse: it parses amounts in files ("4Gi", "15m").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache

from gpushare_spawner.model.share import UNITS_PER_GPU, Share

MIB, GIB, TIB = 2**20, 2**30, 2**40

LOCAL_TIME_SCRIPT = __file__.removesuffix("amounts.py") + "local_time.js"
"""Path of the script that converts instants in a web page, as formatted by `utc`, to the reader's time zone."""

SOON_SECONDS = 120.0
"""Distance below which the minute of an instant is not precise enough to show how much time is left."""


def clock(at: float, now: float) -> str:
    """Return an instant as local time, with its day if that is not today: "14:05", "14:05 on 3 Nov".

    Both arguments are seconds since the epoch.
    """
    return _clock(datetime.fromtimestamp(at), datetime.fromtimestamp(now))


def near_clock(at: float, now: float) -> str:
    """Return an instant like `clock`, with its seconds if it is less than 2 min from ``now``: "14:05:20"."""
    soon = abs(at - now) < SOON_SECONDS
    return _clock(datetime.fromtimestamp(at), datetime.fromtimestamp(now), time="%H:%M:%S" if soon else "%H:%M")


def utc(at: float) -> str:
    """Return an instant in full, for readers in unknown time zones: "2026-11-03 14:05 UTC".

    Programs that know the reader's time zone convert it with `localised`, and web pages with LOCAL_TIME_SCRIPT.
    """
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


_UTC = re.compile(r"\b\d{4}-\d\d-\d\d[ \u00a0]\d\d:\d\d[ \u00a0]UTC\b")


def localised(text: str, now: float) -> str:
    """Return a text with the instants formatted by `utc` converted to local time, see `clock`."""

    def shown(match: re.Match[str]) -> str:
        try:
            at = datetime.strptime(match[0].replace("\u00a0", " "), "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
        except ValueError:
            return match[0]
        return clock(at.timestamp(), now)

    return _UTC.sub(shown, text)


def _clock(at: datetime, now: datetime, time: str = "%H:%M") -> str:
    return f"{at:{time}}" + (f" on {at.day} {at:%b}" if at.date() != now.date() else "")


def gpu_share(units: int, gpus: int = 1, last: int = 0) -> str:
    """Return units of 1 % on each of some GPUs as a share: 25 -> "0.25 GPU"; 100 on each of 2 -> "2 GPUs".

    A part of each of several GPUs is not the same as their sum on one: 50 on each of 2 -> "2 × 0.50 GPU". ``last``:
    most units on the last GPU; 0: as many as on the others.
    """
    if gpus > 1 and 0 < last < units:
        return str(Share(units, gpus, last))
    if gpus > 1 and units % UNITS_PER_GPU:
        return f"{gpus} × {gpu_share(units)}"
    whole = units * gpus % UNITS_PER_GPU == 0
    return f"{number_of_gpus(units, gpus)} {'GPUs' if whole and units * gpus > UNITS_PER_GPU else 'GPU'}"


def share_of(each: Iterable[int]) -> str:
    """Return some units on each GPU as a share: 70 and 20 -> "0.70 + 0.20 GPU"; 50, 50 and 0 -> "2 × 0.50 GPU"."""
    units = sorted(filter(None, each), reverse=True) or [0]
    if len(set(units[:-1])) > 1:
        return f"{' + '.join(map(number_of_gpus, units))} GPU"
    return gpu_share(units[0], len(units), units[-1])


def number_of_gpus(units: int, gpus: int = 1) -> str:
    """Return the number of `gpu_share` without its unit: 25 -> "0.25", 100 -> "1", 0 -> "0"."""
    count = units * gpus / UNITS_PER_GPU
    return f"{count:.0f}" if count == round(count) else f"{count:.2f}"


def time_limit(units: int) -> str:
    """Return a limit of GPU time."""
    return f"at most {units} % of the GPU's time"


def guarantee(now: str, full: str, reclaimed: bool = False) -> str:
    """Return the current guarantee of a session on lent units, and when its full share is guaranteed.

    ``now``: text for the units that the session owns; empty: none. ``full``: text for its share. ``reclaimed``: whether
    the owners of the lent units use all of them again.
    """
    where = "reclaimed by its owners" if reclaimed else "borrowed from idle sessions"
    lent = f"the rest is {where}" if now else f"all units are {where.replace('its', 'their')}"
    return f"{now or 'no GPU time and no GPU memory'} while {lent}; {full} after these have stopped"


def gpu_hours(hours: float) -> str:
    """Return GPU-hours with about three significant digits: 0.034 -> "0.03", 12.34 -> "12.3", 1234 -> "1,234"."""
    if 0 < hours < 0.005:
        return "< 0.01"
    digits = 2 if hours < 9.995 else 1 if hours < 99.95 else 0
    return f"{hours:,.{digits}f}" if hours else "0"


def memory(size: float) -> str:
    """Return bytes in the unit that is easiest to read: "256 MiB", "3.1 GiB", "1.5 TiB"; 0 is "0 GiB"."""
    if size <= 0:
        return "0 GiB"
    if round(size / MIB) < 1024:
        return f"{max(round(size / MIB), 1)} MiB"
    number, unit = (size / GIB, "GiB") if round(size / GIB) < 1024 else (size / TIB, "TiB")
    return (f"{number:.1f}".removesuffix(".0") if number < 100 else f"{number:.0f}") + f" {unit}"


def memory_of(size: int, total: int) -> str:
    """Return a part of a total, both in bytes: "3.1 of 16 GiB", "256 MiB of 16 GiB"."""
    part, whole = memory(size), memory(total)
    number, unit = part.split(" ")
    return f"{number} of {whole}" if whole.endswith(unit) else f"{part} of {whole}"


def duration(seconds: float) -> str:
    """Return seconds in at most two units: 0.5 -> "0.5 s", 75 -> "1 min 15 s", 4000 -> "1 h 6 min"; at least "0 s"."""
    if 0 < seconds < 0.95:
        return f"{max(seconds, 0.001):.2g} s"
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes) + [f"{left} s"] * bool(left and not hours)
    return " ".join(parts)


def elapsed(seconds: float) -> str:
    """Return a growing duration in whole seconds, and in whole minutes from 5 min on, so that a page rarely changes."""
    return duration(round(seconds) if seconds < 300 else 60 * (seconds // 60))


def latency(seconds: float) -> str:
    """Return a short wait, with milliseconds: 0.0337 -> "34 ms", 1.74 -> "1.7 s", 75 -> "1 min 15 s"."""
    if round(seconds * 1000) < 1000:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


@lru_cache(maxsize=2000)
def unbroken(text: str) -> str:
    """Return the text with no-break spaces between numbers and units, and within durations like "3 min 27 s"."""
    joined = re.sub(r"(?<=\d) (?=(?:[KMGT]iB|min|h|ms|s|units?|GPUs?)\b|%)", "\u00a0", text)
    return re.sub(r"(?<=\u00a0h) (?=\d+\u00a0min\b)|(?<=\u00a0min) (?=\d+\u00a0s\b)", "\u00a0", joined)


def printable(text: str) -> str:
    """Return the text on one line, with control characters and bytes that are not UTF-8 escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def either(names: Iterable[str]) -> str:
    """Return names in their order: "a, b or c". There is at least one."""
    *most, last = sorted(names)
    return f"{', '.join(most)} or {last}" if most else last


def plural(count: int, singular: str, more: str | None = None) -> str:
    """Return a count with its noun: 1 -> "1 session", 2 -> "2 sessions"."""
    return f"{count} {singular if count == 1 else more or singular + 's'}"


_GOES_ON = "GPU work continues without the agent."
_REFUSALS = {
    1: "The agent could not read the request.",
    2: "The agent uses another version of the protocol. Restart the server to get the agent's version.",
    3: "The agent does not accept requests from this user.",
    4: "This session has ended. Restart the server to get a GPU share again.",
}

_EXTRAS = {
    "grpc": "kubernetes",
    "google": "kubernetes",
    "kubernetes_asyncio": "kubernetes",
    "kubespawner": "kubernetes",
    "systemdspawner": "systemd",
    "psycopg": "postgresql",
    "jupyterlab": "demo",
    "numpy": "demo",
    "cuda": "demo",
}
"""The extra of gpushare-spawner in pyproject.toml that installs a package, by top-level module."""

AGENT_NOT_YET = "The agent has not answered yet."
AGENT_CLOSED = f"The agent closed the connection. {_GOES_ON}"


def reason(error: BaseException) -> str:
    """Return the text of an exception, or the name of its class if it has no text, like ``TimeoutError()``."""
    return str(error) or type(error).__name__


def belongs_to_extra(error: ImportError) -> bool:
    """Return whether an extra of gpushare-spawner installs the missing module."""
    return _module(error) in _EXTRAS


def missing_package(feature: str, error: ImportError) -> str:
    """Return which package a feature (an option, class or command) lacks, and the command that installs it."""
    module = _module(error)
    missing = f"{feature} needs the Python package {module}, which is not installed."
    if module not in _EXTRAS:
        return f"{missing} Install it in this Python environment."
    return f"{missing} Install it with: pip install 'gpushare-spawner[{_EXTRAS[module]}]'"


def _module(error: ImportError) -> str:
    return (error.name or "").partition(".")[0]


def http_status(code: int | None, phrase: str | None) -> str:
    """Return an HTTP status with the server's phrase, if it sent one: "503 Service Unavailable", "503"."""
    return f"{code} {phrase or ''}".strip()


def agent_refused(code: int) -> str:
    """Return the meaning of an ERROR frame's code, for the session's user."""
    return _REFUSALS.get(code, f"The agent refused the request (code {code}).")


def agent_silent(timeout: float) -> str:
    """Return that the agent did not answer within ``timeout`` seconds."""
    return f"The agent did not answer within {timeout:g} s. {_GOES_ON}"


def agent_unavailable(reason: str) -> str:
    """Return that the agent cannot be reached, and why."""
    return f"The agent is unavailable ({reason}). {_GOES_ON}"


def doubled_gpu(uuid: str, nodes: Sequence[str]) -> str:
    """Return that several nodes report one GPU. ``nodes``: in order of reporting; the first one owns the GPU."""
    return (
        f"GPU {uuid} is reported by the nodes {', '.join(nodes[:-1])} and {nodes[-1]}. It counts for {nodes[0]} alone, "
        "and no server is placed on it elsewhere. Two GPUs never have one UUID: "
        "the agents run on one machine, machines with simulated GPUs were copied, or a node reports a GPU that it does "
        "not have."
    )
