"""What accounts used over quota survives a restart of the hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpushare_spawner.model.quota import HALF_LIFE_SECONDS
from gpushare_spawner.placement.departures import MOST_LENGTHS, SessionLengths
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.spawner.queue.quotas import SAVE_EVERY, PastUse, QueueQuotas, QuotaHistory
from tests.spawner.queue.test_queue_quotas import CAPACITY, QUOTAS, Clock, allocation

DAY = HALF_LIFE_SECONDS
LOG = logging.getLogger("hub")
B = "group:b"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.json"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def hub(path: Path, clock: Clock, ledger: Ledger | None = None) -> QueueQuotas:
    """A hub process that has just started."""
    quotas = QueueQuotas(ledger or Ledger(), LOG, lambda: QUOTAS, clock, QuotaHistory(path, LOG))
    quotas.bring_up_to_date(CAPACITY)
    return quotas


def used(quotas: QueueQuotas, account: str = B) -> float:
    assert quotas._fair is not None
    return quotas._fair.used(account)


def a_day_over_quota(path: Path, clock: Clock) -> None:
    """A hub in which group b uses a quarter of all GPUs for a day, and then ends its session."""
    ledger = Ledger()
    first = hub(path, clock, ledger)
    ledger.add(allocation("s", "b", at=clock.now))
    first.note_use()
    clock.now += DAY
    ledger.remove("s")
    first.bring_up_to_date(CAPACITY)
    assert used(first) == pytest.approx(0.125)


def test_use_of_ended_sessions_is_known_after_a_restart_and_halves_while_the_hub_is_down(
    path: Path, clock: Clock
) -> None:
    a_day_over_quota(path, clock)
    assert used(hub(path, clock)) == pytest.approx(0.125)
    clock.now += DAY
    assert used(hub(path, clock)) == pytest.approx(0.0625)


def test_sessions_that_ran_while_the_hub_was_down_count_from_then_on(path: Path, clock: Clock) -> None:
    a_day_over_quota(path, clock)
    ledger = Ledger()
    ledger.add(allocation("old", "b", at=clock.now - DAY))
    ledger.add(allocation("new", "b", at=clock.now + DAY / 2))
    clock.now += DAY
    # "old" was counted before the restart; the other for half a day
    assert used(hub(path, clock, ledger)) == pytest.approx(0.0625 + 0.125 + 0.25 * (1 - 0.5**0.5))


def test_a_clock_that_was_set_back_changes_nothing(path: Path, clock: Clock) -> None:
    a_day_over_quota(path, clock)
    clock.now -= 2 * DAY
    assert used(hub(path, clock)) == pytest.approx(0.125)


def test_only_the_owner_can_read_the_file_and_it_is_not_written_all_the_time(path: Path, clock: Clock) -> None:
    history = QuotaHistory(path, LOG)
    history.save(clock.now, {})
    assert not path.exists(), "there is nothing to keep"
    history.save(clock.now, {B: 0.5})
    assert path.stat().st_mode & 0o777 == 0o600
    history.save(clock.now + SAVE_EVERY - 1, {B: 0.7})
    kept = history.load()
    assert kept is not None
    assert (kept.at, kept.used) == (clock.now, {B: 0.5})
    history.save(clock.now + SAVE_EVERY, {})
    kept = history.load()
    assert kept is not None
    assert kept.used == {}


def test_lengths_of_ended_sessions_survive_a_restart_also_without_quotas(path: Path, clock: Clock) -> None:
    a_day_over_quota(path, clock)
    kept = PastUse.model_validate_json(path.read_bytes())
    for number in range(2):
        lengths = SessionLengths()
        if not number:
            for seconds in (600.0, 1200.4, 1800.0, 2400.0, 3000.0):
                lengths.ended("small", seconds)
        without = QueueQuotas(Ledger(), LOG, lambda: None, clock, QuotaHistory(path, LOG, lengths))
        clock.now += SAVE_EVERY
        without.bring_up_to_date(CAPACITY)
        assert lengths.expected("small") == 1800.0
        assert lengths.recent == {"small": [600, 1200, 1800, 2400, 3000]}
    again = PastUse.model_validate_json(path.read_bytes())
    assert (again.at, again.used) == (kept.at, kept.used), "use over quota waits for quotas"
    clock.now += DAY
    assert used(hub(path, clock)) == pytest.approx(0.125 / 2, rel=0.01)
    assert PastUse.model_validate_json(path.read_bytes()).lengths == lengths.recent


def test_the_lengths_of_all_templates_together_are_the_newest_of_each_after_a_restart(path: Path, clock: Clock) -> None:
    lengths, later = SessionLengths(), SessionLengths()
    for _ in range(MOST_LENGTHS):
        for template, seconds in (("other", 5000.0), ("long", 9000.0), ("short", 100.0)):
            lengths.ended(template, seconds)
    QuotaHistory(path, LOG, lengths).save(clock.now, None)
    QuotaHistory(path, LOG, later).load()
    assert lengths.expected("new") == later.expected("new") == 5000.0


def test_without_saved_use_sessions_count_from_their_opening_although_lengths_are_saved(
    path: Path, clock: Clock
) -> None:
    lengths = SessionLengths()
    lengths.ended("small", 600.0)
    without = QueueQuotas(Ledger(), LOG, lambda: None, clock, QuotaHistory(path, LOG, lengths))
    without.bring_up_to_date(CAPACITY)
    ledger = Ledger()
    ledger.add(allocation("s", "b", at=clock.now - DAY))
    assert PastUse.model_validate_json(path.read_bytes()).lengths == {"small": [600]}
    assert used(hub(path, clock, ledger)) == pytest.approx(0.125)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["open", "fdopen", "write", "replace"])
def test_a_hub_that_is_killed_while_it_writes_leaves_the_old_file(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    QuotaHistory(path, LOG).save(clock.now, {B: 0.5})

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if step == "replace":
            patch.setattr(Path, "replace", die)
        elif step == "write":
            patch.setattr("gpushare_spawner.spawner.queue.quotas.PastUse.model_dump_json", die)
        else:
            patch.setattr(os, step, die)
        with pytest.raises(Killed):
            QuotaHistory(path, LOG).save(clock.now + 99, {B: 0.9})
    kept = QuotaHistory(path, LOG).load()
    assert kept is not None
    assert kept.used == {B: 0.5}
    QuotaHistory(path, LOG).save(clock.now + 99, {B: 0.9})
    kept = QuotaHistory(path, LOG).load()
    assert kept is not None
    assert kept.used == {B: 0.9}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 2, "at": 1}', '{"version": 1, "at": 1, "used": {"group:b": -1}}',
     '{"version": 1, "at": 1, "used": {"group:b": "much"}}', '{"version": 1, "at": 1, "lengths": {"small": [-1]}}'],
)  # fmt: skip
def test_a_file_that_is_not_valid_is_set_aside_and_logged(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path.write_text(content)
    assert used(hub(path, clock)) == 0.0
    assert path.with_name("usage.json.bad").read_text() == content
    assert "usage.json is lost: the file is not valid" in caplog.text
    a_day_over_quota(path, clock)
    assert used(hub(path, clock)) > 0


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = tmp_path / "missing" / "usage.json"
    history = QuotaHistory(nowhere, LOG)
    for number in range(3):
        history.save(clock.now + 99 * number, {B: 0.5})
    assert caplog.text.count("cannot be written (No such file or directory)") == 1
    assert "Set quota_usage_file to a file that the hub can write" in caplog.text
    (tmp_path / "folder").mkdir()
    assert QuotaHistory(tmp_path / "folder", LOG).load() is None
    assert "folder cannot be read (Is a directory)" in caplog.text
