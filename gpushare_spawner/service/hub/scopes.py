"""The scopes that the service needs, and what does not work without each of them."""

from __future__ import annotations

from collections.abc import Collection

SEE_ALL = "custom:gpushare:read"
"""Lets a user or a service see the sessions of all users on the dashboard. Admins need no scope for it."""
METRICS = "custom:gpushare:metrics"
"""Lets a service (Prometheus) read the metrics."""

_ALWAYS = {
    "list:users": "it cannot list servers, so no server is stopped",
    "read:servers": "it cannot read the servers' last activity, so no server is stopped",
    "delete:servers": "no server is stopped after stop_after or --timeout",
    "read:users:groups": "without quotas, the history counts no GPU time for groups",
}
_FOR_QUOTAS = {
    "read:users:groups": "it cannot read users' groups, so no session makes way for a spawn in quota whose user chose "
    "no quota",
}
_TO_CULL_USERS = {
    "read:users:activity": "it cannot read the users' last activity, so --cull-users deletes no user",
    "delete:users": "--cull-users deletes no user",
}


def missing(own: Collection[str], cull_users: bool = False, quotas: bool = False) -> list[str]:
    """Return a sentence for each scope that is needed and not among ``own`` (expanded, as the hub lists them).

    A scope that is narrowed by a filter, like ``delete:servers!group=ml``, counts: the admin meant it so.
    """
    held = {scope.partition("!")[0] for scope in own}
    wanted = _ALWAYS | (_FOR_QUOTAS if quotas else {}) | (_TO_CULL_USERS if cull_users else {})
    return [f"The service lacks the scope {scope}: {lost}." for scope, lost in wanted.items() if scope not in held]
