"""What the service must be allowed to do, and what does not work without it."""

from __future__ import annotations

from collections.abc import Collection

SEE_ALL = "custom:gpushare:read"
"""Lets a user or a service see everybody's sessions on the dashboard. Admins need no scope for it."""
METRICS = "custom:gpushare:metrics"
"""Lets a service (Prometheus) read the metrics."""

_ALWAYS = {
    "list:users": "it cannot find the servers; no server is ever stopped",
    "read:servers": "it does not see when servers were last active; no server is ever stopped",
    "delete:servers": "servers whose stop_after or --timeout has come are not stopped",
}
_TO_CULL_USERS = {
    "read:users:activity": "it does not see when users were last active; --cull-users deletes nobody",
    "delete:users": "--cull-users deletes nobody",
}


def missing(own: Collection[str], cull_users: bool = False) -> list[str]:
    """A sentence for each scope that is wanted and not among ``own`` (expanded, as the hub lists them).

    A scope that is narrowed by a filter, like ``delete:servers!group=ml``, counts: the admin meant it so.
    """
    held = {scope.partition("!")[0] for scope in own}
    wanted = _ALWAYS | (_TO_CULL_USERS if cull_users else {})
    return [f"The service lacks the scope {scope}: {lost}." for scope, lost in wanted.items() if scope not in held]
