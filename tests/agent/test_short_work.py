"""GPU work of a released session runs at once on the units that it has lent, and restores its share when it lasts.

Over real sockets; the agent's checks are called by hand.
"""

from __future__ import annotations

import asyncio

import pytest

from gpushare_spawner.agent.sessions import tiers
from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier, UseRule
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, Peer

RULE = UseRule(min_use=0.3, window=300.0)


async def released(agent: Agent, id: str, units: int) -> Peer:
    """A session without a unit, and one of its processes."""
    peer = await agent.peer(agent.open(id, share_units=units))
    request = TierRequest(id=id, tier=Tier.RELEASED, effective_units=0, reason="idle", use=RULE)
    agent.node.requests.tier(request)
    return peer


def report(agent: Agent, id: str) -> SessionReport:
    found = agent.node.report().session(id)
    assert found is not None
    return found


async def test_short_work_runs_at_once_with_the_weight_of_the_share_and_restores_nothing(
    agent: Agent, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = await released(agent, "ada", 60)
    ada.send(Kind.REQUEST, 0, 0, gpu=FIRST.uuid)
    grant = await ada.until(Kind.GRANT)
    agent.node.checks.check()
    session = agent.node.sessions["ada"]
    assert [*session.weights.values()] == [60]
    assert (report(agent, "ada").tier, report(agent, "ada").effective_units) == (Tier.RELEASED, 0)
    # its units are lent all the while: another session can be placed on them
    agent.open("bob", share_units=100, borrowed_units=60)
    assert [sum(agent.node.sessions[name].weights.values()) for name in ("ada", "bob")] == [60, 40]
    assert report(agent, "bob").guaranteed_units == 100
    ada.send(Kind.IDLE, grant.fields[0], 1000, gpu=FIRST.uuid)
    await eventually(lambda: not report(agent, "ada").gpu_busy)
    agent.node.checks.check()
    assert [*session.weights.values()] == [60], "cells come in rows"
    monkeypatch.setattr(tiers, "LENT_FOR", 0.0)
    agent.node.checks.check()
    assert [sum(agent.node.sessions[name].weights.values()) for name in ("ada", "bob")] == [0, 100]


async def test_work_that_lasts_restores_the_share(agent: Agent) -> None:
    ada = await released(agent, "ada", 60)
    ada.send(Kind.REQUEST, 0, 0, gpu=FIRST.uuid)
    await ada.until(Kind.GRANT)
    agent.node.checks.check()
    assert report(agent, "ada").tier is Tier.RELEASED
    await asyncio.sleep(RULE.min_use)
    agent.node.checks.check()
    assert (report(agent, "ada").tier, sum(agent.node.sessions["ada"].weights.values())) == (Tier.ACTIVE, 60)
    assert await ada.until(Kind.TIER)
