"""What the progress events of a queued spawn say for programs. The spawner writes it, the service reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gpushare_spawner.model.instant import Instant

LONGEST_TEXT = 1000
"""Letters of a sentence that the service takes at most."""


class QueueProgress(BaseModel):
    """Fields beside JupyterHub's own in an event of ``Spawner.progress``. Only spawns that wait have them."""

    # The event has JupyterHub's fields too, and a newer hub can say more.
    model_config = ConfigDict(extra="ignore", frozen=True)

    queue_position: Annotated[int, Field(ge=1)]
    """First = 1; only spawns that could use the same GPUs count."""
    estimated_minutes: Annotated[int, Field(ge=1)] | None = None
    """How long the spawn will still wait, about; None: nothing is known."""
    waits_for: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""
    """What it waits for, as a sentence for its user."""
    cancelled_at: Instant | None = None
    """When the spawn is cancelled if it still waits then."""
