"""What accounts used over quota, kept in a file, so that a hub that is restarted knows of sessions that have ended."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpushare_spawner.wording.errors import reason

SAVE_EVERY = 30.0
"""Seconds between two writes. Ours: a hub that is killed forgets at most so much use, a tenth of the entry penalty."""
BAD = ".bad"
"""Added to the name of a file that cannot be read, which is set aside."""


class PastUse(BaseModel):
    """The file's content: JSON."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Literal[1] = 1
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the epoch."""
    used: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    """The part of the cluster that each account has used over quota, on average, see `quota.FairShare`."""


class QuotaHistory:
    """The file. It is replaced as a whole: a hub that is killed leaves the old content or the new one.

    A file that cannot be read is set aside, one that cannot be written is given up until the next start of the hub;
    the log says both once. Nothing is raised.
    """

    def __init__(self, path: Path | None, log: logging.Logger) -> None:
        """``path`` None: nothing is kept."""
        self._path = path
        self._log = log
        self._saved: PastUse | None = None

    def load(self) -> PastUse | None:
        """Return what was kept; None: nothing."""
        if self._path is None:
            return None
        try:
            return PastUse.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up("read", error)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            aside = self._path.with_name(self._path.name + BAD)
            self._log.error(
                "The past use over quota in %s is lost: the file is not valid (%s). The file is kept as %s",
                self._path,
                first["msg"],
                aside.name,
            )
            with contextlib.suppress(OSError):
                self._path.replace(aside)
        return None

    def save(self, now: float, used: Mapping[str, float]) -> None:
        """Keep what was used, if that is due. ``now``: seconds since the epoch."""
        last = self._saved
        if self._path is None or (last is not None and 0 <= now - last.at < SAVE_EVERY):
            return
        if not used and (last is None or not last.used) and not self._path.exists():
            return
        content = PastUse(at=max(0.0, now), used=dict(used))
        fresh = self._path.with_name(f".{self._path.name}.new")
        try:
            # by its owner alone: it names users
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content.model_dump_json().encode())
            fresh.replace(self._path)
        except OSError as error:
            self._give_up("written", error)
        else:
            self._saved = content

    def _give_up(self, what: str, error: OSError) -> None:
        self._log.warning(
            "%s cannot be %s (%s): what ended sessions used over quota is forgotten when the hub is restarted. "
            "Set quota_usage_file to a file that the hub can write",
            self._path,
            what,
            error.strerror or reason(error),
        )
        self._path = None
