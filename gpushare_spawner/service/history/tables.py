"""The database's tables. `migrations/` makes them; a test keeps both the same."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

from gpushare_spawner.service.history.use import AMOUNTS

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)
_NAME = String(255)
"""JupyterHub's and Kubernetes' names have at most this many characters."""
ROW = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only in a column of this type."""

SUBJECT = Table(
    "gpushare_subject",
    METADATA,
    Column("id", ROW, primary_key=True),
    Column("user", _NAME, nullable=False),
    Column("server", _NAME, nullable=False),
    Column("template", _NAME, nullable=False),
    Column("group", _NAME, nullable=False),
    Column("node", _NAME, nullable=False),
    Column("gpu", _NAME, nullable=False),
    Column("model", _NAME, nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
)
"""Who used which GPU, see `use.Subject`. An empty user: the name was deleted for its age.

``digest`` stands for all other columns: a unique index over all of them is too long for some databases."""

USE = Table(
    "gpushare_use",
    METADATA,
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("subject", ROW, ForeignKey("gpushare_subject.id"), primary_key=True, autoincrement=False),
    Column("length", Integer, nullable=False),
    *(Column(name, Float(53), nullable=False) for name in AMOUNTS),
    Index(None, "subject"),
)
"""Amounts of an hour or a day (``length``, seconds) from ``start`` (seconds since the epoch)."""

COUNTERS = Table(
    "gpushare_counters",
    METADATA,
    Column("node", _NAME, primary_key=True),
    Column("session", _NAME, primary_key=True),
    Column("opened_at", Float(53), nullable=False),
    Column("seen_at", Float(53), nullable=False),
    Column("effective_units", Integer, nullable=False),
    Column("gpu_seconds", Float(53), nullable=False),
    Column("entitled", Float(53), nullable=False),
    Column("delivered", Float(53), nullable=False),
    Column("waits", BigInteger, nullable=False),
)
"""What is counted of the sessions that are open, see `use.Counters`."""

ACTION = Table(
    "gpushare_action",
    METADATA,
    Column("id", ROW, primary_key=True),
    Column("at", Float(53), nullable=False, index=True),
    Column("action", String(32), nullable=False),
    Column("actor", _NAME, nullable=False),
    Column("user", _NAME, nullable=False, index=True),
    Column("server", _NAME, nullable=False),
    Column("template", _NAME, nullable=False),
    Column("group", _NAME, nullable=False),
    Column("node", _NAME, nullable=False),
    Column("units", Integer, nullable=False),
    Column("cause", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    Column("dry_run", Boolean, nullable=False),
)
"""What was done to sessions, GPUs and nodes, see `events.Action`."""

WAIT = Table(
    "gpushare_wait",
    METADATA,
    Column("id", ROW, primary_key=True),
    Column("began_at", Float(53), nullable=False, index=True),
    Column("seconds", Float(53), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("user", _NAME, nullable=False, index=True),
    Column("server", _NAME, nullable=False),
    Column("template", _NAME, nullable=False),
    Column("group", _NAME, nullable=False),
)
"""How long spawns waited for a GPU, see `events.Wait`."""

RESTART = Table(
    "gpushare_restart",
    METADATA,
    Column("user", _NAME, primary_key=True),
    Column("server", _NAME, primary_key=True),
    Column("at", Float(53), nullable=False),
    *(Column(name, _NAME, nullable=False) for name in ("node", "group", "old_template", "template", "actor")),
    Column("options", Text, nullable=False),
    Column("old_options", Text, nullable=False),
)
"""Restarts that are under way, see `events.BegunRestart`. User options are JSON."""
