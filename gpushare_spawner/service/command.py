"""``gpushare service``: its options, and the start of the idle culler, the dashboard and the REST API.

Builds the parts of the service, connects them, and serves the pages and the API until SIGTERM. Options of
jupyterhub-idle-culler keep their names. TLS uses the certificates that the hub creates for itself and its services.
`hub_process` ends the service with the hub.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from jupyterhub.utils import make_ssl_context
from tornado.web import Application

from gpushare_spawner.background import cancel
from gpushare_spawner.clients.agent import default_control_socket
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.descriptors import allow_many
from gpushare_spawner.http_server import BoundedHTTPServer
from gpushare_spawner.model.quantity import parse_seconds
from gpushare_spawner.model.quota import BUDGETS_FILE, Quotas
from gpushare_spawner.service import hub_process
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.actions.restart import finish_restarts
from gpushare_spawner.service.api.answers import Refusal
from gpushare_spawner.service.api.api import api_routes
from gpushare_spawner.service.api.router import Services
from gpushare_spawner.service.api.snapshots import MAX_AGE, Events, ServiceSnapshots
from gpushare_spawner.service.budgets import Budgets
from gpushare_spawner.service.culler.asks import AskResponder
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings, servers_of
from gpushare_spawner.service.dashboard import DashboardPage
from gpushare_spawner.service.history.recorder import History, HistorySources, Retention
from gpushare_spawner.service.history.store import Action, HistoryFailed, HistoryStore
from gpushare_spawner.service.hub.client import Hub, HubFailed
from gpushare_spawner.service.hub.roles import missing
from gpushare_spawner.service.hub.watch import PendingSpawns, QueueOfHub
from gpushare_spawner.service.hub_process import wait_for_end
from gpushare_spawner.service.notifiers.config import notifier_file
from gpushare_spawner.service.notifiers.outbox import Outbox
from gpushare_spawner.service.reports import Agents, ClusterAgents, MachineAgent, MachineAgents, NoAgents, RecentReports
from gpushare_spawner.service.right_size import ShareAdvisor
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.templates import TemplateSource, UserGroups
from gpushare_spawner.service.web.app import HubTheme
from gpushare_spawner.service.web.dashboard import dashboard_application
from gpushare_spawner.templates.folder import DEFAULT_FOLDER, default_folder
from gpushare_spawner.wording.service import body_too_large

DEFAULT_CULL_EVERY = 10.0
DEFAULT_HISTORY = "sqlite:///gpushare-history.sqlite"


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
        help="in a cluster with one namespace per user: read the pods of all namespaces",
    )
    where.add_argument(
        "--nodes-are-added",
        action="store_true",
        help="nodes with other GPUs are added later, as with GPUShareSpawner.nodes_are_added: a server can be "
        "restarted with a template that no current node can run",
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
        "Templates define when an idle share is downgraded and released, and when a server is stopped. These options "
        "are for servers without a template.",
    )
    _time(idle, "--timeout", 0, "stop servers without a template after this long without activity, like 3600 or 1h")
    _time(
        idle,
        "--max-age",
        0,
        "stop each server that has run for this long, busy or not, with or without a template; the user of a "
        "session gets a notice before that",
    )
    _time(
        idle,
        "--cull-every",
        DEFAULT_CULL_EVERY,
        "time between two rounds of the idle culler; it reads the hub's list of servers in every third round, and in "
        "each round with an idle action",
    )
    _switch(
        idle,
        "--dry-run",
        False,
        "decide, log and show idle actions without carrying them out: no share is downgraded or released, no server is "
        "stopped, no user is deleted, and users get no notices",
    )
    _switch(idle, "--remove-named-servers", False, "remove named servers when they are stopped")
    _switch(
        idle,
        "--cull-users",
        False,
        "delete users without a running server after --timeout without activity, or when their account is older than "
        "--max-age",
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
    _time(history, "--history-names", kept.names, "keep the names of users and of their servers for this long")
    _time(history, "--history-keep", kept.keep, "delete everything that is older")

    notices = parser.add_argument_group("notices")
    notices.add_argument(
        "--notifiers",
        type=Path,
        default=os.environ.get("GPUSHARE_NOTIFIERS") or None,
        metavar="FILE",
        help="YAML file of e-mail and webhooks for users whose notebook tab is closed; default $GPUSHARE_NOTIFIERS, "
        "else no messages",
    )

    hub_process.configure(parser)
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    parser.add_argument("--log-level", default="INFO", choices=levels, help="default INFO")


def lacking_setting(options: argparse.Namespace, token: str) -> str:
    """Return a sentence about a missing or invalid setting; empty: none."""
    if not options.url:
        return "The address of the hub is not set: give --url, or let the hub start the service."
    if not token:
        return "$JUPYTERHUB_API_TOKEN is not set. The hub sets it for each service that it starts."
    if options.all_namespaces and not options.namespace:
        return "--all-namespaces is for a cluster: give --namespace, where the agents publish their reports."
    return ""


def culler_settings(options: argparse.Namespace) -> CullerSettings:
    """Return the culler's settings, each from the option of the same name."""
    given = {setting.name: getattr(options, setting.name) for setting in fields(CullerSettings)}
    return CullerSettings(**given | {"cull_every": options.cull_every or DEFAULT_CULL_EVERY})


