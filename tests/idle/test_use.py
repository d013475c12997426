"""Which GPU work keeps a share. Instants are seconds since the session was opened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.idle.policy import decide
from gpushare_spawner.idle.use import Observation, RecentUse, ShortWork, UseCount
from gpushare_spawner.model.share import Tier, UseRule
from gpushare_spawner.model.template import Idle
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
        self.session = replace(
            self.session, gpu_busy=False, last_gpu_activity=self.now, gpu_seconds=self.session.gpu_seconds + seconds
        )
        self._look()

    def wait(self, seconds: float) -> None:
        """GPU work waits for a lease, or its pages come in."""
        self.session = replace(self.session, gpu_busy=True)
        end = self.now + seconds
        while self.now < end:
            self._pass(min(EVERY, end - self.now))
            self._look()
            self.round()

    def hold(self, seconds: float) -> None:
        """A process holds a lease without work, and says so at its end: the count rises and falls."""
        before = self.session.gpu_seconds
        self.session = replace(self.session, gpu_busy=True, gpu_seconds=before + seconds)
        self._pass(seconds)
        self._look()
        self.round()
        self.session = replace(self.session, gpu_busy=False, gpu_seconds=before, last_gpu_activity=self.now)
        self._look()
        self.round()

    def lose_count(self) -> None:
        """The agent no longer knows the session's GPU seconds."""
        self.session = replace(self.session, gpu_seconds=0.0)

    def _look(self) -> None:
        """What the agent does now and then."""
        one = self.session
        if self.count is not None and self.count.add(self.now, one.gpu_seconds, one.gpu_busy, self.rule):
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
        self.count = UseCount(self.now, self.session.gpu_seconds)

    def live(self, until: float, touch_every: float | None = None, length: float = TOUCH) -> None:
        while self.now < until:
            self._pass(EVERY)
            if touch_every is not None and self.now % touch_every == 0:
                self.work(length)
            self.round()

    def _pass(self, seconds: float) -> None:
        self.full += seconds if self.session.effective_units == 25 else 0.0
        self.now += seconds


@pytest.mark.parametrize("every", [10, 20, 60, 250])
def test_a_heartbeat_keeps_nothing(every: float) -> None:
    life = Life()
    life.work(1.0)
    life.live(4 * HOUR, touch_every=every)
    assert [tier for _, tier in life.tiers] == [Tier.DOWNGRADED, Tier.RELEASED], "once, without a second notice period"
    assert life.tiers[-1][0] <= 46 * MINUTE, "as without the heartbeat"
    assert len(life.told) == 2


@pytest.mark.parametrize(
    ("idle", "after"),
    [(SHIPPED, 5 * MINUTE), pytest.param(IDLE, 15 * MINUTE, marks=pytest.mark.slow)],
    ids=["shipped", "downgrade after 15 min"],
)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_no_use_below_a_thousandth_keeps_the_full_share_for_a_tenth_of_the_time(
    idle: Idle, after: float, data: st.DataObject
) -> None:
    """Whatever its pattern: 0.1 % of 4 h of work and of leases held without work, in any pieces at any times, after
    any waits, and although the count is lost."""
    left, rule = 0.001 * 4 * HOUR - 1e-3, UseRule(min_use=min(15.0, after / 60), window=after)
    life = Life(idle, rule)
    pieces = st.tuples(st.sampled_from([10, 20, 100, 280, 300, 590, 3000]), st.sampled_from([0.01, 0.3, 1, 3, 4.9, 6]))
    waits = st.tuples(st.sampled_from([0, 0, 5, 15, 60, 400]), st.sampled_from([0.0, 0.0, 0.5, 2.0]), st.booleans())
    for (pause, seconds), (waited, held, lost) in data.draw(st.lists(st.tuples(pieces, waits), max_size=60)):
        if life.now + pause + waited + held > 4 * HOUR or seconds + held > left:
            continue
        life.live(life.now + pause)
        life.wait(waited)
        if held:
            life.hold(held)
        if lost:
            life.lose_count()
        life.work(seconds)
        left -= seconds + held
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


def test_a_count_that_began_anew_is_no_use_and_keeps_what_the_session_has_used() -> None:
    use = RecentUse()
    use.update("ann", observed(gpu_seconds=50.0, last_gpu_activity=10.0), 20.0, RULE)
    touched = observed(gpu_seconds=50.15, last_gpu_activity=400.0)
    use.update("ann", touched, 400.0, RULE)
    touched = observed(gpu_seconds=0.004, last_gpu_activity=401.0)
    use.update("ann", touched, 401.0, RULE)
    assert use.observe("ann", touched).gpu_idle_since == 10.0
    touched = observed(gpu_seconds=0.064, last_gpu_activity=402.0)
    use.update("ann", touched, 402.0, RULE)
    assert use.observe("ann", touched).gpu_idle_since == 402.0, "0.15 s before the fall and 0.06 s after it"


