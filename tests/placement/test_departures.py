"""Departures are expected by the lengths of ended sessions and by notices; without these nothing is expected."""

from __future__ import annotations

import math

import pytest

from gpushare_spawner.model.report import GpuReport, Notice
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.model.template import Idle
from gpushare_spawner.placement.departures import (
    FEWEST_LENGTHS,
    MOST_LENGTHS,
    MOST_TEMPLATES,
    MOST_UNSEEN_SECONDS,
    Departures,
    IdleSince,
    SessionLengths,
    candidates,
)
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.placement.request import PlacementRequest
from tests.present import present

HOUR = 3600.0
NOW = 1_000_000.0
STOP = Notice(tier=Tier.STOPPED, at=NOW + 300.0, reason="idle")


def lengths(*seconds: float, template: str = "t") -> SessionLengths:
    ended = SessionLengths()
    for each in seconds:
        ended.ended(template, each)
    return ended


def of(session: str, gpu: str, units: int = 100, age: float = HOUR, template: str = "t") -> Allocation:
    return Allocation(session, (gpu,), units, effective_units=units, opened_at=NOW - age, template=template)


def departures(*allocations: Allocation, cpu: int | None = None, **nodes: int) -> Departures:
    """Of nodes with so many GPUs: a-0 and a-1 are on node a. All sessions last two to three hours."""
    ledger = Ledger()
    for node, gpus in nodes.items():
        ledger.put_node(
            node, [GpuReport(index=i, uuid=f"{node}-{i}", model="A100", memory_bytes=2**30) for i in range(gpus)]
        )
        ledger.put_resources(node, NodeResources(cpu))
    expected = Departures(ledger, lambda template: Requested(2000))
    expected.lengths = lengths(*[2 * HOUR + 60 * minute for minute in range(60)])
    ledger.change(allocations)
    return expected


def test_a_new_session_lasts_as_long_as_half_of_those_that_ended() -> None:
    assert lengths(*[HOUR] * (FEWEST_LENGTHS - 1)).expected("t") is None
    assert lengths(100.0, 200.0, 300.0, 400.0, 5000.0).expected("t") == 300.0


def test_the_templates_with_the_newest_lengths_are_kept() -> None:
    ended = lengths(HOUR, template="first")
    for number in range(MOST_TEMPLATES - 1):
        ended.ended(f"t{number}", HOUR)
    ended.ended("first", HOUR)
    ended.ended("last", HOUR)
    assert len(ended.recent) == MOST_TEMPLATES
    assert ended.recent.keys() >= {"first", "t1", "last"}
    assert "t0" not in ended.recent
    assert len(ended.remaining("t0", 0.0)) == 32, "the lengths of all templates stay"


def test_where_few_sessions_of_a_template_have_ended_those_of_all_templates_count() -> None:
    ended = lengths(100.0, 200.0, 300.0, 400.0, 5000.0)
    assert ended.expected("other") == 300.0
    assert ended.remaining("other", 0.0)[0] == 100.0
    for _ in range(FEWEST_LENGTHS):
        ended.ended("other", HOUR)
    assert (ended.expected("other"), ended.expected("t")) == (HOUR, 300.0)
    assert ended.recent == {"t": [100, 200, 300, 400, 5000], "other": [HOUR] * FEWEST_LENGTHS}


def test_servers_that_failed_to_start_and_sessions_of_long_ago_do_not_count() -> None:
    ended = lengths(*[5.0] * 50, *[HOUR] * MOST_LENGTHS)
    assert ended.expected("t") == HOUR
    for _ in range(MOST_LENGTHS):
        ended.ended("t", 2 * HOUR)
    assert ended.remaining("t", 0.0)[0] == 2 * HOUR


def test_a_session_is_compared_with_those_that_lasted_as_long() -> None:
    ended = lengths(*[100.0] * 50, *[1000.0] * FEWEST_LENGTHS)
    assert set(ended.remaining("t", 500.0)) == {500.0}


def test_a_session_that_outlasts_nearly_all_others_lasts_as_long_again_in_half_of_the_cases() -> None:
    remaining = lengths(*[100.0] * FEWEST_LENGTHS).remaining("t", HOUR)
    assert remaining == sorted(remaining)
    assert remaining[15] < HOUR < remaining[16]
    assert set(SessionLengths().remaining("t", HOUR)) == {math.inf}


