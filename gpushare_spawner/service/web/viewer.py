"""Who looks at a page, and what they may see. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Owned(Protocol):
    """A session, or a server."""

    @property
    def user(self) -> str: ...


@dataclass(frozen=True)
class Viewer:
    """The user of the page. ``sees_all``: all sessions with names; otherwise their own, and totals without names."""

    name: str
    sees_all: bool = False

    def may_see(self, of: Owned) -> bool:
        return self.sees_all or of.user == self.name
