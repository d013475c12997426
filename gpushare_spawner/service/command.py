"""``gpushare service``: the idle culler and the dashboard. Options of jupyterhub-idle-culler keep their names."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlparse

from jupyterhub.utils import make_ssl_context
from tornado.httpserver import HTTPServer

from gpushare_spawner.clients.agent import default_control_socket
from gpushare_spawner.model.quantity import parse_seconds
from gpushare_spawner.service.agents import ClusterAgents, NoAgents, agents_of_machine
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.settings import MIN_USE, USE_WINDOW, CullerSettings
from gpushare_spawner.service.history.recorder import History, HistorySources, Retention
from gpushare_spawner.service.history.store import HistoryFailed, HistoryStore
from gpushare_spawner.service.hub.client import Hub, HubFailed
from gpushare_spawner.service.hub.pending_spawns import PendingSpawns
from gpushare_spawner.service.hub.scopes import missing
from gpushare_spawner.service.reports import Agent, RecentReports
from gpushare_spawner.service.template_source import TemplateSource
from gpushare_spawner.service.web.dashboard import DashboardSources, dashboard_application
from gpushare_spawner.templates.folder import DEFAULT_FOLDER, default_folder

log = logging.getLogger("gpushare.service")

DEFAULT_CULL_EVERY = 10.0
DEFAULT_HISTORY = "sqlite:///gpushare-history.sqlite"
PARENT_EVERY = 1.0
"""Seconds between two checks whether the hub that started the service still runs, with --end-with-hub."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    where = parser.add_argument_group("locations")
    where.add_argument(
        "--url", default=os.environ.get("JUPYTERHUB_API_URL"), help="the hub's API; default $JUPYTERHUB_API_URL"
    )
    where.add_argument(
        "--templates-dir",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help=f"the folder of compute templates; default $GPUSHARE_TEMPLATES, else {DEFAULT_FOLDER}",
    )
    kind = where.add_mutually_exclusive_group()
    kind.add_argument(
        "--control-socket",
        type=Path,
        default=default_control_socket(),
        metavar="PATH",
        help="on one machine: the agent's control socket; default $GPUSHARE_CONTROL, else /run/gpushare/control.sock",
    )
    kind.add_argument(
        "--namespace",
        default="",
        metavar="NAME",
        help="in a cluster: the namespace of the users' pods and of the agents' reports",
    )
    where.add_argument(
        "--all-namespaces",
        action="store_true",
        help="in a cluster with a namespace for each user: read the pods of all namespaces",
    )
    where.add_argument(
        "--ip",
        metavar="ADDRESS",
        help="address that the dashboard listens on, if not the host of its URL; *: all addresses, as in a pod behind "
        "a Service",
    )
    _switch(where, "--ssl-enabled", False, "use TLS with the hub's internal certificates for the hub's API")
    where.add_argument(
        "--internal-certs-location",
        default="internal-ssl",
        metavar="DIR",
        help="folder of the hub's internal certificates, with --ssl-enabled; not needed where the hub starts the "
        "service; default internal-ssl",
    )

    idle = parser.add_argument_group(
        "idle servers",
        "Templates say when an idle share is downgraded and released, and when a server is stopped. These options "
        "are for servers without a template.",
    )
    _time(idle, "--timeout", 0, "stop servers without a template after this long without activity, like 3600 or 1h")
    _time(
        idle,
        "--max-age",
        0,
        "stop each server that has run for this long, busy or not, with or without a template; the user of a "
        "session gets a notice before",
    )
    _time(
        idle,
        "--cull-every",
        DEFAULT_CULL_EVERY,
        "time between two rounds; every third round and each round with an idle action read the hub's list of servers",
    )
    _switch(
        idle,
        "--cull-default-servers",
        True,
        "whether default servers may be stopped; idle shares are released in any case",
    )
    _switch(idle, "--cull-named-servers", True, "whether named servers may be stopped")
    idle.add_argument(
        "--idle-when",
        choices=["always", "pressure"],
        default="always",
        help="when idle shares are downgraded and released, where the template does not say; pressure: only while a "
        "spawn waits that can use the units; default always",
    )
    _time(
        idle,
        "--min-use",
        MIN_USE,
        "GPU time within --use-window that counts as use of a share, where the template does not say; 0: all GPU work",
    )
    _time(idle, "--use-window", USE_WINDOW, "the time over which --min-use is added up")
    _switch(
        idle,
        "--dry-run",
        False,
        "decide, log and show idle actions, and carry out none: no share is downgraded or released, no server is "
        "stopped, no user is deleted, and users get no notices",
    )
    _switch(idle, "--remove-named-servers", False, "remove named servers when they are stopped")
    _switch(
        idle,
        "--cull-users",
        False,
        "delete users without a server after --timeout without activity, or when they are older than --max-age",
    )
    _switch(idle, "--cull-admin-users", True, "whether --cull-users deletes admins too")

    history = parser.add_argument_group("history")
    history.add_argument(
        "--history",
        default=os.environ.get("GPUSHARE_HISTORY") or DEFAULT_HISTORY,
        metavar="URL",
        help="SQLAlchemy URL of the history's database, like postgresql+psycopg://gpushare@db/gpushare; "
        f"false: keep no history; default $GPUSHARE_HISTORY, else {DEFAULT_HISTORY} in the folder where the hub runs",
    )
    kept = Retention()
    _time(history, "--history-detail", kept.detail, "keep GPU time by the hour for this long, then by the day")
    _time(history, "--history-names", kept.names, "keep the names of users and of their servers for this long")
    _time(history, "--history-keep", kept.keep, "delete everything that is older")

    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=int,
        default=10,
        metavar="N",
        help="requests to the hub at a time, 0: any number; default 10",
    )
    load.add_argument(
        "--api-page-size",
        type=int,
        default=0,
        metavar="N",
        help="users on each page of the hub's list, 0: the hub's own setting; default 0",
    )
    parser.add_argument(
        "--end-with-hub",
        action="store_true",
        help="end when the process that started the service ends, so that a killed hub leaves no service behind",
    )
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    parser.add_argument("--log-level", default="INFO", choices=levels, help="default INFO")


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
    wanting = _wanting(options, token)
    if wanting:
        log.error("%s", wanting)
        return 2
    try:
        asyncio.run(_serve(options, token, hub_name, cluster_agents))
    except (OSError, NoAgents, HistoryFailed) as error:
        log.error("The service cannot start: %s", error)
        return 1
    return 0


