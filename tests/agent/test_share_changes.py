"""The share of a session that runs changes: units, weight in the arbiter, memory limit, record, frames."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.agent.sessions.tiers import Shares, Tiers
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.control import ControlRefused, NoticeRequest, ResizeRequest, TierRequest
from gpushare_spawner.model.frames import Feature, Frame, Kind, Role
from gpushare_spawner.model.report import NOTHING, SessionReport
from gpushare_spawner.model.share import Share, Tier, UseRule
from gpushare_spawner.service.units import KINDS, gpu_bar, units_of
from gpushare_spawner.wording.share_status import explanation, page
from tests.agent.conftest import Agent, request_for
from tests.agent.peers import FIRST, GIB, SECOND, Peer


def session(agent: Agent, id: str = "ada") -> SessionReport:
    found = agent.node.report().session(id)
    assert found is not None
    return found


async def resize(agent: Agent, units: int, id: str = "ada", **more: Any) -> None:
    await agent.node.requests.answer(ResizeRequest(id=id, share_units=units, **more))


def units(one: SessionReport) -> tuple[int, int, int, int]:
    """Share, effective, guaranteed and borrowed units."""
    return one.share_units, one.effective_units, one.guaranteed_units, one.borrowed_units


async def test_larger_share_is_the_sessions_weight_guarantee_and_record(agent: Agent) -> None:
    agent.open("ada")
    await resize(agent, 50)
    assert units(session(agent)) == (50, 50, 50, 0)
    held = agent.node.sessions["ada"]
    assert [*held.weights.values()] == [50]
    assert held.memory_guarantee(FIRST) == 8 * GIB
    await agent.stop()
    await agent.start()
    assert units(session(agent)) == (50, 50, 50, 0)
    await resize(agent, 50)
    assert units(session(agent)) == (50, 50, 50, 0), "the same again changes nothing"


async def test_share_that_does_not_fit_is_refused_and_nothing_changes(agent: Agent) -> None:
    agent.open("ada")
    agent.open("bob", share_units=60)
    with pytest.raises(ControlRefused, match="15 free units now, and 15 units without an owner") as refused:
        await resize(agent, 50)
    assert refused.value.code == "no-capacity"
    assert units(session(agent)) == (25, 25, 25, 0)
    await resize(agent, 40)
    assert units(session(agent)) == (40, 40, 40, 0)


async def test_units_that_idle_sessions_lend_are_borrowed_and_go_back_to_their_owner(agent: Agent) -> None:
    agent.open("ada")
    bob = await agent.peer(agent.open("bob", share_units=60))
    agent.node.requests.tier(TierRequest(id="bob", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    await resize(agent, 50)
    assert units(session(agent)) == (50, 50, 50, 10)
    bob.send(Kind.REQUEST, 0, 0, gpu=FIRST.uuid)
    await bob.until(Kind.GRANT)
    assert units(session(agent)) == (50, 50, 40, 10)
    await resize(agent, 45)
    assert units(session(agent)) == (45, 45, 40, 5), "borrowed units go first"
    await resize(agent, 20)
    assert units(session(agent)) == (20, 20, 20, 0)


async def test_smaller_share_leaves_units_for_others_and_a_borrower_comes_to_own_them(agent: Agent) -> None:
    agent.open("ada", share_units=60)
    agent.node.requests.tier(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    agent.open("bob", share_units=70, borrowed_units=30)
    assert units(session(agent, "bob")) == (70, 70, 70, 30)
    await resize(agent, 30)
    assert units(session(agent, "bob")) == (70, 70, 70, 0)
    assert units(session(agent)) == (30, 0, 0, 0), "a released session stays released"


async def test_idle_session_owns_more_but_borrows_no_more(agent: Agent) -> None:
    agent.open("ada")
    agent.open("bob", share_units=60)
    for name, left in (("ada", 10), ("bob", 0)):
        tier = Tier.DOWNGRADED if left else Tier.RELEASED
        agent.node.requests.tier(TierRequest(id=name, tier=tier, effective_units=left, reason="idle"))
    with pytest.raises(ControlRefused):
        await resize(agent, 50)
    await resize(agent, 40)
    assert units(session(agent)) == (40, 10, 10, 0)
    await resize(agent, 10)
    assert (session(agent).tier, units(session(agent))) == (Tier.ACTIVE, (10, 10, 10, 0)), "nothing is left to lend"


async def test_session_that_gives_up_units_and_one_that_is_unknown_cannot_change(agent: Agent) -> None:
    agent.open("ada")
    until = 4e9
    tier = TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason="", yields_until=until)
    agent.node.requests.tier(tier)
    with pytest.raises(ControlRefused, match="gives up units"):
        await resize(agent, 20)
    agent.node.registry.end("ada", "test")
    with pytest.raises(ControlRefused) as refused:
        await resize(agent, 50, "nobody")
    assert refused.value.code == "unknown-session"


async def test_processes_and_observers_are_told_at_once(agent: Agent) -> None:
    path = agent.open("ada", memory_limit="4Gi")
    process, server = await agent.peer(path), await agent.peer(path, Role.NOTEBOOK)
    await resize(agent, 50, memory_limit="6Gi")
    told = await process.until(Kind.TIER)
    assert told.fields[:5] == (Tier.ACTIVE.depth, 50, 0, 50, 50)
    limit = await process.until(Kind.DEVICE)
    assert limit.fields[:2] == (6 * GIB, 8 * GIB)
    status = await server.changed()
    assert (status.share_units, status.limit_bytes) == (50, 6 * GIB)


async def reserve(peer: Peer, wanted: int, number: int) -> Frame:
    peer.send(Kind.RESERVE, wanted, 0, wanted, number, 1, gpu=FIRST.uuid)
    return await peer.until(Kind.RESERVED)


async def test_memory_limit_follows_and_what_a_process_has_beyond_a_lower_one_stays(agent: Agent) -> None:
    process = Peer(agent.open("ada", memory_limit="4Gi"))
    agent.peers.append(process)
    await process.connect(Role.CUDA, Feature.RESERVE)
    assert (await reserve(process, 5 * GIB, 1)).fields[1] == 1, "the session's limit"
    await resize(agent, 50, memory_limit="6Gi")
    assert (await reserve(process, 5 * GIB, 2)).fields[1] == 0
    process.send(Kind.MEMORY, 5 * GIB, 0, gpu=FIRST.uuid)
    await resize(agent, 25, memory_limit="4Gi")
    assert (await reserve(process, 5 * GIB + 1, 3)).fields[1] == 1
    assert session(agent).memory_limit_bytes == 4 * GIB


async def test_notice_of_a_downgrade_that_takes_nothing_is_withdrawn(agent: Agent) -> None:
    agent.open("ada")
    notice = NoticeRequest(id="ada", tier=Tier.DOWNGRADED, at=4e9, effective_units=10, reason="idle")
    agent.node.requests.notify(notice)
    await resize(agent, 20)
    assert session(agent).notice is not None
    await resize(agent, 10)
    assert session(agent).notice is None


# -- many changes at the same time ------------------------------------------------------------------------------------


class Machine:
    """One GPU with the real ledger, shares, tiers and arbiter, and no sockets."""

    def __init__(self) -> None:
        arbitration = GpuArbitration(FIRST, ArbiterSettings(), clock=lambda: 0.0, call_at=lambda at, call: _Never())
        self.sessions: dict[str, Session] = {}
        self.shares = Shares([FIRST], 100, {FIRST.uuid: arbitration})
        self.tiers = Tiers(self.shares, lambda one: QUIET, lambda one: None, lambda: 0.0)

    def open(self, name: str, share: int) -> None:
        self.shares.check_free_units(FIRST, share, 0)
        record = SessionRecord.opened(request_for(name, share_units=share), 0.0)
        self.sessions[name] = Session(record, (FIRST,))
        self.shares.enter(self.sessions[name])

    def act(self, what: str, name: str, amount: int) -> None:
        known = self.sessions.get(name)
        if what == "open" and known is None:
            self.open(name, amount)
        elif known is not None and what == "resize":
            self.tiers.resize(known, ResizeRequest(id=name, share_units=amount))
        elif known is not None and what == "close":
            self.shares.leave(self.sessions.pop(name))
        elif known is not None and what in ("lend", "lend until use"):
            use = UseRule(min_use=5.0) if what == "lend until use" else None
            self.tiers.change_tier(known, Tier.RELEASED, 0, "", use=use)
        elif known is not None and what == "work":
            self.tiers.work_begins(known)
        elif known is not None and what == "rest":
            self.shares.work_on_lent_units(known, works=False)


QUIET = Activity(False, False, None, 0.0, 0, 0, NOTHING)


class _Never:
    def cancel(self) -> None:
        pass


ACTS = st.tuples(
    st.sampled_from(["open", "resize", "resize", "close", "lend", "lend until use", "work", "rest"]),
    st.sampled_from(["ada", "bob", "eve", "joe"]),
    st.integers(1, 100),
)


@given(st.lists(ACTS, max_size=30))
def test_changes_and_spawns_in_any_order_never_give_away_more_than_there_is(acts: list[tuple[str, str, int]]) -> None:
    machine = Machine()
    for act in acts:
        before = {name: one.record.model_copy() for name, one in machine.sessions.items()}
        try:
            machine.act(*act)
        except ControlRefused:
            after = {name: one.record for name, one in machine.sessions.items()}
            assert after == before, "what is refused has changed nothing"
        records = [one.record for one in machine.sessions.values()]
        owned = sum(one.request.share_units - one.borrowed_units for one in records)
        guaranteed = sum(one.guaranteed_units for one in machine.sessions.values())
        assert owned <= 100, act
        assert guaranteed <= 100, act
        weights = [weight for one in machine.sessions.values() for weight in one.weights.values()]
        assert sum(weight for weight in weights if weight > 1) <= 100, act
        for one in machine.sessions.values():
            works = one.works_on_lent_units or one.record.tier is Tier.ACTIVE
            owned = one.record.request.share_units - one.record.borrowed_units
            weight = sum(one.weights.values())
            assert weight >= max(1, owned) if works else weight == 0, act
        assert all(0 <= one.effective_units <= one.request.share_units for one in records)
        assert all(0 <= one.borrowed_units <= one.request.share_units for one in records)
        check_ledger(machine.shares._ledger)


async def largest_told(agent: Agent, path: str) -> int | None:
    """What a notebook server is told as the largest share."""
    observer = Peer(path)
    agent.peers.append(observer)
    await observer.connect(Role.NOTEBOOK)
    controls = (await observer.status()).controls
    return controls.largest_share_units if controls is not None else None


async def test_observers_are_told_the_largest_share_that_is_free_now(agent: Agent) -> None:
    path = agent.open("ada")
    assert await largest_told(agent, path) == 100
    agent.open("bob", share_units=60)
    assert await largest_told(agent, path) == 40
    with pytest.raises(ControlRefused):
        await resize(agent, 41)
    await resize(agent, 40)
    assert await largest_told(agent, path) == 40
    # what bob lends is free for those who work, and not for those who are idle
    await agent.node.requests.answer(TierRequest(id="bob", tier=Tier.RELEASED, effective_units=0, reason=""))
    assert await largest_told(agent, path) == 100
    await agent.node.requests.answer(TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason=""))
    assert await largest_told(agent, path) == 40


async def test_a_share_of_several_gpus_changes_on_each(agent: Agent) -> None:
    path = agent.open("ada", share_units=50, gpus=(FIRST.uuid, SECOND.uuid))
    agent.open("bob", share_units=30, gpus=(SECOND.uuid,))
    assert await largest_told(agent, path) == 70
    with pytest.raises(ControlRefused, match="20 free units now"):
        await resize(agent, 71)
    await resize(agent, 70, last_units=40)
    held = agent.node.sessions["ada"]
    assert session(agent).share == Share(70, 2, 40)
    arbiters = [agent.node.registry.arbitrations[gpu.uuid]._arbiter for gpu in (FIRST, SECOND)]
    assert [arbiter._roster.sessions["ada"].weight for arbiter in arbiters] == [70, 40]
    await resize(agent, 70, last_units=30)
    assert [arbiter._roster.sessions["ada"].weight for arbiter in arbiters] == [70, 30]
    await resize(agent, 70, last_units=40)
    server = await agent.peer(path, Role.NOTEBOOK)
    assert "0.70 + 0.40 GPU" in page(await server.status(), 0.0)
    assert [held.memory_guarantee(gpu) for gpu in (FIRST, SECOND)] == [16 * GIB * 70 // 100, 16 * GIB * 40 // 100]
    assert await largest_told(agent, path) == 70, "the same on each"
    with pytest.raises(ControlRefused, match="fewer than the 40 units of the others"):
        await resize(agent, 40, last_units=40)
    await agent.stop()
    await agent.start()
    assert session(agent).share == Share(70, 2, 40)


async def test_one_and_a_half_gpus_borrow_only_of_the_gpu_that_an_idle_session_lends(agent: Agent) -> None:
    owner = await agent.peer(agent.open("bob", share_units=80, gpus=(SECOND.uuid,)))
    await agent.node.requests.answer(TierRequest(id="bob", tier=Tier.RELEASED, effective_units=0, reason=""))
    both = (FIRST.uuid, SECOND.uuid)
    # the hub's one number says: at least 20 units of each GPU have no owner
    path = agent.open("ada", share_units=100, last_units=50, borrowed_units=80, gpus=both)
    status = await (await agent.peer(path, Role.NOTEBOOK)).status()
    assert "1.50 GPU, 0.30 GPU of it borrowed" in page(status, 0.0)
    owner.send(Kind.REQUEST, 0, 0, gpu=SECOND.uuid)
    await owner.until(Kind.GRANT)

    def on_each() -> list[tuple[int, int, int]]:
        here = session(agent).each
        return [(one.share_units - one.borrowed_units, one.borrowed_now, one.guaranteed_units) for one in here]

    assert on_each() == [(100, 0, 100), (20, 0, 20)]
    held = agent.node.sessions["ada"]
    assert held.weights == {FIRST.uuid: 100, SECOND.uuid: 20}
    assert [held.memory_guarantee(gpu) for gpu in (FIRST, SECOND)] == [16 * GIB, 16 * GIB * 20 // 100]
    status = await (await agent.peer(path, Role.NOTEBOOK)).status()
    assert "Of your 1.50 GPU, 1.20 GPU is guaranteed now" in explanation(status)
    for gpu in agent.node.report().gpus:
        bar = gpu_bar(gpu, agent.node.report().sessions)
        assert {kind: units_of(bar, kind) for kind in KINDS} == {"owned": 100, "borrowed": 0, "lent": 0, "free": 0}
    await agent.stop()
    await agent.start()
    assert on_each() == [(100, 0, 100), (20, 0, 20)]
    await resize(agent, 90, last_units=40)
    assert on_each() == [(90, 0, 90), (20, 0, 20)], "borrowed units go first"
    agent.node.registry.end("bob", "test")
    assert on_each() == [(90, 0, 90), (40, 0, 40)]
    assert (session(agent).borrowed_units, session(agent).borrowed_each, session(agent).guaranteed_each) == (0, (), ())


async def test_share_is_a_whole_gpu_at_most_where_units_are_overcommitted(agent: Agent) -> None:
    await agent.stop()
    await agent.start(capacity_units=200)
    path = agent.open("ada")
    assert await largest_told(agent, path) == 100
    await resize(agent, 100)
    assert units(session(agent)) == (100, 100, 100, 0)


async def test_limit_of_gpu_time_is_never_below_the_share_and_comes_back_with_a_smaller_one(agent: Agent) -> None:
    peer = await agent.peer(agent.open("ada", time_limit_units=30))
    held = agent.node.sessions["ada"]
    assert limit_in_force(agent) == held.time_limit_units == 30
    await resize(agent, 50)
    assert limit_in_force(agent) == held.time_limit_units == session(agent).time_limit_units == 50
    await agent.stop()
    await agent.start()
    assert limit_in_force(agent) == agent.node.sessions["ada"].time_limit_units == 50
    await resize(agent, 20)
    assert limit_in_force(agent) == agent.node.sessions["ada"].time_limit_units == 30
    peer.close()


def limit_in_force(agent: Agent) -> int:
    """Units of the GPU's time in the arbiter."""
    arbiter = agent.node.registry.arbitrations[FIRST.uuid]._arbiter
    return round(100 * arbiter._time_limits.part("ada"))
