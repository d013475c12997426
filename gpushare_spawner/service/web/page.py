"""What all pages of the service have in common: the user of the hub who asks, headers, errors."""

from __future__ import annotations

import json
from typing import Any

from jupyterhub.services.auth import HubOAuthenticated
from tornado.web import HTTPError, RequestHandler

from gpushare_spawner.service.web.caller import Caller
from gpushare_spawner.service.web.viewer import Viewer
from gpushare_spawner.wording import dashboard as words


class Page(HubOAuthenticated, RequestHandler):  # type: ignore[misc]  # jupyterhub has no types
    """A page for users of the hub. The hub is asked for the user without blocking the event loop."""

    async def prepare(self) -> None:
        # the hub's library would keep a token of the address in a cookie, and nothing tells it from a login then:
        # a token with few scopes would have all rights of its user
        self.hub_auth.allow_token_in_url = False
        await self.hub_auth.get_user(self, sync=False)  # kept on this handler, so current_user asks no more

    def set_default_headers(self) -> None:
        self.set_header("Server", "gpushare")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        hub = self.settings["theme"].source
        self.set_header(
            "Content-Security-Policy",
            # the bars' widths are style attributes; a form that filters may lead to the hub's login
            f"default-src 'none'; script-src 'self'; style-src 'self'{hub}; style-src-attr 'unsafe-inline'; "
            f"img-src 'self'{hub}; font-src 'self'{hub}; connect-src 'self'; base-uri 'none'; form-action 'self'{hub}; "
            "frame-ancestors 'none'",
        )

    @property
    def caller(self) -> Caller:
        """The user who asks, or a program with a token that names none."""
        # the hub's library says so on the handler, and nowhere else (jupyterhub/services/auth.py, HubAuth._get_user)
        by_token = bool(getattr(self, "_token_authenticated", False))
        return Caller.of(self.current_user, by_token)

    @property
    def viewer(self) -> Viewer:
        """What the user who asks may see."""
        return self.caller.viewer

    def may(self, scope: str) -> bool:
        """Return whether the user is an admin, or has the scope."""
        return self.caller.has(scope)

    def require_login(self) -> None:
        """Refuse without a login: a program cannot use a redirect to a login form."""
        if not self.current_user:
            raise HTTPError(403, words.LOG_IN)

    def finish_page(self, name: str, **values: Any) -> None:
        """Answer with a page of `pages/`."""
        self.set_header("Content-Type", "text/html; charset=utf-8")
        page = self.settings["pages"].get_template(name)
        # the hub's library takes the cookie of a script's request only together with the token
        self.finish(page.render(xsrf=self.xsrf_token.decode(), admin=bool(self.current_user.get("admin")), **values))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = (kwargs.get("exc_info") or (None, None))[1]
        said = error.log_message if isinstance(error, HTTPError) else None
        # tornado keeps a percent sign twice in a message without arguments
        message = said % error.args if isinstance(error, HTTPError) and said else self._reason
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"status": status_code, "message": message}))
