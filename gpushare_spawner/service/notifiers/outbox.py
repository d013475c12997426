"""Messages about upcoming idle actions: one per notice, if no tab of the server is open.

A notice about processes that bypass the library is sent in any case, because a running cell keeps the server active.
The outbox reads the decisions of each culler round and sends in a separate task, so the culler never waits for it. Sent
messages are not recorded on disk; notices in force when the service starts count as sent. `RateLimits` limits the
messages to one user per day, and to all users per minute. `senders` sends the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from gpushare_spawner.model.controls import Message, MessageCause
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.notifiers.config import (
    BYPASS,
    SEND_SECONDS,
    Notification,
    Notifier,
    NotifierConfig,
    NotSent,
    OwnClass,
    rendered,
)
from gpushare_spawner.service.notifiers.senders import MailNotifier, WebhookNotifier
from gpushare_spawner.templates.folder import OptionalFile
from gpushare_spawner.wording.amounts import reason, utc
from gpushare_spawner.wording.notices import BYPASS_SUBJECT

DAY, MINUTE = 86400.0, 60.0
MOST_PER_DAY = 6
"""Maximum messages to one user within 24 hours. Our choice: a server has one or two stops a day; more indicate a
template with very short idle times; its user has read the first messages."""
MOST_PER_MINUTE = 60
"""Maximum messages to all users within a minute. Our choice: mail servers and chats accept one per second. Further
messages are sent later if the action is still upcoming."""
_ALL = ""


class RateLimits:
    """Rate limits, based on the times of sent messages."""

    def __init__(self) -> None:
        self._sent: dict[str, deque[float]] = {}
        """Times by user; `_ALL`: of all users."""

    def user_may(self, user: str, now: float) -> bool:
        """Return whether a user may get another message now."""
        return self._count(user, DAY, now) < MOST_PER_DAY

    def all_may(self, now: float) -> bool:
        """Return whether another message may be sent to any user now."""
        return self._count(_ALL, MINUTE, now) < MOST_PER_MINUTE

    def sent(self, user: str, now: float) -> None:
        """Count a sent message."""
        for key in (_ALL, user):
            self._sent.setdefault(key, deque()).append(now)

    def _count(self, key: str, period: float, now: float) -> int:
        """Return the number of messages in a period. Discard older ones, and those in the future."""
        sent = self._sent.get(key, deque())
        while sent and not now - period < sent[0] <= now:
            sent.popleft()
        if not sent:
            self._sent.pop(key, None)
        return len(sent)


log = logging.getLogger("gpushare.service.notifiers")

MOST_WAITING = 1000
"""Maximum number of messages that wait to be sent. Others are offered again in the next round."""
ATTEMPTS = 3
"""Maximum attempts per message."""
RETRY_SECONDS = 60.0
"""Seconds from the first failure to the next attempt; after the second failure twice as long."""
ACTIONS: Mapping[Tier, str] = {Tier.DOWNGRADED: "downgrade", Tier.RELEASED: "release", Tier.STOPPED: "stop"}

Key = tuple[str, float, Tier | MessageCause]
"""The key of a notice: the session, its opening time, and the tier or the cause."""


@dataclass
class _Progress:
    """The progress of a notice's message."""

    action_at: float
    attempts: int = 0
    next_at: float = 0.0
    done: bool = False
    waiting: bool = False


