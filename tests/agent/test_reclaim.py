"""Units of a session over quota go to one in quota: ownership, tiers and texts, over real sockets."""

from __future__ import annotations

import os
import time

from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.model.control import ConfirmRequest, NoticeRequest, ResizeRequest, TierRequest
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.wording.share_status import explanation
from tests.agent.conftest import Agent, Eventually, request_for
from tests.agent.peers import FIRST, Peer


def session(agent: Agent, id: str) -> SessionReport:
    found = agent.node.report().session(id)
    assert found is not None
    return found


def make_way(agent: Agent, id: str, units: int, seconds: float = 60.0) -> None:
    tier = Tier.DOWNGRADED if units else Tier.RELEASED
    until = time.time() + seconds
    agent.node.requests.tier(TierRequest(id=id, tier=tier, effective_units=units, reason="", yields_until=until))


def held(agent: Agent, id: str) -> tuple[Tier, int, int, int]:
    """Tier, effective, guaranteed and borrowed units."""
    one = session(agent, id)
    return one.tier, one.effective_units, one.guaranteed_units, one.borrowed_now


def work(peer: Peer) -> None:
    peer.send(Kind.REQUEST, 0, 0, gpu=FIRST.uuid)


async def test_the_session_in_quota_owns_the_units_and_the_one_over_quota_borrows(
    agent: Agent, eventually: Eventually
) -> None:
    over = await agent.peer(agent.open("over", share_units=100))
    work(over)
    await over.until(Kind.GRANT)
    make_way(agent, "over", 40)
    assert held(agent, "over") == (Tier.DOWNGRADED, 40, 40, 0)
    assert session(agent, "over").gpu_busy
    owner = await agent.peer(agent.open("owner", share_units=60))
    # the units are owned again: the one over quota works on with what is left, and would get the rest if it were free
    assert held(agent, "over") == (Tier.ACTIVE, 100, 40, 0)
    assert held(agent, "owner") == (Tier.ACTIVE, 60, 60, 0)
    assert session(agent, "over").borrowed_units == 60
    assert not session(agent, "over").yields
    work(owner)
    await owner.until(Kind.GRANT)
    # what the arbiters are told
    assert [sum(agent.node.sessions[name].weights.values()) for name in ("over", "owner")] == [40, 60]
    agent.node.requests.tier(TierRequest(id="owner", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    assert held(agent, "over") == (Tier.ACTIVE, 100, 100, 60)
    work(owner)
    await eventually(lambda: held(agent, "over") == (Tier.ACTIVE, 100, 40, 0))
    assert held(agent, "owner") == (Tier.ACTIVE, 60, 60, 0)
    agent.node.registry.end("owner", "test")
    assert held(agent, "over") == (Tier.ACTIVE, 100, 100, 0)
    assert session(agent, "over").borrowed_units == 0


async def test_work_restores_nothing_while_the_units_are_kept(agent: Agent) -> None:
    over = await agent.peer(agent.open("over", share_units=100))
    make_way(agent, "over", 0)
    work(over)
    await over.until(Kind.GRANT)  # its cell runs
    assert held(agent, "over") == (Tier.RELEASED, 0, 0, 0)
    # and others who borrow come to own nothing of it
    assert agent.node.report().session("over") is not None
    agent.open("owner", share_units=100)
    assert held(agent, "owner") == (Tier.ACTIVE, 100, 100, 0)
    assert held(agent, "over") == (Tier.ACTIVE, 100, 0, 0)


async def test_units_that_nobody_came_for_go_back(agent: Agent, eventually: Eventually) -> None:
    over = await agent.peer(agent.open("over", share_units=100))
    make_way(agent, "over", 30, seconds=0.3)
    work(over)
    await eventually(lambda: held(agent, "over") == (Tier.ACTIVE, 100, 100, 0))
    assert session(agent, "over").borrowed_units == 0
    # idle: it stays as any idle session does, and owns its units
    make_way(agent, "over", 30)
    over.send(Kind.RELEASE, 0, 0, gpu=FIRST.uuid)
    agent.node.requests.tier(TierRequest(id="over", tier=Tier.DOWNGRADED, effective_units=30, reason="nobody waits"))
    assert (session(agent, "over").borrowed_units, session(agent, "over").yields) == (0, False)


async def test_a_borrower_comes_to_own_nothing_of_what_is_kept(agent: Agent) -> None:
    agent.open("over", share_units=60)
    agent.open("idle", share_units=40)
    agent.node.requests.tier(TierRequest(id="idle", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    agent.open("borrower", share_units=40, borrowed_units=40)
    make_way(agent, "over", 0)
    assert session(agent, "borrower").borrowed_units == 40
    agent.open("owner", share_units=60)
    assert held(agent, "owner") == (Tier.ACTIVE, 60, 60, 0)


async def test_a_restart_of_the_agent_keeps_what_is_kept(agent: Agent) -> None:
    agent.open("over", share_units=100)
    agent.node.registry.sessions["over"].record.process = None
    make_way(agent, "over", 30)
    await agent.stop()
    await agent.start()
    assert session(agent, "over").yields
    agent.open("owner", share_units=70)
    assert held(agent, "owner") == (Tier.ACTIVE, 70, 70, 0)


async def test_borrower_owns_nothing_of_a_session_that_is_restored_after_it(agent: Agent) -> None:
    agent.open("borrower", share_units=30)
    agent.open("owner", share_units=70)
    agent.node.requests.tier(TierRequest(id="owner", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    await agent.node.requests.answer(ResizeRequest(id="borrower", share_units=100, reason="a test"))
    await agent.stop()
    await agent.start()
    assert session(agent, "borrower").borrowed_units == 70
    agent.node.requests.tier(TierRequest(id="owner", tier=Tier.ACTIVE, effective_units=70, reason="it works"))
    assert held(agent, "owner") == (Tier.ACTIVE, 70, 70, 0)
    assert held(agent, "borrower") == (Tier.ACTIVE, 100, 30, 0)
    agent.node.registry.end("owner", "test")
    assert session(agent, "borrower").borrowed_units == 0


async def test_gpu_work_withdraws_only_notices_that_it_averts(agent: Agent) -> None:
    over = await agent.peer(agent.open("over", share_units=100))
    for cause, stays in ((IdleCause.MAX_AGE, True), (IdleCause.RECLAIM, True), (IdleCause.IDLE, False)):
        notice = Notice(tier=Tier.STOPPED, at=time.time() + 60, reason="", cause=cause)
        agent.node.requests.notify(NoticeRequest.of("over", notice))
        work(over)
        over.send(Kind.QUERY)  # not allowed from this role: it ends the connection after the work is dealt with
        await over.ended()
        assert (session(agent, "over").notice is not None) == stays, cause
        over = await agent.peer(
            agent.node.requests.open(request_for("over", share_units=100)).environment["GPUSHARE_SOCKET"]
        )


async def test_gpu_work_does_not_withdraw_the_notice(agent: Agent) -> None:
    path = agent.open("over", share_units=100)
    over, observer = await agent.peer(path), await agent.peer(path, Role.NOTEBOOK)
    notice = Notice(tier=Tier.DOWNGRADED, at=time.time() + 60, reason="", effective_units=40, cause=IdleCause.RECLAIM)
    agent.node.requests.notify(NoticeRequest.of("over", notice))
    work(over)
    await over.until(Kind.GRANT)
    assert session(agent, "over").notice == notice
    make_way(agent, "over", 40)
    assert session(agent, "over").notice is None
    status = await observer.status()
    assert status.yields
    assert "by quota, others are entitled to its units" in explanation(status)


async def test_a_pod_that_comes_after_its_units_went_back_borrows_them_until_their_owner_is_gone(agent: Agent) -> None:
    agent.open("over", share_units=60)
    agent.open("other", share_units=40)
    late = request_for("late", share_units=50)
    # the kubelet has given it the devices: it cannot be refused
    agent.node.registry.add_and_listen(SessionRecord.opened(late, time.time() + 1))
    assert (session(agent, "late").borrowed_units, session(agent, "late").guaranteed_units) == (50, 0)
    assert [session(agent, name).guaranteed_units for name in ("over", "other")] == [60, 40]
    agent.node.registry.end("over", "a test")
    assert (session(agent, "late").borrowed_units, session(agent, "late").guaranteed_units) == (0, 50)


def use_up(agent: Agent, id: str, seconds: float = 60.0) -> None:
    """What the service sends for a session whose budget is used up."""
    until = time.time() + seconds
    request = TierRequest(
        id=id, tier=Tier.RELEASED, effective_units=0, reason="", yields_until=until, background=True
    )  # fmt: skip
    agent.node.requests.tier(request)


async def test_a_session_with_a_used_up_budget_waits_while_another_works(agent: Agent, eventually: Eventually) -> None:
    over = await agent.peer(agent.open("over", share_units=50))
    use_up(agent, "over")
    assert held(agent, "over") == (Tier.RELEASED, 0, 0, 0)
    assert session(agent, "over").background
    work(over)
    await over.until(Kind.GRANT)  # alone it works
    within = await agent.peer(agent.open("within", share_units=50))
    work(within)
    await within.until(Kind.GRANT)
    revoked = await over.until(Kind.REVOKE)
    over.send(Kind.RELEASE, revoked.fields[0], 0, gpu=FIRST.uuid)
    work(over)
    await eventually(lambda: session(agent, "over").gpu_busy)
    # all units have an owner, which ends other reservations, and not this state
    agent.open("third", share_units=50)
    assert session(agent, "over").background
    agent.node.registry.end("within", "test")
    agent.node.registry.end("third", "test")
    await over.until(Kind.GRANT)


async def test_the_share_comes_back_if_the_service_says_nothing_for_long(agent: Agent, eventually: Eventually) -> None:
    over = await agent.peer(agent.open("over", share_units=50))
    use_up(agent, "over", seconds=0.3)
    work(over)
    await eventually(lambda: held(agent, "over")[:2] == (Tier.ACTIVE, 50))
    assert not session(agent, "over").background


async def test_a_used_up_budget_survives_a_restart_of_the_agent_and_the_user_reads_it(agent: Agent) -> None:
    path = agent.open("over", share_units=50)
    agent.node.registry.sessions["over"].record.process = None
    use_up(agent, "over")
    await agent.stop()
    await agent.start()
    assert session(agent, "over").background
    status = await (await agent.peer(path, Role.NOTEBOOK)).status()
    assert status.background
    assert "your budget of GPU-hours is used up. GPU cells use what others leave" in explanation(status)


async def test_a_session_that_ended_is_reported_with_its_last_figures(agent: Agent) -> None:
    agent.open("ada", share_units=50)
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    begun = session(agent, "ada").opened_at
    agent.node.registry.end("ada", "test")
    [ended] = agent.node.report().ended
    assert (ended.id, ended.opened_at, ended.effective_units) == ("ada", begun, 50)
    assert begun <= ended.ended_at <= time.time()
