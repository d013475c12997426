"""The history's database: its tables and rows, writing, and the deletion of old rows.

It uses SQLAlchemy's portable SQL, so all databases that SQLAlchemy supports can be used. Methods block; `recorder`
calls them in a thread. `queries` has the queries for pages. Only one service writes at a time, because the hub runs
one. `migrations/` creates the tables; a test compares them with these definitions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    JSON,
    URL,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
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
from sqlalchemy.types import TypeEngine

from gpushare_spawner.model.report import Burst, SessionReport
from gpushare_spawner.model.share import ADVICE_PERIOD, SizeAdvice
from gpushare_spawner.quota.budgets import Grant
from gpushare_spawner.wording.amounts import missing_package, reason

HOUR = 3600
"""Seconds. Recent amounts are stored by hour (UTC)."""
DAY = 86400
"""Seconds. Older amounts are stored by day (UTC)."""


@dataclass(frozen=True)
class Subject:
    """A user's server on a GPU, the key of amounts."""

    user: str
    server: str
    """The server's name; empty for the default server."""
    template: str
    group: str
    """The group to which the time is charged; empty: none."""
    node: str
    gpu: str
    """The GPU's UUID."""
    model: str
    account: str = ""
    """The account of the session's quota, see `quota.Account`; empty: none."""


@dataclass(frozen=True)
class GpuTimeAmounts:
    """GPU time in GPU-seconds. One GPU-second is a second of a whole GPU, or four seconds of a quarter of it."""

    reserved: float = 0.0
    """The share's units for the time that the session was open."""
    idle: float = 0.0
    """The part of `reserved` in which the session did no GPU work."""
    recovered: float = 0.0
    """The part of `reserved` that idle actions took from the session for other sessions."""
    borrowed: float = 0.0
    """The part of `reserved` that consists of borrowed units."""
    used: float = 0.0
    """Time with a burst of the session on the GPU. Sessions that compute at the same time each count in full."""
    entitled: float = 0.0
    """Time that the session was entitled to while others competed."""
    delivered: float = 0.0
    """Time that the session received while others competed."""
    waits: float = 0.0
    """Number of times that its GPU work waited for a lease."""
    energy: float = 0.0
    """Energy in joules: the GPU's power by delivered time, and its power without work by held units."""
    co2: float = 0.0
    """Grams of CO2 for that energy."""
    cost: float = 0.0
    """The price of `reserved` without `recovered`, in the currency of the price list."""
    saved: float = 0.0
    """The price of `recovered`."""

    @property
    def held(self) -> float:
        """The part of `reserved` that the session kept."""
        return max(0.0, self.reserved - self.recovered)

    def plus(self, other: GpuTimeAmounts) -> GpuTimeAmounts:
        """Return the sums of both."""
        return GpuTimeAmounts(**{name: getattr(self, name) + getattr(other, name) for name in AMOUNTS})

    def times(self, factor: float) -> GpuTimeAmounts:
        """Return each amount multiplied by the factor."""
        return GpuTimeAmounts(**{name: getattr(self, name) * factor for name in AMOUNTS})


AMOUNTS = tuple(field.name for field in fields(GpuTimeAmounts))
"""The names of the amounts."""


@dataclass(frozen=True)
class SessionCounters:
    """A session's counters in its last report. The next amounts are their increase."""

    node: str
    session: str
    opened_at: float
    """Seconds since the epoch. A restarted server has the same session id and counts from 0."""
    seen_at: float
    """Time of the report, in seconds since the epoch on the agent's clock."""
    effective_units: int
    gpu_seconds: float = 0.0
    entitled: float = 0.0
    delivered: float = 0.0
    waits: int = 0
    bursts_to: float = 0.0
    """End of the last recorded burst, in seconds since the epoch on the agent's clock."""

    energy: float = 0.0
    """Joules."""
    session_report: str = ""
    """JSON of the report's lasting fields (`recorder.LASTING`), with which the time after a restart of the service is
    counted if the session has ended."""


@dataclass(frozen=True)
class BurstRecord:
    """A session's burst, see `model.report.Burst`, and its share of the GPU at that time."""

    ended_at: float
    seconds: float
    gpu_seconds: float
    gap_seconds: float
    contended_seconds: float
    memory_bytes: int
    units: int

    @property
    def burst(self) -> Burst:
        return Burst(*(getattr(self, name) for name in Burst._fields))


