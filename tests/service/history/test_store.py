"""The database of the history, on SQLite and on PostgreSQL."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, select, text

from gpushare_spawner.service.history.queries import By, Period, actions, gpu_time, waits
from gpushare_spawner.service.history.store import (
    DAY,
    HOUR,
    METADATA,
    SUBJECT,
    USE,
    VERSION_TABLE,
    Action,
    BegunRestart,
    GpuTimeAmounts,
    HistoryFailed,
    HistoryStore,
    SessionCounters,
    Subject,
    Wait,
    WaitOutcome,
)
from tests.service.history.databases import postgresql

NOW = 20_000 * DAY
"""The start of a day."""
ALWAYS = Period(0, NOW + DAY)
ANN = Subject("ann", "", "quarter", "ml", "n1", "GPU-0", "A100")
BOB = Subject("bob", "thesis", "half", "bio", "n1", "GPU-1", "A100")
ONE = GpuTimeAmounts(reserved=900, idle=600, recovered=300, borrowed=0, used=300, entitled=200, delivered=190, waits=4)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/history.sqlite"
    url: str = request.getfixturevalue("server")
    empty = HistoryStore(url)
    with empty._engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    empty.close()
    return url


@pytest.fixture
def store(url: str) -> Iterator[HistoryStore]:
    store = HistoryStore(url)
    store.upgrade()
    yield store
    store.close()


def test_a_migration_leaves_the_services_logging_as_it_is(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Alembic's usual `env.py` sets logging up anew, and switches off the loggers that are there."""
    root, ours = logging.getLogger(), logging.getLogger("gpushare.service.actions")
    before = (root.level, list(root.handlers), ours.level, list(ours.handlers), ours.propagate)
    store = HistoryStore(url)
    store.upgrade()
    store.close()
    assert (root.level, list(root.handlers), ours.level, list(ours.handlers), ours.propagate) == before
    ours.error("logged after the migration")
    assert "logged after the migration" in caplog.text


def sums(store: HistoryStore, *by: By, period: Period = ALWAYS) -> dict[tuple[str | int, ...], GpuTimeAmounts]:
    return {one.key: one.amounts for one in store.read(lambda connection: gpu_time(connection, period, by))}


def test_migrations_make_the_tables_that_the_code_uses(store: HistoryStore) -> None:
    store.upgrade()  # a second time changes nothing
    options = {"version_table": VERSION_TABLE, "compare_type": True}
    assert store.read(lambda c: compare_metadata(MigrationContext.configure(c, opts=options), METADATA)) == []


def test_amounts_of_an_hour_add_up(store: HistoryStore) -> None:
    store.add({(NOW, ANN): ONE}, [], [])
    store.add({(NOW, ANN): ONE, (NOW, BOB): ONE}, [], [])
    assert sums(store, By.USER) == {("ann",): ONE.plus(ONE), ("bob",): ONE}


def test_which_group_got_how_many_gpu_hours_and_how_much_was_idle(store: HistoryStore) -> None:
    store.add({(NOW, ANN): ONE, (NOW + HOUR, ANN): ONE, (NOW, replace(ANN, user="amy")): ONE, (NOW, BOB): ONE}, [], [])
    groups = sums(store, By.GROUP)
    assert (groups[("ml",)].reserved, groups[("ml",)].idle) == (2700, 1800)
    assert groups[("bio",)].reserved == 900


def test_sums_by_time_and_by_gpu(store: HistoryStore) -> None:
    store.add({(NOW, ANN): ONE, (NOW + HOUR, ANN): ONE, (NOW - HOUR, BOB): ONE}, [], [])
    assert list(sums(store, By.DAY)) == [(NOW - DAY,), (NOW,)]
    assert list(sums(store, By.HOUR, By.GPU)) == [(NOW - HOUR, "n1 GPU-1"), (NOW, "n1 GPU-0"), (NOW + HOUR, "n1 GPU-0")]
    assert sums(store) == {(): ONE.plus(ONE).plus(ONE)}


def test_a_period_and_filters_leave_out_the_rest(store: HistoryStore) -> None:
    store.add({(NOW, ANN): ONE, (NOW + HOUR, ANN): ONE, (NOW, BOB): ONE}, [], [])
    assert sums(store, By.USER, period=Period(NOW, NOW + HOUR, user="ann")) == {("ann",): ONE}
    assert sums(store, By.USER, period=Period(NOW, NOW + DAY, group="bio")) == {("bob",): ONE}
    assert sums(store, period=Period(NOW + DAY, NOW + 2 * DAY)) == {}


