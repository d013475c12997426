"""Who gets a message of a coming idle action, and when: once for each notice, while no tab of the server is open.

The outbox looks at the decisions of each round of the culler, and sends in a task of its own. The culler never waits
for it. What was sent is not kept on disk: notices that stand when the service starts are taken to be sent.

How many messages are sent: to one user within a day, and to all within a minute. Time is an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.notifiers.config import (
    SEND_SECONDS,
    Notification,
    Notifier,
    NotifierConfig,
    NotSent,
    OwnClass,
    rendered,
)
from gpushare_spawner.service.notifiers.senders import MailNotifier, WebhookNotifier
from gpushare_spawner.templates.files import OptionalFile
from gpushare_spawner.wording.amounts import reason, utc

DAY, MINUTE = 86400.0, 60.0


class RateLimits:
    """The instants of the messages that were sent."""

    def __init__(self) -> None:
        self._all: deque[float] = deque()
        self._of_user: dict[str, deque[float]] = {}

    def user_may(self, user: str, per_day: int, now: float) -> bool:
        """Return whether a user may get one more message now."""
        sent = self._of_user.get(user)
        if sent is None:
            return True
        _forget(sent, now - DAY, now)
        if not sent:
            del self._of_user[user]
        return len(sent) < per_day

    def all_may(self, per_minute: int, now: float) -> bool:
        """Return whether one more message may be sent to anybody now."""
        _forget(self._all, now - MINUTE, now)
        return len(self._all) < per_minute

    def sent(self, user: str, now: float) -> None:
        """Take note of a message."""
        self._all.append(now)
        self._of_user.setdefault(user, deque()).append(now)


def _forget(instants: deque[float], before: float, now: float) -> None:
    """Leave out what is too old, and what lies in the future: the clock was set back since."""
    while instants and (instants[0] <= before or instants[0] > now):
        instants.popleft()


log = logging.getLogger("gpushare.service.notifiers")

MOST_WAITING = 1000
"""Messages that wait to be sent. What does not fit is offered again in the next round."""
ATTEMPTS = 3
"""For each message."""
RETRY_SECONDS = 60.0
"""From a failure until the next attempt."""
ACTIONS: Mapping[Tier, str] = {Tier.DOWNGRADED: "downgrade", Tier.RELEASED: "release", Tier.STOPPED: "stop"}

Key = tuple[str, float, Tier]
"""Of a notice: the session, when it was opened, and the tier."""


@dataclass
class _Progress:
    """How far the message of a notice is."""

    action_at: float
    attempts: int = 0
    next_at: float = 0.0
    done: bool = False
    waiting: bool = False


class Outbox:
    """Sends messages by what the admin's file says now. ``clock``: seconds since the epoch."""

    def __init__(self, file: OptionalFile[NotifierConfig], now: Callable[[], float]) -> None:
        self._file = file
        self._clock = now
        self._rates = RateLimits()
        self._progress: dict[Key, _Progress] = {}
        self._queue: asyncio.Queue[tuple[Key, Notification]] = asyncio.Queue(MOST_WAITING)
        self._began = False
        self._made_for: NotifierConfig | None = None
        self._notifiers: list[tuple[str, Notifier]] = []

    @property
    def problems(self) -> list[str]:
        """What is wrong with the file, one sentence each."""
        return [f"Notifiers {problem}" for problem in self._file.load(max_age=1.0).problems]

    def offer(self, decisions: Sequence[SessionDecision]) -> None:
        """Put the messages of these decisions into the queue that are due. Raises nothing, and waits for nothing."""
        try:
            config, now = self._file.load(max_age=1.0).content, self._clock()
            standing = {
                key: told
                for decision in decisions
                if (told := decision.session.notice) and (key := _key(decision, told))
            }
            # a notice that is sent again for a later time is a new one
            self._progress = {
                key: known
                for key, known in self._progress.items()
                if key in standing and abs(standing[key].at - known.action_at) < 1.0
            }
            for decision in decisions:
                told = decision.session.notice
                if told is None or decision.dry_run:
                    continue
                known = self._progress.setdefault(_key(decision, told), _Progress(told.at, done=not self._began))
                if config is not None and self._due(decision, told, known, config, now):
                    self._enqueue(_key(decision, told), known, _message(decision, told, config, now))
            self._began = True
        except Exception:
            log.exception("Messages about coming idle actions could not be made")

    def _due(
        self, decision: SessionDecision, told: Notice, known: _Progress, config: NotifierConfig, now: float
    ) -> bool:
        if known.done or known.waiting or now < known.next_at or told.at <= now:
            return False
        if ACTIONS.get(told.tier) not in config.actions or decision.session.kernels_busy:
            return False
        seen = decision.server.last_activity if decision.server is not None else None
        if seen is None or now - seen < config.closed_after:
            return False
        return self._rates.user_may(decision.session.user, config.rates.per_user, now)

    def _enqueue(self, key: Key, known: _Progress, message: Notification) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait((key, message))
            known.waiting = True

    async def run(self) -> None:
        """Send what is in the queue, without end."""
        while True:
            key, message = await self._queue.get()
            try:
                await self._send_in_turn(key, message)
            except Exception:
                log.exception("A message to %s failed", message.user)

    async def _send_in_turn(self, key: Key, message: Notification) -> None:
        config = self._file.load(max_age=1.0).content
        known = self._progress.get(key)
        if config is None or known is None:
            return  # the notice was withdrawn
        known.waiting = False
        now = self._clock()
        if message.at <= now or not self._rates.user_may(message.user, config.rates.per_user, now):
            return
        if not self._rates.all_may(config.rates.per_minute, now):
            known.next_at = now + 1.0
            return
        self._rates.sent(message.user, now)
        known.attempts += 1
        failed = await self._send(message, config)
        known.next_at = self._clock() + RETRY_SECONDS * known.attempts
        known.done = not failed or known.attempts >= ATTEMPTS

    async def _send(self, message: Notification, config: NotifierConfig) -> bool:
        """Send by all notifiers; return whether all failed. One that fails does not affect the others."""
        self._make(config)
        results = await asyncio.gather(*(self._by(name, one, message) for name, one in self._notifiers))
        if any(results):
            log.info("%s: a message was sent: %s at %s", message.user, message.action, utc(message.at))
        return not any(results)

    async def _by(self, name: str, notifier: Notifier, message: Notification) -> bool:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await notifier.send(message)
        except TimeoutError:
            log.warning("%s: no message by %s: it took longer than %.0f s", message.user, name, SEND_SECONDS)
        except NotSent as error:
            log.warning("%s: no message by %s: %s", message.user, name, error)
        except Exception as error:
            log.warning("%s: no message by %s: %s", message.user, name, reason(error))
        else:
            return True
        return False

    def _make(self, config: NotifierConfig) -> None:
        """Make the notifiers of a file that has changed. One that cannot be made is logged and left out."""
        if config is self._made_for:
            return
        self._made_for = config
        self._notifiers = [("e-mail", MailNotifier(config.email))] if config.email is not None else []
        self._notifiers += [(f"webhook {n}", WebhookNotifier(one)) for n, one in enumerate(config.webhooks, start=1)]
        for one in config.classes:
            try:
                self._notifiers.append((one.path, _own(one)))
            except Exception as error:
                log.error("The notifier %s cannot be made: %s", one.path, reason(error))


def _own(one: OwnClass) -> Notifier:
    module, _, name = one.path.partition(":")
    made: Notifier = getattr(import_module(module), name)(**one.options)
    return made


def _key(decision: SessionDecision, told: Notice) -> Key:
    return decision.session.id, decision.session.opened_at, told.tier


def _message(decision: SessionDecision, told: Notice, config: NotifierConfig, now: float) -> Notification:
    session, action = decision.session, ACTIONS[told.tier]
    values = {
        "user": session.user,
        "server": session.server,
        "action": action,
        "explanation": told.reason,
        "can_keep": told.averted_by_work,
        "time": utc(told.at),
        "minutes": max(1, round((told.at - now) / 60)),
        "dashboard": config.dashboard,
    }
    text, subject = rendered(config.text, values), rendered(config.subject, values)
    return Notification(session.user, session.server, action, told.at, subject, text)