def _time(group: argparse._ArgumentGroup, name: str, default: float, help: str) -> None:
    unit, size = next((pair for pair in (("d", 86400), ("h", 3600)) if default % pair[1] == 0), ("s", 1))
    default_text = f"{default / size:g}{unit}" if default else "0: never"
    group.add_argument(name, type=_seconds, default=default, metavar="TIME", help=f"{help}; default {default_text}")


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _switch(group: argparse._ArgumentGroup, name: str, default: bool, help: str) -> None:
    """Declare an option that takes ``--x``, ``--x=true`` and ``--x=false``, like tornado's options."""
    help_text = f"{help}; default {str(default).lower()}"
    group.add_argument(
        name, nargs="?", const=True, default=default, type=_boolean, metavar="true|false", help=help_text
    )


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "t": True, "false": False, "0": False, "no": False, "f": False}
    with contextlib.suppress(KeyError):
        return words[text.strip().lower()]
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def own_tls() -> ssl.SSLContext | None:
    """Return the TLS context for the hub's proxy, with the certificates that the hub created for this service."""
    return _tls(ssl.Purpose.CLIENT_AUTH, *(os.environ.get(f"JUPYTERHUB_SSL_{part}", "") for part in _PARTS))


def hub_tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the TLS context for requests to the hub's API; None without TLS with internal certificates."""
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


MOST_CONNECTIONS = 4096
"""Maximum connections, if descriptors suffice. The hub's proxy has one per running request and per open dashboard."""
MOST_BODY_BYTES = 16 * 1024
"""Maximum size of a request's body. The API's bodies have a few hundred bytes. tornado reads a body before the login
check."""
REQUEST_WITHIN = 60.0
"""Maximum seconds for a peer to send a request's headers, or the next request on its connection."""
BODY_WITHIN = 10.0
"""Maximum seconds for a peer to send a request's body."""
MOST_BYTES_BUFFERED = 256 * 1024
"""Maximum bytes that are read from one connection and not yet processed."""

log = logging.getLogger("gpushare.service")


def service_application(
    sources: DashboardSources,
    prefix: str,
    theme: HubTheme | None = None,
    history: History | None = None,
    max_age: float = MAX_AGE,
    budgets: Budgets | None = None,
) -> Application:
    """Return the application of the pages and the API under ``prefix`` (JUPYTERHUB_SERVICE_PREFIX).

    ``history``: None if there is no history; ``max_age``: maximum age of the API's snapshots, in seconds.
    """
    prefix = prefix.rstrip("/") + "/"
    snapshots = ServiceSnapshots(sources, max_age)
    services = Services(prefix, snapshots, Events(snapshots), sources.context, history, budgets)
    return dashboard_application(
        sources, prefix, theme, history, [(prefix, DashboardPage, {"services": services}), *api_routes(services)]
    )


def service_server(application: Application, tls: ssl.SSLContext | None = None) -> BoundedHTTPServer:
    """Return the HTTP server for the pages and the API. The hub's proxy makes it reachable without a login."""
    refusal = Refusal(status=413, message=body_too_large(MOST_BODY_BYTES), code="bad-request")
    return BoundedHTTPServer(
        application,
        most_connections=MOST_CONNECTIONS,
        title="the dashboard",
        log=log,
        most_body_bytes=MOST_BODY_BYTES,
        too_large=refusal.model_dump_json().encode(),
        ssl_options=tls,
        xheaders=True,
        max_buffer_size=MOST_BYTES_BUFFERED,
        idle_connection_timeout=REQUEST_WITHIN,
        body_timeout=BODY_WITHIN,
    )


BACKLOG = 4096
"""Maximum connections that the kernel queues until they are accepted. It may queue fewer (net.core.somaxconn)."""