@dataclass(frozen=True, kw_only=True)
class AdviceRecord(SizeAdvice):
    """The newest advice on the share of a user's sessions with a template."""

    user: str
    template: str
    group: str
    computed_at: float
    """Seconds since the epoch."""


CORDON, DRAIN, CORDON_ENDED, DRAIN_ENDED = "cordon", "drain", "cordon-ended", "drain-ended"
OF_NODES = (CORDON, DRAIN, CORDON_ENDED, DRAIN_ENDED, "uncordon")  # "uncordon": histories before 0.2
"""Actions on a GPU or node. All other actions are on sessions or spawns."""


@dataclass(frozen=True)
class Action:
    """An action of the culler, a user or an admin."""

    at: float
    """Seconds since the epoch."""
    action: str
    """The tier for idle actions; "restored", "keep", "drain" and so on for others."""
    actor: str
    """A user's name, "culler" or "agent"."""
    user: str = ""
    server: str = ""
    template: str = ""
    group: str = ""
    node: str = ""
    units: int = 0
    """The session's units after the action, on each of its GPUs."""
    cause: str = ""
    """The rule behind an idle action: `model.share.IdleCause`."""
    reason: str = ""
    """A sentence with figures."""
    dry_run: bool = False
    """Whether the action was decided but not carried out."""

    @classmethod
    def on(cls, session: SessionReport, node: str, at: float, action: str, actor: str, group: str) -> Action:
        """Return an action after which the session has its current effective units."""
        user, server, template = session.user, session.server, session.template
        return cls(at, action, actor, user, server, template, group, node, session.effective_units)


class WaitOutcome(StrEnum):
    """The outcome of a wait for a GPU."""

    STARTED = "started"
    GAVE_UP = "gave-up"
    """The spawn was cancelled or failed."""


@dataclass(frozen=True)
class Wait:
    """A spawn's wait for a GPU."""

    began_at: float
    """Seconds since the epoch."""
    seconds: float
    outcome: WaitOutcome
    user: str
    server: str = ""
    template: str = ""
    group: str = ""


@dataclass(frozen=True)
class BegunRestart:
    """A restart of a server with a template that is in progress."""

    at: float
    """Time of the decision to stop the server, in seconds since the epoch."""
    user: str
    server: str
    node: str
    """The node of the old server."""
    group: str
    old_template: str
    template: str
    """The template to start with."""
    actor: str
    options: Mapping[str, object] = field(hash=False)
    """The user options to start with."""
    old_options: Mapping[str, object] = field(hash=False)


METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)
ROW = BigInteger().with_variant(Integer, "sqlite")
"""Type of row numbers. SQLite numbers rows automatically only in a column of this type."""
_TYPES: Mapping[Any, TypeEngine[Any]] = {
    # the maximum length of names in JupyterHub and Kubernetes
    str: String(255),
    float: Float(53),
    int: Integer(),
    bool: Boolean(),
    WaitOutcome: String(16),
    Mapping[str, object]: JSON(),
}


def _columns(
    record: type, key: Collection[str] = (), index: Collection[str] = (), **types: TypeEngine[Any]
) -> list[Column[Any]]:
    """Return a column for each field of a record. ``types``: columns with a type other than the usual one."""
    return [
        Column(name, types.get(name, _TYPES[hint]), nullable=False, primary_key=name in key, index=name in index)
        for name, hint in get_type_hints(record).items()
    ]


SUBJECT = Table(
    "gpushare_subject",
    METADATA,
    Column("id", ROW, primary_key=True),
    *_columns(Subject),
    Column("digest", String(64), nullable=False, unique=True),
)
"""Rows of `Subject`. An empty user means that the name was deleted because of its age.

``digest`` represents all other columns, because a unique index over all of them is too long for some databases."""

USE = Table(
    "gpushare_use",
    METADATA,
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("subject", ROW, ForeignKey("gpushare_subject.id"), primary_key=True, autoincrement=False),
    Column("length", Integer, nullable=False),
    *_columns(GpuTimeAmounts),
    Index(None, "subject"),
)
"""Amounts of the hour or day of ``length`` seconds that begins at ``start`` (seconds since the epoch)."""

COUNTERS = Table(
    "gpushare_counters",
    METADATA,
    *_columns(SessionCounters, key=("node", "session"), waits=BigInteger(), session_report=Text()),
)
"""Counters of open sessions: rows of `SessionCounters`."""

