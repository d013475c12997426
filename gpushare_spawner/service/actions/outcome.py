"""Common parts of the actions: actor, target, outcome and refusal, the log of actions, and the controls of sessions.

Each action is logged as one line with its figures and entered in the history. Controls have one writer for each user at
a time. The actions themselves: see `session_actions`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol
from weakref import WeakValueDictionary

from gpushare_spawner.idle.keep import in_force
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, ControlsRequest
from gpushare_spawner.model.controls import Ask, AskAnswer, Controls
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.service.history.queries import group_of_session
from gpushare_spawner.service.history.store import Action, BegunRestart
from gpushare_spawner.service.hub.client import HubFailed, HubServer
from gpushare_spawner.service.reports import Agent, ask_all
from gpushare_spawner.wording import actions as words


@dataclass(frozen=True)
class Actor:
    """The person that acts, or a program on a person's behalf."""

    name: str
    is_admin: bool = False
    """An admin may act on the sessions of all users, without limits."""


@dataclass(frozen=True)
class ActionOutcome:
    """The outcome of an action. The same action a second time changes nothing."""

    changed: bool
    text: str
    """A sentence or two for the actor."""


class RefusalCode(StrEnum):
    """The reason for a refusal, for programs."""

    FORBIDDEN = "forbidden"
    """The actor may not do this to this session."""
    BAD_REQUEST = "bad-request"
    LIMIT = "limit"
    """A limit of the template or of the service does not allow it."""
    CAPACITY = "capacity"
    """The GPU has not enough free units, or spawns wait for them."""
    BUSY = "busy"
    """The session works on the GPU, or has changed meanwhile: try again."""
    UNKNOWN_SESSION = "unknown-session"
    OLDER_AGENT = "older-agent"
    """The agent of the session's node is too old for this action."""
    AGENT_UNAVAILABLE = "agent-unavailable"
    HUB_UNAVAILABLE = "hub-unavailable"