class Outbox:
    """Queue of messages, sent according to the admin's current file. ``now``: seconds since the epoch."""

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
        """Problems of the file, one sentence each."""
        return [f"Notifiers {problem}" for problem in self._file.load(max_age=1.0).problems]

    def offer(self, decisions: Sequence[SessionDecision]) -> None:
        """Queue the due messages of these decisions. Raises nothing and does not wait."""
        try:
            config, now = self._file.load(max_age=1.0).content, self._clock()
            standing: dict[Key, Notice | Message] = {
                key: notice
                for decision in decisions
                if (notice := decision.session.notice) and (key := _key(decision, notice))
            }
            bypasses = {
                (decision.session.id, decision.session.opened_at, MessageCause.BYPASS): (decision, message)
                for decision in decisions
                if (message := decision.session.message_of(MessageCause.BYPASS))
            }
            standing |= {key: message for key, (_, message) in bypasses.items()}
            # a notice that is resent for a later time is a new notice
            self._progress = {
                key: progress
                for key, progress in self._progress.items()
                if key in standing and abs(standing[key].at - progress.action_at) < 1.0
            }
            for decision in decisions:
                notice = decision.session.notice
                if notice is None or decision.dry_run:
                    continue
                progress = self._progress.setdefault(_key(decision, notice), _Progress(notice.at, done=not self._began))
                if config is not None and self._due(decision, notice, progress, config, now):
                    self._enqueue(_key(decision, notice), progress, _message(decision, notice, config, now))
            for key, (decision, message) in bypasses.items():
                progress = self._progress.setdefault(key, _Progress(message.at, done=not self._began))
                if config is not None and BYPASS in config.actions and self._may_send(decision, progress, now):
                    session, subject = decision.session, BYPASS_SUBJECT
                    text = Notification(session.user, session.server, BYPASS, message.at, subject, message.text)
                    self._enqueue(key, progress, text)
            self._began = True
        except Exception:
            log.exception("Cannot create messages about upcoming idle actions")

    def _due(
        self, decision: SessionDecision, notice: Notice, progress: _Progress, config: NotifierConfig, now: float
    ) -> bool:
        if notice.at <= now or not self._may_send(decision, progress, now):
            return False
        if ACTIONS.get(notice.tier) not in config.actions or decision.session.kernels_busy:
            return False
        seen = decision.server.last_activity if decision.server is not None else None
        return seen is not None and now - seen >= config.closed_after

    def _may_send(self, decision: SessionDecision, progress: _Progress, now: float) -> bool:
        if progress.done or progress.waiting or now < progress.next_at:
            return False
        return self._rates.user_may(decision.session.user, now)

    def _enqueue(self, key: Key, progress: _Progress, message: Notification) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait((key, message))
            progress.waiting = True

    async def run(self) -> None:
        """Send the queued messages until cancelled."""
        while True:
            key, message = await self._queue.get()
            try:
                await self._send_in_turn(key, message)
            except Exception:
                log.exception("A message to %s failed", message.user)

    async def _send_in_turn(self, key: Key, message: Notification) -> None:
        config = self._file.load(max_age=1.0).content
        progress = self._progress.get(key)
        if config is None or progress is None:
            return  # the notice was withdrawn
        progress.waiting = False
        now = self._clock()
        late = message.at <= now and message.action != BYPASS
        if late or not self._rates.user_may(message.user, now):
            return
        if not self._rates.all_may(now):
            progress.next_at = now + 1.0
            return
        self._rates.sent(message.user, now)
        progress.attempts += 1
        failed = await self._send(message, config)
        progress.next_at = self._clock() + RETRY_SECONDS * progress.attempts
        progress.done = not failed or progress.attempts >= ATTEMPTS

    async def _send(self, message: Notification, config: NotifierConfig) -> bool:
        """Send by all notifiers. Return whether all failed. A failure does not affect the other notifiers."""
        self._make(config)
        results = await asyncio.gather(*(self._by(name, notifier, message) for name, notifier in self._notifiers))
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
        """Create the notifiers of a changed file. A notifier that cannot be created is logged and skipped."""
        if config is self._made_for:
            return
        self._made_for = config
        self._notifiers = [("e-mail", MailNotifier(config.email))] if config.email is not None else []
        self._notifiers += [
            (f"webhook {n}", WebhookNotifier(webhook)) for n, webhook in enumerate(config.webhooks, start=1)
        ]
        for own_class in config.classes:
            try:
                self._notifiers.append((own_class.path, _own(own_class)))
            except Exception as error:
                log.error("The notifier %s cannot be made: %s", own_class.path, reason(error))


def _own(own_class: OwnClass) -> Notifier:
    module, _, name = own_class.path.partition(":")
    made: Notifier = getattr(import_module(module), name)(**own_class.options)
    return made


def _key(decision: SessionDecision, notice: Notice) -> Key:
    return decision.session.id, decision.session.opened_at, notice.tier


def _message(decision: SessionDecision, notice: Notice, config: NotifierConfig, now: float) -> Notification:
    session, action = decision.session, ACTIONS[notice.tier]
    values = {
        "user": session.user,
        "server": session.server,
        "action": action,
        "explanation": notice.reason,
        "can_keep": notice.averted_by_work,
        "time": utc(notice.at),
        "minutes": max(1, round((notice.at - now) / 60)),
        "dashboard": config.dashboard,
    }
    text, subject = rendered(config.text, values), rendered(config.subject, values)
    return Notification(session.user, session.server, action, notice.at, subject, text)
