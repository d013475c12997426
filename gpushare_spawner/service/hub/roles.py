"""Scopes and services in the hub's configuration: for the service, all users, and admins.

api/router.py (`Needs.check`) and caller.py (`Caller`) enforce them.

The module checks the scopes that the service needs, and extends the roles `user` and `admin`. JupyterHub 6 has
``extra_user_scopes``, but ignores it if an admin defines the role `user`. JupyterHub 5 has only the role, and does not
start if two files define it. Config files are read in any order and cannot see each other, so the role is extended when
the hub reads the whole list. No configuration can change the role `admin`.

It suppresses the hub's warning about each login to the dashboard by a user without the right to see all sessions. The
dashboard requests the custom scopes, and the hub grants the user's scopes among them. The hub warns about each user
that lacks any of them, which is the normal case here (jupyterhub/apihandlers/auth.py, OAuthAuthorizeHandler).

It also replaces the idle culler of The Littlest JupyterHub (TLJH), which is in TLJH's list of services. TLJH reads the
config file with load_subconfig, so the file cannot see that list. The file's list is merged with it later, in
``LazyConfigValue.merge_into``, where our subclass removes TLJH's culler.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from traitlets.config.loader import Config, LazyConfigValue
from traitlets.log import get_logger

SEE_ALL = "custom:gpushare:read"
"""Scope to see all users' sessions on the dashboard, for a user or a service. Admins do not need it."""
METRICS = "custom:gpushare:metrics"
"""Scope to read the metrics, for a service such as Prometheus."""

ACT_OWN = "custom:gpushare:act-own"
"""Scope to act on the user's own sessions, for a token. In a browser, users do not need it."""
ACT = "custom:gpushare:act"
"""Scope to see all users' sessions and act on them, for a user or a service. Admins do not need it."""
DRAIN = "custom:gpushare:drain"
"""Scope to cordon and drain GPUs and nodes, for a user or a service. Admins do not need it."""
CUSTOM = {
    SEE_ALL: "See all users' sessions on the dashboard of shared GPUs",
    ACT_OWN: "Act on one's own sessions on shared GPUs: keep, release, stop, restart",
    ACT: "See all users' sessions on shared GPUs, and act on them",
    DRAIN: "Cordon and drain shared GPUs and their nodes",
    METRICS: "Read the metrics of shared GPUs",
}
"""Our scopes, with the descriptions that the hub shows."""
OF_USERS = ("access:services!service=gpushare", ACT_OWN)
"""Scopes of all users: access to the service, and the scope that they can grant to their tokens."""

START = "start:servers"
"""Part of the scope ``servers``; a separate scope since JupyterHub 6."""

FOR_FORM = ("access:services!service=gpushare", SEE_ALL)
"""Scopes of the service itself: the hub asks with the service's token for the advice that the spawn form shows."""

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
    "no quota, and of an idle policy's groups the most generous counts for all users"
}
_TO_CULL_USERS = {
    "read:users:activity": "it cannot read the users' last activity, so --cull-users deletes no user",
    "delete:users": "--cull-users deletes no user",
}


def missing(own: Collection[str], cull_users: bool = False, groups: bool = False) -> list[str]:
    """Return a sentence for each needed scope that is not among ``own`` (expanded, as the hub lists them).

    ``groups``: quotas or the idle policy depend on users' groups.

    A scope that is narrowed by a filter, like ``delete:servers!group=ml``, counts, because the admin intended it.
    """
    held = {scope.partition("!")[0] for scope in own}
    if "servers" in held:
        held.add(START)
    needed = _ALWAYS | (_FOR_GROUPS if groups else {}) | (_TO_CULL_USERS if cull_users else {})
    return [f"The service lacks the scope {scope}: {lost}." for scope, lost in needed.items() if scope not in held]


def start_scope() -> str:
    """Return the narrowest scope of the installed hub that allows starting servers."""
    # imported here: only the hub's config file needs it
    from jupyterhub.scopes import scope_definitions

    return START if START in scope_definitions else "servers"


USER = "user"
Role = dict[str, Any]


def grant_to_everybody(section: Config, scopes: Sequence[str], has_extra_scopes: bool) -> None:
    """Grant the scopes to all users. ``section`` is ``c.JupyterHub``.

    They are added to a role `user` in ``load_roles``, even one from a later file. Without such a role, they are added
    to ``extra_user_scopes``; if the hub has no such setting (JupyterHub 5), the role is defined here.
    """
    roles = section.load_roles
    define = not has_extra_scopes
    if isinstance(roles, LazyConfigValue):
        section.load_roles = _LazyRoles.of(roles, scopes, define)
    else:
        section.load_roles = _Roles(_raw(roles), scopes, define)
    if has_extra_scopes:
        if isinstance(section.extra_user_scopes, list):
            # YAML, as in hub.config of zero-to-jupyterhub, has no sets
            section.extra_user_scopes = set(section.extra_user_scopes)
        section.extra_user_scopes.update(scopes)


def grant_to_admins(scopes: Sequence[str]) -> None:
    """Grant the scopes to all admins of a hub that runs in this process. A second call has no effect.

    The dashboard requires no scopes of admins. But a token can have only its owner's scopes, so without them an admin
    could not create a token with a single right. The hub refuses a role `admin` in ``load_roles`` (jupyterhub/roles.py,
    create_role), so the definition that it compares with is extended.
    """
    # imported here: only the hub's config file needs it
    from jupyterhub import roles
    from jupyterhub.scopes import scope_definitions

    original = roles.get_default_roles
    if getattr(original, "completed_by_gpushare", False):
        return

    def completed() -> list[Role]:
        defaults: list[Role] = original()
        for role in defaults:
            if role["name"] == "admin":
                # a scope that another config file has removed from custom_scopes would terminate the hub
                role["scopes"] += [scope for scope in scopes if scope in scope_definitions]
        return defaults

    completed.completed_by_gpushare = True  # type: ignore[attr-defined]
    roles.get_default_roles = completed