class ActionRefused(Exception):
    """A refused action: nothing was changed. The text is a sentence for the actor.

    ``to_admins``: the sentence for readers that may see all, where it has more detail.
    """

    def __init__(self, text: str, code: RefusalCode, to_admins: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.to_admins = to_admins if to_admins is not None else text


First = Callable[[], Awaitable[None]]
"""Function that is called right before a server is stopped."""


async def nothing_first() -> None:
    """Do nothing before a server is stopped."""


@dataclass(frozen=True)
class ReceivedAsk:
    """An ask of a session's notebook server, with the time of the service's clock."""

    ask: Ask
    """The ask. Its instant is by the agent's clock."""
    at: float
    """Time of the ask by the service's clock: seconds since the epoch."""


class Target(Protocol):
    """The session of an action, from the last report. A `SessionDecision` is a target."""

    @property
    def agent(self) -> Agent: ...

    @property
    def node(self) -> str: ...

    @property
    def session(self) -> SessionReport: ...


def check_own(target: Target, actor: Actor) -> None:
    """Raise ActionRefused unless the session is the actor's, or the actor is an admin."""
    if not actor.is_admin and actor.name != target.session.user:
        raise ActionRefused(words.NOT_YOURS, RefusalCode.FORBIDDEN)


def check_admin(actor: Actor) -> None:
    """Raise ActionRefused unless the actor is an admin."""
    if not actor.is_admin:
        raise ActionRefused(words.ADMINS_ONLY, RefusalCode.FORBIDDEN)


async def current(target: Target) -> SessionReport:
    """Return the session as its agent reports it now. Raises ActionRefused."""
    with refusals():
        session = (await target.agent.report()).session(target.session.id)
    if session is None:
        raise ActionRefused(words.SESSION_ENDED, RefusalCode.UNKNOWN_SESSION)
    return session


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Translate the errors of agents and of the hub to ActionRefused."""
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
    """Return the refusal. ``why`` is for admins; it can name sockets, namespaces and pods."""
    return ActionRefused(words.AGENT_FAILED, RefusalCode.AGENT_UNAVAILABLE, to_admins=words.agent_failed(why))


def hub_refused(error: HubFailed, sentence: Callable[[str], str]) -> ActionRefused:
    """Return the refusal after an error of the hub. ``sentence`` makes the sentence from the error's text."""
    return ActionRefused(sentence(error.to_users), RefusalCode.HUB_UNAVAILABLE, to_admins=sentence(str(error)))


log = logging.getLogger("gpushare.service.actions")

RESTART = "restart"
"""The name of a restart in the history."""
CULLER = "culler"
"""The actor in the log and in the history, where no person acts."""


class ActionLog:
    """The log of actions. ``record`` enters an action in the history; ``clock``: seconds since the epoch."""

    def __init__(self, record: Callable[[Action], None], clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock

    def session(
        self,
        session: SessionReport,
        node: str,
        action: str,
        actor: str = CULLER,
        *,
        units: int | None = None,
        cause: str = "",
        reason: str = "",
        dry_run: bool = False,
    ) -> float:
        """Log an action on a session, and return its time in seconds since the epoch.

        ``units``: its effective units afterwards, on each of its GPUs; None: as before.
        """
        at = self._clock()
        self._log(
            Action(
                at=at,
                action=action,
                actor=actor,
                user=session.user,
                server=session.server,
                template=session.template,
                group=group_of_session(session, {}),
                node=node,
                units=units if units is not None else session.effective_units,
                cause=cause,
                reason=reason,
                dry_run=dry_run,
            )
        )
        return at

    def server(
        self, server: HubServer, action: str, actor: str = CULLER, *, reason: str = "", dry_run: bool = False
    ) -> None:
        """Log an action on a server without a share."""
        self._log(
            Action(
                at=self._clock(),
                action=action,
                actor=actor,
                user=server.user,
                server=server.name,
                template=server.profile or "",
                reason=reason,
                dry_run=dry_run,
            )
        )

    def restart(self, begun: BegunRestart, reason: str) -> None:
        """Log the restart of a server that had a share."""
        self._log(
            Action(
                at=self._clock(),
                action=RESTART,
                actor=begun.actor,
                user=begun.user,
                server=begun.server,
                template=begun.old_template,
                group=begun.group,
                node=begun.node,
                reason=reason,
            )
        )

    def node(self, node: str, action: str, actor: str, *, reason: str) -> None:
        """Log an action on a node or on one of its GPUs."""
        self._log(Action(at=self._clock(), action=action, actor=actor, node=node, reason=reason))

    def _log(self, action: Action) -> None:
        log.info("%s", line(action))
        self._record(action)


def line(action: Action) -> str:
    """Return an action as ``name=value`` pairs (logfmt), without empty values; the log has the time."""
    pairs = asdict(action) | {"at": "", "dry_run": "true" if action.dry_run else ""}
    return " ".join(f"{name}={_value(value)}" for name, value in pairs.items() if value != "")


def _value(value: object) -> str:
    text = str(value)
    return text if text and all(letter.isalnum() or letter in "-_.@:/" for letter in text) else json.dumps(text)


_TURN_AROUND = frozenset(range(0x202A, 0x202F)) | frozenset(range(0x2066, 0x206A))
"""Unicode's marks that change the direction of the text after them (UAX 9). Letters have a direction without them."""


def harmless(text: str) -> str:
    """Return a text without a terminal's control characters, and without marks that change the direction of text.

    `gpushare status` prints messages in users' terminals. Line breaks stay.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("".join(map(_shown, line)) for line in lines).strip()


def _shown(letter: str) -> str:
    if ord(letter) in _TURN_AROUND:
        return ""
    # control characters of both kinds, and line separators that only some programs support
    return " " if unicodedata.category(letter) in ("Cc", "Zl", "Zp") else letter


@dataclass(frozen=True)
class SessionsOfUser:
    """The other sessions of a session's user."""

    controls: Mapping[str, Controls]
    """The controls in force now, by the sessions' ids."""
    nodes: frozenset[str]
    """Nodes with agents that have answered: sessions on other nodes are unknown."""


PAUSES = (0.3, 1.0)
"""Pauses in seconds before a write is repeated, where the agent changed the session's pod at the same time."""


class ControlsOfSessions:
    """The controls of sessions as they are in force now. Methods raise ActionRefused."""

    def __init__(self, agents: Iterable[Agent], clock: Callable[[], float]) -> None:
        """Create the reader and writer of controls.

        ``agents`` is iterated over anew each time; ``clock``: seconds since the epoch.
        """
        self._agents = agents
        self.clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def of_user(self, user: str) -> AsyncIterator[None]:
        """Lock the controls of this user's sessions against other changes."""
        lock = self._locks.get(user)
        if lock is None:
            lock = self._locks[user] = asyncio.Lock()
        async with lock:
            yield

    async def read(self, target: Target) -> tuple[SessionReport, Controls]:
        """Return the session and its controls as they are now."""
        session = await current(target)
        return session, in_force(session.controls, self.clock())

    async def of_others(self, session: SessionReport) -> SessionsOfUser:
        """Return the controls of the user's other sessions, as far as agents answer."""
        reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
        sessions = (other for report in reports for other in report.sessions)
        controls = {
            other.id: in_force(other.controls, self.clock())
            for other in sessions
            if other.user == session.user and other.id != session.id
        }
        return SessionsOfUser(controls, frozenset(report.node for report in reports))

    async def write(self, target: Target, controls: Controls, answer: AskAnswer | None = None) -> None:
        """Set a session's controls, and answer the ask behind them."""
        request = ControlsRequest.of(target.session.id, controls, answer)
        with refusals():
            for pause in (*PAUSES, None):
                try:
                    await target.agent.controls(request)
                    break
                except ControlRefused as error:
                    if error.code != "busy" or pause is None:
                        raise
                await asyncio.sleep(pause)
                await target.agent.report()


def answer_to(received: ReceivedAsk | None, text: str, at: float) -> AskAnswer | None:
    """Return the answer that an ask was carried out."""
    return None if received is None else AskAnswer(number=received.ask.number, done=True, text=text, at=at)
