"""Carries out what notebook servers ask, as their sessions' users, and answers.

Session actions decide, as they do for the dashboard. An ask can be seen more than once: in several reports until its
answer has reached the agent, or by a service that was killed before it answered. Session actions are idempotent, and an
ask for a keep is answered in the same write as the keep is set.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpushare_spawner.model.control import AgentUnreachable, AnswerRequest, ControlRefused
from gpushare_spawner.model.controls import ASK_SECONDS, Ask, AskAnswer
from gpushare_spawner.model.frames import MAX_TEXT_LETTERS, AskKind
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.service.actions.outcome import ActionOutcome, ActionRefused, Actor, Asked, RefusalCode
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.reports import Agent, Agents
from gpushare_spawner.wording import actions as words

log = logging.getLogger("gpushare.service")

LOOK_EVERY = 0.2
"""Seconds between two looks at least: an ask stays in the report until its answer has reached the agent."""
AFTER_FAILURE = 1.0
"""Seconds until the next look after an answer could not be delivered."""

_Key = tuple[str, int, float]
"""Session, number and instant of an ask."""


@dataclass(frozen=True)
class _Asking:
    """A session that asks, as its agent reports it."""

    agent: Agent
    node: str
    session: SessionReport


class AskResponder:
    """Answers asks as they come. Those of one session are answered one after the other."""

    def __init__(self, agents: Agents, actions: SessionActions, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds since the epoch."""
        self._agents = agents
        self._actions = actions
        self._clock = clock
        self._under_way: dict[str, asyncio.Task[None]] = {}
        """By session."""
        self._answers: dict[_Key, tuple[float, AskAnswer]] = {}
        """What was answered, with the time (`time.monotonic`)."""

    async def run(self) -> None:
        """Answer without end."""
        try:
            while True:
                try:
                    await self.look()
                    await asyncio.sleep(LOOK_EVERY)
                except Exception:
                    log.exception("What notebook servers ask could not be looked at")
                    await asyncio.sleep(AFTER_FAILURE)
        finally:
            for task in self._under_way.values():
                task.cancel()

    async def look(self) -> None:
        """Wait until something is asked, and begin to answer it."""
        for agent in await self._agents.asking():
            try:
                report = await agent.report()
            except (AgentUnreachable, ControlRefused) as error:
                log.warning("What notebook servers ask is not known: %s", error)
                await asyncio.sleep(AFTER_FAILURE)
                continue
            for session in report.sessions:
                if session.asks and session.id not in self._under_way:
                    one = _Asking(agent, report.node, session)
                    task = asyncio.create_task(self._answer_all(one, report))
                    self._under_way[session.id] = task
                    task.add_done_callback(lambda _, name=session.id: self._under_way.pop(name, None))  # type: ignore[misc]

    async def answered(self) -> None:
        """Wait until all that was begun is answered."""
        await asyncio.gather(*self._under_way.values())

    async def _answer_all(self, one: _Asking, report: Report) -> None:
        now = time.monotonic()
        self._answers = {key: known for key, known in self._answers.items() if now - known[0] < 2 * ASK_SECONDS}
        for ask in one.session.asks:
            try:
                await self._answer(one, Asked(ask, self._asked_at(one, report, ask)))
            except (AgentUnreachable, ControlRefused) as error:
                log.info("%s: the answer to what it asked is sent again: %s", one.session.id, error)
                await asyncio.sleep(AFTER_FAILURE)
            except Exception:
                log.exception("%s: what its notebook server asked could not be answered", one.session.id)
                await asyncio.sleep(AFTER_FAILURE)

    def _asked_at(self, one: _Asking, report: Report, ask: Ask) -> float:
        """Return when it was asked, by the clock of this machine: the clock of a node can differ."""
        age = report.published_at - ask.at + one.agent.report_age()
        return self._clock() - min(max(0.0, age), ASK_SECONDS) if math.isfinite(age) else ask.at

    async def _answer(self, one: _Asking, asked: Asked) -> None:
        ask = asked.ask
        key = (one.session.id, ask.number, ask.at)
        known = self._answers.get(key)
        if known is None:
            answer, with_action = await self._carried_out(one, asked)
            self._answers[key] = time.monotonic(), answer
            if with_action:
                return
        elif time.monotonic() - known[0] < AFTER_FAILURE:
            return  # it is on its way
        else:
            answer = known[1]
        await one.agent.answer(AnswerRequest(id=one.session.id, answer=answer))

    async def _carried_out(self, one: _Asking, asked: Asked) -> tuple[AskAnswer, bool]:
        """Return the answer, and whether it has been written with the action."""
        kind, with_action = asked.ask.kind, False
        try:
            outcome = await self._act(one, asked)
            done, text = True, outcome.text
            with_action = outcome.changed and kind in (AskKind.KEEP, AskKind.END_KEEP)
        except ActionRefused as refusal:
            done, text = False, refusal.text
        return AskAnswer(
            number=asked.ask.number, done=done, text=text[:MAX_TEXT_LETTERS], at=self._clock()
        ), with_action

    async def _act(self, one: _Asking, asked: Asked) -> ActionOutcome:
        # never as an admin: it is a program that asks
        actor, ask = Actor(one.session.user), asked.ask
        match ask.kind:
            case AskKind.KEEP:
                return await self._actions.keep(one, actor, seconds=ask.value, asked=asked)
            case AskKind.END_KEEP:
                return await self._actions.end_keep(one, actor, asked)
            case AskKind.RELEASE:
                return await self._actions.release(one, actor, asked)
            case AskKind.STOP:
                return await self._actions.stop(one, actor)
            case AskKind.SHARE:
                return await self._actions.share(one, actor, ask.value / UNITS_PER_GPU)
            case AskKind.SHARES:
                return ActionOutcome(False, json.dumps(await self._actions.other_shares(one, actor)))
            case AskKind.KEEPS:
                return await self._actions.ask_keeps_left(one, actor)
            case _:
                raise ActionRefused(words.ASK_NOT_SUPPORTED, RefusalCode.BAD_REQUEST)
