"""Everything that the service serves: the pages and the REST API."""

from __future__ import annotations

from tornado.web import Application

from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.api.api import api_routes
from gpushare_spawner.service.api.events import Events
from gpushare_spawner.service.api.services import Services
from gpushare_spawner.service.api.snapshots import MAX_AGE, ServiceSnapshots
from gpushare_spawner.service.dashboard.page import DashboardPage
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web.dashboard import dashboard_application
from gpushare_spawner.service.web.hub_theme import HubTheme

MOST_BYTES_OF_REQUEST = 64 * 1024
"""Of a body, for the HTTP server: tornado reads it whole, 100 MiB by default, before anybody is asked for a login. The
API says in a sentence what is wrong with one of more than `router.MOST_BODY_BYTES`."""


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