def run(options: argparse.Namespace, cluster_agents: ClusterAgents) -> int:
    """Run until SIGTERM or SIGINT. `cluster_agents` is used with `--namespace`.

    Returns 2, and logs a sentence, if a setting is missing.
    """
    # libraries log too much at INFO, including about logins
    logging.basicConfig(level="WARNING", format="[%(levelname).1s %(asctime)s gpushare] %(message)s")
    logging.getLogger("gpushare").setLevel(options.log_level)
    token = os.environ.get("JUPYTERHUB_API_TOKEN", "")
    # the hub's API address in the environment of pods; --url can be another address of the same API
    hub_name = os.environ.get("JUPYTERHUB_API_URL", "")
    if options.url:
        # the dashboard's logins use the same hub
        os.environ["JUPYTERHUB_API_URL"] = options.url
    problem = lacking_setting(options, token)
    if problem:
        log.error("%s", problem)
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
    patience = float(os.environ.get("JUPYTERHUB_REQUEST_TIMEOUT") or 60)
    hub = Hub(options.url, token, request_timeout=patience, ssl_options=hub_tls(options), since_set=clock.since_set)
    groups = UserGroups(lambda: culler.hub_users)
    templates = TemplateSource(Path(options.templates_dir), groups)
    listeners: list[Callable[[], None]] = []
    async with _agents(options, listeners, hub_name, cluster_agents, templates) as agents:
        pending, queue, reports = PendingSpawns(hub), QueueOfHub(hub), RecentReports(agents)

        def acted(action: Action) -> None:
            if history is not None:
                history.record(action)
            culler.session_changed()

        actions = ActionContext(
            agents,
            hub,
            templates,
            acted,
            clock,
            quotas=templates.quotas,
            pending=pending.now,
            servers=lambda: servers_of(culler.hub_users or ()).values(),
            nodes_are_added=options.nodes_are_added,
        )
        outbox = Outbox(notifier_file(Path(options.notifiers)), time.time) if options.notifiers else None
        notify = outbox.offer if outbox is not None else lambda decisions: None
        culler = Culler(
            actions,
            settings,
            pending=lambda: budgets.within(pending.recent)(),
            notify=notify,
            progress=queue.progress,
            used_up=lambda sessions: budgets.used_up(sessions),
        )
        history = actions.journal = _history(options, actions, reports, culler)
        budgets = Budgets(actions, history, Path(BUDGETS_FILE).absolute())
        clock.was_set = culler.clock_was_set
        listeners.append(culler.reports_changed)
        lacking: list[str] = []

        def notes() -> list[str]:
            problems = [*lacking, *templates.problems, *(outbox.problems if outbox is not None else ())]
            problems += [budgets.problem] * bool(budgets.problem)
            return [*problems, history.problem] if history is not None and history.problem else problems

        sources = DashboardSources(actions, reports, culler.decide, notes, queue.progress, budgets.states)
        server = _listen(sources, options.ip, history, budgets)
        scopes = _check_scopes(hub, settings.cull_users, templates.needs_groups, lacking)
        work = [culler.run(), scopes, AskResponder(agents, actions).run(), finish_restarts(actions)]
        work.append(budgets.run())
        advisor = ShareAdvisor(history, actions) if history is not None else None
        work += [part.run() for part in (history, advisor, outbox) if part is not None]
        await _run_until_stopped(options, work)
        if server is not None:
            server.stop()
        for part in (pending, queue, hub):
            part.close()


def _agents(
    options: argparse.Namespace,
    listeners: list[Callable[[], None]],
    hub_name: str,
    cluster_agents: ClusterAgents,
    templates: TemplateSource,
) -> contextlib.AbstractAsyncContextManager[Agents]:
    if not options.namespace:
        return contextlib.nullcontext(MachineAgents(MachineAgent(options.control_socket)))

    def notify() -> None:
        for listener in listeners:
            listener()

    return cluster_agents(options.namespace, options.all_namespaces, notify, hub_name, templates)


async def _run_until_stopped(options: argparse.Namespace, work: list[Coroutine[Any, Any, None]]) -> None:
    """Run the parts of the service until SIGTERM or SIGINT or, with ``--end-with-hub``, until the hub ends."""
    tasks = [asyncio.create_task(part) for part in work]
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
    await cancel(*tasks)


def _history(
    options: argparse.Namespace, context: ActionContext, reports: RecentReports, culler: Culler
) -> History | None:
    if options.history.strip().lower() in ("", "false"):
        return None
    sources = HistorySources(
        snapshots=reports.snapshots,
        users=lambda: culler.hub_users,
        pending=context.pending,
        templates=context.templates,
        waited=context.counters.waited,
        prices=lambda: (context.quotas() or Quotas()).prices,
    )
    kept = Retention(names=options.history_names, keep=options.history_keep)
    return History(HistoryStore(options.history), sources, kept)


async def _stop_without_hub(stop: asyncio.Event, hub: int) -> None:
    await wait_for_end(hub)
    stop.set()


async def _check_scopes(hub: Hub, cull_users: bool, groups: bool, lacking: list[str]) -> None:
    """Log the missing scopes, and show them on the dashboard."""
    try:
        lacking[:] = missing(await hub.own_scopes(), cull_users, groups)
    except HubFailed as error:
        log.warning("The service's scopes cannot be checked. %s", error)
    for sentence in lacking:
        log.warning("%s", sentence)


def _listen(
    sources: DashboardSources, ip: str | None, history: History | None, budgets: Budgets | None = None
) -> BoundedHTTPServer | None:
    """Serve the pages at $JUPYTERHUB_SERVICE_URL; without that variable, serve none.

    ``ip``: the address to listen on if the URL's host is not this machine, like a Kubernetes Service; *: all addresses.
    """
    url = urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL") or "")
    if not url.hostname:
        log.info("$JUPYTERHUB_SERVICE_URL is not set: the idle culler runs without a dashboard")
        return None
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or "/services/gpushare/"
    application = service_application(sources, prefix, HubTheme.of_environment(), history, budgets=budgets)
    port = url.port or (443 if url.scheme == "https" else 80)
    server = service_server(application, own_tls() if url.scheme == "https" else None)
    host = ip or url.hostname
    try:
        server.listen(port, "" if host == "*" else host, backlog=BACKLOG)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"the dashboard cannot listen on {host}:{port} ({why}); give the service another url") from None
    return server
