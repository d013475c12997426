"""A machine whose clock is set by a day: sessions are as old, as idle and as warned as before."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from gpushare_spawner.model.control import ControlsRequest, MessageRequest, NoticeRequest, TierRequest
from gpushare_spawner.model.controls import Controls, Keep, Message
from gpushare_spawner.model.frames import AskKind, Kind
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, GIB
from tests.present import present

DAY = 86400.0


@dataclass
class Ages:
    """Of one session, in seconds by the report's own clock."""

    opened: float
    idle: float
    tier: float
    notice: float
    keep_begun: float
    message: float

    @classmethod
    def of(cls, agent: Agent, name: str) -> Ages:
        report = agent.node.report()
        session, now = present(report.session(name)), report.published_at
        return cls(
            opened=now - session.opened_at - session.clock_moved,
            idle=now - (session.last_gpu_activity or 0.0),
            tier=now - session.tier_since,
            notice=now - present(session.notice).at,
            keep_begun=now - session.keeps[0],
            message=now - present(session.messages[0]).at,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ages) and vars(self) == pytest.approx(vars(other), abs=20)


@pytest.fixture(params=[DAY, -DAY])
def step(request: pytest.FixtureRequest) -> float:
    return float(request.param)


async def worked(agent: Agent, eventually: Eventually) -> None:
    """Session ada: a burst, a downgrade, a notice and a keep, all of an instant ago."""
    peer = await agent.peer(agent.open("ada"))
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.expect(Kind.GRANT)).fields[0]
    peer.send(Kind.RELEASE, lease, 1000, 0, gpu=FIRST.uuid)
    await eventually(lambda: present(agent.node.report().session("ada")).last_gpu_activity is not None)
    await agent.node.requests.answer(TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason="test"))
    now = time.time()
    notice = NoticeRequest(id="ada", tier=Tier.RELEASED, effective_units=0, at=now + 300, reason="test")
    await agent.node.requests.answer(notice)
    await agent.node.requests.answer(MessageRequest(id="ada", message=Message(text="Hello.", by="boss", at=now)))
    kept = Controls(keep=Keep(until=now + 3600, since=now, by="ada"), keeps=(now,))
    await agent.node.requests.answer(ControlsRequest.of("ada", kept))


async def test_durations_stay_what_they_were(agent: Agent, eventually: Eventually, step: float) -> None:
    await worked(agent, eventually)
    before, named = Ages.of(agent, "ada"), present(agent.node.report().session("ada"))
    agent.clock_set = step
    assert Ages.of(agent, "ada") == before
    after = present(agent.node.report().session("ada"))
    assert (after.opened_at, after.keep) == (named.opened_at, named.keep), "its name, and what people were told"
    assert after.clock_moved == pytest.approx(step, abs=1)
    agent.clock_set = 0.0
    assert Ages.of(agent, "ada") == before, "and set right again"


async def test_a_step_while_no_agent_runs_changes_no_duration(
    agent: Agent, eventually: Eventually, step: float
) -> None:
    await worked(agent, eventually)
    before = Ages.of(agent, "ada")
    await agent.stop()
    agent.clock_set = step
    await agent.start()
    assert Ages.of(agent, "ada") == before
    agent.clock_set = 0.0
    await agent.stop()
    await agent.start()
    assert Ages.of(agent, "ada") == before


async def test_a_spawn_under_way_keeps_its_session(agent: Agent, step: float) -> None:
    agent.open("ada", confirm_within=60)
    agent.clock_set = step
    agent.node.checks.check()
    assert agent.node.report().session("ada") is not None


async def test_work_after_the_step_is_seen_by_an_idle_action_that_was_decided_before(
    agent: Agent, eventually: Eventually
) -> None:
    await worked(agent, eventually)
    decided_on = present(agent.node.report().session("ada")).last_gpu_activity
    agent.clock_set = DAY
    request = TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="test", if_idle_since=decided_on)
    with pytest.raises(Exception, match="worked on the GPU"):
        await agent.node.requests.answer(request)


async def test_an_ask_that_waits_is_as_old_as_before(agent: Agent, step: float) -> None:
    agent.open("ada")
    present(agent.node.sessions["ada"].asks).take(9, int(AskKind.KEEP), 3600.0)
    agent.clock_set = step
    report = agent.node.report()
    ask = present(report.session("ada")).asks[-1]
    assert report.published_at - ask.at == pytest.approx(0, abs=20)
