"""The base of all service pages: login, headers, errors, and the hub's theme.

The hub's stylesheet is imported into a cascade layer below the service's own, so it provides colors and fonts
(Bootstrap's variables), but its rules cannot break the page. If it cannot be loaded, the page uses its own colors.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from jupyterhub.services.auth import HubOAuthenticated
from tornado.web import HTTPError, RequestHandler

from gpushare_spawner.service.hub.caller import Caller


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