ACTION = Table(
    "gpushare_action",
    METADATA,
    Column("id", ROW, primary_key=True),
    *_columns(Action, index=("at", "user"), action=String(32), cause=String(32), reason=Text()),
)
"""Actions on sessions, GPUs and nodes: rows of `Action`."""

WAIT = Table(
    "gpushare_wait", METADATA, Column("id", ROW, primary_key=True), *_columns(Wait, index=("began_at", "user"))
)
"""Waits of spawns for a GPU: rows of `Wait`."""

BURST = Table(
    "gpushare_burst",
    METADATA,
    Column("id", ROW, primary_key=True),
    Column("subject", ROW, ForeignKey("gpushare_subject.id"), nullable=False),
    *_columns(BurstRecord, memory_bytes=BigInteger()),
    # without another index on `ended_at`, for which SQLite would read all users' bursts of a week
    Index(None, "subject", "ended_at"),
)
"""Bursts of the last days: rows of `BurstRecord`."""

_MEMORY = [name for name in get_type_hints(SizeAdvice) if name.endswith("_bytes")]
ADVICE = Table(
    "gpushare_advice",
    METADATA,
    *_columns(AdviceRecord, ("user", "template"), (), **dict.fromkeys(_MEMORY, BigInteger())),
)
"""The newest advice on shares: rows of `AdviceRecord`."""

GRANT = Table(
    "gpushare_grant", METADATA, Column("id", ROW, primary_key=True), *_columns(Grant, index=("until",), reason=Text())
)
"""Grants of GPU-hours beyond budgets: rows of `quota.budgets.Grant`."""

RESTART = Table("gpushare_restart", METADATA, *_columns(BegunRestart, key=("user", "server")))
"""Restarts in progress: rows of `BegunRestart`."""


BURSTS_KEPT = ADVICE_PERIOD + DAY
"""Seconds: no older burst is replayed."""
ADVICE_KEPT = 30.0 * DAY
"""Seconds after which advice for a user who has not come back says nothing about that user's next work. Our choice."""
MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "gpushare_version"
"""Alembic's table. The history can share a database with the hub, which has a separate version table."""
_CHUNK = 400
"""Maximum values in one IN. Old versions of SQLite accept 999."""

T = TypeVar("T")


class HistoryFailed(Exception):
    """Error: the database cannot be used. The text states the reason for people."""


