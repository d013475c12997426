"""Carries out and answers the asks of notebook servers on behalf of their sessions' users.

`service.actions` decides, as for the dashboard. An ask can be read several times: it stays in the reports until its
answer has reached the agent, and the service can be killed before it answers. Therefore session actions are idempotent,
and a single write sets a keep and answers its ask.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import dataclass

from gpushare_spawner.model.control import AgentUnreachable, AnswerRequest, ControlRefused
from gpushare_spawner.model.controls import ASK_SECONDS, Ask, AskAnswer
from gpushare_spawner.model.frames import MAX_TEXT_LETTERS, AskKind
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.service import right_size
from gpushare_spawner.service.actions import keeps, restart, share
from gpushare_spawner.service.actions.context import (
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    ReceivedAsk,
    RefusalCode,
)
from gpushare_spawner.service.reports import Agent, Agents
from gpushare_spawner.wording import actions as words

log = logging.getLogger("gpushare.service")

POLL_EVERY = 0.2
"""Minimum seconds between polls, because an ask stays in the report until its answer has reached the agent."""
AFTER_FAILURE = 1.0
"""Seconds until the next poll after a failed delivery of an answer."""

_Key = tuple[str, int, float]
"""Session, number and time of an ask."""


@dataclass(frozen=True)
class _AskingSession:
    """A session with asks, as its agent reports it."""

    agent: Agent
    node: str
    session: SessionReport


class AskResponder:
    """Responder to asks. The asks of one session are answered sequentially."""

    def __init__(self, agents: Agents, actions: ActionContext) -> None:
        self._agents = agents
        self._actions = actions
        self._under_way: dict[str, asyncio.Task[None]] = {}
        """Running tasks by session."""
        self._answers: dict[_Key, tuple[float, AskAnswer]] = {}
        """Answers already given, with their times (`time.monotonic`)."""

    async def run(self) -> None:
        """Answer asks until cancelled."""
        try:
            while True:
                try:
                    await self.poll()
                    await asyncio.sleep(POLL_EVERY)
                except Exception:
                    log.exception("Cannot poll for asks of notebook servers")
                    await asyncio.sleep(AFTER_FAILURE)
        finally:
            for task in self._under_way.values():
                task.cancel()

    async def poll(self) -> None:
        """Wait for asks, and start answering them."""
        for agent in await self._agents.asking():
            try:
                report = await agent.report()
            except (AgentUnreachable, ControlRefused) as error:
                log.warning("The asks of notebook servers are unknown: %s", error)
                await asyncio.sleep(AFTER_FAILURE)
                continue
            for session in report.sessions:
                if session.asks and session.id not in self._under_way:
                    asking = _AskingSession(agent, report.node, session)
                    task = asyncio.create_task(self._answer_all(asking, report))
                    self._under_way[session.id] = task
                    task.add_done_callback(lambda _, name=session.id: self._under_way.pop(name, None))  # type: ignore[misc]

    async def answered(self) -> None:
        """Wait until all asks in progress are answered."""
        await asyncio.gather(*self._under_way.values())

    async def _answer_all(self, asking: _AskingSession, report: Report) -> None:
        now = time.monotonic()
        self._answers = {
            key: recorded for key, recorded in self._answers.items() if now - recorded[0] < 2 * ASK_SECONDS
        }
        for ask in asking.session.asks:
            try:
                await self._answer(asking, ReceivedAsk(ask, self._received_at(asking, report, ask)))
            except (AgentUnreachable, ControlRefused) as error:
                log.info("%s: the answer to its ask will be sent again: %s", asking.session.id, error)
                await asyncio.sleep(AFTER_FAILURE)
            except Exception:
                log.exception("%s: cannot answer an ask of its notebook server", asking.session.id)
                await asyncio.sleep(AFTER_FAILURE)

    def _received_at(self, asking: _AskingSession, report: Report, ask: Ask) -> float:
        """Return the time of an ask on this machine's clock, because a node's clock can differ."""
        age = report.published_at - ask.at + asking.agent.report_age()
        return self._actions.clock() - min(max(0.0, age), ASK_SECONDS) if math.isfinite(age) else ask.at

    async def _answer(self, asking: _AskingSession, received: ReceivedAsk) -> None:
        ask = received.ask
        key = (asking.session.id, ask.number, ask.at)
        recorded = self._answers.get(key)
        if recorded is None:
            answer, with_action = await self._carried_out(asking, received)
            self._answers[key] = time.monotonic(), answer
            if with_action:
                return
        elif time.monotonic() - recorded[0] < AFTER_FAILURE:
            return  # the answer was sent less than AFTER_FAILURE ago
        else:
            answer = recorded[1]
        await asking.agent.send(AnswerRequest(id=asking.session.id, answer=answer))

    async def _carried_out(self, asking: _AskingSession, received: ReceivedAsk) -> tuple[AskAnswer, bool]:
        """Carry out an ask. Return the answer, and whether the action has already written it."""
        kind, with_action = received.ask.kind, False
        try:
            outcome = await self._act(asking, received)
            done, text = True, outcome.text
            with_action = outcome.changed and kind in (AskKind.KEEP, AskKind.END_KEEP)
        except ActionRefused as refusal:
            done, text = False, refusal.text
        return AskAnswer(
            number=received.ask.number, done=done, text=text[:MAX_TEXT_LETTERS], at=self._actions.clock()
        ), with_action

    async def _act(self, asking: _AskingSession, received: ReceivedAsk) -> ActionOutcome:
        # never as an admin, because a program asks
        actor, ask = Actor(asking.session.user), received.ask
        match ask.kind:
            case AskKind.KEEP:
                return await keeps.keep(self._actions, asking, actor, seconds=ask.value, received=received)
            case AskKind.END_KEEP:
                return await keeps.end_keep(self._actions, asking, actor, received)
            case AskKind.RELEASE:
                return await share.release(self._actions, asking, actor, received=received)
            case AskKind.STOP:
                return await restart.stop(self._actions, asking, actor)
            case AskKind.SHARE:
                return await share.change_share(self._actions, asking, actor, ask.value / UNITS_PER_GPU)
            case AskKind.SHARES:
                return ActionOutcome(False, json.dumps(await share.other_shares(self._actions, asking)))
            case AskKind.KEEPS:
                return await keeps.ask_left(self._actions, asking)
            case AskKind.ADVICE:
                return ActionOutcome(False, json.dumps(await right_size.advice_for(self._actions, asking)))
            case _:
                raise ActionRefused(words.ASK_NOT_SUPPORTED, RefusalCode.BAD_REQUEST)
