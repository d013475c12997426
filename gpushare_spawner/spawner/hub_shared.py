"""What all spawners of one hub share: the template folder, the queue, the snapshots. Made once, gone with the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Shared = TypeVar("Shared")


class _NoLoop:
    """Stands for the event loop where none runs."""


_NO_LOOP = _NoLoop()

_without_hub: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
"""What spawners share that belong to no hub (scripts, tests of spawners), by their event loop."""


def shared(user: Any, key: tuple[str, ...], make: Callable[[], Shared]) -> Shared:
    """Return the object of this key that all spawners of the user's hub share; the first call makes it."""
    # in the hub's settings and not in a module: it lives as long as the hub, and two hubs in one process stay apart
    settings = getattr(user, "settings", None)
    if isinstance(settings, dict):
        store: dict[tuple[str, ...], Any] = settings.setdefault("gpushare", {})
    else:
        store = _without_hub.setdefault(_running_loop(), {})
    if key not in store:
        store[key] = make()
    found: Shared = store[key]
    return found


def hub_runs(user: Any, name: str, server: str) -> bool:
    """Return whether the hub of ``user`` knows the server of user ``name`` to run, or to be starting or stopping."""
    known = user.settings["users"].get(name)
    if known is None:
        return False
    if server in known.spawners and known.spawners[server].active:
        return True
    stored = known.orm_spawners.get(server)
    return stored is not None and stored.server is not None


def _running_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _NO_LOOP