class HistoryStore:
    """A database with created or migrated tables. Each method raises HistoryFailed."""

    def __init__(self, url: str) -> None:
        """Open a database. ``url``: SQLAlchemy's URL, like ``sqlite:////srv/jupyterhub/gpushare-history.sqlite``."""
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
        """Create the tables, or migrate those of an earlier version. A later version is rejected."""
        _make_private(self._engine.url)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        versions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        with self._failing("cannot be prepared"), self._engine.begin() as connection:
            config.attributes |= {"connection": connection, "version_table": VERSION_TABLE}
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise HistoryFailed(
                    f"The database of the history was made by a later version of gpushare-spawner ({reason(error)}): "
                    f"install that version, or give another database. This version knows {', '.join(sorted(versions))}."
                ) from None

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query and return its result."""
        with self._failing("cannot be read"), self._engine.connect() as connection:
            return query(connection)

    def counters(self) -> list[SessionCounters]:
        """Return the counters of open sessions."""
        return self.read(
            lambda connection: [SessionCounters(**row._mapping) for row in connection.execute(select(COUNTERS))]
        )

    def add(
        self,
        amounts: Mapping[tuple[int, Subject], GpuTimeAmounts],
        counted: Sequence[SessionCounters],
        ended: Sequence[tuple[str, str]],
        actions: Sequence[Action] = (),
        waits: Sequence[Wait] = (),
        bursts: Sequence[tuple[Subject, BurstRecord]] = (),
    ) -> None:
        """Add all of these or nothing, so that the next service can count what a killed service had not stored."""
        with self._failing("cannot be written"), self._engine.begin() as connection:
            self._add_use(connection, amounts, HOUR)
            gone = [(counters.node, counters.session) for counters in counted] + list(ended)
            if gone:
                connection.execute(
                    delete(COUNTERS).where(
                        COUNTERS.c.node == bindparam("old_node"), COUNTERS.c.session == bindparam("old_session")
                    ),
                    [{"old_node": node, "old_session": session} for node, session in gone],
                )
            _insert(connection, COUNTERS, (asdict(counters) for counters in counted))
            _insert(connection, ACTION, (asdict(action) for action in actions))
            _insert(connection, WAIT, (asdict(wait) for wait in waits))
            ids = self._subject_ids(connection, {subject for subject, _ in bursts})
            _insert(connection, BURST, (asdict(burst) | {"subject": ids[subject]} for subject, burst in bursts))

    def set_advice(self, advice: AdviceRecord) -> None:
        """Replace the advice for a user and a template."""
        with self._failing("cannot be written"), self._engine.begin() as connection:
            connection.execute(delete(ADVICE).where(ADVICE.c.user == advice.user, ADVICE.c.template == advice.template))
            connection.execute(insert(ADVICE).values(asdict(advice)))

    def grants(self, now: float) -> list[Grant]:
        """Return the grants that have not ended, oldest first."""
        rows = self.read(
            lambda connection: connection.execute(select(GRANT).where(GRANT.c.until > now).order_by(GRANT.c.id)).all()
        )
        return [Grant(**{name: value for name, value in row._mapping.items() if name != "id"}) for row in rows]

    def grant(self, grant: Grant) -> None:
        """Add a grant. It replaces those of the same account and user that have not ended."""
        same = (GRANT.c.account == grant.account) & (GRANT.c.user == grant.user) & (GRANT.c.until > grant.since)
        with self._failing("cannot be written"), self._engine.begin() as connection:
            connection.execute(update(GRANT).where(same).values(until=grant.since))
            if grant.until > grant.since:
                connection.execute(insert(GRANT).values(asdict(grant)))

    def begin_restart(self, restart: BegunRestart) -> None:
        """Add a restart in progress. It replaces an earlier restart of the same server."""
        with self._failing("cannot be written"), self._engine.begin() as connection:
            connection.execute(_restart_of(restart.user, restart.server))
            connection.execute(insert(RESTART).values(asdict(restart)))

    def end_restart(self, user: str, server: str) -> None:
        """Delete a finished restart."""
        with self._failing("cannot be written"), self._engine.begin() as connection:
            connection.execute(_restart_of(user, server))

    def begun_restarts(self) -> list[BegunRestart]:
        """Return the restarts in progress, oldest first."""
        rows = self.read(lambda connection: connection.execute(select(RESTART).order_by(RESTART.c.at)).all())
        return [BegunRestart(**row._mapping) for row in rows]

    def thin(self, now: float, detail: float, names: float, keep: float) -> None:
        """Merge and delete old rows. All ages are in seconds; 0: never.

        Hours older than ``detail`` are merged into days. Users' names older than ``names`` and everything older than
        ``keep`` are deleted. Bursts and advice name users: they are deleted after days, see `BURSTS_KEPT`.
        """
        with self._thinning() as connection:
            shorter = [age for age in (names, keep) if age]
            connection.execute(delete(BURST).where(BURST.c.ended_at < now - min([BURSTS_KEPT, *shorter])))
            connection.execute(delete(ADVICE).where(ADVICE.c.computed_at < now - min([ADVICE_KEPT, *shorter])))
            if keep:
                connection.execute(delete(USE).where(USE.c.start < now - keep))
                connection.execute(delete(ACTION).where(ACTION.c.at < now - keep))
                connection.execute(delete(WAIT).where(WAIT.c.began_at < now - keep))
                connection.execute(delete(GRANT).where(GRANT.c.until < now - keep))
        if detail:
            self._merge(int((now - detail) // DAY) * DAY, lambda subject: subject, only_hours=True)
        if names:
            oldest = int((now - names) // DAY) * DAY
            self._merge(oldest, _without_names, only_hours=False)
            with self._thinning() as connection:
                for table, instant in ((ACTION, ACTION.c.at), (WAIT, WAIT.c.began_at)):
                    connection.execute(
                        update(table).where(instant < oldest, table.c.user != "").values(user="", server="")
                    )
                connection.execute(
                    delete(GRANT).where(GRANT.c.until < oldest, (GRANT.c.user != "") | ~GRANT.c.account.like("group:%"))
                )
                # a reason has no user names, but an actor can be a user
                connection.execute(
                    update(ACTION)
                    .where(ACTION.c.at < oldest, ACTION.c.actor.not_in(["culler", "agent", ""]))
                    .values(actor="")
                )
        with self._thinning() as connection:
            kept = SUBJECT.c.id.not_in(select(USE.c.subject)), SUBJECT.c.id.not_in(select(BURST.c.subject))
            connection.execute(delete(SUBJECT).where(*kept))

    def _merge(self, before: int, renamed: Callable[[Subject], Subject], only_hours: bool) -> None:
        """Merge the rows before an instant into days, for the renamed subjects, oldest day first.

        Each day is a transaction, so that queries can run in between and a killed service loses no rows.
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
        merged: dict[tuple[int, Subject], GpuTimeAmounts] = defaultdict(GpuTimeAmounts)
        for row in rows:
            subject = renamed(Subject(*(row._mapping[SUBJECT.c[field.name]] for field in fields(Subject))))
            amounts = GpuTimeAmounts(*(row._mapping[USE.c[name]] for name in AMOUNTS))
            merged[day, subject] = merged[day, subject].plus(amounts)
        connection.execute(delete(USE).where(within))
        self._add_use(connection, merged, DAY)

    @contextlib.contextmanager
    def _thinning(self) -> Iterator[Connection]:
        with self._failing("cannot be thinned out"), self._engine.begin() as connection:
            yield connection

    def _add_use(
        self, connection: Connection, amounts: Mapping[tuple[int, Subject], GpuTimeAmounts], length: int
    ) -> None:
        if not amounts:
            return
        ids = self._subject_ids(connection, {subject for _, subject in amounts})
        by_key = {(start, ids[subject]): amount for (start, subject), amount in amounts.items()}
        starts = [start for start, _ in by_key]
        stored = select(USE.c.start, USE.c.subject).where(USE.c.start.between(min(starts), max(starts)))
        rows = (
            row
            for some in _chunks(list(ids.values()))
            for row in connection.execute(stored.where(USE.c.subject.in_(some)))
        )
        existing = by_key.keys() & {(row.start, row.subject) for row in rows}
        if existing:
            connection.execute(
                update(USE)
                .where(USE.c.start == bindparam("key_start"), USE.c.subject == bindparam("key_subject"))
                .values({name: USE.c[name] + bindparam(f"more_{name}") for name in AMOUNTS}),
                [
                    {"key_start": start, "key_subject": subject}
                    | {f"more_{name}": getattr(by_key[start, subject], name) for name in AMOUNTS}
                    for start, subject in sorted(existing)
                ],
            )
        fresh = (
            {"start": start, "subject": subject, "length": length} | asdict(amount)
            for (start, subject), amount in by_key.items()
            if (start, subject) not in existing
        )
        _insert(connection, USE, fresh)

    def _subject_ids(self, connection: Connection, subjects: Collection[Subject]) -> dict[Subject, int]:
        """Return the subjects' row ids, and insert new subjects. The ids are invalid if the transaction rolls back."""
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
            # a URL's query can also have a password
            shown = self._engine.url.set(query={}).render_as_string(hide_password=True)
            raise HistoryFailed(f"The database of the history ({shown}) {what}: {_cause(error)}.") from error


