"""Everything that the service serves: the pages and the REST API."""

from __future__ import annotations

import logging
import ssl

from tornado.web import Application

from gpushare_spawner.http_server import BoundedHTTPServer
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.api.answers import Refusal
from gpushare_spawner.service.api.api import api_routes
from gpushare_spawner.service.api.events import Events
from gpushare_spawner.service.api.services import Services
from gpushare_spawner.service.api.snapshots import MAX_AGE, ServiceSnapshots
from gpushare_spawner.service.dashboard.page import DashboardPage
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web.dashboard import dashboard_application
from gpushare_spawner.service.web.hub_theme import HubTheme
from gpushare_spawner.wording.api import body_too_large

MOST_CONNECTIONS = 4096
"""Where descriptors suffice. The hub's proxy has a connection for each request under way and each open dashboard."""
MOST_BODY_BYTES = 16 * 1024
"""The longest body of the API has a few hundred. tornado reads a body before the login is checked."""
REQUEST_WITHIN = 60.0
"""Seconds that a peer has for the head of a request, and for the next request on its connection."""
BODY_WITHIN = 10.0
"""Seconds that a peer has for a request's body."""
MOST_BYTES_BUFFERED = 256 * 1024
"""Read of one connection and not yet dealt with."""

log = logging.getLogger("gpushare.service")


def service_application(
    sources: DashboardSources,
    actions: SessionActions,
    prefix: str,
    theme: HubTheme | None = None,
    history: History | None = None,
    max_age: float = MAX_AGE,
) -> Application:
    """Return what is served under ``prefix`` (JUPYTERHUB_SERVICE_PREFIX). ``history``: None, the service keeps none;
    ``max_age``: of what the API shows, in seconds."""
    prefix = prefix.rstrip("/") + "/"
    snapshots = ServiceSnapshots(sources, max_age)
    services = Services(prefix, snapshots, Events(snapshots), actions, history, sources.clock)
    return dashboard_application(
        sources, prefix, theme, history, [(prefix, DashboardPage, {"services": services}), *api_routes(services)]
    )


def service_server(application: Application, tls: ssl.SSLContext | None = None) -> BoundedHTTPServer:
    """Return the server of the pages and the API. Everybody who reaches the hub's proxy reaches it without a login."""
    refusal = Refusal(status=413, message=body_too_large(MOST_BODY_BYTES), code="bad-request")
    return BoundedHTTPServer(
        application,
        most_connections=MOST_CONNECTIONS,
        crowded=LogOnce(
            log,
            "Too many connections to the dashboard: the oldest without a complete request are closed",
            "There are few connections to the dashboard again",
            lasts=60.0,
        ),
        trouble=LogOnce(
            log,
            "No connection to the dashboard can be accepted",
            "Connections to the dashboard are accepted again",
            lasts=60.0,
        ),
        most_body_bytes=MOST_BODY_BYTES,
        too_large=refusal.model_dump_json().encode(),
        ssl_options=tls,
        xheaders=True,
        max_buffer_size=MOST_BYTES_BUFFERED,
        idle_connection_timeout=REQUEST_WITHIN,
        body_timeout=BODY_WITHIN,
    )
