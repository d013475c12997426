"""Alembic's migrations of the history's database."""
