"""``gpushare service``: the idle culler and the dashboard. The options: `options`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

from gpushare_spawner.descriptors import allow_many
from gpushare_spawner.http_server import BoundedHTTPServer
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.agents import ClusterAgents, NoAgents, agents_of_machine
from gpushare_spawner.service.application import service_application, service_server
from gpushare_spawner.service.culler.asks import Asks
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.history.events import Action
from gpushare_spawner.service.history.recorder import History, HistorySources, Retention
from gpushare_spawner.service.history.store import HistoryFailed, HistoryStore
from gpushare_spawner.service.hub.client import Hub, HubFailed
from gpushare_spawner.service.hub.pending_spawns import PendingSpawns
from gpushare_spawner.service.hub.queue_progress import QueueOfHub
from gpushare_spawner.service.hub.scopes import missing
from gpushare_spawner.service.hub_process import wait_for_end
from gpushare_spawner.service.notifiers.config import notifier_file
from gpushare_spawner.service.notifiers.outbox import Outbox
from gpushare_spawner.service.options import culler_settings, lacking_setting
from gpushare_spawner.service.reports import Agents, RecentReports
from gpushare_spawner.service.session_templates import UserGroups
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.template_source import TemplateSource
from gpushare_spawner.service.tls import hub_tls, own_tls
from gpushare_spawner.service.web.hub_theme import HubTheme
from gpushare_spawner.wall_clock import WallClock

log = logging.getLogger("gpushare.service")

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; it may keep fewer (net.core.somaxconn)."""


def run(options: argparse.Namespace, cluster_agents: ClusterAgents) -> int:
    """Run until SIGTERM or SIGINT. `cluster_agents` is used with `--namespace`.

    Returns 2, and logs a sentence, if a setting is missing.
    """
    # libraries log much at INFO, some of it about logins
    logging.basicConfig(level="WARNING", format="[%(levelname).1s %(asctime)s gpushare] %(message)s")
    logging.getLogger("gpushare").setLevel(options.log_level)
    token = os.environ.get("JUPYTERHUB_API_TOKEN", "")
    # the hub's own name for its API, as its pods have it; --url can be another address of it
    hub_name = os.environ.get("JUPYTERHUB_API_URL", "")
    if options.url:
        # the dashboard's logins ask the same hub
        os.environ["JUPYTERHUB_API_URL"] = options.url
    wanting = lacking_setting(options, token)
    if wanting:
        log.error("%s", wanting)
        return 2
    allow_many()
    try:
        asyncio.run(_serve(options, token, hub_name, cluster_agents))
    except (OSError, NoAgents, HistoryFailed) as error:
        log.error("The service cannot start: %s", error)
        return 1
    return 0


async def _serve(options: argparse.Namespace, token: str, hub_name: str, cluster_agents: ClusterAgents) -> None:
    settings, clock = culler_settings(options), WallClock()
    hub = Hub(
        options.url,
        token,
        concurrency=options.concurrency,
        page_size=options.api_page_size,
        request_timeout=float(os.environ.get("JUPYTERHUB_REQUEST_TIMEOUT") or 60),
        ssl_options=hub_tls(options),
        since_set=clock.since_set,
    )
    groups = UserGroups(lambda: snapshot.users if (snapshot := culler.hub_snapshot) is not None else None)
    templates = TemplateSource(Path(options.templates_dir), groups)
    listeners: list[Callable[[], None]] = []
    async with _agents(options, listeners, hub_name, cluster_agents, templates) as agents:
        pending, reports = PendingSpawns(hub), RecentReports(agents)
        history = _history(
            options,
            HistorySources(
                snapshots=reports.snapshots,
                users=lambda: snapshot.users if (snapshot := culler.hub_snapshot) is not None else (),
                pending=pending.now,
                templates=templates,
                waited=lambda wait: culler.counters.waited(wait),
            ),
        )
        record: Callable[[Action], None] = history.record if history is not None else lambda action: None

        def acted(action: Action) -> None:
            record(action)
            culler.session_changed()

        actions = SessionActions(
            agents,
            hub,
            templates,
            settings.keep_rule,
            acted,
            quotas=templates.quotas,
            pending=pending.now,
            journal=history,
            nodes_are_added=options.nodes_are_added,
            use_rule=settings.use_rule,
        )
        outbox = Outbox(notifier_file(Path(options.notifiers)), time.time) if options.notifiers else None
        culler = Culler(
            agents,
            hub,
            templates,
            settings,
            clock,
            quotas=templates.quotas,
            pending=pending.recent,
            record=record,
            actions=actions,
            notify=outbox.offer if outbox is not None else lambda decisions: None,
        )
        clock.was_set = culler.clock_was_set
        listeners.append(culler.reports_changed)
        beside = [asyncio.create_task(Asks(agents, actions).run()), asyncio.create_task(actions.finish_restarts())]
        if outbox is not None:
            beside.append(asyncio.create_task(outbox.run()))
        notes = (lambda: templates.problems) if outbox is None else lambda: [*templates.problems, *outbox.problems]
        try:
            await _run_until_stopped(
                options, hub, culler, reports, templates, settings, pending, history, actions, notes
            )
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


