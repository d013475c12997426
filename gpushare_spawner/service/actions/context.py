"""Common parts of the actions: their context, actor, target, outcome and refusal, and the log of actions.

The actions are functions in the modules `keeps`, `share`, `restart` and `drains`, each with the `ActionContext` as its
first argument. They serve the REST API, the asks of notebook servers, and the culler. Each action is idempotent, and
returns an `ActionOutcome` or raises `ActionRefused` with a sentence and a code. Actions check limits, but not the
actor's right to act on the target: the API checks that for each operation, and a notebook server asks only for its own
session.

Each action that has an effect is logged on one line with its figures and recorded in the history. A lock per user
serializes changes of controls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Literal, Protocol
from weakref import WeakValueDictionary

from gpushare_spawner.idle.keep import in_force
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, ControlsRequest
from gpushare_spawner.model.controls import Ask, AskAnswer, Controls, Keep
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.history.queries import group_of_session
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.history.store import Action, BegunRestart, Wait, WaitOutcome
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer, ServerNotes
from gpushare_spawner.service.reports import Agent, KnownReport, answered, ask_all
from gpushare_spawner.service.templates import SessionTemplates
from gpushare_spawner.service.waiting import PendingServers, pending_unknown
from gpushare_spawner.wording import actions as words


@dataclass(frozen=True)
class Actor:
    """The acting person, or a program on a person's behalf."""

    name: str
    is_admin: bool = False
    """Whether the actor is an admin and may act on all users' sessions without limits."""


@dataclass(frozen=True)
class ActionOutcome:
    """The outcome of an action. Repeating the action changes nothing."""

    changed: bool
    text: str
    """One or two sentences for the actor."""


class RefusalCode(StrEnum):
    """The reason for a refusal, for programs."""

    BAD_REQUEST = "bad-request"
    LIMIT = "limit"
    """A limit of the template or the service does not allow the action."""
    CAPACITY = "capacity"
    """The GPU has too few free units, or spawns wait for them."""
    BUSY = "busy"
    """The session works on the GPU or has changed in the meantime. The actor can try again."""
    UNKNOWN_SESSION = "unknown-session"
    OLDER_AGENT = "older-agent"
    """The agent of the session's node is too old for this action."""
    AGENT_UNAVAILABLE = "agent-unavailable"
    HUB_UNAVAILABLE = "hub-unavailable"


