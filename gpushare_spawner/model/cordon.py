"""A cordon keeps new sessions away from a GPU or a node; a drain also has the sessions there leave. Pure data."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gpushare_spawner.model.instant import Instant

MAX_REASON = 200
"""Letters. The reason goes into a message to each session's user, see `model.controls.Message`."""


class Cordon(BaseModel):
    """By an admin's decision no new sessions come. Sessions that run keep their shares."""

    # Unknown fields are ignored: a newer service can write more than this agent understands.
    model_config = ConfigDict(extra="ignore", frozen=True)

    gpu: str = ""
    """The GPU's UUID; empty: all GPUs of the node."""
    by: str
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    since: Instant
    drain: bool = False
    """The sessions there are told to leave."""
    stop_at: Instant | None = None
    """Of a drain: when the servers that are still there are stopped, but not before their template's notice period
    after their users were told is over; None: never."""