def _agents(
    options: argparse.Namespace,
    listeners: list[Callable[[], None]],
    hub_name: str,
    cluster_agents: ClusterAgents,
    templates: TemplateSource,
) -> contextlib.AbstractAsyncContextManager[Agents]:
    if not options.namespace:
        return contextlib.nullcontext(agents_of_machine(options.control_socket))

    def tell() -> None:
        for listener in listeners:
            listener()

    return cluster_agents(options.namespace, options.all_namespaces, tell, hub_name, templates)


async def _run_until_stopped(
    options: argparse.Namespace,
    hub: Hub,
    culler: Culler,
    reports: RecentReports,
    templates: TemplateSource,
    settings: CullerSettings,
    pending: PendingSpawns,
    history: History | None,
    actions: SessionActions,
    problems: Callable[[], list[str]],
) -> None:
    lacking: list[str] = []
    queue = QueueOfHub(hub)
    sources = DashboardSources(
        reports=reports,
        templates=templates,
        hub_snapshot=lambda: culler.hub_snapshot,
        counters=culler.counters,
        notes=lambda: [*lacking, *problems(), *([history.problem] if history and history.problem else [])],
        pending=pending.now,
        told=queue.told,
        quotas=templates.quotas,
        claims=lambda: culler.pressure.claims,
        settings=settings,
        dry_run=culler.dry_run,
        use=culler.use,
        needed=lambda: culler.pressure.needed,
    )
    server = _listen(sources, options.ip, history, actions)
    scopes = _check_scopes(hub, settings.cull_users, templates.needs_groups, lacking)
    tasks = [asyncio.create_task(culler.run()), asyncio.create_task(scopes)]
    if history is not None:
        tasks.append(asyncio.create_task(history.run()))
    stop = asyncio.Event()
    if options.end_with_hub is not None:
        tasks.append(asyncio.create_task(_stop_without_hub(stop, options.end_with_hub)))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    where = f"agent on {options.control_socket}"
    if options.namespace:
        where = f"agents of the namespace {options.namespace}"
    log.info("Idle culler and dashboard for the %s, templates in %s", where, options.templates_dir)
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if server is not None:
        server.stop()
    pending.close()
    queue.close()
    hub.close()


def _history(options: argparse.Namespace, sources: HistorySources) -> History | None:
    if options.history.strip().lower() in ("", "false"):
        return None
    kept = Retention(options.history_detail, options.history_names, options.history_keep)
    return History(HistoryStore(options.history), sources, kept)


async def _stop_without_hub(stop: asyncio.Event, hub: int) -> None:
    await wait_for_end(hub)
    stop.set()


async def _check_scopes(hub: Hub, cull_users: bool, groups: bool, lacking: list[str]) -> None:
    """Log the missing scopes, and put them on the dashboard."""
    try:
        lacking[:] = missing(await hub.own_scopes(), cull_users, groups)
    except HubFailed as error:
        log.warning("The service's scopes cannot be checked. %s", error)
    for sentence in lacking:
        log.warning("%s", sentence)


def _listen(
    sources: DashboardSources, ip: str | None, history: History | None, actions: SessionActions
) -> BoundedHTTPServer | None:
    """Serve the pages at $JUPYTERHUB_SERVICE_URL; without it there are none.

    ``ip`` is for a URL whose host is not this machine, like that of a Kubernetes Service; *: all addresses.
    """
    url = urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL") or "")
    if not url.hostname:
        log.info("$JUPYTERHUB_SERVICE_URL is not set: the idle culler runs without a dashboard")
        return None
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or "/services/gpushare/"
    application = service_application(sources, actions, prefix, HubTheme.of_environment(), history)
    port = url.port or (443 if url.scheme == "https" else 80)
    server = service_server(application, own_tls() if url.scheme == "https" else None)
    host = ip or url.hostname
    try:
        server.listen(port, "" if host == "*" else host, backlog=BACKLOG)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"the dashboard cannot listen on {host}:{port} ({why}); give the service another url") from None
    return server
