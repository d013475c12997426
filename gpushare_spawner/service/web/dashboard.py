"""The service's web application: routes, page environment and metrics. The dashboard is in `service.dashboard`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jupyterhub.services.auth import HubOAuthCallbackHandler
from tornado.web import Application, HTTPError, RequestHandler, StaticFileHandler

from gpushare_spawner import __version__
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.hub.roles import METRICS
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web.app import HubTheme, Page, ThemeStylesheet
from gpushare_spawner.service.web.history import HistoryPage
from gpushare_spawner.service.web.metrics import CONTENT_TYPE, exposition
from gpushare_spawner.wording import service as words
from gpushare_spawner.wording.actions import closed
from gpushare_spawner.wording.amounts import (
    LOCAL_TIME_SCRIPT,
    elapsed,
    gpu_hours,
    gpu_share,
    latency,
    memory,
    number_of_gpus,
    plural,
    share_of,
    unbroken,
    utc,
)
from gpushare_spawner.wording.share_status import on_gpu, received_time
from gpushare_spawner.wording.spawn_failures import cancelled_unless_started, estimated_wait

log = logging.getLogger("gpushare.service.dashboard")

HERE = Path(__file__).parent


def dashboard_application(
    sources: DashboardSources,
    prefix: str,
    theme: HubTheme | None = None,
    history: History | None = None,
    more: Sequence[tuple[str, type[RequestHandler], dict[str, Any]]] = (),
) -> Application:
    """Return the application of the pages under ``prefix`` (JUPYTERHUB_SERVICE_PREFIX).

    ``history``: None if there is no history; ``more``: additional routing rules.
    """
    theme = theme or HubTheme()
    prefix = prefix.rstrip("/") + "/"
    return Application(
        [
            *more,
            (prefix.rstrip("/"), ToDashboard, {"prefix": prefix}),
            (prefix + "history", HistoryPage),
            (prefix + "metrics", MetricsText),
            (prefix + "oauth_callback", HubOAuthCallbackHandler),
            (prefix + "static/theme.css", ThemeStylesheet),
            (prefix + r"static/(local_time\.js)", PageFiles, {"path": str(Path(LOCAL_TIME_SCRIPT).parent)}),
            (prefix + r"static/(.*)", PageFiles, {"path": str(HERE / "static")}),
        ],
        sources=sources,
        history=history,
        theme=theme,
        pages=page_environment(prefix, theme, history is not None),
        cookie_secret=os.urandom(32),
        log_function=_log_request,
    )


def _log_request(page: RequestHandler) -> None:
    """Log a request without its query, because a login's query has a secret code."""
    level = logging.DEBUG if page.get_status() < 500 else logging.ERROR
    log.log(level, "%s %s: %d", page.request.method, page.request.path, page.get_status())


def page_environment(prefix: str, theme: HubTheme, has_history: bool = False) -> Environment:
    """Return the environment that renders the pages."""
    pages = Environment(
        loader=FileSystemLoader(HERE / "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {
        "size": lambda amount: unbroken(memory(amount)),
        "duration": lambda seconds: unbroken(elapsed(seconds)),
        "latency": lambda seconds: unbroken(latency(seconds)),
        "gpus": lambda units, *several: unbroken(gpu_share(units, *several)),
        "number_of_gpus": number_of_gpus,
        "unbroken": unbroken,
        "counted": plural,
        "instant": lambda at: datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
        "estimated_wait": lambda spawn: unbroken(
            estimated_wait(spawn.earliest_minutes, spawn.estimated_minutes, spawn.latest_minutes)
        ),
        "cancelled_unless_started": cancelled_unless_started,
        "gpu_hours": gpu_hours,
        "instant_text": utc,
    }
    pages.globals |= {
        "prefix": prefix,
        "hub": theme,
        "version": __version__,
        "has_history": has_history,
        "closed": lambda cordon: closed(cordon.drain, cordon.by, cordon.reason),
        "received_time": lambda received, entitled: unbroken(received_time(received, entitled)),
        "borrowed": lambda session: unbroken(share_of(session.borrowed_each)),
        "on_gpu": lambda received, entitled: unbroken(on_gpu(received, entitled)),
    }
    return pages


class MetricsText(Page):
    """The metrics in Prometheus' text format.

    They are for admins and for tokens with the scope `custom:gpushare:metrics`; others get 403.
    """

    async def get(self) -> None:
        # a redirect to a login form is useless to a program
        if not self.current_user:
            raise HTTPError(403, words.LOG_IN)
        if not self.caller.has(METRICS):
            raise HTTPError(403, words.metrics_refused(METRICS))
        self.set_header("Content-Type", CONTENT_TYPE)
        sources: DashboardSources = self.settings["sources"]
        history: History | None = self.settings["history"]
        snapshot = await sources.take(with_progress=False)
        problem = history.problem if history is not None else None
        self.finish(exposition(snapshot, sources.context.counters, problem))


class PageFiles(StaticFileHandler):
    """Stylesheets and scripts. Browsers check them for changes each time: modules of two versions are incompatible."""

    def set_extra_headers(self, path: str) -> None:
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")


class ToDashboard(RequestHandler):
    """Redirect to the dashboard."""

    def initialize(self, prefix: str) -> None:
        self._prefix = prefix

    def get(self) -> None:
        self.redirect(self._prefix)
