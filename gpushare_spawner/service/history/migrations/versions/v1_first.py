"""The first version of the tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "1"
down_revision: str | None = None

ROW = sa.BigInteger().with_variant(sa.Integer, "sqlite")
AMOUNTS = ("reserved", "idle", "recovered", "borrowed", "used", "entitled", "delivered", "waits")
PRICED = ("energy", "co2", "cost", "saved")


def _names(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(255), nullable=False) for name in names]


def _numbers(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Float(53), nullable=False) for name in names]


def _integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer, nullable=False) for name in names]


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "gpushare_subject",
        sa.Column("id", ROW, nullable=False),
        *_names("user", "server", "template", "group", "node", "gpu", "model", "account"),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpushare_subject"),
        sa.UniqueConstraint("digest", name="uq_gpushare_subject_digest"),
    )
    op.create_table(
        "gpushare_use",
        sa.Column("start", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("subject", ROW, autoincrement=False, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        *_numbers(*AMOUNTS, *PRICED),
        sa.PrimaryKeyConstraint("start", "subject", name="pk_gpushare_use"),
        sa.ForeignKeyConstraint(["subject"], ["gpushare_subject.id"], name="fk_gpushare_use_subject"),
    )
    op.create_index("ix_gpushare_use_subject", "gpushare_use", ["subject"])
    op.create_table(
        "gpushare_counters",
        *_names("node", "session"),
        *_numbers("opened_at", "seen_at"),
        sa.Column("effective_units", sa.Integer, nullable=False),
        *_numbers("gpu_seconds", "entitled", "delivered"),
        sa.Column("waits", sa.BigInteger, nullable=False),
        *_numbers("bursts_to", "energy"),
        sa.Column("session_report", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node", "session", name="pk_gpushare_counters"),
    )
    op.create_table(
        "gpushare_action",
        sa.Column("id", ROW, nullable=False),
        *_numbers("at"),
        sa.Column("action", sa.String(32), nullable=False),
        *_names("actor", "user", "server", "template", "group", "node"),
        sa.Column("units", sa.Integer, nullable=False),
        sa.Column("cause", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("dry_run", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpushare_action"),
    )
    op.create_index("ix_gpushare_action_at", "gpushare_action", ["at"])
    op.create_index("ix_gpushare_action_user", "gpushare_action", ["user"])
    op.create_table(
        "gpushare_wait",
        sa.Column("id", ROW, nullable=False),
        *_numbers("began_at", "seconds"),
        sa.Column("outcome", sa.String(16), nullable=False),
        *_names("user", "server", "template", "group"),
        sa.PrimaryKeyConstraint("id", name="pk_gpushare_wait"),
    )
    op.create_index("ix_gpushare_wait_began_at", "gpushare_wait", ["began_at"])
    op.create_index("ix_gpushare_wait_user", "gpushare_wait", ["user"])
    op.create_table(
        "gpushare_grant",
        sa.Column("id", ROW, nullable=False),
        *_names("account", "user"),
        *_numbers("hours", "since", "until"),
        *_names("by"),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpushare_grant"),
    )
    op.create_index("ix_gpushare_grant_until", "gpushare_grant", ["until"])
    op.create_table(
        "gpushare_restart",
        *_numbers("at"),
        *_names("user", "server", "node", "group", "old_template", "template", "actor"),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("old_options", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("user", "server", name="pk_gpushare_restart"),
    )
    op.create_table(
        "gpushare_burst",
        sa.Column("id", ROW, nullable=False),
        sa.Column("subject", ROW, nullable=False),
        *_numbers("ended_at", "seconds", "gpu_seconds", "gap_seconds", "contended_seconds"),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("units", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpushare_burst"),
        sa.ForeignKeyConstraint(["subject"], ["gpushare_subject.id"], name="fk_gpushare_burst_subject"),
    )
    op.create_index("ix_gpushare_burst_subject_ended_at", "gpushare_burst", ["subject", "ended_at"])
    op.create_table(
        "gpushare_advice",
        *_integers("units", "advised_units"),
        *_numbers("since", "until"),
        *_integers("bursts"),
        *_numbers("gpu_seconds", "waited_seconds"),
        *_integers("later"),
        *_numbers("later_seconds", "saved_seconds", "freed_gpu_seconds"),
        *(sa.Column(f"memory_{name}_bytes", sa.BigInteger, nullable=False) for name in ("p50", "p95", "peak")),
        *_names("user", "template", "group"),
        *_numbers("computed_at"),
        sa.PrimaryKeyConstraint("user", "template", name="pk_gpushare_advice"),
    )
