"""The group that GPU time counts for. A user can be in several; the time counts once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.quota import AccountKind


def group_of_session(session: SessionReport, groups_of: Mapping[str, Collection[str]]) -> str:
    """Return the group whose quota the session uses; without one that of its user. Empty: none.

    ``groups_of``: each user's groups on the hub.
    """
    kind, _, name = session.quota.partition(":")
    return name if kind == AccountKind.GROUP else group_of_user(session.user, groups_of)


def group_of_user(user: str, groups_of: Mapping[str, Collection[str]]) -> str:
    """Return the first of a user's groups by name; empty: none."""
    return min(groups_of.get(user, ()), default="")