def test_the_node_on_which_the_oldest_session_runs_empties_first() -> None:
    expected = departures(of("young", "a-0", age=60.0), of("old", "b-0", age=2 * HOUR), a=1, b=1)
    starts = {node: expected.start_on(node, PlacementRequest(Share(100)), NOW, {}) for node in "ab"}
    old, young = starts["b"], starts["a"]
    assert old is not None
    assert young is not None
    assert (old.hold.node, old.hold.gpus) == ("b", ("b-0",))
    assert old.at.earliest <= old.at.likely <= old.at.latest <= NOW + HOUR < young.at.earliest
    assert old.at.likely == pytest.approx(NOW + HOUR / 2, abs=300)
    assert old.hold.start == old.at.likely


def test_several_sessions_have_to_end_for_several_gpus() -> None:
    expected = departures(*(of(f"s{number}", f"a-{number}", age=2 * HOUR) for number in range(4)), a=4)
    one, four = (expected.start_on("a", PlacementRequest(Share(100, count)), NOW, {}) for count in (1, 4))
    assert one is not None
    assert four is not None
    # the first and the last of four that end at any time of the next hour
    assert one.at.likely == pytest.approx(NOW + HOUR / 5, abs=500)
    assert four.at.likely == pytest.approx(NOW + HOUR * 4 / 5, abs=500)
    assert expected.start_on("a", PlacementRequest(Share(100, 5)), NOW, {}) is None
    assert expected.start_on("gone", PlacementRequest(Share(100)), NOW, {}) is None


def test_the_last_gpu_of_a_share_needs_only_its_own_units() -> None:
    half = of("half", "a-0", 50, age=60.0)
    pair = Allocation("pair", ("a-1", "a-2"), 100, effective_units=100, opened_at=NOW, template="t", last_units=50)
    expected = departures(half, pair, a=3)
    start = expected.start_on("a", PlacementRequest(Share(100, 2, 50)), NOW, {"pair": STOP})
    assert start is not None
    assert start.hold.gpus == ("a-1", "a-0")
    assert set(start.at) == {NOW + 300.0}


def test_a_notice_says_more_than_the_lengths() -> None:
    expected = departures(of("idle", "a-0", age=60.0), a=1)
    expected.lengths = SessionLengths()
    request = PlacementRequest(Share(50))
    unknown, told = (expected.start_on("a", request, NOW, notices) for notices in ({}, {"idle": STOP}))
    assert unknown is not None
    assert told is not None
    assert unknown.at.likely == math.inf
    assert set(told.at) == {NOW + 300.0}
    downgrade = Notice(tier=Tier.DOWNGRADED, at=NOW + 100.0, reason="idle", effective_units=60)
    too_little = expected.start_on("a", request, NOW, {"idle": downgrade})
    assert too_little is not None
    assert too_little.at.likely == math.inf
    enough = expected.start_on("a", PlacementRequest(Share(40)), NOW, {"idle": downgrade})
    assert enough is not None
    assert enough.at.likely == NOW + 100.0


RELEASED = Idle(release_after=2700.0, warn_before=300.0)


@pytest.mark.parametrize(
    ("idle", "seconds", "likely"),
    [
        (RELEASED, 2000.0, 700.0),  # of sessions that are idle for so long, 26 of 100 work again before
        (RELEASED, 300.0, None),
        (RELEASED, 2390.0, 310.0),
        (RELEASED, 2650.0, None),  # without a notice: something delays it
        (RELEASED.model_copy(update={"when": "pressure"}), 2650.0, 60.0),
        (RELEASED.model_copy(update={"when": "pressure"}), 9000.0, 60.0),
        (Idle(downgrade_after=2100.0, downgrade_to=0.6), 2000.0, None),  # it keeps too much
        (Idle(downgrade_after=2400.0, downgrade_to=0.5, release_after=9000.0), 2000.0, 400.0),
        (Idle(stop_after=2700.0), 2000.0, 700.0),
        (None, 2000.0, None),
    ],
)
def test_a_session_that_is_idle_for_long_is_expected_to_stay_idle_until_its_idle_action(
    idle: Idle | None, seconds: float, likely: float | None
) -> None:
    expected = departures(of("idle", "a-0"), a=1)
    expected._idle = {"t": idle}.get
    since = IdleSince(NOW - seconds, NOW - seconds)
    request = PlacementRequest(Share(50))
    works, start = (present(expected.start_on("a", request, NOW, {}, {"idle": value}.get)) for value in (None, since))
    assert works.at.likely >= NOW + HOUR, "it ends as others do"
    assert start.at.likely >= NOW + HOUR if likely is None else start.at.likely == NOW + likely
    assert start.at.latest >= NOW + HOUR or (idle is not None and idle.when == "pressure"), "its user may come back"
    if likely is not None:
        notice = Notice(tier=Tier.RELEASED, at=NOW + 200.0, reason="idle")
        assert set(present(expected.start_on("a", request, NOW, {"idle": notice}, {"idle": since}.get)).at) == {
            NOW + 200
        }


