"""What the operations work with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.api.events import Events
from gpushare_spawner.service.api.snapshots import ServiceSnapshots
from gpushare_spawner.service.history.recorder import History


@dataclass(frozen=True)
class Services:
    """The parts of the service that the API shows and uses."""

    prefix: str
    """Of the service's addresses, with a slash at its end."""
    snapshots: ServiceSnapshots
    events: Events
    actions: SessionActions
    history: History | None = None
    """None: the service keeps none."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""

    def changed(self) -> None:
        """Show at once what an action has changed, and tell the pages."""
        self.snapshots.outdated()
        self.events.look_now()
