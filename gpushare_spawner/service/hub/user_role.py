"""Gives scopes to all users, whatever the hub's configuration says about the role `user`, and scopes to all admins.

JupyterHub 6 has ``extra_user_scopes``, but ignores it if an admin defines the role `user`. JupyterHub 5 has only that
role, and does not start if two files define it. Config files are read in any order and cannot see each other; so the
role is completed when the hub reads the whole list. No configuration can change the role `admin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from traitlets.config.loader import Config, LazyConfigValue

USER = "user"
Role = dict[str, Any]


def grant_to_everybody(section: Config, scopes: Sequence[str], has_extra_scopes: bool) -> None:
    """Give all users the scopes; ``section`` is ``c.JupyterHub``.

    A role `user` in ``load_roles``, also one of a later file, gets them beside its own. Without such a role they are
    in ``extra_user_scopes``; where the hub has no such setting (JupyterHub 5), the role is defined here.
    """
    roles = section.load_roles
    define = not has_extra_scopes
    if isinstance(roles, LazyConfigValue):
        section.load_roles = _LazyRoles.of(roles, scopes, define)
    else:
        section.load_roles = _Roles(_raw(roles), scopes, define)
    if has_extra_scopes:
        if isinstance(section.extra_user_scopes, list):
            # YAML, as in hub.config of zero-to-jupyterhub, knows no sets
            section.extra_user_scopes = set(section.extra_user_scopes)
        section.extra_user_scopes.update(scopes)


def grant_to_admins(scopes: Sequence[str]) -> None:
    """Give all admins of a hub that runs in this process the scopes. A second call has no effect.

    The dashboard asks admins for no scope. A token can have only scopes that its owner has, so without them an admin
    could make no token that may do one thing and nothing else. The hub refuses a role `admin` in ``load_roles``
    (jupyterhub/roles.py, create_role), so the definition that it compares with is completed.
    """
    # not at the top: only the hub's config file needs it
    from jupyterhub import roles
    from jupyterhub.scopes import scope_definitions

    original = roles.get_default_roles
    if getattr(original, "completed_by_gpushare", False):
        return

    def completed() -> list[Role]:
        found: list[Role] = original()
        for role in found:
            if role["name"] == "admin":
                # one that another config file has taken out of custom_scopes would end the hub
                role["scopes"] += [scope for scope in scopes if scope in scope_definitions]
        return found

    completed.completed_by_gpushare = True  # type: ignore[attr-defined]
    roles.get_default_roles = completed


class _Roles(list[Role]):
    """A list of roles. Its iterator, which the hub uses once at its start, adds the scopes to the role `user`."""

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
        """Return the roles without the addition."""
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
        """Return the list joined with that of earlier files."""
        if isinstance(other, LazyConfigValue):
            self._extend = _Roles([*_raw(other._extend), *_raw(self._extend)], self.scopes, self.define)
            self._prepend = [*self._prepend, *other._prepend]
            self._inserts = [*other._inserts, *self._inserts]
            return self
        return _Roles([*self._prepend, *_raw(other), *_raw(self._extend)], self.scopes, self.define)

    def get_value(self, initial: Any) -> Any:
        """Return the whole list, after the hub's default, which is empty."""
        value = LazyConfigValue()
        value._inserts = self._inserts
        value._extend = [*self._prepend, *_raw(self._extend)]
        return list(_Roles(value.get_value(initial), self.scopes, self.define))


def _raw(roles: Iterable[Role]) -> list[Role]:
    return roles.raw() if isinstance(roles, _Roles) else list(roles)