def _wanting(options: argparse.Namespace, token: str) -> str:
    if not options.url:
        return "The address of the hub is not set: give --url, or let the hub start the service."
    if not token:
        return "$JUPYTERHUB_API_TOKEN is not set. The hub sets it for each service that it starts."
    if options.all_namespaces and not options.namespace:
        return "--all-namespaces is for a cluster: give --namespace, where the agents publish their reports."
    if options.concurrency < 0 or options.api_page_size < 0:
        return "--concurrency and --api-page-size cannot be negative."
    return ""


async def _serve(options: argparse.Namespace, token: str, hub_name: str, cluster_agents: ClusterAgents) -> None:
    settings = CullerSettings(
        timeout=options.timeout,
        max_age=options.max_age,
        cull_every=options.cull_every or DEFAULT_CULL_EVERY,
        cull_users=options.cull_users,
        cull_admin_users=options.cull_admin_users,
        cull_default_servers=options.cull_default_servers,
        cull_named_servers=options.cull_named_servers,
        remove_named_servers=options.remove_named_servers,
        dry_run=options.dry_run,
        idle_when=options.idle_when,
        min_use=options.min_use,
        use_window=options.use_window,
        concurrency=options.concurrency,
    )
    hub = Hub(
        options.url,
        token,
        concurrency=options.concurrency,
        page_size=options.api_page_size,
        request_timeout=float(os.environ.get("JUPYTERHUB_REQUEST_TIMEOUT") or 60),
        ssl_options=_hub_tls(options),
    )
    templates = TemplateSource(Path(options.templates_dir))
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
        culler = Culler(
            agents,
            hub,
            templates,
            settings,
            quotas=templates.quotas,
            pending=pending.recent,
            record=history.record if history is not None else lambda action: None,
        )
        listeners.append(culler.reports_changed)
        await _run_until_stopped(options, hub, culler, reports, templates, settings, pending, history)


def _agents(
    options: argparse.Namespace,
    listeners: list[Callable[[], None]],
    hub_name: str,
    cluster_agents: ClusterAgents,
    templates: TemplateSource,
) -> contextlib.AbstractAsyncContextManager[Iterable[Agent]]:
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
) -> None:
    lacking: list[str] = []
    sources = DashboardSources(
        reports=reports,
        templates=templates,
        hub_snapshot=lambda: culler.hub_snapshot,
        counters=culler.counters,
        notes=lambda: [*lacking, *templates.problems, *([history.problem] if history and history.problem else [])],
        pending=pending.now,
        quotas=templates.quotas,
        claims=lambda: culler.pressure.claims,
        settings=settings,
        dry_run=culler.dry_run,
        use=culler.use,
        needed=lambda: culler.pressure.needed,
    )
    server = _listen(sources, options.ip, history)
    scopes = _check_scopes(hub, settings.cull_users, templates.quotas() is not None, lacking)
    tasks = [asyncio.create_task(culler.run()), asyncio.create_task(scopes)]
    if history is not None:
        tasks.append(asyncio.create_task(history.run()))
    stop = asyncio.Event()
    if options.end_with_hub:
        tasks.append(asyncio.create_task(_stop_without_parent(stop)))
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
    hub.close()


