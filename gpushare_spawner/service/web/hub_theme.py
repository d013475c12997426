"""The hub's look: its stylesheet, its logo and the links of its page header, as far as a service can use them.

The hub's stylesheet is imported into a cascade layer below the service's own: it gives colours and fonts (Bootstrap's
variables), and no rule of it can break the page. Where it cannot be loaded, the page has colours of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tornado.web import RequestHandler


@dataclass(frozen=True)
class HubTheme:
    """Where the hub's pages are.

    ``prefix``: the path of the hub's pages. ``host``: the hub's scheme and host where each server and service has a
    host of its own (JupyterHub.subdomain_host); else empty.
    """

    prefix: str = "/hub/"
    host: str = ""

    @classmethod
    def of_environment(cls) -> HubTheme:
        """Return the hub that started this service, by the variables that it sets."""
        base = os.environ.get("JUPYTERHUB_BASE_URL") or "/"
        return cls(base.rstrip("/") + "/hub/", os.environ.get("JUPYTERHUB_HOST", ""))

    def page(self, path: str) -> str:
        """Return the address of a page or file of the hub."""
        return f"{self.host}{self.prefix}{path}"

    @property
    def stylesheet(self) -> str:
        return self.page("static/css/style.min.css")  # in JupyterHub 5 and 6

    @property
    def source(self) -> str:
        """The hub as one more source for the Content-Security-Policy; empty where it is on the same host."""
        return f" {self.host}" if self.host else ""


class ThemeStylesheet(RequestHandler):
    """Imports the hub's stylesheet; the service's own rules are stronger whatever their order."""

    def get(self) -> None:
        self.set_header("Content-Type", "text/css; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        theme: HubTheme = self.settings["theme"]
        address = theme.stylesheet.replace("\\", "%5C").replace('"', "%22")
        self.finish(f'@import url("{address}") layer(hub);\n')