def _without_names(subject: Subject) -> Subject:
    account = subject.account if subject.account.startswith("group:") else ""
    return replace(subject, user="", server="", account=account)


def _restart_of(user: str, server: str) -> Delete:
    return delete(RESTART).where(RESTART.c.user == user, RESTART.c.server == server)


def _engine(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, pool_pre_ping=True)
    engine = create_engine(parsed, connect_args={"timeout": 30})
    event.listen(engine, "connect", _sqlite_settings)
    return engine


def _make_private(url: URL) -> None:
    """Create a SQLite file that only its owner can read, because it contains user names."""
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        # SQLite itself reports an invalid path
        with contextlib.suppress(OSError):
            os.close(os.open(url.database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _sqlite_settings(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # readers do not wait for the writer
    cursor.execute("PRAGMA journal_mode=WAL")
    # a power failure can lose the last minute, as a kill does, but the database stays consistent
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _insert(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    if values := list(rows):
        connection.execute(insert(table), values)


def _find_digests(connection: Connection, digests: Iterable[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for some in _chunks(list(digests)):
        rows = connection.execute(select(SUBJECT.c.digest, SUBJECT.c.id).where(SUBJECT.c.digest.in_(some)))
        ids |= {row.digest: row.id for row in rows}
    return ids


def _digest(subject: Subject) -> str:
    return hashlib.sha256(json.dumps(asdict(subject), sort_keys=True).encode()).hexdigest()


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[begin : begin + _CHUNK] for begin in range(0, len(values), _CHUNK))


def _cause(error: BaseException) -> str:
    """Return the database's message, without SQLAlchemy's statement and link."""
    return reason(getattr(error, "orig", None) or error)