def _history(options: argparse.Namespace, sources: HistorySources) -> History | None:
    if options.history.strip().lower() in ("", "false"):
        return None
    kept = Retention(options.history_detail, options.history_names, options.history_keep)
    return History(HistoryStore(options.history), sources, kept)


async def _stop_without_parent(stop: asyncio.Event) -> None:
    """Set ``stop`` when the parent ends: a killed hub ends no service, and the next hub's service needs the port."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_EVERY)
    log.warning("The hub that started this service has ended; the service ends too")
    stop.set()


async def _check_scopes(hub: Hub, cull_users: bool, quotas: bool, lacking: list[str]) -> None:
    """Log the missing scopes, and put them on the dashboard."""
    try:
        lacking[:] = missing(await hub.own_scopes(), cull_users, quotas)
    except HubFailed as error:
        log.warning("The service's scopes cannot be checked. %s", error)
    for sentence in lacking:
        log.warning("%s", sentence)


def _listen(sources: DashboardSources, ip: str | None, history: History | None) -> HTTPServer | None:
    """Serve the pages at $JUPYTERHUB_SERVICE_URL; without it there are none.

    ``ip`` is for a URL whose host is not this machine, like that of a Kubernetes Service; *: all addresses.
    """
    url = urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL") or "")
    if not url.hostname:
        log.info("$JUPYTERHUB_SERVICE_URL is not set: the idle culler runs without a dashboard")
        return None
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or "/services/gpushare/"
    application = dashboard_application(sources, prefix, os.environ.get("JUPYTERHUB_BASE_URL", "/") + "hub/", history)
    port = url.port or (443 if url.scheme == "https" else 80)
    server = HTTPServer(application, ssl_options=_own_tls() if url.scheme == "https" else None, xheaders=True)
    host = ip or url.hostname
    try:
        server.listen(port, "" if host == "*" else host)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"the dashboard cannot listen on {host}:{port} ({why}); give the service another url") from None
    return server


def _own_tls() -> ssl.SSLContext | None:
    """For the hub's proxy, with the certificates that the hub made for this service."""
    return _tls(ssl.Purpose.CLIENT_AUTH, *(os.environ.get(f"JUPYTERHUB_SSL_{part}", "") for part in _PARTS))


def _hub_tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    own = tuple(os.environ.get(f"JUPYTERHUB_SSL_{part}", "") for part in _PARTS)
    if all(own):
        return _tls(ssl.Purpose.SERVER_AUTH, *own)
    if not options.ssl_enabled:
        return None
    folder = Path(options.internal_certs_location)
    return _tls(
        ssl.Purpose.SERVER_AUTH,
        str(folder / "hub-internal/hub-internal.key"),
        str(folder / "hub-internal/hub-internal.crt"),
        str(folder / "hub-ca/hub-ca.crt"),
    )


_PARTS = ("KEYFILE", "CERTFILE", "CLIENT_CA")


def _tls(purpose: ssl.Purpose, key: str, certificate: str, authority: str) -> ssl.SSLContext:
    context: ssl.SSLContext = make_ssl_context(key, certificate, cafile=authority, purpose=purpose)
    return context


def _time(group: argparse._ArgumentGroup, name: str, default: float, help: str) -> None:
    days = default and default % 86400 == 0
    default_said = (f"{default / 86400:g}d" if days else f"{default:g}s") if default else "0: never"
    group.add_argument(name, type=_seconds, default=default, metavar="TIME", help=f"{help}; default {default_said}")


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _switch(group: argparse._ArgumentGroup, name: str, default: bool, help: str) -> None:
    """``--x``, ``--x=true`` and ``--x=false``, as tornado's options take them."""
    said = f"{help}; default {str(default).lower()}"
    group.add_argument(name, nargs="?", const=True, default=default, type=_boolean, metavar="true|false", help=said)


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "t": True, "false": False, "0": False, "no": False, "f": False}
    with contextlib.suppress(KeyError):
        return words[text.strip().lower()]
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
