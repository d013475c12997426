"""Changes of a running session's share in its pod's annotations: the service asks, the agent decides and answers.

The pod's requests of devices cannot change while it runs. `PLACED_SHARE` keeps what they stand for; the agent's device
plugin offers so many devices more or fewer that free units and free devices stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gpushare_spawner.model.kubernetes.json_annotations import read_json
from gpushare_spawner.model.kubernetes.prefix import PREFIX
from gpushare_spawner.model.protocol.control import Failure, ResizeRequest
from gpushare_spawner.model.quantity import PercentOrBytes
from gpushare_spawner.model.share import UNITS_PER_GPU

RESIZE = PREFIX + "resize"
"""Annotation: JSON of `ShareChange`, what the service asks; absent: nothing is asked."""
RESIZED = PREFIX + "resized"
"""Annotation: JSON of `ShareChangeAnswer`, the agent's last one; absent: the share was never changed."""
PLACED_SHARE = PREFIX + "placed-share"
"""Annotation: the units that the pod's devices stand for, on each of its GPUs; absent: those of its share."""


class _Part(BaseModel):
    # a newer service or agent can write more than this version understands
    model_config = ConfigDict(extra="ignore", frozen=True)


class ShareChange(_Part):
    """Another share, as in `model.control.ResizeRequest`."""

    number: Annotated[int, Field(ge=1)]
    """The answer repeats it."""
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    memory_limit: PercentOrBytes | None = None
    reason: str = ""

    def request(self, session: str) -> ResizeRequest:
        """Return the same for a session's agent."""
        return ResizeRequest(
            id=session, share_units=self.share_units, memory_limit=self.memory_limit, reason=self.reason
        )


class ShareChangeAnswer(_Part):
    """What became of a `ShareChange`."""

    number: Annotated[int, Field(ge=1)]
    refused: Failure | None = None
    """None: the share was changed."""


_CHANGE: TypeAdapter[ShareChange | None] = TypeAdapter(ShareChange)
_ANSWER: TypeAdapter[ShareChangeAnswer | None] = TypeAdapter(ShareChangeAnswer)


def resize_patch(change: ShareChange | None) -> dict[str, str | None]:
    """Return the annotations of a merge patch that asks for another share; None: nothing is asked any longer."""
    return {RESIZE: None if change is None else change.model_dump_json()}


def resized_patch(answer: ShareChangeAnswer) -> dict[str, str | None]:
    """Return the annotations of a merge patch that answers."""
    return {RESIZED: answer.model_dump_json(), RESIZE: None}


def read_resize(annotations: Mapping[str, str]) -> ShareChange | None:
    """Return what the service asks. Raises ValueError, which names the annotation that is wrong."""
    return read_json(annotations, RESIZE, _CHANGE, None)


def read_resized(annotations: Mapping[str, str]) -> ShareChangeAnswer | None:
    """Return the agent's last answer. Raises ValueError, which names the annotation that is wrong."""
    return read_json(annotations, RESIZED, _ANSWER, None)