class _Roles(list[Role]):
    """A list of roles. Its iterator, which the hub uses once at startup, adds the scopes to the role `user`."""

    def __init__(self, roles: Iterable[Role], scopes: Sequence[str], define: bool) -> None:
        super().__init__(roles)
        self.scopes, self.define = scopes, define

    def __iter__(self) -> Iterator[Role]:
        missing = self.define
        for role in super().__iter__():
            if role.get("name") == USER:
                missing = False
                role = {**role, "scopes": list(dict.fromkeys([*role.get("scopes", ["self"]), *self.scopes]))}
            yield role
        if missing:
            yield {"name": USER, "description": "Standard user privileges", "scopes": ["self", *self.scopes]}

    def raw(self) -> list[Role]:
        """Return the roles without the added scopes."""
        return list(super().__iter__())


class _LazyRoles(LazyConfigValue):
    """The items that a file appends to a list that it cannot see."""

    scopes: Sequence[str]
    define: bool

    @classmethod
    def of(cls, roles: LazyConfigValue, scopes: Sequence[str], define: bool) -> _LazyRoles:
        new = cls()
        new.scopes, new.define = scopes, define
        new._prepend, new._inserts = roles._prepend, roles._inserts
        new._extend = _Roles(_raw(roles._extend), scopes, define)
        return new

    def merge_into(self, other: Any) -> Any:
        """Return the list merged with that of earlier files."""
        if isinstance(other, LazyConfigValue):
            self._extend = _Roles([*_raw(other._extend), *_raw(self._extend)], self.scopes, self.define)
            self._prepend = [*self._prepend, *other._prepend]
            self._inserts = [*other._inserts, *self._inserts]
            return self
        return _Roles([*self._prepend, *_raw(other), *_raw(self._extend)], self.scopes, self.define)

    def get_value(self, initial: Any) -> Any:
        """Return the whole list. The hub's default is empty."""
        value = LazyConfigValue()
        value._inserts = self._inserts
        value._extend = [*self._prepend, *_raw(self._extend)]
        return list(_Roles(value.get_value(initial), self.scopes, self.define))


def _raw(roles: Iterable[Role]) -> list[Role]:
    return roles.raw() if isinstance(roles, _Roles) else list(roles)


def drop_login_warnings() -> None:
    """Suppress the warning in the log of a hub that runs in this process. A second call has no effect."""
    log = logging.getLogger("JupyterHub")
    if not any(isinstance(log_filter, _ExpectedLogins) for log_filter in log.filters):
        log.addFilter(_ExpectedLogins())


class _ExpectedLogins(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not (" requested scopes " in message and SEE_ALL in message and " granting only " in message)


CULLER = "cull-idle"
"""The name of TLJH's culler in c.JupyterHub.services. (tljh/configurer.py, set_cull_idle_service)"""
_OPTIONS = ("timeout", "max_age", "remove_named_servers")
"""Settings of ``services.cull`` that are also options of `gpushare service`. ``every`` is excluded, because rounds are
cheap here and notices need short intervals, and ``users``, because the service lacks the scopes to delete users."""


def culler_options() -> list[str]:
    """Return the settings of ``tljh-config set services.cull...`` as options of `gpushare service`.

    The result is empty if TLJH's culler is disabled, and in other hubs.
    """
    if not _in_tljh():
        return []
    from tljh.configurer import load_config

    cull = load_config()["services"]["cull"]
    if not cull["enabled"]:
        return []
    if cull.get("users"):
        get_logger().warning(
            "gpushare: services.cull.users is ignored: no user is deleted (docs/explanation/culler.md, Scopes)"
        )
    return [f"--{name.replace('_', '-')}={str(cull[name]).lower()}" for name in _OPTIONS if cull.get(name) is not None]


def replace_culler(section: Config) -> None:
    """Remove TLJH's culler from earlier files' services; ``section`` is ``c.JupyterHub``. No effect in other hubs."""
    if not _in_tljh():
        return
    services = section.services
    if isinstance(services, LazyConfigValue):
        section.services = _WithoutCuller.of(services)
    else:
        section.services = _without_culler(services)


def _in_tljh() -> bool:
    # TLJH's main config file imports this module before it reads other files
    return "tljh.configurer" in sys.modules


class _WithoutCuller(LazyConfigValue):
    @classmethod
    def of(cls, services: LazyConfigValue) -> _WithoutCuller:
        new = cls()
        new._prepend, new._inserts, new._extend = services._prepend, services._inserts, services._extend
        return new

    def merge_into(self, other: Any) -> Any:
        """Return the list merged with that of earlier files, without TLJH's culler."""
        if isinstance(other, LazyConfigValue):
            other._prepend, other._extend = _without_culler(other._prepend), _without_culler(other._extend)
        else:
            other = _without_culler(other)
        return super().merge_into(other)


def _without_culler(services: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [service for service in services if service.get("name") != CULLER]
    if len(kept) < len(services):
        get_logger().info("gpushare: the service gpushare stops idle servers and replaces TLJH's idle culler")
    return kept
