"""Which of a session's tier and its pod's annotations follows the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.agent.kubernetes.pods.annotations import (
    MAX_SEEN,
    follow_tier,
    needed_patch,
    remember,
    tier_decision_key,
)
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.model.control import NoticeRequest
from gpushare_spawner.model.kubernetes.annotations import (
    BACKGROUND,
    EFFECTIVE_SHARE,
    IDLE_SINCE,
    IF_GPU_SECONDS,
    NOTICE,
    TIER,
    TIER_SINCE,
    USE,
    YIELDS_UNTIL,
    SessionAnnotations,
)
from gpushare_spawner.model.report import NOTHING, Notice
from gpushare_spawner.model.share import Tier, UseRule
from tests.agent.conftest import request_for
from tests.agent.peers import FIRST

IDLE = Activity(
    busy=False, waiting=False, last=None, gpu_seconds=0.0, memory_bytes=0, resident_bytes=0, delivered=NOTHING
)
SOON = Notice(tier=Tier.RELEASED, at=1900.0, reason="idle for 45 min", effective_units=0)
SAID = SessionAnnotations(
    session="ada", template="quarter-gpu", share_units=25, gpus=(FIRST.uuid,), gpu_indices=(0,), tier_since=1000.0,
    effective_units=25,
)  # fmt: skip


class World:
    """A session whose tier is changed by hand, and what its pod's annotations made of it."""

    def __init__(self) -> None:
        record = SessionRecord.opened(request_for(), 1000.0)
        record.pod = PodOwner(
            namespace="jupyter", name="ada", uid="1", devices={}, seen=(tier_decision_key(SAID.annotations()),)
        )
        self.session = Session(record, (FIRST,))
        self.doing = IDLE
        self.moves: list[tuple[Tier, int]] = []
        self.notices: list[Notice | None] = []
        self.saved = 0
        self.tiers = self

    def change_tier(
        self,
        session: Session,
        tier: Tier,
        units: int,
        reason: str,
        yields_until: float | None = None,
        use: UseRule | None = None,
        background: bool = False,
    ) -> None:
        session.record.yields_until, session.record.background = yields_until, background
        self.moves.append((tier, units))
        session.record.tier, session.record.effective_units = tier, units

    def notify(self, session: Session, request: NoticeRequest) -> None:
        self.notices.append(request.notice)
        session.record.notice = request.notice

    def activity(self, session: Session) -> Activity:
        return self.doing

    def save(self, session: Session) -> None:
        self.saved += 1

    def says(self, said: SessionAnnotations) -> None:
        follow_tier(self.session, said, said.annotations(), self)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def down(units: int = 10, idle_since: float | None = 1500.0) -> SessionAnnotations:
    """What the service writes to downgrade the session."""
    return replace(SAID, tier=Tier.DOWNGRADED, tier_since=1600.0, effective_units=units, idle_since=idle_since)


def test_session_follows_a_downgrade_of_its_pod(world: World) -> None:
    world.says(down())
    assert world.moves == [(Tier.DOWNGRADED, 10)]
    assert world.saved == 1


def test_session_with_a_used_up_budget_follows_its_pod_into_the_background_and_back(world: World) -> None:
    # it worked a moment ago, which does not matter
    released = replace(SAID, tier=Tier.RELEASED, tier_since=1600.0, effective_units=0, idle_since=None)
    world.says(replace(released, yields_until=2200.0))
    assert not world.session.record.background
    world.says(replace(released, yields_until=2200.0, background=True))
    assert world.session.record.background
    assert needed_patch(replace(released, yields_until=2200.0, background=True), world.session.record, 1700.0) == {}
    world.session.record.background = False
    patch = needed_patch(replace(released, yields_until=2200.0, background=True), world.session.record, 1700.0)
    assert patch["gpushare-spawner.io/background"] is None


def test_annotations_that_were_dealt_with_are_no_new_decision(world: World) -> None:
    world.says(SAID)
    assert world.saved == 0
    world.says(down())
    # the agent restored the session, and an event of the pod from before comes late
    world.change_tier(world.session, Tier.ACTIVE, 25, "it has GPU work again")
    world.says(down())
    assert world.moves[-1] == (Tier.ACTIVE, 25)


