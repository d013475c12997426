"""Sessions that processes without the library make exceed their memory limit: notices, and stops of these processes.

The template's `gpu.bypass` says what follows. The agent finds the processes, and checks each again before it stops it.
A process is stopped at the earliest after the grace since its session's user got the message that names it. This object
records that time, so after a restart of the service the grace begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from gpushare_spawner.model.control import StopProcessesRequest
from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.report import BypassingProcess
from gpushare_spawner.model.template import GpuBypass
from gpushare_spawner.service.actions import keeps
from gpushare_spawner.service.actions.context import CULLER, ActionContext, Actor, harmless, refusals
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.wording import actions as words

STOP_PROCESS = "stop-process"
"""The name of the action in the history."""
STOP_AGAIN = 60.0
"""Seconds before the agent is asked again to stop a process. It takes at most 12 s, and a report up to 30 s."""
_CULLER = Actor(CULLER, is_admin=True)
_Key = tuple[str, float, BypassingProcess]


def consequence(decision: SessionDecision) -> GpuBypass:
    """Return what the session's template says about such processes."""
    template = decision.template
    return template.gpu.bypass if template is not None and template.gpu is not None else GpuBypass()


class BypassNotices:
    """The notices in force, with their times in seconds since the epoch."""

    def __init__(self, actions: ActionContext) -> None:
        self._actions = actions
        self._notified: dict[_Key, float] = {}
        self._requested: dict[_Key, float] = {}
        """The times of the requests to stop processes."""

    def due(
        self, decisions: Sequence[SessionDecision], now: float
    ) -> Iterator[tuple[str, Callable[[], Awaitable[bool]]]]:
        """Yield the actions that are due now, each with the session's name."""
        confirmed = [decision for decision in decisions if decision.session.confirmed]
        current = {key for decision in confirmed for key in _keys(decision)}
        self._notified = {key: min(at, now) for key, at in self._notified.items() if key in current}
        self._requested = {
            key: at for key, at in self._requested.items() if key in current and 0 <= now - at < STOP_AGAIN
        }
        for decision in confirmed:
            message, text = decision.session.message_of(MessageCause.BYPASS), _notice(decision)
            if text is None:
                if message is not None:
                    yield decision.name, partial(self._withdraw, decision)
                continue
            if message is None or message.text != text:
                yield decision.name, partial(self._notify, decision, text, now)
            else:
                self._was_notified(decision, now)
            # also beside a new message: a process that starts again and again delays no other's stop
            if message is not None and _stops(decision) and (due := self._due(decision, now)):
                yield decision.name, partial(self._stop, decision, due, now)

    def clock_was_set(self, by: float) -> None:
        """Adjust the times by a step of the clock."""
        self._notified = {key: at + by for key, at in self._notified.items()}
        self._requested = {key: at + by for key, at in self._requested.items()}

    def next_stop(self, decisions: Sequence[SessionDecision], now: float) -> float | None:
        """Return the time at which the next process is stopped; None if there is none."""
        ends = (
            self._notified[key] + consequence(decision).grace
            for decision in decisions
            if _stops(decision)
            for key in _keys(decision)
            if key in self._notified
        )
        return min((at for at in ends if at > now), default=None)

    def _due(self, decision: SessionDecision, now: float) -> list[_Key]:
        grace = consequence(decision).grace
        keys = [key for key in _keys(decision) if key in self._notified and key not in self._requested]
        return [key for key in keys if now - self._notified[key] >= grace]

    def _was_notified(self, decision: SessionDecision, now: float) -> None:
        for key in _keys(decision):
            self._notified.setdefault(key, now)

    async def _notify(self, decision: SessionDecision, text: str, now: float) -> bool:
        changed = (await keeps.message(self._actions, decision, _CULLER, text, MessageCause.BYPASS)).changed
        self._was_notified(decision, now)
        return changed

    async def _withdraw(self, decision: SessionDecision) -> bool:
        return (await keeps.withdraw_messages(self._actions, decision, _CULLER, MessageCause.BYPASS)).changed

    async def _stop(self, decision: SessionDecision, due: Sequence[_Key], now: float) -> bool:
        async with self._actions.controls_of(decision) as (session, _):
            named = tuple(process for _, _, process in due if process in session.exceeding)
            if not named:
                return False
            with refusals():
                await decision.agent.send(StopProcessesRequest(id=session.id, processes=named))
        self._requested |= dict.fromkeys(due, now)
        reasons = [words.process_stopped(process.pid, session.memory_limit_bytes) for process in named]
        for reason in reasons:
            self._actions.log.session(session, decision.node, STOP_PROCESS, reason=reason)
        await keeps.explain(self._actions, decision, _CULLER, " ".join(reasons))
        return True


def _keys(decision: SessionDecision) -> list[_Key]:
    session = decision.session
    return [(session.id, session.opened_at, process) for process in session.exceeding]


def _stops(decision: SessionDecision) -> bool:
    return consequence(decision).action == "stop" and decision.report.stop_trouble is None


def _notice(decision: SessionDecision) -> str | None:
    """Return the notice for the session's user; None if there is no reason for it."""
    session, rule = decision.session, consequence(decision)
    if not session.exceeding or rule.action == "report":
        return None
    pids = sorted(process.pid for process in session.exceeding)
    grace = rule.grace if _stops(decision) else None
    return harmless(words.bypass_notice(pids, session.memory_limit_bytes, grace))
