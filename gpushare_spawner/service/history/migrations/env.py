"""Script that Alembic runs for each migration, with the connection of `store.HistoryStore`."""

from __future__ import annotations

from alembic import context

from gpushare_spawner.service.history.store import METADATA

_given = context.config.attributes
context.configure(
    connection=_given["connection"],
    target_metadata=METADATA,
    version_table=_given["version_table"],
    # SQLite can change columns only by copying the table
    render_as_batch=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
