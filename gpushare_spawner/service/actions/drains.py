"""Cordon and drain of GPUs and nodes. The caller checks the actor's right, which is separate from other actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpushare_spawner.model.control import CordonRequest
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.report import Report
from gpushare_spawner.service.actions.outcome import ActionLog, ActionOutcome, Actor, refusals
from gpushare_spawner.service.history.store import CORDON, CORDON_ENDED, DRAIN, DRAIN_ENDED
from gpushare_spawner.service.reports import Agent
from gpushare_spawner.wording import actions as words

SAME = 5.0
"""Seconds. A drain that ends within this time of the current drain is the same: a request that is sent twice."""


@dataclass(frozen=True)
class CordonTarget:
    """A node, or one of its GPUs."""

    agent: Agent
    node: str
    gpu: str = ""
    """UUID; empty: the node."""


class DrainActions:
    """Actions on nodes and GPUs. Each method raises ActionRefused."""

    def __init__(self, log: ActionLog, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock

    async def cordon(self, place: CordonTarget, actor: Actor, reason: str = "") -> ActionOutcome:
        """Keep new sessions away. A drain becomes a cordon."""
        return await self._set(place, Cordon(gpu=place.gpu, by=actor.name, reason=reason, since=self._clock()))

    async def drain(
        self, place: CordonTarget, actor: Actor, reason: str = "", stop_after: float | None = None
    ) -> ActionOutcome:
        """Keep new sessions away, and have the users of present sessions notified.

        ``stop_after``: seconds from now until their servers are stopped; None: never. The culler notifies the users and
        stops the servers.
        """
        now = self._clock()
        stop_at = now + stop_after if stop_after is not None else None
        drain = Cordon(gpu=place.gpu, by=actor.name, reason=reason, since=now, drain=True, stop_at=stop_at)
        return await self._set(place, drain)

    async def uncordon(self, place: CordonTarget, actor: Actor) -> ActionOutcome:
        """End a cordon or a drain: new sessions are placed there again."""
        with refusals():
            report = await place.agent.report()
            standing = report.cordon(place.gpu)
            if standing is None:
                return ActionOutcome(False, words.NOT_CORDONED)
            await place.agent.cordon(CordonRequest(gpu=place.gpu, cordon=None))
        text = words.uncordoned(_name(place, report))
        self._log.node(place.node, DRAIN_ENDED if standing.drain else CORDON_ENDED, actor.name, reason=text)
        return ActionOutcome(True, text)

    async def _set(self, place: CordonTarget, cordon: Cordon) -> ActionOutcome:
        with refusals():
            report = await place.agent.report()
            standing = report.cordon(place.gpu)
            if standing is not None and _same(standing, cordon):
                return ActionOutcome(False, words.cordoned_already(_name(place, report), standing.drain))
            await place.agent.cordon(CordonRequest(gpu=place.gpu, cordon=cordon))
        left = None if cordon.stop_at is None else cordon.stop_at - cordon.since
        text = words.cordoned(_name(place, report), cordon.drain, left)
        reason = f"{text} {cordon.reason}".strip()
        self._log.node(place.node, DRAIN if cordon.drain else CORDON, cordon.by, reason=reason)
        return ActionOutcome(True, text)


def _same(cordon: Cordon, other: Cordon) -> bool:
    if (cordon.drain, cordon.reason) != (other.drain, other.reason):
        return False
    if cordon.stop_at is None or other.stop_at is None:
        return cordon.stop_at is other.stop_at
    return abs(cordon.stop_at - other.stop_at) <= SAME


def _name(place: CordonTarget, report: Report) -> str:
    index = next((gpu.index for gpu in report.gpus if gpu.uuid == place.gpu), None)
    return f"GPU {index} of node {place.node}" if index is not None else f"Node {place.node}"
