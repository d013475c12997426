"""Which GPU work keeps a share. Instants are seconds since the session was opened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.idle import Observation, RecentUse, ShortWork, UseCount, decide
from gpushare_spawner.model.template import Idle
from gpushare_spawner.model.tier import Tier, UseRule
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told
from tests.present import present

RULE = UseRule(min_use=0.2, window=5 * MINUTE)
TOUCH = 0.004
"""Seconds. What a memset of one byte takes by the library's measure."""
EVERY = 10.0
SHIPPED = Idle(downgrade_after=5 * MINUTE, downgrade_to=0.1, release_after=10 * MINUTE, warn_before=2 * MINUTE)


class Life:
    """A session with a culler of every 10 s. Its agent restores the share and withdraws the notice after enough use."""

    def __init__(self, idle: Idle = IDLE, rule: UseRule = RULE) -> None:
        self.idle, self.rule = idle, rule
        self.now = 0.0
        self.session = observed()
        self.use = RecentUse()
        self.count: UseCount | None = None
        self.tiers: list[tuple[float, Tier]] = []
        self.told: list[tuple[float, float]] = []
        """When notices were sent, and of when."""
        self.full = 0.0
        """Seconds with the full share."""

    def work(self, seconds: float) -> None:
        """A burst that ends now."""
        self.session = one = replace(
            self.session, last_gpu_activity=self.now, gpu_seconds=self.session.gpu_seconds + seconds
        )
        if self.count is not None and self.count.add(self.now, one.gpu_seconds, False, self.now, self.rule):
            since = one.tier_since if one.tier is Tier.ACTIVE else self.now
            self.session = replace(one, tier=Tier.ACTIVE, tier_since=since, effective_units=25, notice=None)
            self.count = None

    def round(self) -> None:
        self.use.update("ann", self.session, self.now, self.rule)
        decision = decide(self.idle, self.use.observe("ann", self.session), self.now)
        if decision.tier is not self.session.tier:
            self.tiers.append((self.now, decision.tier))
            self.session = replace(
                self.session, tier=decision.tier, tier_since=self.now, effective_units=decision.units, notice=None
            )
            self._begin_count()
        elif (notice := told(decision, self.rule)) != self.session.notice:
            if notice is not None and (self.now, notice.at) not in self.told:
                self.told.append((self.now, notice.at))
            if self.session.notice is None and self.session.tier is Tier.ACTIVE:
                self._begin_count()
            self.session = replace(self.session, notice=notice)

    def _begin_count(self) -> None:
        self.count = UseCount(self.now, self.session.gpu_seconds, self.session.last_gpu_activity)

    def live(self, until: float, touch_every: float | None = None, length: float = TOUCH) -> None:
        while self.now < until:
            self.full += EVERY if self.session.effective_units == 25 else 0.0
            self.now += EVERY
            if touch_every is not None and self.now % touch_every == 0:
                self.work(length)
            self.round()


@pytest.mark.parametrize("every", [10, 20, 60, 250])
def test_a_heartbeat_keeps_nothing(every: float) -> None:
    life = Life()
    life.work(1.0)
    life.live(4 * HOUR, touch_every=every)
    assert [tier for _, tier in life.tiers] == [Tier.DOWNGRADED, Tier.RELEASED], "once, without a second notice period"
    assert life.tiers[-1][0] <= 46 * MINUTE, "as without the heartbeat"
    assert len(life.told) == 2


@pytest.mark.parametrize(
    ("idle", "after"), [(SHIPPED, 5 * MINUTE), (IDLE, 15 * MINUTE)], ids=["shipped", "downgrade after 15 min"]
)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_no_use_below_a_thousandth_keeps_the_full_share_for_a_tenth_of_the_time(
    idle: Idle, after: float, data: st.DataObject
) -> None:
    """Whatever its pattern: 0.1 % of 4 h, spent in any pieces at any times."""
    left, rule = 0.001 * 4 * HOUR - 1e-3, UseRule(min_use=min(15.0, after / 60), window=after)
    life = Life(idle, rule)
    pieces = st.tuples(st.sampled_from([10, 20, 100, 280, 300, 590, 3000]), st.sampled_from([0.01, 0.3, 1, 3, 4.9, 6]))
    for pause, seconds in data.draw(st.lists(pieces, max_size=60)):
        if life.now + pause > 4 * HOUR or seconds > left:
            continue
        life.live(life.now + pause)
        life.work(seconds)
        left -= seconds
    life.live(4 * HOUR)
    assert life.full <= 0.1 * 4 * HOUR + 2 * EVERY


def test_use_of_a_released_share_restores_it_when_it_has_lasted_for_min_use() -> None:
    life = Life(SHIPPED, UseRule(min_use=5.0, window=5 * MINUTE))
    life.live(20 * MINUTE)
    tiers = [life.session.tier]
    for _ in range(5):
        life.work(1.2)
        tiers.append(life.session.tier)
        life.now += 2.0
    life.live(24 * MINUTE)
    assert tiers == [Tier.RELEASED] * 5 + [Tier.ACTIVE]
    assert life.session.tier is Tier.ACTIVE, "for its whole idle time"


def test_small_cells_that_add_up_in_the_window_count() -> None:
    life = Life()
    life.live(2 * HOUR, touch_every=20, length=0.02)
    assert life.tiers == []


