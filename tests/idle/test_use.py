"""Which GPU work keeps a share. Instants are seconds since the session was opened."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.idle import Observation, RecentUse, ShortWork, UseRule, decide
from gpushare_spawner.model.tier import Tier
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told
from tests.present import present

RULE = UseRule(min_use=0.2, window=5 * MINUTE)
TOUCH = 0.004
"""Seconds. What a memset of one byte takes by the library's measure."""
EVERY = 10.0


class Life:
    """A session with an agent and a culler of every 10 s. The agent restores the share and withdraws the notice."""

    def __init__(self) -> None:
        self.now = 0.0
        self.session = observed()
        self.use = RecentUse()
        self.tiers: list[tuple[float, Tier]] = []
        self.told: list[tuple[float, float]] = []
        """When notices were sent, and of when."""

    def work(self, seconds: float) -> None:
        """A burst that ends now."""
        one = self.session
        since = one.tier_since if one.tier is Tier.ACTIVE else self.now
        self.session = replace(
            one, tier=Tier.ACTIVE, tier_since=since, effective_units=25, notice=None, last_gpu_activity=self.now,
            gpu_seconds=one.gpu_seconds + seconds,
        )  # fmt: skip

    def round(self) -> None:
        self.use.update("ann", self.session, self.now, RULE)
        decision = decide(IDLE, self.use.observe("ann", self.session), self.now)
        if decision.tier is not self.session.tier:
            self.tiers.append((self.now, decision.tier))
            self.use.acted("ann", decision.tier)
            self.session = replace(
                self.session, tier=decision.tier, tier_since=self.now, effective_units=decision.units, notice=None
            )
        elif (notice := told(decision)) != self.session.notice:
            if notice is not None and (self.now, notice.at) not in self.told:
                self.told.append((self.now, notice.at))
            self.session = replace(self.session, notice=notice)
            self.use.notified("ann", notice)

    def live(self, until: float, touch_every: float | None = None, length: float = TOUCH) -> None:
        while self.now < until:
            self.now += EVERY
            if touch_every is not None and self.now % touch_every == 0:
                self.work(length)
            self.round()


@pytest.mark.parametrize("every", [10, 20, 60, 250])
def test_a_heartbeat_keeps_nothing(every: float) -> None:
    life = Life()
    life.work(1.0)
    life.live(HOUR, touch_every=every)
    assert life.tiers[0][1] is Tier.DOWNGRADED
    released = next(at for at, tier in life.tiers if tier is Tier.RELEASED)
    assert released <= 46 * MINUTE, "as without the heartbeat"


def test_a_share_that_a_heartbeat_restored_is_taken_again_after_a_notice_period() -> None:
    life = Life()
    life.work(1.0)
    life.live(3 * HOUR, touch_every=20)
    released = [at for at, tier in life.tiers if tier is Tier.RELEASED]
    assert len(released) > 10
    assert all(
        IDLE.warn_before <= after - before <= 1.2 * IDLE.warn_before for before, after in itertools.pairwise(released)
    )
    for at, _ in life.tiers:
        assert any(sent <= at - IDLE.warn_before and due <= at for sent, due in life.told), "each after its notice"


def test_one_step_of_training_counts() -> None:
    life = Life()
    life.live(3 * HOUR, touch_every=10 * MINUTE, length=0.25)
    assert life.tiers == []


def test_small_cells_that_add_up_in_the_window_count() -> None:
    life = Life()
    life.live(2 * HOUR, touch_every=20, length=0.02)
    assert life.tiers == []


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


def test_a_session_that_always_works_needs_little_memory() -> None:
    use = RecentUse()
    for at in range(2000):
        use.update("ann", observed(last_gpu_activity=float(at), gpu_seconds=at / 2), float(at), RULE)
    assert len(use._known["ann"].samples) <= 33


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
def test_use_is_never_later_than_the_last_work_and_never_earlier_than_enough_of_it(
    events: list[tuple[int, float]],
) -> None:
    use, done = RecentUse(), list[tuple[float, float]]()
    use.update("ann", observed(), 0.0, RULE)
    enough_at = 0.0
    for now, seen, seconds in _reports(events):
        done.append((now, seconds))
        use.update("ann", seen, now, RULE)
        if seconds and sum(length for at, length in done if at > now - RULE.window) >= RULE.min_use:
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
