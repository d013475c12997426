"""Sentences of the REST API's answers."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN_ADDRESS = "The API has no such address. GET openapi.json lists all addresses."
XSRF = (
    "The request has a login cookie but no valid XSRF token. Reload the page. A program must send a token of the hub "
    "instead of the cookie."
)
INTERNAL = "The service failed. Its log says why."
KEY_REUSED = "This Idempotency-Key was sent with another request. Use a new key for each request."


def body_too_large(most: int) -> str:
    """Return that a request's body is too large. ``most``: the bytes that it may have."""
    return f"The body is too large: it may have {most:,} bytes."


def too_many(seconds: int) -> str:
    """Return that a caller acts too often. ``seconds``: until the next action."""
    return f"You have sent many actions in a short time. Try again in {seconds} s."


def unknown_node(name: str) -> str:
    """Return that there is no such node."""
    return f"There is no node {name!r} with an agent that answers."


def unknown_gpu(uuid: str, node: str) -> str:
    """Return that a node has no such GPU."""
    return f"Node {node} has no GPU {uuid!r}."


def unknown_session(name: str) -> str:
    """Return that a client asks for a session that it may not see, or that does not exist."""
    return f"You have no session {name!r}."


def unknown_spawn(name: str) -> str:
    """Return that a client asks for a spawn that it may not see. ``name``: of user and server."""
    return f"You have no spawn {name!r}."


def scope_missing(scopes: Sequence[str]) -> str:
    """Return that a caller may not do this. ``scopes``: each is enough."""
    return f"You are not allowed to do this. It is for admins, and for tokens with the scope {' or '.join(scopes)}."


def not_your_session(scopes: Sequence[str]) -> str:
    """Return that a caller sees a session, and may not act on it."""
    return (
        f"You are not allowed to act on this session: a token needs the scope {scopes[0]} for its user's own sessions, "
        f"and {scopes[-1]} for the sessions of all users."
    )


def wrong_method(method: str, allowed: Sequence[str]) -> str:
    """Return that an address has no such method."""
    return f"This address has no {method}: use {' or '.join(allowed)}."


def wrong_argument(name: str, problem: str) -> str:
    """Return what is wrong with an argument. ``problem``: a phrase of pydantic."""
    return f"{name}: {problem[:1].lower()}{problem[1:]}." if name else f"{problem}."


def not_json(problem: str) -> str:
    """Return that a body is no JSON object."""
    return f"The body is not a JSON object: {problem}."