class ActionRefused(Exception):
    """A refused action: nothing was changed. The text is a sentence for the actor.

    ``to_admins``: a more detailed sentence for readers with the right to see everything.
    """

    def __init__(self, text: str, code: RefusalCode, to_admins: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.to_admins = to_admins if to_admins is not None else text


@dataclass(frozen=True)
class ReceivedAsk:
    """An ask of a session's notebook server, with its time on the service's clock."""

    ask: Ask
    """The ask. Its time is on the agent's clock."""
    at: float
    """Time of the ask on the service's clock, seconds since the epoch."""


class Target(Protocol):
    """The session that an action affects, from the last report. A `SessionDecision` is a target."""

    @property
    def agent(self) -> Agent: ...

    @property
    def node(self) -> str: ...

    @property
    def session(self) -> SessionReport: ...


async def current(target: Target) -> SessionReport:
    """Return the session as its agent currently reports it. Raises ActionRefused."""
    with refusals():
        session = (await target.agent.report()).session(target.session.id)
    if session is None:
        raise ActionRefused(words.SESSION_ENDED, RefusalCode.UNKNOWN_SESSION)
    return session


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Translate errors of the agents and the hub to ActionRefused."""
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
    """Return the refusal. ``why`` is for admins, because it can name sockets, namespaces and pods."""
    return ActionRefused(words.AGENT_FAILED, RefusalCode.AGENT_UNAVAILABLE, to_admins=words.agent_failed(why))


def hub_refused(error: HubFailed, sentence: Callable[[str], str]) -> ActionRefused:
    """Return the refusal for an error of the hub. ``sentence`` builds the sentence from the error's text."""
    return ActionRefused(sentence(error.to_users), RefusalCode.HUB_UNAVAILABLE, to_admins=sentence(str(error)))


log = logging.getLogger("gpushare.service.actions")

RESTART = "restart"
"""The name of a restart in the history."""
CULLER = "culler"
"""The actor in the log and the history if no person acts."""


class ActionLog:
    """The log of actions. ``record`` adds an action to the history; ``clock`` returns seconds since the epoch."""

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
        """Log an action on a session. Return its time in seconds since the epoch.

        ``units``: the effective units after the action, on each of its GPUs; None: unchanged.
        """
        entry = Action.on(session, node, self._clock(), action, actor, group_of_session(session, {}))
        units = units if units is not None else entry.units
        self._log(replace(entry, units=units, cause=cause, reason=reason, dry_run=dry_run))
        return entry.at

    def server(
        self, server: HubServer, action: str, actor: str = CULLER, *, reason: str = "", dry_run: bool = False
    ) -> None:
        """Log an action on a server without a share."""
        at, template = self._clock(), server.profile or ""
        self._log(Action(at, action, actor, server.user, server.name, template, reason=reason, dry_run=dry_run))

    def restart(self, begun: BegunRestart, reason: str) -> None:
        """Log the restart of a server that had a share."""
        at, template = self._clock(), begun.old_template
        self._log(
            Action(at, RESTART, begun.actor, begun.user, begun.server, template, begun.group, begun.node, reason=reason)
        )

    def budget(self, group: str, user: str, action: str, actor: str, reason: str) -> None:
        """Log an action on a budget. ``group``: the name of the account; ``user``: of a user's budget, else empty."""
        self._log(Action(self._clock(), action, actor, user, group=group, reason=reason))

    def node(self, node: str, action: str, actor: str, *, reason: str) -> None:
        """Log an action on a node or on one of its GPUs."""
        self._log(Action(self._clock(), action, actor, node=node, reason=reason))

    def _log(self, action: Action) -> None:
        log.info("%s", line(action))
        self._record(action)


def line(action: Action) -> str:
    """Return an action as ``name=value`` pairs (logfmt), without empty values. The log adds the time."""
    pairs = asdict(action) | {"at": "", "dry_run": "true" if action.dry_run else ""}
    return " ".join(f"{name}={_value(value)}" for name, value in pairs.items() if value != "")


def _value(value: object) -> str:
    text = str(value)
    return text if text and all(letter.isalnum() or letter in "-_.@:/" for letter in text) else json.dumps(text)


_TURN_AROUND = frozenset(range(0x202A, 0x202F)) | frozenset(range(0x2066, 0x206A))
"""Unicode marks that change the direction of the text after them (UAX 9). Letters have a direction without such
marks."""


def harmless(text: str) -> str:
    """Return a text without control characters and without marks that change the text's direction.

    `gpushare status` prints messages in users' terminals. Line breaks are preserved.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("".join(map(_shown, line)) for line in lines).strip()


def _shown(letter: str) -> str:
    if ord(letter) in _TURN_AROUND:
        return ""
    # control characters, and line separators that only some programs support
    return " " if unicodedata.category(letter) in ("Cc", "Zl", "Zp") else letter


PAUSES = (0.3, 1.0)
"""Pauses in seconds before a write is repeated because the agent changed the session's pod at the same time."""


@dataclass(frozen=True)
class RunningRestart:
    """A restart that runs in this process."""

    template: str
    task: asyncio.Task[ActionOutcome]


WAIT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the histogram buckets of waits, in seconds: from an immediate placement to an hour in the queue."""


Component = Literal["agent", "hub", "session", "round"]


class SpawnWaits:
    """Histogram of the waits of a template's spawns."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(WAIT_BOUNDS) + 1)
        self.seconds = 0.0
        """Sum of all waits."""

    def add(self, seconds: float) -> None:
        self._buckets[bisect_left(WAIT_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def cumulative(self) -> list[int]:
        """Return the number of waits up to each of `WAIT_BOUNDS`, and the total number."""
        return list(accumulate(self._buckets))


class Counters:
    """Counters of idle actions, notices, failures, and waits of spawns since the start of the service.

    Only the metrics use them; no decision depends on them.
    """

    def __init__(self) -> None:
        self.actions: Counter[Tier] = Counter()
        self.notices: Counter[Tier] = Counter()
        self.withdrawn: Counter[Tier] = Counter()
        """Number of withdrawn notices, by tier of the action."""
        self.failures: Counter[Component] = Counter()
        self.waits: dict[str, SpawnWaits] = {}
        """Waits of spawns that got a GPU, by template."""
        self.given_up: Counter[str] = Counter()
        """Number of spawns that got no GPU, by template."""
        self.last_round: float | None = None
        """End of the last round, in seconds since the epoch; None if no round has ended yet."""

    def waited(self, wait: Wait) -> None:
        if wait.outcome is WaitOutcome.STARTED:
            self.waits.setdefault(wait.template, SpawnWaits()).add(wait.seconds)
        else:
            self.given_up[wait.template] += 1


@dataclass(eq=False)
class ActionContext:
    """The parts of the service that the actions, the culler and the pages use, and the state of running actions."""

    agents: Iterable[Agent]
    """The agents. Iterate again for each use, because a cluster's nodes change."""
    hub: Hub
    templates: Callable[[], Mapping[str, Template]]
    record: Callable[[Action], None] = lambda action: None
    """Adds an action to the history."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    quotas: Callable[[], Quotas | None] = lambda: None
    """Returns the quotas in force."""
    pending: PendingServers = pending_unknown
    servers: Callable[[], Iterable[HubServer]] = tuple
    """Returns the servers of the hub's last list."""
    journal: History | None = None
    """The store of running restarts; None: they are not stored."""
    nodes_are_added: bool = False
    """Whether nodes can be added later that can take shares that no current node can."""
    patience: float = 60.0
    """Maximum seconds to wait for a server to stop: the sum of the hub's settings `slow_stop_timeout` and
    `poll_interval`."""

    def __post_init__(self) -> None:
        self.log = ActionLog(self.record, self.clock)
        self.counters = Counters()
        self.notes = ServerNotes(self.hub)
        """Notes about stops for the hub's pages."""
        self.share_lock = asyncio.Lock()
        """Lock that serializes changes of shares, so that two sessions cannot exceed their account's quota together."""
        self.followed: set[asyncio.Task[None]] = set()
        """Tier changes that were answered and still wait for an agent's decision."""
        self.restarts: dict[tuple[str, str], RunningRestart] = {}
        """Running restarts, by user and server."""
        self.keeps_began: dict[str, Counter[tuple[str, float]]] = {}
        """Session ids and start times of keeps, by user. Agents discard the keeps of an ended session, and a user can
        restart a server at any time."""
        self.standing_keeps: dict[str, tuple[str, str, Keep]] = {}
        """User, node and keep, by session id. They count while the node's agent is unavailable."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def reports(self) -> list[KnownReport]:
        """Return the reports of all available agents."""
        return answered(await ask_all(self.agents))

    def template_of(self, session: SessionReport) -> Template | None:
        """Return the template as it applies to the session's user; None if it was removed."""
        return SessionTemplates.of(self.templates()).of_user(session.template, session.user)

    def title(self, template: str) -> str:
        """Return a template's display name, or its name if it was removed."""
        match = self.templates().get(template)
        return match.display_name if match is not None else template

    @contextlib.asynccontextmanager
    async def controls_of(self, target: Target) -> AsyncIterator[tuple[SessionReport, Controls]]:
        """Lock the controls of the user's sessions, and yield the session and its current controls."""
        async with self._locks.setdefault(target.session.user, asyncio.Lock()):
            yield await self.read_controls(target)

    async def read_controls(self, target: Target) -> tuple[SessionReport, Controls]:
        """Return the session and its controls that are in force now."""
        session = await current(target)
        return session, in_force(session.controls, self.clock())

    async def write_controls(self, target: Target, controls: Controls, answer: AskAnswer | None = None) -> None:
        """Set a session's controls, and answer the ask that requested them."""
        request = ControlsRequest.of(target.session.id, controls, answer)
        with refusals():
            for pause in (*PAUSES, None):
                try:
                    await target.agent.send(request)
                    break
                except ControlRefused as error:
                    if error.code != "busy" or pause is None:
                        raise
                await asyncio.sleep(pause)
                await target.agent.report()


def answer_to(received: ReceivedAsk | None, text: str, at: float) -> AskAnswer | None:
    """Return the answer to an ask that was carried out."""
    return None if received is None else AskAnswer(number=received.ask.number, done=True, text=text, at=at)


SAME = 5.0
"""Seconds. A decision is the same request sent twice if its end differs by at most this from the current decision's."""


def same_instant(end: float | None, other: float | None) -> bool:
    """Return whether two decisions end at about the same time; None: never."""
    if end is None or other is None:
        return end is other
    return abs(end - other) <= SAME