def test_the_estimate_of_work_in_progress_is_taken_back_when_the_work_was_shorter() -> None:
    """A process that holds a lease over a report and then says that it did nothing."""
    rule, use = UseRule(min_use=5.0, window=300.0), RecentUse()
    use.update("ann", observed(), 0.0, rule)
    for begin in range(20, 4000, 20):
        use.update("ann", observed(gpu_busy=True, gpu_seconds=3.0), begin + 3.0, rule)
        touched = observed(last_gpu_activity=begin + 4.0, gpu_seconds=0.0)
        use.update("ann", touched, begin + 10.0, rule)
        assert use.observe("ann", touched).gpu_idle_since == 0.0


def test_a_wait_counts_for_nothing_however_long_it_is() -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    for at in range(400, 2000, 10):
        use.update("ann", observed(gpu_busy=True), float(at), RULE)
    after = observed(last_gpu_activity=2000.0, gpu_seconds=0.001)
    use.update("ann", after, 2000.0, RULE)
    assert use.observe("ann", after).gpu_idle_since == 0.0


@pytest.mark.parametrize(("waited", "counts"), [(0.0, True), (200.0, True), (600.0, False)])
def test_a_wait_lets_gpu_time_be_forgotten_four_times_as_slowly(waited: float, counts: bool) -> None:
    """4 s before the wait, and 2 s after it, make use of 5 s."""
    rule, count = UseRule(min_use=5.0, window=300.0), UseCount(0.0, 0.0)
    assert not count.add(0.0, 4.0, True, rule)
    assert not count.add(waited, 4.0, True, rule)
    assert count.add(waited, 6.0, True, rule) is counts


def test_a_wait_delays_a_downgrade_by_two_minutes_at_most_and_prevents_a_stop() -> None:
    life = Life(SHIPPED, UseRule(min_use=5.0, window=5 * MINUTE))
    life.live(4 * MINUTE + 50)
    life.wait(2 * HOUR)
    assert [tier for _, tier in life.tiers] == [Tier.DOWNGRADED, Tier.RELEASED]
    assert 6 * MINUTE <= life.tiers[0][0] <= 7 * MINUTE
    life.idle = SHIPPED.model_copy(update={"stop_after": 3 * HOUR})
    life.wait(4 * HOUR)
    assert life.session.tier is Tier.RELEASED
    life.work(6.0)
    assert life.session.effective_units == 25, "the wait costs nothing once it works"


def test_requests_without_work_between_them_delay_no_action_for_long() -> None:
    """A client that returns each lease at once and asks again is busy at every report."""
    life = Life(SHIPPED, UseRule(min_use=5.0, window=5 * MINUTE))
    while life.now < HOUR:
        life.wait(20.0)
        life.work(0.0)
    assert [tier for _, tier in life.tiers] == [Tier.DOWNGRADED, Tier.RELEASED]
    assert life.full <= 7 * MINUTE
    assert len(life.told) == 2


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
    assert ShortWork(3, RULE, longest_gap=60.0).would_keep(after, idle=after)
    assert not ShortWork(2, RULE, longest_gap=60.0).would_keep(after, idle=after)
    assert not ShortWork(3, RULE, longest_gap=after).would_keep(after, idle=HOUR), "the share was taken all the same"
    assert not ShortWork(3, RULE, longest_gap=60.0).would_keep(after, idle=after - 1)


@pytest.mark.parametrize(("works_at", "longest"), [((300.0, 500.0, 800.0), 300.0), ((400.0, 500.0, 600.0), 400.0)])
def test_the_longest_gap_between_short_work_and_since_the_last_use_is_seen(
    works_at: tuple[float, ...], longest: float
) -> None:
    use = RecentUse()
    use.update("ann", observed(), 0.0, RULE)
    for number, at in enumerate(works_at, 1):
        seen = observed(last_gpu_activity=at, gpu_seconds=number / 1e4)
        use.update("ann", seen, at + 10, RULE)
    work = present(use.observe("ann", seen).short_work)
    assert work.would_keep(longest + 1, idle=HOUR)
    assert not work.would_keep(longest, idle=HOUR)


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
