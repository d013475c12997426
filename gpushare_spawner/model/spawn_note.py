"""The service's note to the spawner in a spawn request: an action on the earlier server or spawn.

The note is a user option, because the hub's route for servers accepts nothing else. The spawner removes it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

NOTE_OPTION = "gpushare_note"
"""The user option. Users can set it too, but only they themselves read the text."""
STATE_KEY = "gpushare_stopped"
"""Key in the spawner's state: why the server was stopped. The hub's pages read it there (`spawner/pages/hub`)."""
MAX_LETTERS = 500


class SpawnNote(BaseModel):
    """One note."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str = Field(min_length=1, max_length=MAX_LETTERS)
    """The action, in a sentence."""
    cancelled: bool = False
    """Whether the earlier spawn was cancelled. Then nothing is started, and the user reads the text."""
    stopped: bool = False
    """Whether the server was stopped. Then nothing is started; the hub's pages show the text until the next spawn."""

    def within(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user options with this note."""
        return {**options, NOTE_OPTION: self.model_dump(exclude_defaults=True)}


def taken_out(options: Any) -> tuple[dict[str, Any], SpawnNote] | None:
    """Return user options without their note, and the note; None: they have no valid note."""
    if not isinstance(options, dict) or NOTE_OPTION not in options:
        return None
    try:
        note = SpawnNote.model_validate(options[NOTE_OPTION])
    except ValidationError:
        return None
    return {name: value for name, value in options.items() if name != NOTE_OPTION}, note