def test_counters_of_open_sessions_are_kept_and_those_of_ended_ones_deleted(store: HistoryStore) -> None:
    first = SessionCounters("n1", "ann", 1.5, 2.5, 25, 3.0, 4.0, 5.0, 6)
    second = replace(first, session="bob")
    store.add({}, [first, second], [])
    store.add({}, [replace(first, seen_at=9.0)], [("n1", "bob")])
    assert store.counters() == [replace(first, seen_at=9.0)]


def test_a_transaction_is_whole_or_not_at_all(store: HistoryStore) -> None:
    wrong = Wait(NOW, 1.0, WaitOutcome.STARTED, user=None)  # type: ignore[arg-type]
    with pytest.raises(HistoryFailed, match="cannot be written"):
        store.add({(NOW, ANN): ONE}, [], [], waits=[wrong])
    assert sums(store) == {}
    store.add({(NOW, ANN): ONE}, [], [])
    assert sums(store) == {(): ONE}


def test_waits_and_actions(store: HistoryStore) -> None:
    wait = Wait(NOW, 10.0, WaitOutcome.STARTED, "ann", "", "quarter", "ml")
    gave_up = replace(wait, seconds=500.0, outcome=WaitOutcome.GAVE_UP)
    action = Action(NOW, "released", "culler", "ann", "", "quarter", "ml", "n1", 0, "idle", "GPU idle for 45 min")
    store.add(
        {}, [], [], [action, replace(action, user="bob", at=NOW + 1)], [wait, replace(wait, seconds=20.0), gave_up]
    )
    answer = store.read(lambda connection: waits(connection, ALWAYS))
    assert (answer.started, answer.gave_up, answer.mean_seconds, answer.longest_seconds) == (2, 1, 15.0, 20.0)
    newest = store.read(lambda connection: actions(connection, ALWAYS, 10))
    assert [one.user for _, one in newest] == ["bob", "ann"]
    assert newest[1][1] == action
    assert store.read(lambda connection: actions(connection, ALWAYS, 10, before=newest[0][0])) == [newest[1]]
    assert store.read(lambda connection: actions(connection, Period(0, NOW + DAY, user="zoe"), 10)) == []


def test_old_hours_become_days_and_sums_stay(store: HistoryStore) -> None:
    old = NOW - 40 * DAY
    store.add({(old + hour * HOUR, subject): ONE for hour in range(24) for subject in (ANN, BOB)}, [], [])
    store.add({(NOW - HOUR, ANN): ONE}, [], [])
    before = sums(store, By.USER, By.DAY)
    store.thin(NOW, detail=31 * DAY, names=0, keep=0)
    store.thin(NOW, detail=31 * DAY, names=0, keep=0)
    assert sums(store, By.USER, By.DAY) == before
    rows = store.read(
        lambda connection: connection.execute(select(USE.c.length, func.count()).group_by(USE.c.length)).all()
    )
    assert sorted(tuple(row) for row in rows) == [(HOUR, 1), (DAY, 2)]


