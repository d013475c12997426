"""Cordon and drain of GPUs and nodes."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.control import CordonRequest
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.report import Report
from gpushare_spawner.service.actions.context import ActionContext, ActionOutcome, Actor, refusals, same_instant
from gpushare_spawner.service.history.store import CORDON, CORDON_ENDED, DRAIN, DRAIN_ENDED
from gpushare_spawner.service.reports import Agent
from gpushare_spawner.wording import actions as words


@dataclass(frozen=True)
class CordonTarget:
    """A node, or one of its GPUs."""

    agent: Agent
    node: str
    gpu: str = ""
    """The GPU's UUID; empty: the node."""

    def name(self, report: Report) -> str:
        """Return its name for texts."""
        index = next((gpu.index for gpu in report.gpus if gpu.uuid == self.gpu), None)
        return f"GPU {index} of node {self.node}" if index is not None else f"Node {self.node}"


async def cordon(context: ActionContext, place: CordonTarget, actor: Actor, reason: str = "") -> ActionOutcome:
    """Exclude a GPU or node from new sessions. A drain becomes a cordon."""
    return await _set(context, place, Cordon(gpu=place.gpu, by=actor.name, reason=reason, since=context.clock()))


async def drain(
    context: ActionContext, place: CordonTarget, actor: Actor, reason: str = "", stop_after: float | None = None
) -> ActionOutcome:
    """Exclude a GPU or node from new sessions, and have the users of its running sessions notified.

    ``stop_after``: seconds until their servers are stopped; None: never. The culler notifies the users and stops the
    servers.
    """
    now = context.clock()
    stop_at = now + stop_after if stop_after is not None else None
    drained = Cordon(gpu=place.gpu, by=actor.name, reason=reason, since=now, drain=True, stop_at=stop_at)
    return await _set(context, place, drained)


async def uncordon(context: ActionContext, place: CordonTarget, actor: Actor) -> ActionOutcome:
    """End a cordon or drain, so that new sessions are placed there again."""
    with refusals():
        report = await place.agent.report()
        standing = report.cordon(place.gpu)
        if standing is None:
            return ActionOutcome(False, words.NOT_CORDONED)
        await place.agent.send(CordonRequest(gpu=place.gpu, cordon=None))
    text = words.uncordoned(place.name(report))
    context.log.node(place.node, DRAIN_ENDED if standing.drain else CORDON_ENDED, actor.name, reason=text)
    return ActionOutcome(True, text)


async def _set(context: ActionContext, place: CordonTarget, cordon: Cordon) -> ActionOutcome:
    with refusals():
        report = await place.agent.report()
        standing = report.cordon(place.gpu)
        if standing is not None and _same(standing, cordon):
            return ActionOutcome(False, words.cordoned_already(place.name(report), standing.drain))
        await place.agent.send(CordonRequest(gpu=place.gpu, cordon=cordon))
    left = None if cordon.stop_at is None else cordon.stop_at - cordon.since
    text = words.cordoned(place.name(report), cordon.drain, left)
    reason = f"{text} {cordon.reason}".strip()
    context.log.node(place.node, DRAIN if cordon.drain else CORDON, cordon.by, reason=reason)
    return ActionOutcome(True, text)


def _same(cordon: Cordon, other: Cordon) -> bool:
    terms = (cordon.drain, cordon.reason) == (other.drain, other.reason)
    return terms and same_instant(cordon.stop_at, other.stop_at)
