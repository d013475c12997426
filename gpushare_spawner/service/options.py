"""The options of ``gpushare service``. Options of jupyterhub-idle-culler keep their names."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from pathlib import Path

from gpushare_spawner.clients.agent import default_control_socket
from gpushare_spawner.idle import KeepRule
from gpushare_spawner.model.quantity import parse_seconds
from gpushare_spawner.service import hub_process
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.history.recorder import Retention
from gpushare_spawner.templates.folder import DEFAULT_FOLDER, default_folder

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
        help="in a cluster with a namespace for each user: read the pods of all namespaces",
    )
    where.add_argument(
        "--nodes-are-added",
        action="store_true",
        help="nodes with other GPUs are added later, as with GPUShareSpawner.nodes_are_added: a server can be "
        "restarted with a template that no present node can take",
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
        "stop each server that has run for this long, busy or not, with or without a template; before that the "
        "user of a session gets a notice",
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
    idle.add_argument(
        "--min-use",
        type=_seconds,
        metavar="TIME",
        help="GPU time that keeps or restores a share, where the template does not say; 0: all GPU work counts; "
        "default: a sixtieth of the template's first idle time, at most 15s",
    )
    _switch(
        idle,
        "--dry-run",
        False,
        "decide, log and show idle actions, and carry out none: no share is downgraded or released, no server is "
        "stopped, no user is deleted, and users get no notices",
    )
    keep = KeepRule()
    _time(
        idle,
        "--keep-longest",
        keep.longest,
        "how long users may keep their share, without idle actions of the template, where the template does not say; "
        "0: nobody may",
    )
    _count(
        idle,
        "--keep-per-day",
        keep.per_day,
        "how often one user may keep a share within 24 hours, where the template does not say",
    )
    _count(
        idle,
        "--keep-at-once",
        keep.at_once,
        "sessions that one user may keep at a time, where the template does not say",
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
    _time(history, "--history-detail", kept.detail, "keep GPU time by the hour for this long, then by the day")
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
    hub_process.configure(parser)
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    parser.add_argument("--log-level", default="INFO", choices=levels, help="default INFO")


def lacking_setting(options: argparse.Namespace, token: str) -> str:
    """Return what is missing or wrong, in a sentence; empty: nothing."""
    if not options.url:
        return "The address of the hub is not set: give --url, or let the hub start the service."
    if not token:
        return "$JUPYTERHUB_API_TOKEN is not set. The hub sets it for each service that it starts."
    if options.all_namespaces and not options.namespace:
        return "--all-namespaces is for a cluster: give --namespace, where the agents publish their reports."
    if options.concurrency < 0 or options.api_page_size < 0:
        return "--concurrency and --api-page-size cannot be negative."
    return ""


def culler_settings(options: argparse.Namespace) -> CullerSettings:
    """Return the culler's settings."""
    return CullerSettings(
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
        keep_longest=options.keep_longest,
        keep_per_day=options.keep_per_day,
        keep_at_once=options.keep_at_once,
        concurrency=options.concurrency,
    )


def _time(group: argparse._ArgumentGroup, name: str, default: float, help: str) -> None:
    unit, size = next((one for one in (("d", 86400), ("h", 3600)) if default % one[1] == 0), ("s", 1))
    default_said = f"{default / size:g}{unit}" if default else "0: never"
    group.add_argument(name, type=_seconds, default=default, metavar="TIME", help=f"{help}; default {default_said}")


def _count(group: argparse._ArgumentGroup, name: str, default: int, help: str) -> None:
    group.add_argument(name, type=_number, default=default, metavar="N", help=f"{help}; default {default}")


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write a whole number from 0, like 3")
    return int(text)


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
