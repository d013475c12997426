"""How a notebook server is named between the hub, the agent and the service."""

from __future__ import annotations

from urllib.parse import quote, unquote

MAX_LENGTH = 6200
"""The longest session id, in characters. JupyterHub stores 255 characters each of a user's and a server's name; one
character takes at most 4 bytes of UTF-8, and each byte 3 characters of the id."""


def session_id(user: str, server: str = "") -> str:
    """One string for a user's server; the default server has no name. Inverse of `split_session_id`."""
    # '+' cannot come out of quote() with these safe characters, so the two parts stay apart
    return f"{_quoted(user)}+{_quoted(server)}" if server else _quoted(user)


def split_session_id(value: str) -> tuple[str, str]:
    """(user, server name) of a session id."""
    user, _, server = value.partition("+")
    return unquote(user.replace("=", "%")), unquote(server.replace("=", "%"))


def _quoted(name: str) -> str:
    # '%' is not allowed in a session id, '=' takes its place; a real '=' is quoted itself
    return quote(name, safe="@._:~-").replace("%", "=")
