"""The user or program that uses a page or the API, and its permissions. Pure.

`web.app.Page` makes the `Caller` of a request from the hub's answer; `api.router.Needs` checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpushare_spawner.service.hub.roles import ACT, ACT_OWN, DRAIN, SEE_ALL


class Owned(Protocol):
    """A session or server with an owner."""

    @property
    def user(self) -> str: ...


FULL_ADMIN = "admin:servers"
"""The scope of a full admin. An admin's token without it was created with limited scopes, and has only those."""


@dataclass(frozen=True)
class Caller:
    """A user with a browser login or a token, or a program with a token of its own."""

    name: str
    """The user's name; empty for a program."""
    label: str = ""
    """Name for logs: the user's name, or the word "service" and the service's name."""
    is_admin: bool = False
    scopes: frozenset[str] = frozenset()
    by_token: bool = False
    groups: frozenset[str] = frozenset()
    """The user's groups on the hub, if the login includes them."""

    @classmethod
    def of(cls, user: Mapping[str, Any], by_token: bool) -> Caller:
        """Return the caller from the hub's data. ``by_token``: whether the caller used a token, not a browser login."""
        scopes = frozenset(map(str, user.get("scopes") or ()))
        groups = frozenset(map(str, user.get("groups") or ()))
        is_user = user.get("kind", "user") == "user"
        is_admin = bool(user.get("admin")) and (not by_token or FULL_ADMIN in scopes)
        name = str(user["name"])
        label = name if is_user else f"service {name}"
        return cls(name if is_user else "", label, is_admin, scopes, by_token, groups)

    def has(self, scope: str) -> bool:
        """Return whether the caller has the scope, or is an admin."""
        return self.is_admin or scope in self.scopes

    @property
    def sees_all(self) -> bool:
        """Whether the caller may see the sessions of all users."""
        return self.has(SEE_ALL) or self.acts_on_all

    @property
    def acts_on_all(self) -> bool:
        """Whether the caller may act on the sessions of all users."""
        return self.has(ACT)

    @property
    def acts_on_own(self) -> bool:
        """Whether the caller may act on their own sessions. A token needs a scope for it."""
        return bool(self.name) and (not self.by_token or self.has(ACT_OWN) or self.acts_on_all)

    @property
    def drains(self) -> bool:
        """Whether the caller may cordon and drain GPUs and nodes."""
        return self.has(DRAIN)

    def may_act_on(self, owned: Owned) -> bool:
        """Return whether the caller may act on this session or server."""
        return self.acts_on_all or (self.acts_on_own and owned.user == self.name)

    def may_see(self, owned: Owned) -> bool:
        """Return whether the caller may see this session or server and its user's name."""
        return self.sees_all or owned.user == self.name
