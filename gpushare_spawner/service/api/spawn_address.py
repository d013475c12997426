"""The address of a spawn below the API's prefix. The default server has no name, and an address no empty part: `~`
stands for it. Before a name that begins with `~` comes another one."""

from __future__ import annotations

from urllib.parse import quote

DEFAULT_SERVER = "~"


def address_of(user: str, server: str) -> str:
    """Return the address of the spawn of a user's server."""
    part = DEFAULT_SERVER + server if not server or server.startswith(DEFAULT_SERVER) else server
    return f"queue/{quote(user, safe='')}/{quote(part, safe='')}"


def server_of(part: str) -> str:
    """Return the name of the server that the last part of an address stands for."""
    return part.removeprefix(DEFAULT_SERVER)