def test_only_a_stop_is_expected_to_free_cpu_and_only_while_no_kernel_works() -> None:
    expected = departures(of("idle", "a-0"), a=1, cpu=0)
    expected._idle = {"t": Idle(release_after=2600.0, stop_after=3000.0)}.get
    request = PlacementRequest(Share(50), cpu=2000)
    for quiet, likely in ((NOW - 2500.0, NOW + 500.0), (None, NOW + HOUR)):
        start = present(expected.start_on("a", request, NOW, {}, {"idle": IdleSince(NOW - 2500.0, quiet)}.get))
        assert start.at.likely >= likely
        assert (start.at.likely == likely) is (quiet is not None)


def test_a_spawn_that_waits_for_cpu_starts_when_enough_servers_have_ended() -> None:
    expected = departures(*(of(f"s{n}", "a-0", 10, age=2 * HOUR) for n in range(4)), cpu=1000, a=1)
    starts = [expected.start_on("a", PlacementRequest(Share(10), cpu=cpu), NOW, {}) for cpu in (1000, 3000, 9000, 9001)]
    likely = [start.at.likely - NOW for start in starts if start is not None]
    assert likely[0] == 0.0
    assert 0.0 < likely[1] < HOUR / 2 < likely[2] < HOUR
    assert likely[3] == math.inf


def test_released_sessions_free_no_cpu_and_what_they_lent_is_free_already() -> None:
    expected = departures(of("there", "a-0", 80).with_effective(0), cpu=1000, a=1)
    release = {"there": Notice(tier=Tier.RELEASED, at=NOW + 10.0, reason="idle")}
    lent = expected.start_on("a", PlacementRequest(Share(90)), NOW, {})
    cpu = expected.start_on("a", PlacementRequest(Share(90), cpu=2000), NOW, release)
    assert lent is not None
    assert cpu is not None
    assert lent.at.likely == NOW
    assert cpu.at.earliest > NOW + 10.0


def test_lengths_are_learned_from_sessions_that_leave_the_ledger() -> None:
    expected = departures(a=1)
    ledger, expected.lengths = expected._ledger, SessionLengths()
    expected.follow(NOW)
    for number in range(FEWEST_LENGTHS):
        ledger.add(of(f"s{number}", "a-0", 10))
    ledger.replace(of("s0", "a-0", 10).with_effective(0))
    expected.follow(NOW + 1)
    assert expected.lengths.expected("t") is None, "a change of its tier does not end a session"
    for number in range(FEWEST_LENGTHS):
        ledger.remove(f"s{number}")
    expected.follow(NOW + 60)
    assert expected.lengths.expected("t") == HOUR + 60


def test_a_reservation_that_a_pod_replaces_has_not_ended() -> None:
    feed = LedgerFeed()
    expected = Departures(feed.ledger, is_reserved=feed.is_reserved)
    expected.follow(NOW)
    feed.put(EntrySource.RESERVED, of("ann#1", "a-0", 10, age=100.0))
    feed.put(EntrySource.SEEN, of("pod-ann", "a-0", 10, age=90.0))
    feed.drop(EntrySource.RESERVED, "ann#1")
    expected.follow(NOW)
    assert not expected.lengths.recent
    feed.put(EntrySource.RESERVED, of("pod-ann", "a-0", 10, age=90.0))
    feed.drop(EntrySource.SEEN, "pod-ann")
    feed.drop(EntrySource.RESERVED, "pod-ann")
    expected.follow(NOW)
    assert expected.lengths.recent == {"t": [90]}


def test_a_session_that_ended_while_nobody_looked_has_no_known_length() -> None:
    expected = departures(of("there", "a-0"), a=1)
    expected.lengths = SessionLengths()
    expected.follow(NOW)
    expected._ledger.remove("there")
    expected.follow(NOW + MOST_UNSEEN_SECONDS + 1)
    assert not expected.lengths.recent


def test_nodes_that_the_request_leaves_out_are_no_candidates() -> None:
    expected = departures(of("there", "a-0", 50), a=1, b=1)
    capacity = expected._ledger.capacity
    assert candidates(capacity, PlacementRequest(Share(100))) == ["b", "a"]
    assert candidates(capacity, PlacementRequest(Share(100), left_out=frozenset("b"))) == ["a"]
