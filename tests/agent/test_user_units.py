"""The total of one user's weights on a GPU is bounded where the quota says so."""

from __future__ import annotations

import json

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import Agent, request_for
from tests.agent.test_node import session, to_tier
from tests.arbiter.test_weights import shares
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, forever


def guaranteed(agent: Agent) -> dict[str, int]:
    return {one.id: one.guaranteed_units for one in agent.node.report().sessions}


async def test_sessions_of_one_user_are_scaled_down_in_proportion(agent: Agent) -> None:
    for name, units in (("big", 40), ("small", 20)):
        agent.open(name, user="ada", quota="group:ml", share_units=units, user_units=30)
    assert guaranteed(agent) == {"big": 20, "small": 10}
    # another user, and another quota of the same user
    agent.open("ben", user="ben", quota="group:ml", share_units=20, user_units=30)
    agent.open("other", user="ada", quota="user:ada", share_units=20)
    assert guaranteed(agent) == {"big": 20, "small": 10, "ben": 20, "other": 20}
    to_tier(agent, "big", Tier.RELEASED, 0)
    assert guaranteed(agent) == {"big": 0, "small": 20, "ben": 20, "other": 20}
    to_tier(agent, "big", Tier.ACTIVE, 40)
    assert guaranteed(agent)["small"] == 10
    # what placement counts stays: the shares are the user's
    assert session(agent, "big").share_units == 40
    agent.node.registry.end("small", "test")
    assert guaranteed(agent) == {"big": 30, "ben": 20, "other": 20}


async def test_the_arbiter_gives_the_others_what_the_bound_takes(agent: Agent) -> None:
    for name in ("a1", "a2", "a3"):
        agent.open(name, user="ada", quota="group:ml", share_units=25, user_units=25)
    agent.open("ben", user="ben", quota="group:ml", share_units=25, user_units=25)
    device = VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings()))
    for name, one in agent.node.sessions.items():
        device.session(name, sum(one.weights.values()))
        device.start(Job(name, name, 10 * GIB, forever()))
    device.run(50000.0)
    got = shares(device)
    # whole units: 8 of 25 each
    assert got["ben"] == pytest.approx(25 / 49, abs=0.02)
    assert got["a1"] + got["a2"] + got["a3"] == pytest.approx(24 / 49, abs=0.02)


def test_an_older_agent_is_not_asked_for_what_it_does_not_know() -> None:
    assert "user_units" not in json.loads(request_for().model_dump_json())
    bounded = request_for(user_units=30)
    assert OpenRequest.model_validate_json(bounded.model_dump_json()) == bounded
    with pytest.raises(ValueError, match="user_units"):
        request_for(user_units=0)
