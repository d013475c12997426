"""Instants in messages between processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LATEST = 253_402_300_799.0
"""The last second of the year 9999: Python's calendar ends there, so no text could be made of a later instant."""

Instant = Annotated[float, Field(ge=0, le=LATEST, allow_inf_nan=False)]
"""Seconds since the epoch (UTC), a number that a calendar can show."""
