"""A share's status that prints like ``gpushare status``."""

from __future__ import annotations

import time
from typing import Any

from gpushare_spawner.model.share_status import ShareStatus


class ReadableStatus(ShareStatus):
    """What ``gpushare_spawner.notebook.status()`` returns to a cell or a script."""

    def __str__(self) -> str:
        # a cell that does not print it imports no pydantic
        from gpushare_spawner.wording.share_status import page

        return page(self, time.time())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show a cell's value like ``gpushare status``."""
        printer.text(str(self))