def test_work_that_runs_and_is_too_short_yet_withdraws_no_notice() -> None:
    life = Life()
    life.live(12 * MINUTE)
    notice = present(life.session.notice)
    life.session = replace(life.session, gpu_busy=True, gpu_seconds=0.1)
    life.live(12 * MINUTE + EVERY)
    assert life.session.notice == notice
    life.session = replace(life.session, gpu_seconds=0.3)
    life.live(12 * MINUTE + 2 * EVERY)
    assert life.session.notice is None


def test_a_service_that_restarts_counts_all_earlier_work_as_use() -> None:
    life = Life()
    life.work(1.0)
    life.live(14 * MINUTE, touch_every=20)
    assert life.session.notice is not None
    life.use = RecentUse()
    life.live(28 * MINUTE, touch_every=20)
    assert life.tiers == []


def test_a_count_that_began_anew_counts_as_use() -> None:
    use = RecentUse()
    use.update("ann", observed(gpu_seconds=50.0, last_gpu_activity=10.0), 20.0, RULE)
    touched = observed(gpu_seconds=0.004, last_gpu_activity=400.0)
    use.update("ann", touched, 410.0, RULE)
    assert use.observe("ann", touched).gpu_idle_since == 400.0


def test_work_that_waits_for_long_counts_as_use() -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    waits = observed(gpu_busy=True)
    use.update("ann", waits, 400.0, RULE)
    assert use.observe("ann", waits).gpu_idle_since == 0.0
    use.update("ann", waits, 410.0, RULE)
    assert use.observe("ann", waits).gpu_idle_since == 0.0, "no short work came after the last use"
    after = observed(last_gpu_activity=411.0, gpu_seconds=0.001)
    use.update("ann", after, 415.0, RULE)
    assert use.observe("ann", after).gpu_idle_since == 410.0


def test_short_work_keeps_the_server_from_being_stopped() -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    touched = observed(last_gpu_activity=400.0, gpu_seconds=0.004)
    use.update("ann", touched, 410.0, RULE)
    seen = use.observe("ann", touched)
    assert (seen.gpu_idle_since, seen.quiet_since) == (0.0, 400.0)


def test_the_decision_is_void_after_work_that_the_report_did_not_have() -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    touched = observed(last_gpu_activity=400.0, gpu_seconds=0.004)
    use.update("ann", touched, 410.0, RULE)
    decision = decide(IDLE, use.observe("ann", touched), 410.0)
    assert (decision.idle_since, decision.worked_at) == (0.0, 400.0)


def test_the_reason_of_an_action_says_what_counts_only_where_short_work_was_seen() -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    quiet = present(decide(IDLE, use.observe("ann", observed()), 11 * MINUTE).upcoming)
    assert quiet.short_of is None
    touched = observed(last_gpu_activity=400.0, gpu_seconds=0.004)
    use.update("ann", touched, 410.0, RULE)
    assert present(decide(IDLE, use.observe("ann", touched), 11 * MINUTE).upcoming).short_of == RULE


def test_a_pattern_is_short_work_so_often_that_it_would_have_kept_the_share() -> None:
    after = 15 * MINUTE
    assert ShortWork(3, RULE, longest_gap=60.0).kept(after, idle=after)
    assert not ShortWork(2, RULE, longest_gap=60.0).kept(after, idle=after)
    assert not ShortWork(3, RULE, longest_gap=after).kept(after, idle=HOUR), "the share was taken all the same"
    assert not ShortWork(3, RULE, longest_gap=60.0).kept(after, idle=after - 1)


def test_with_no_minimum_all_work_counts() -> None:
    use = RecentUse()
    for at in (0.0, 410.0):
        use.update("ann", observed(last_gpu_activity=at, gpu_seconds=at / 1e5), at, UseRule(min_use=0.0))
    seen = observed(last_gpu_activity=410.0)
    assert use.observe("ann", seen) == seen


works = st.lists(st.tuples(st.sampled_from([1, 7, 20, 100, 400]), st.sampled_from([0.0, 0.004, 0.05, 0.15, 0.3])))


def _reports(events: list[tuple[int, float]]) -> list[tuple[float, Observation, float]]:
    """Reports with their time and the GPU seconds since the last one."""
    now, total, end = 0.0, 0.0, None
    reports = []
    for pause, seconds in events:
        now += pause
        total += seconds
        end = now if seconds else end
        reports.append((now, observed(last_gpu_activity=end, gpu_seconds=total), seconds))
    return reports


@settings(deadline=None)
@given(works)
def test_use_is_never_later_than_the_last_work_and_never_earlier_than_a_piece_of_min_use(
    events: list[tuple[int, float]],
) -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    enough_at = 0.0
    for now, seen, seconds in _reports(events):
        use.update("ann", seen, now, RULE)
        if seconds >= RULE.min_use:
            enough_at = now
        assert enough_at <= use.observe("ann", seen).gpu_idle_since <= seen.gpu_quiet_since


@settings(deadline=None)
@given(works, st.integers(0, 20))
def test_missing_reports_never_make_a_session_idler(events: list[tuple[int, float]], dropped: int) -> None:
    reports = _reports(events)
    every, some = RecentUse(), RecentUse()
    for use in (every, some):
        use.update("ann", observed(), 0.0, RULE)
    for number, (now, seen, _) in enumerate(reports):
        every.update("ann", seen, now, RULE)
        if number != dropped or number == len(reports) - 1:
            some.update("ann", seen, now, RULE)
    if reports:
        last = reports[-1][1]
        assert some.observe("ann", last).gpu_idle_since >= every.observe("ann", last).gpu_idle_since
