"""Who asks a page or the API, and what their scopes allow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.service.hub.scopes import ACT, ACT_OWN, DRAIN, SEE_ALL
from gpushare_spawner.service.web.viewer import Owned, Viewer

FULL_ADMIN = "admin:servers"
"""A token of an admin that lacks this scope was narrowed when it was made: it has its own scopes and no more."""


@dataclass(frozen=True)
class Caller:
    """A user, by the browser's login or by a token; or a program that is no user."""

    name: str
    """Of the user; empty: a program that is no user."""
    label: str = ""
    """For logs: the name of the user, or of the service with the word before it."""
    is_admin: bool = False
    scopes: frozenset[str] = frozenset()
    by_token: bool = False
    groups: frozenset[str] = frozenset()
    """Of the user on the hub, as far as the login shows them."""

    @classmethod
    def of(cls, user: Mapping[str, Any], by_token: bool) -> Caller:
        """Return the caller that the hub describes. ``by_token``: not by the login of a browser."""
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
        """Whether the caller may act on sessions of their own: by a token only with a scope for it."""
        return bool(self.name) and (not self.by_token or self.has(ACT_OWN) or self.acts_on_all)

    @property
    def drains(self) -> bool:
        """Whether the caller may cordon and drain GPUs and nodes."""
        return self.has(DRAIN)

    def may_act_on(self, of: Owned) -> bool:
        """Return whether the caller may act on this session or server."""
        return self.acts_on_all or (self.acts_on_own and of.user == self.name)

    @property
    def viewer(self) -> Viewer:
        """What the caller may see."""
        return Viewer(self.name, self.sees_all)
