"""The database of the history: writes amounts, actions and waits, and deletes what is old.

Plain SQL of SQLAlchemy, so any of its databases can be used. Methods block; `recorder` calls them in a thread.
One service writes at a time: the hub runs one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    Table,
    bindparam,
    create_engine,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gpushare_spawner.service.history.events import Action, BegunRestart, Wait
from gpushare_spawner.service.history.tables import ACTION, COUNTERS, RESTART, SUBJECT, USE, WAIT
from gpushare_spawner.service.history.use import AMOUNTS, DAY, HOUR, Amounts, Counters, Subject
from gpushare_spawner.wording.errors import missing_package, reason

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "gpushare_version"
"""Alembic's table: the history can share a database with the hub, which has one of its own."""
_CHUNK = 400
"""Values in one IN: SQLite takes 999 in old versions."""

T = TypeVar("T")


class HistoryFailed(Exception):
    """The database cannot be used; the text says why, for people."""


class HistoryStore:
    """A database, with its tables made or migrated. Each method raises HistoryFailed."""

    def __init__(self, url: str) -> None:
        """``url``: SQLAlchemy's, like ``sqlite:////srv/jupyterhub/gpushare-history.sqlite``."""
        try:
            self._engine = _engine(url)
        except ArgumentError as error:
            raise HistoryFailed(
                f"The database of the history cannot be used: {reason(error)}. Give an SQLAlchemy URL, like "
                "sqlite:////srv/jupyterhub/gpushare-history.sqlite, or false for no history."
            ) from None
        except ImportError as error:
            raise HistoryFailed(missing_package("The database of the history", error)) from None

    def upgrade(self) -> None:
        """Make the tables, or migrate those of an earlier version. Those of a later version are refused."""
        _make_private(self._engine.url)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        with self._failing("cannot be prepared"), self._engine.begin() as connection:
            config.attributes |= {"connection": connection, "version_table": VERSION_TABLE}
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise HistoryFailed(
                    f"The database of the history was made by a later version of gpushare-spawner ({reason(error)}): "
                    f"install that version, or give another database. This version knows {', '.join(sorted(known))}."
                ) from None

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query and return its result."""
        with self._failing("cannot be read"), self._engine.connect() as connection:
            return query(connection)

    def counters(self) -> list[Counters]:
        """Return what is counted of open sessions."""
        return self.read(lambda connection: [Counters(**row._mapping) for row in connection.execute(select(COUNTERS))])

    def add(
        self,
        amounts: Mapping[tuple[int, Subject], Amounts],
        counted: Sequence[Counters],
        ended: Sequence[tuple[str, str]],
        actions: Sequence[Action] = (),
        waits: Sequence[Wait] = (),
    ) -> None:
        """Add all of these, or nothing: what a killed service had not stored is counted by the next one."""
        with self._failing("cannot be written"), self._engine.begin() as connection:
            self._add_use(connection, amounts, HOUR)
            gone = [(one.node, one.session) for one in counted] + list(ended)
            if gone:
                connection.execute(
                    delete(COUNTERS).where(
                        COUNTERS.c.node == bindparam("old_node"), COUNTERS.c.session == bindparam("old_session")
                    ),
                    [{"old_node": node, "old_session": session} for node, session in gone],
                )
            _insert(connection, COUNTERS, (asdict(one) for one in counted))
            _insert(connection, ACTION, (asdict(one) for one in actions))
            _insert(connection, WAIT, (asdict(one) for one in waits))

    def begin_restart(self, one: BegunRestart) -> None:
        """Add a restart that is under way, instead of an earlier one of the same server."""
        row = asdict(one) | {name: json.dumps(dict(getattr(one, name))) for name in _OPTIONS}
        with self._failing("cannot be written"), self._engine.begin() as connection:
            connection.execute(_restart_of(one.user, one.server))
            connection.execute(insert(RESTART).values(row))

    def end_restart(self, user: str, server: str) -> None:
        """Delete a restart that is over."""
        with self._failing("cannot be written"), self._engine.begin() as connection:
            connection.execute(_restart_of(user, server))

    def begun_restarts(self) -> list[BegunRestart]:
        """Return the restarts that are under way, the oldest first."""
        rows = self.read(lambda connection: connection.execute(select(RESTART).order_by(RESTART.c.at)).all())
        found = (dict(row._mapping) for row in rows)
        return [BegunRestart(**row | {name: json.loads(row[name]) for name in _OPTIONS}) for row in found]

    def thin(self, now: float, detail: float, names: float, keep: float) -> None:
        """Make old rows fewer. All in seconds, 0: never.

        Hours older than ``detail`` become days; users' names older than ``names``, and everything older than ``keep``,
        are deleted.
        """
        with self._thinning() as connection:
            if keep:
                connection.execute(delete(USE).where(USE.c.start < now - keep))
                connection.execute(delete(ACTION).where(ACTION.c.at < now - keep))
                connection.execute(delete(WAIT).where(WAIT.c.began_at < now - keep))
        if detail:
            self._merge(int((now - detail) // DAY) * DAY, lambda subject: subject, only_hours=True)
        if names:
            oldest = int((now - names) // DAY) * DAY
            self._merge(oldest, lambda subject: replace(subject, user="", server=""), only_hours=False)
            with self._thinning() as connection:
                for table, instant in ((ACTION, ACTION.c.at), (WAIT, WAIT.c.began_at)):
                    connection.execute(
                        update(table).where(instant < oldest, table.c.user != "").values(user="", server="")
                    )
                # a reason names nobody; an actor can be a user
                connection.execute(
                    update(ACTION)
                    .where(ACTION.c.at < oldest, ACTION.c.actor.not_in(["culler", "agent", ""]))
                    .values(actor="")
                )
        with self._thinning() as connection:
            connection.execute(delete(SUBJECT).where(SUBJECT.c.id.not_in(select(USE.c.subject))))

    def _merge(self, before: int, renamed: Callable[[Subject], Subject], only_hours: bool) -> None:
        """Make days of the rows before an instant, for the renamed subjects, the oldest day first.

        Each day is a transaction: pages are answered between two of them, and a killed service has lost no row.
        """
        old = USE.c.start < before
        if only_hours:
            old &= USE.c.length < DAY
        else:
            old &= USE.c.subject.in_(select(SUBJECT.c.id).where(SUBJECT.c.user != ""))
        while True:
            with self._thinning() as connection:
                first = connection.scalar(select(USE.c.start).where(old).order_by(USE.c.start).limit(1))
                if first is None:
                    return
                self._merge_day(connection, int(first) // DAY * DAY, old, renamed)

    def _merge_day(
        self, connection: Connection, day: int, old: ColumnElement[bool], renamed: Callable[[Subject], Subject]
    ) -> None:
        within = old & (USE.c.start >= day) & (USE.c.start < day + DAY)
        rows = connection.execute(select(USE, SUBJECT).join(SUBJECT).where(within)).all()
        merged: dict[tuple[int, Subject], Amounts] = defaultdict(Amounts)
        for row in rows:
            subject = renamed(Subject(*(row._mapping[SUBJECT.c[name]] for name in _FIELDS)))
            amounts = Amounts(*(row._mapping[USE.c[name]] for name in AMOUNTS))
            merged[day, subject] = merged[day, subject].plus(amounts)
        connection.execute(delete(USE).where(within))
        self._add_use(connection, merged, DAY)

    @contextlib.contextmanager
    def _thinning(self) -> Iterator[Connection]:
        with self._failing("cannot be thinned out"), self._engine.begin() as connection:
            yield connection

    def _add_use(self, connection: Connection, amounts: Mapping[tuple[int, Subject], Amounts], length: int) -> None:
        if not amounts:
            return
        ids = self._subject_ids(connection, {subject for _, subject in amounts})
        by_key = {(start, ids[subject]): amount for (start, subject), amount in amounts.items()}
        known: set[tuple[int, int]] = set()
        for start in {start for start, _ in by_key}:
            wanted = [subject for at, subject in by_key if at == start]
            for some in _chunks(wanted):
                found = connection.scalars(select(USE.c.subject).where(USE.c.start == start, USE.c.subject.in_(some)))
                known |= {(start, subject) for subject in found}
        if known:
            connection.execute(
                update(USE)
                .where(USE.c.start == bindparam("key_start"), USE.c.subject == bindparam("key_subject"))
                .values({name: USE.c[name] + bindparam(f"more_{name}") for name in AMOUNTS}),
                [
                    {"key_start": start, "key_subject": subject}
                    | {f"more_{name}": getattr(by_key[start, subject], name) for name in AMOUNTS}
                    for start, subject in sorted(known)
                ],
            )
        fresh = [key for key in by_key if key not in known]
        _insert(
            connection,
            USE,
            (
                {"start": start, "subject": subject, "length": length} | asdict(by_key[start, subject])
                for start, subject in fresh
            ),
        )

    def _subject_ids(self, connection: Connection, subjects: Collection[Subject]) -> dict[Subject, int]:
        """Return the subjects' rows; new ones are inserted. Known after the transaction only: it can be rolled back."""
        digests = {_digest(subject): subject for subject in subjects}
        ids = _find_digests(connection, digests)
        fresh = [digest for digest in digests if digest not in ids]
        _insert(connection, SUBJECT, (asdict(digests[digest]) | {"digest": digest} for digest in fresh))
        ids |= _find_digests(connection, fresh)
        return {subject: ids[digest] for digest, subject in digests.items()}

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, OSError) as error:
            # a query can have a password too
            shown = self._engine.url.set(query={}).render_as_string(hide_password=True)
            raise HistoryFailed(f"The database of the history ({shown}) {what}: {_cause(error)}.") from error


