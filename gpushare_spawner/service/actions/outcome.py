"""Who acts on a session, what came of it, and why an action is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpushare_spawner.model.controls import Ask
from gpushare_spawner.model.protocol.control import AgentUnreachable, ControlRefused
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.service.hub.client import HubFailed
from gpushare_spawner.service.reports import Agent
from gpushare_spawner.wording.controls import session_controls as words


@dataclass(frozen=True)
class Actor:
    """A person, or a program on a person's behalf."""

    name: str
    is_admin: bool = False
    """May act on the sessions of all users, and is bound by no limit."""


@dataclass(frozen=True)
class Outcome:
    """What an action did. The same action a second time changes nothing."""

    changed: bool
    text: str
    """A sentence or two for whoever acts."""


class RefusalCode(StrEnum):
    """Why an action is refused, for programs."""

    FORBIDDEN = "forbidden"
    """The actor may not do this to this session."""
    BAD_REQUEST = "bad-request"
    LIMIT = "limit"
    """A limit of the template or of the service stands in the way."""
    CAPACITY = "capacity"
    """The GPU has not enough free units, or spawns wait for them."""
    BUSY = "busy"
    """The session works on the GPU, or has changed meanwhile: try again."""
    UNKNOWN_SESSION = "unknown-session"
    OLDER_AGENT = "older-agent"
    """The agent of the session's node does not know this action yet."""
    AGENT_UNAVAILABLE = "agent-unavailable"
    HUB_UNAVAILABLE = "hub-unavailable"


class ActionRefused(Exception):
    """Nothing was changed. The text is a sentence for whoever acts.

    ``to_admins``: the sentence for those who see all, where it says more.
    """

    def __init__(self, text: str, code: RefusalCode, to_admins: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.to_admins = to_admins if to_admins is not None else text


First = Callable[[], Awaitable[None]]
"""What is done right before a server is stopped."""


async def nothing_first() -> None:
    """Do nothing before a server is stopped."""


@dataclass(frozen=True)
class Asked:
    """What a session's notebook server asked."""

    ask: Ask
    """Its instant is of the agent's clock."""
    at: float
    """When it was asked, by the service's clock: seconds since the epoch."""


class Target(Protocol):
    """The session that somebody acts on: what the last report says of it. A `SessionDecision` is one."""

    @property
    def agent(self) -> Agent: ...

    @property
    def node(self) -> str: ...

    @property
    def session(self) -> SessionReport: ...


def check_own(one: Target, actor: Actor) -> None:
    """Raise ActionRefused unless the session is the actor's, or the actor is an admin."""
    if not actor.is_admin and actor.name != one.session.user:
        raise ActionRefused(words.NOT_YOURS, RefusalCode.FORBIDDEN)


def check_admin(actor: Actor) -> None:
    """Raise ActionRefused unless the actor is an admin."""
    if not actor.is_admin:
        raise ActionRefused(words.ADMINS_ONLY, RefusalCode.FORBIDDEN)


async def current(one: Target) -> SessionReport:
    """Return the session as its agent reports it now. Raises ActionRefused."""
    with refusals():
        session = (await one.agent.report()).session(one.session.id)
    if session is None:
        raise ActionRefused(words.SESSION_ENDED, RefusalCode.UNKNOWN_SESSION)
    return session


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors of agents and of the hub into ActionRefused."""
    try:
        yield
    except ControlRefused as error:
        match error.code:
            case "busy":
                raise ActionRefused(words.WORKED_MEANWHILE, RefusalCode.BUSY) from error
            case "unknown-session":
                raise ActionRefused(words.SESSION_ENDED, RefusalCode.UNKNOWN_SESSION) from error
            case "bad-request":
                raise ActionRefused(words.OLDER_AGENT, RefusalCode.OLDER_AGENT) from error
            case _:
                raise _agent_refused(error.message) from error
    except AgentUnreachable as error:
        raise _agent_refused(str(error)) from error
    except HubFailed as error:
        raise hub_refused(error, words.hub_failed) from error


def _agent_refused(why: str) -> ActionRefused:
    """``why``: for admins; it can name sockets, namespaces and pods."""
    return ActionRefused(words.AGENT_FAILED, RefusalCode.AGENT_UNAVAILABLE, to_admins=words.agent_failed(why))


def hub_refused(error: HubFailed, said: Callable[[str], str]) -> ActionRefused:
    """Return what to raise after an error of the hub. ``said``: makes the sentence of the error's text."""
    return ActionRefused(said(error.to_users), RefusalCode.HUB_UNAVAILABLE, to_admins=said(str(error)))