def test_each_old_day_is_merged_for_itself(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is killed on the way has lost nothing, and what it did stays done."""
    old = NOW - 40 * DAY
    store.add({(old + hour * HOUR, ANN): ONE for hour in range(3 * 24)}, [], [])
    before, merge_day = sums(store, By.DAY), store._merge_day
    days: list[int] = []

    def killed_at_the_third(*args: Any) -> None:
        if len(days) == 2:
            raise KeyboardInterrupt
        days.append(args[1])
        merge_day(*args)

    monkeypatch.setattr(store, "_merge_day", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        store.thin(NOW, detail=31 * DAY, names=0, keep=0)
    assert sums(store, By.DAY) == before
    assert store.read(lambda connection: connection.scalar(select(func.count()).select_from(USE))) == 2 + 24


def test_a_late_amount_of_an_old_day_is_merged_too(store: HistoryStore) -> None:
    old = NOW - 40 * DAY
    store.add({(old, ANN): ONE}, [], [])
    store.thin(NOW, detail=31 * DAY, names=0, keep=0)
    store.add({(old, ANN): ONE, (old + HOUR, ANN): ONE}, [], [])
    store.thin(NOW, detail=31 * DAY, names=0, keep=0)
    assert sums(store, By.HOUR) == {(old,): ONE.plus(ONE).plus(ONE)}


def test_old_names_are_deleted_and_groups_keep_their_sums(store: HistoryStore) -> None:
    old = NOW - 500 * DAY
    said = Action(old, "keep", "ann", "ann", "thesis", "quarter", "ml")
    store.add({(old, ANN): ONE, (old, BOB): ONE, (NOW, ANN): ONE}, [], [], [said, replace(said, at=NOW)])
    store.thin(NOW + HOUR, detail=31 * DAY, names=400 * DAY, keep=0)
    assert sums(store, By.USER) == {("",): ONE.plus(ONE), ("ann",): ONE}
    assert sums(store, By.GROUP)[("ml",)] == ONE.plus(ONE)
    newest = [action for _, action in store.read(lambda connection: actions(connection, ALWAYS, 10))]
    assert [(one.user, one.server, one.actor) for one in newest] == [("ann", "thesis", "ann"), ("", "", "")]
    names = store.read(lambda connection: list(connection.scalars(select(SUBJECT.c.user))))
    assert sorted(names) == ["", "", "ann"]


def test_what_is_too_old_is_deleted(store: HistoryStore) -> None:
    old = NOW - 2000 * DAY
    wait = Wait(old, 1.0, WaitOutcome.STARTED, "ann")
    store.add({(old, ANN): ONE, (NOW, BOB): ONE}, [], [], [Action(old, "keep", "ann")], [wait])
    store.thin(NOW, detail=0, names=0, keep=1000 * DAY)
    assert sums(store, By.USER) == {("bob",): ONE}
    assert store.read(lambda connection: actions(connection, ALWAYS, 10)) == []
    assert store.read(lambda connection: waits(connection, ALWAYS)).started == 0
    assert store.read(lambda connection: list(connection.scalars(select(SUBJECT.c.user)))) == ["bob"]


def test_many_sessions_in_one_hour(store: HistoryStore) -> None:
    many = {(NOW, replace(ANN, user=f"user-{number}")): ONE for number in range(1500)}
    store.add(many, [], [])
    store.add(many, [], [])
    assert len(sums(store, By.USER)) == 1500
    assert sums(store)[()].reserved == 2 * 1500 * 900


def test_a_restart_is_stored_until_it_is_over(store: HistoryStore) -> None:
    options = {"profile": "half", "image": ["a", {"b": 1}], "ü": None}
    first = BegunRestart(NOW, "ann", "", "n1", "ml", "quarter", "half", "root", options, {"profile": "quarter"})
    store.begin_restart(first)
    later = replace(first, at=NOW + 60, template="whole", options={})
    store.begin_restart(later)
    named = replace(first, at=NOW + 1, server="thesis")
    store.begin_restart(named)
    assert store.begun_restarts() == [named, later]
    store.end_restart("ann", "thesis")
    store.end_restart("eve", "")
    assert store.begun_restarts() == [later]


def test_a_database_of_a_later_version_is_refused(url: str, store: HistoryStore) -> None:
    with store._engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '999'"))
    with pytest.raises(HistoryFailed, match="made by a later version"):
        HistoryStore(url).upgrade()


def test_the_sqlite_file_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        HistoryStore(f"sqlite:///{tmp_path}/h.sqlite").upgrade()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "h.sqlite").st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "cannot be used: .* Give an SQLAlchemy URL, like sqlite:"),
        ("postgresql+nodriver://x", "cannot be used"),
        ("sqlite:////nowhere/at/all.sqlite", "unable to open database file"),
    ],
)
def test_a_database_that_cannot_be_used_is_said_in_a_sentence(url: str, said: str) -> None:
    with pytest.raises(HistoryFailed, match=said):
        HistoryStore(url).upgrade()


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    store = HistoryStore(f"postgresql+psycopg://ann:secret@/x?host={tmp_path}")
    with pytest.raises(HistoryFailed) as caught:
        store.upgrade()
    assert "secret" not in str(caught.value)
    assert "ann:***" in str(caught.value)


def test_an_error_shows_no_password_in_the_query_of_the_url(tmp_path: Path) -> None:
    store = HistoryStore(f"sqlite:///{tmp_path}/missing/h.sqlite?password=secret")
    with pytest.raises(HistoryFailed) as failed:
        store.upgrade()
    assert "secret" not in str(failed.value)
    assert "missing/h.sqlite" in str(failed.value)
