"""The second version of the tables: restarts that are under way."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "2"
down_revision: str | None = "1"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def _names(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(255), nullable=False) for name in names]


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "gpushare_restart",
        *_names("user", "server"),
        sa.Column("at", sa.Float(53), nullable=False),
        *_names("node", "group", "old_template", "template", "actor"),
        sa.Column("options", sa.Text, nullable=False),
        sa.Column("old_options", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("user", "server", name="pk_gpushare_restart"),
    )


def downgrade() -> None:
    """Delete the table."""
    op.drop_table("gpushare_restart")
