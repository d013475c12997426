"""Objects shared by all spawners of one hub, the hub pages that we extend, and refusals of a spawn.

The template folder, the queue and the snapshots are created once and live as long as the hub. The pages show whether a
spawn is waiting for a GPU and why a server was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jupyterhub.spawner
from tornado.web import HTTPError

Shared = TypeVar("Shared")


_without_hub: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
"""Shared objects of spawners without a hub (scripts, tests of spawners), by event loop."""
_without_loop: dict[tuple[str, ...], Any] = {}
"""The same for code that runs without an event loop."""


def shared(user: Any, key: tuple[str, ...], make: Callable[[], Shared]) -> Shared:
    """Return the object with this key that all spawners of the user's hub share; the first call creates it."""
    # The object is in the hub's settings, not in a module: it lives as long as the hub, and two hubs in one process do
    # not share it.
    settings = getattr(user, "settings", None)
    if isinstance(settings, dict):
        store: dict[tuple[str, ...], Any] = settings.setdefault("gpushare", {})
    else:
        try:
            store = _without_hub.setdefault(asyncio.get_running_loop(), {})
        except RuntimeError:
            store = _without_loop
    if key not in store:
        store[key] = make()
    instance: Shared = store[key]
    return instance


def hub_runs(user: Any, name: str, server: str) -> bool:
    """Return whether the server of user ``name`` runs, starts or stops, according to the hub of ``user``."""
    owner = user.settings["users"].get(name)
    if owner is None:
        return False
    if server in owner.spawners and owner.spawners[server].active:
        return True
    stored = owner.orm_spawners.get(server)
    return stored is not None and stored.server is not None


HUB_PAGES = str(Path(__file__).parent / "pages" / "hub")
"""Folder for ``c.JupyterHub.template_paths``."""


_SPAWN_EXCEPTION: type[HTTPError] | None = getattr(jupyterhub.spawner, "SpawnException", None)
"""JupyterHub 6's exception for refusals that do not count as failures; None on 5.x."""

_Base: Any = _SPAWN_EXCEPTION or HTTPError


class SpawnRefused(_Base):  # type: ignore[misc]
    """A refused spawn. The hub shows ``message`` on the form, on the spawn page and in the API response.

    ``reason`` is a short word for metrics. ``retry_after`` (seconds) is sent as the header of that name.
    """

    def __init__(
        self, message: str, *, reason: str, status: int = 400, retry_after: int | None = None, log_message: str = ""
    ) -> None:
        if _SPAWN_EXCEPTION is not None:
            super().__init__(message, reason=reason, log_message=log_message or message, status_code=status)
        else:
            super().__init__(status, log_message or message)
        self.refusal = reason
        # the attribute that the hub's pages and API of every version show
        self.jupyterhub_message = message
        self.headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}


@contextlib.contextmanager
def refusals_reported(spawner: Any) -> Iterator[None]:
    """Log a refusal in this part of a spawn, and do not let JupyterHub 5 count it as a failed start.

    JupyterHub 5 counts every start that raises, including refusals, toward ``consecutive_failure_limit`` and exits at
    the limit (zero-to-jupyterhub sets it to 5). The hub adds 1 after the spawn has raised, so this function subtracts 1
    beforehand.
    """
    try:
        yield
    except SpawnRefused as error:
        spawner.log.warning("Not starting %s: %s", spawner._log_name, error.jupyterhub_message)
        if spawner.handler is not None and _SPAWN_EXCEPTION is None:
            settings = spawner.handler.settings
            settings["failure_count"] = settings.get("failure_count", 0) - 1
        raise
