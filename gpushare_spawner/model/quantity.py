"""Amounts in admins' files (``4Gi``, ``500m``, ``15m``, ``25%``), and instants in messages between processes.

The amounts in texts for users are in `wording.amounts`.
"""

from __future__ import annotations

import math
import re
from datetime import time
from decimal import Decimal
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

_BYTES: dict[str, int] = {
    "": 1,
    "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_NUMBER = r"(\d+(?:\.\d+)?)"
_BYTES_WRITTEN = _NUMBER + r"\s*([kKMGTP]|[KMGTP]i|)B?"
_PART_OF_DURATION = _NUMBER + r"\s*(ms|s|m|h|d)"
_DURATION_WRITTEN = rf"({_PART_OF_DURATION}\s*)+"
_CORES_WRITTEN = _NUMBER + r"(m?)"


def parse_bytes(value: Any) -> int:
    """Return the bytes of a number or a Kubernetes quantity: 1024, "4Gi", "1.5G". Raises ValueError."""
    match = re.fullmatch(_BYTES_WRITTEN, str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not an amount of memory: write bytes like 4Gi, 512Mi or 16G")
    return int(Decimal(match[1]) * _BYTES[match[2]])


def parse_seconds(value: Any) -> float:
    """Return the seconds of a number or a duration: 90, "15m", "1h30m".

    Raises ValueError for a negative number and for other text.
    """
    text = str(value).strip()
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if not re.fullmatch(_DURATION_WRITTEN, text):
        raise ValueError(f"{value!r} is not a duration: write a duration like 30s, 15m, 8h or 1h30m")
    parts = re.findall(_PART_OF_DURATION, text)
    return float(sum((Decimal(number) * _SECONDS[unit] for number, unit in parts), Decimal(0)))


def parse_cores(value: Any) -> float:
    """Return the CPU cores of a number or a Kubernetes quantity: 0.5, "500m", 4. Raises ValueError."""
    match = re.fullmatch(_CORES_WRITTEN, str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a number of CPU cores: write CPU cores like 0.5, 500m or 4")
    return float(Decimal(match[1]) / (1000 if match[2] else 1))


def parse_percent(value: Any) -> int:
    """Return the units of "25%". Raises ValueError for other text, and for less than 1 % or more than 100 %."""
    match = re.fullmatch(r"(\d{1,3})\s*%", str(value).strip(), re.ASCII)
    if match is None or not 1 <= int(match[1]) <= 100:
        raise ValueError(f"{value!r} is not a percentage: write a whole number from 1% to 100%, like 25%")
    return int(match[1])


def parse_percent_or_bytes(value: Any) -> str:
    """Return "80%" or "12Gi" unchanged. Raises ValueError for other text."""
    resolve_bytes(value, total=2**40)
    return str(value).strip()


def resolve_bytes(value: Any, total: int) -> int:
    """Return the bytes of "80%" or "12Gi" on a GPU of ``total`` bytes. Raises ValueError."""
    text = str(value).strip()
    if text.endswith("%"):
        match = re.fullmatch(_NUMBER, text[:-1].strip())
        if not match or not 0 < Decimal(match[1]) <= 1000:
            raise ValueError(f"{value!r} is not a percentage: write more than 0% and at most 1000%, like 100%")
        return int(total * Decimal(match[1]) / 100)
    return parse_bytes(text)


def _written(text: str, number: str, pattern: str) -> Any:
    """Return the type for the JSON Schema that editors use: text with a unit, or a plain number.

    ``pattern``: the pattern of the text without surrounding space.
    """
    written = Annotated[str, Field(pattern=rf"^\s*({pattern})\s*$", title=text)]
    return written | Annotated[float, Field(ge=0, title=number)]


Bytes = Annotated[
    int, BeforeValidator(parse_bytes, json_schema_input_type=_written("bytes like 4Gi", "bytes", _BYTES_WRITTEN))
]
"""Bytes, written as a Kubernetes quantity."""

Seconds = Annotated[
    float,
    BeforeValidator(
        parse_seconds,
        json_schema_input_type=_written("duration like 15m", "seconds", rf"{_NUMBER}|{_DURATION_WRITTEN}"),
    ),
]
"""Seconds, written as a duration."""

Cores = Annotated[
    float, BeforeValidator(parse_cores, json_schema_input_type=_written("cores like 500m", "cores", _CORES_WRITTEN))
]
"""CPU cores, written as a Kubernetes quantity."""

MILLICORES = 1000
"""Millicores of a CPU core."""


def whole_millicores(cores: float) -> int:
    """Return cores in millicores, rounded up as Kubernetes does; 4.03 cores are 4030 and not 4031 (rounding error)."""
    return math.ceil(round(cores * MILLICORES, 6))


Percent = Annotated[
    int,
    BeforeValidator(parse_percent, json_schema_input_type=Annotated[str, Field(pattern=r"^\s*\d+\s*%\s*$")]),
    PlainSerializer(lambda units: f"{units}%", return_type=str),
]
"""A whole percentage from 1 % to 100 %, in units of 1 %, written as "25%"."""

PercentOrBytes = Annotated[
    str,
    BeforeValidator(
        parse_percent_or_bytes,
        json_schema_input_type=_written(
            "percent like 80%, bytes like 12Gi", "bytes", rf"{_NUMBER}\s*%|{_BYTES_WRITTEN}"
        ),
    ),
    AfterValidator(str),
    PlainSerializer(str),
]
"""A part of a GPU's memory, as "80%" or as "12Gi"; `resolve_bytes` converts it to bytes."""


LATEST = 253_402_300_799.0
"""The last second of the year 9999. Python's calendar ends there, so a later instant could not be formatted."""

Instant = Annotated[float, Field(ge=0, le=LATEST, allow_inf_nan=False)]
"""Seconds since the epoch (UTC), within the range of Python's calendar."""


def shifted(instant: float, by: float) -> float:
    """Return an instant after a step of the clock, within the range of `Instant`."""
    return min(max(0.0, instant + by), LATEST)


_TIME_WRITTEN = r"([01]?\d|2[0-3]):[0-5]\d"


def _time_of_day(value: Any) -> time:
    if isinstance(value, time):
        return value
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(_TIME_WRITTEN, text):
        raise ValueError(f"{value!r} is not a time of day: write hours and minutes in quotes, like '22:00'")
    hour, minute = text.split(":")
    return time(int(hour), int(minute))


def _time_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        raise ValueError(
            f"{name!r} is not a time zone: write a name of the IANA database, like Europe/Berlin"
        ) from None
    return name


TimeOfDay = Annotated[
    time,
    BeforeValidator(
        _time_of_day,
        json_schema_input_type=Annotated[str, Field(pattern=f"^{_TIME_WRITTEN}$", title="time like 22:00")],
    ),
]
"""A time of day, by hours and minutes."""
TimeZone = Annotated[str, AfterValidator(_time_zone)]
"""A time zone of the IANA database."""
