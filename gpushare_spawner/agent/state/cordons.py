"""The cordons of the node and its GPUs, in a file of the state folder: they stay when the agent starts anew."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gpushare_spawner.agent.state.records import regular_content, replace_file
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.wording.actions import UNREADABLE

log = logging.getLogger(__name__)

UNKNOWN = "gpushare-agent"
"""The author of the cordon of a node with unknown cordons."""


_CORDONS = TypeAdapter(tuple[Cordon, ...])


class Cordons:
    """``cordons.json``, replaced atomically: a crash leaves the old or the new file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Read the file. A missing file means no cordons.

        An unreadable file means a cordon of the node until an admin ends it: a GPU that an admin has cordoned
        must not get sessions now. `clock`: seconds since the epoch.
        """
        self.path = path
        self._writing = asyncio.Lock()
        self.now: tuple[Cordon, ...] = ()
        try:
            self.now = _CORDONS.validate_json(regular_content(path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ValidationError) as error:
            self.now = (Cordon(by=UNKNOWN, reason=UNREADABLE, since=clock()),)
            log.error("cannot read the cordons of this node, %s; no new session comes to its GPUs: %s", path, error)

    async def put(self, gpu: str, cordon: Cordon | None) -> None:
        """Set the cordon of a GPU (UUID), or of the node (empty). Raises OSError, without a change."""
        async with self._writing:
            others = [other for other in self.now if other.gpu != gpu]
            await self._write([*others, *([cordon] if cordon is not None else [])])

    async def replace(self, cordons: Iterable[Cordon]) -> None:
        """Set all cordons; nothing is written if they are the same. Raises OSError."""
        cordons = sorted(cordons, key=lambda cordon: cordon.gpu)
        async with self._writing:
            if cordons != sorted(self.now, key=lambda entry: entry.gpu):
                await self._write(cordons)

    async def _write(self, cordons: list[Cordon]) -> None:
        # Write them to the disk first, so that an answered request survives a crash.
        await asyncio.to_thread(replace_file, self.path, _CORDONS.dump_json(tuple(cordons)))
        self.now = tuple(cordons)
