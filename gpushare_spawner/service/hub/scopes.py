"""The scopes that the service needs, and what does not work without each of them."""

from __future__ import annotations

from collections.abc import Collection

SEE_ALL = "custom:gpushare:read"
"""Lets a user or a service see the sessions of all users on the dashboard. Admins need no scope for it."""
METRICS = "custom:gpushare:metrics"
"""Lets a service (Prometheus) read the metrics."""

ACT_OWN = "custom:gpushare:act-own"
"""Lets a token of a user act on the user's own sessions. In a browser, users may without it."""
ACT = "custom:gpushare:act"
"""Lets a user or a service act on the sessions of all users, and see them. Admins need no scope for it."""
DRAIN = "custom:gpushare:drain"
"""Lets a user or a service cordon and drain GPUs and nodes. Admins need no scope for it."""
CUSTOM = {
    SEE_ALL: "See all users' sessions on the dashboard of shared GPUs",
    ACT_OWN: "Act on one's own sessions on shared GPUs: keep, release, stop, restart",
    ACT: "See all users' sessions on shared GPUs, and act on them",
    DRAIN: "Cordon and drain shared GPUs and their nodes",
    METRICS: "Read the metrics of shared GPUs",
}
"""All scopes of ours, with what the hub says of them."""
OF_USERS = ("access:services!service=gpushare", ACT_OWN)
"""What all users have: the access to the service, and what they can give to tokens of theirs."""

START = "start:servers"
"""Part of the scope ``servers``, which is the only one for it before JupyterHub 6."""

_ALWAYS = {
    "list:users": "it cannot list servers, so no server is stopped",
    "read:servers": "it cannot read the servers' last activity, so no server is stopped",
    "delete:servers": "no server is stopped after stop_after or --timeout",
    START: "no server can be restarted from the dashboard, no spawn put at the end of the queue, and the hub's pages "
    "do not say why a server was stopped",
    "read:users:groups": "without quotas, the history counts no GPU time for groups",
}
_FOR_GROUPS = {
    "read:users:groups": "it cannot read users' groups, so no session makes way for a spawn in quota whose user chose "
    "no quota, and of an idle policy's groups the most generous counts for all users",
}
_TO_CULL_USERS = {
    "read:users:activity": "it cannot read the users' last activity, so --cull-users deletes no user",
    "delete:users": "--cull-users deletes no user",
}


def missing(own: Collection[str], cull_users: bool = False, groups: bool = False) -> list[str]:
    """Return a sentence for each scope that is needed and not among ``own`` (expanded, as the hub lists them).

    ``groups``: quotas or the idle policy depend on users' groups.

    A scope that is narrowed by a filter, like ``delete:servers!group=ml``, counts: the admin meant it so.
    """
    held = {scope.partition("!")[0] for scope in own}
    if "servers" in held:
        held.add(START)
    wanted = _ALWAYS | (_FOR_GROUPS if groups else {}) | (_TO_CULL_USERS if cull_users else {})
    return [f"The service lacks the scope {scope}: {lost}." for scope, lost in wanted.items() if scope not in held]


def start_scope() -> str:
    """Return the least scope of the hub that is installed here with which servers can be started."""
    # not at the top: only the hub's config file needs it
    from jupyterhub.scopes import scope_definitions

    return START if START in scope_definitions else "servers"
