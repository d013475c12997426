"""What the service tells the spawner with a spawn that it asks for: an action on the server or the spawn before it.

The note is a user option, since a hub's route for servers takes nothing else. The spawner takes it out at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

NOTE_OPTION = "gpushare_note"
"""The user option. Users can set it too: it says something to themselves alone."""
STATE_KEY = "gpushare_stopped"
"""In the spawner's state: why the server was stopped. The hub's pages read it there (`spawner/pages/hub`)."""
MAX_LETTERS = 500


class SpawnNote(BaseModel):
    """One note."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str = Field(min_length=1, max_length=MAX_LETTERS)
    """What happened, in a sentence."""
    cancelled: bool = False
    """The spawn before it was cancelled: nothing is to be started, and the user reads the text."""
    stopped: bool = False
    """The server was stopped: nothing is to be started, and the hub's pages say the text until the next start."""

    def within(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return user options with the note among them."""
        return {**options, NOTE_OPTION: self.model_dump(exclude_defaults=True)}


def taken_out(options: Any) -> tuple[dict[str, Any], SpawnNote] | None:
    """Return user options without their note, and the note; None: they have no valid one."""
    if not isinstance(options, dict) or NOTE_OPTION not in options:
        return None
    try:
        note = SpawnNote.model_validate(options[NOTE_OPTION])
    except ValidationError:
        return None
    return {name: value for name, value in options.items() if name != NOTE_OPTION}, note
