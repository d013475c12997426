"""The base of all service pages: the caller and the caller's rights, headers, errors, and the hub's theme.

`Caller` has the rights of a user or program that uses a page or the API, and is pure.

The hub's stylesheet is imported into a cascade layer below the service's own, so it provides colors and fonts
(Bootstrap's variables), but its rules cannot break the page. If it cannot be loaded, the page uses its own colors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jupyterhub.services.auth import HubOAuthenticated
from tornado.web import HTTPError, RequestHandler

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

    def may_act_on(self, of: Owned) -> bool:
        """Return whether the caller may act on this session or server."""
        return self.acts_on_all or (self.acts_on_own and of.user == self.name)

    def may_see(self, of: Owned) -> bool:
        """Return whether the caller may see this session or server and its user's name."""
        return self.sees_all or of.user == self.name


class Page(HubOAuthenticated, RequestHandler):  # type: ignore[misc]  # jupyterhub has no types
    """A page for the hub's users. The request to the hub for the user does not block the event loop."""

    async def prepare(self) -> None:
        # The hub's library would store a token from the URL in a cookie and then treat it as a login, so a token with
        # few scopes would have all of its user's rights.
        self.hub_auth.allow_token_in_url = False
        await self.hub_auth.get_user(self, sync=False)  # stored on this handler, so current_user sends no request

    def set_default_headers(self) -> None:
        self.set_header("Server", "gpushare")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        hub = self.settings["theme"].source
        self.set_header(
            "Content-Security-Policy",
            # The bars' widths are style attributes. Submitting a filter form can redirect to the hub's login page.
            f"default-src 'none'; script-src 'self'; style-src 'self'{hub}; style-src-attr 'unsafe-inline'; "
            f"img-src 'self'{hub}; font-src 'self'{hub}; connect-src 'self'; base-uri 'none'; form-action 'self'{hub}; "
            "frame-ancestors 'none'",
        )

    @property
    def caller(self) -> Caller:
        """The sender of the request: a user or a program."""
        # available only as this attribute of the handler (jupyterhub/services/auth.py, HubAuth._get_user)
        by_token = bool(getattr(self, "_token_authenticated", False))
        return Caller.of(self.current_user, by_token)

    def finish_page(self, name: str, **values: Any) -> None:
        """Answer with a page from `pages/`."""
        self.set_header("Content-Type", "text/html; charset=utf-8")
        page = self.settings["pages"].get_template(name)
        # for requests by scripts, the hub's library accepts the cookie only with the token
        self.finish(page.render(xsrf=self.xsrf_token.decode(), admin=bool(self.current_user.get("admin")), **values))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = (kwargs.get("exc_info") or (None, None))[1]
        text = error.log_message if isinstance(error, HTTPError) else None
        # In a message without arguments, tornado doubles each percent sign.
        message = text % error.args if isinstance(error, HTTPError) and text else self._reason
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"status": status_code, "message": message}))


@dataclass(frozen=True)
class HubTheme:
    """The hub's theme and the location of its pages.

    ``prefix``: the path of the hub's pages. ``host``: the hub's scheme and host if each server and service has its own
    host (JupyterHub.subdomain_host), otherwise empty.
    """

    prefix: str = "/hub/"
    host: str = ""

    @classmethod
    def of_environment(cls) -> HubTheme:
        """Return the theme of the hub that started this service, from its environment variables."""
        base = os.environ.get("JUPYTERHUB_BASE_URL") or "/"
        return cls(base.rstrip("/") + "/hub/", os.environ.get("JUPYTERHUB_HOST", ""))

    def page(self, path: str) -> str:
        """Return the URL of a page or file of the hub."""
        return f"{self.host}{self.prefix}{path}"

    @property
    def stylesheet(self) -> str:
        return self.page("static/css/style.min.css")  # in JupyterHub 5 and 6

    @property
    def source(self) -> str:
        """The hub as a source for the Content-Security-Policy; empty if it is on the same host."""
        return f" {self.host}" if self.host else ""


class ThemeStylesheet(RequestHandler):
    """A stylesheet that imports the hub's. The service's own rules take precedence regardless of the order."""

    def get(self) -> None:
        self.set_header("Content-Type", "text/css; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        theme: HubTheme = self.settings["theme"]
        address = theme.stylesheet.replace("\\", "%5C").replace('"', "%22")
        self.finish(f'@import url("{address}") layer(hub);\n')