@pytest.mark.parametrize("doing", [replace(IDLE, busy=True), replace(IDLE, last=1500.5)])
def test_session_that_worked_in_the_meantime_follows_no_idle_action(world: World, doing: Activity) -> None:
    world.doing = doing
    world.says(down())
    assert world.moves == []
    # and its pod is patched back
    assert needed_patch(down(), world.session.record, 1700.0)[TIER] == "active"


def test_session_that_worked_before_the_service_looked_follows(world: World) -> None:
    world.doing = replace(IDLE, last=1499.0)
    world.says(down())
    assert world.moves == [(Tier.DOWNGRADED, 10)]


def test_step_up_is_followed_while_the_session_works(world: World) -> None:
    world.says(down())
    world.doing = replace(IDLE, busy=True)
    world.says(replace(SAID, tier_since=1700.0))
    assert world.moves[-1] == (Tier.ACTIVE, 25)


def test_annotations_cannot_give_more_than_the_share(world: World) -> None:
    world.says(replace(SAID, share_units=80, effective_units=80, tier_since=1700.0))
    assert world.moves == [(Tier.ACTIVE, 25)]


def test_notice_reaches_an_idle_session(world: World) -> None:
    world.says(replace(SAID, notice=SOON))
    assert world.notices == [SOON]
    world.says(SAID)
    assert world.notices == [SOON, None], "withdrawn, though the annotations are those of the beginning"
    assert needed_patch(SAID, world.session.record, 1700.0) == {}


def test_notice_does_not_reach_a_session_that_works(world: World) -> None:
    world.doing = replace(IDLE, busy=True)
    world.says(replace(SAID, notice=SOON))
    assert world.notices == []
    world.says(replace(SAID, notice=SOON))
    assert (world.notices, world.saved) == ([], 1)
    patch = needed_patch(replace(SAID, notice=SOON), world.session.record, 1700.0)
    assert patch[NOTICE] is None


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
def test_notice_of_before_a_step_of_the_clock_is_shown_with_the_time_that_it_has_now(world: World, step: float) -> None:
    began, record = 1_790_000_000.1, world.session.record
    notice = SOON.model_copy(update={"at": began + 300})
    said = replace(SAID, notice=notice)
    world.says(said)
    for number in (1, 2, 3):
        record.clock_was_set(step)
        if number != 2:
            world.says(said)
        assert record.notice == notice.model_copy(update={"at": notice.at + number * step})
    assert world.notices == [notice], "no notice for an instant that has passed"
    world.doing = replace(IDLE, busy=True)
    world.says(said)
    assert record.notice is None
    world.doing = IDLE
    record.clock_was_set(-step)
    world.says(said)
    assert record.notice is None, "work averted it"
    assert needed_patch(said, record, began)[NOTICE] is None
    later = replace(said, notice=SOON.model_copy(update={"at": began + 900}))
    world.says(later)
    assert record.notice == later.notice


def test_no_patch_is_wanted_while_both_say_the_same(world: World) -> None:
    assert needed_patch(SAID, world.session.record, 1700.0) == {}


def test_restored_session_wants_its_pod_patched(world: World) -> None:
    world.session.record.tier_since = 1650.0
    assert needed_patch(down(), world.session.record, 1700.0) == {
        TIER: "active", TIER_SINCE: "1650.000", EFFECTIVE_SHARE: "25", IDLE_SINCE: None, IF_GPU_SECONDS: None,
        USE: None, NOTICE: None, YIELDS_UNTIL: None, BACKGROUND: None,
    }  # fmt: skip


def test_withdrawn_notice_starts_the_idle_time_anew(world: World) -> None:
    world.doing = replace(IDLE, busy=True)
    world.says(replace(SAID, notice=SOON))
    patch = needed_patch(replace(SAID, notice=SOON), world.session.record, 1700.0)
    assert (patch[TIER_SINCE], patch[NOTICE]) == ("1700.000", None)


def test_record_remembers_the_latest_decisions_only(world: World) -> None:
    hold = world.session.record.pod
    assert hold is not None
    for number in range(2 * MAX_SEEN):
        remember(hold, f"tier {number}")
    assert hold.seen == tuple(f"tier {number}" for number in range(MAX_SEEN, 2 * MAX_SEEN))
    remember(hold, f"tier {2 * MAX_SEEN - 1}")
    assert len(set(hold.seen)) == MAX_SEEN
