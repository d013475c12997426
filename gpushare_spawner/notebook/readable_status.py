"""A share's status that prints itself as ``gpushare status`` does."""

from __future__ import annotations

from typing import Any

from gpushare_spawner.model.share_status import ShareStatus


class ReadableStatus(ShareStatus):
    """What ``gpushare_spawner.notebook.status()`` gives to a cell or a script."""

    def __str__(self) -> str:
        # a cell that never prints it imports no pydantic
        from gpushare_spawner.wording.share_status import page

        return page(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show a cell's value as ``gpushare status`` does."""
        printer.text(str(self))