_OPTIONS = ("options", "old_options")
"""Columns with user options, as JSON."""
_FIELDS = ("user", "server", "template", "group", "node", "gpu", "model")


def _restart_of(user: str, server: str) -> Delete:
    return delete(RESTART).where(RESTART.c.user == user, RESTART.c.server == server)


def _engine(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, pool_pre_ping=True)
    engine = create_engine(parsed, connect_args={"timeout": 30})
    event.listen(engine, "connect", partial(_sqlite_settings))
    return engine


def _make_private(url: URL) -> None:
    """Make a SQLite file that only its owner can read: names of users stand in it."""
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        # SQLite itself says what is wrong with the path
        with contextlib.suppress(OSError):
            os.close(os.open(url.database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _sqlite_settings(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # readers do not wait for the writer
    cursor.execute("PRAGMA journal_mode=WAL")
    # a power cut can lose the last minute, as a kill does; the database stays whole
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _insert(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    if values := list(rows):
        connection.execute(insert(table), values)


def _find_digests(connection: Connection, digests: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in _chunks(list(digests)):
        rows = connection.execute(select(SUBJECT.c.digest, SUBJECT.c.id).where(SUBJECT.c.digest.in_(some)))
        found |= {row.digest: row.id for row in rows}
    return found


def _digest(subject: Subject) -> str:
    return hashlib.sha256(json.dumps(asdict(subject), sort_keys=True).encode()).hexdigest()


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[begin : begin + _CHUNK] for begin in range(0, len(values), _CHUNK))


def _cause(error: BaseException) -> str:
    """Return what the database said, without SQLAlchemy's statement and link."""
    return reason(getattr(error, "orig", None) or error)
