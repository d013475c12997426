"""Objects shared by all spawners of one hub, the hub pages that we extend, refusals of a spawn, the service's advice.

The template folder, the queue and the snapshots are created once and live as long as the hub. The pages show whether a
spawn is waiting for a GPU and why a server was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from weakref import WeakKeyDictionary

import jupyterhub.spawner
from jupyterhub.utils import make_ssl_context
from tornado.httpclient import HTTPClientError
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.web import HTTPError

Shared = TypeVar("Shared")


_without_hub: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
"""Shared objects of spawners without a hub (scripts, tests of spawners), by event loop."""
_without_loop: dict[tuple[str, ...], Any] = {}
"""The same for code that runs without an event loop."""


def shared(user: Any, key: tuple[str, ...], make: Callable[[], Shared]) -> Shared:
    """Return the object with this key that all spawners of the user's hub share; the first call creates it."""
    # The object is in the hub's settings, not in a module: it lives as long as the hub, and two hubs in one process do
    # not share it.
    settings = getattr(user, "settings", None)
    if isinstance(settings, dict):
        store: dict[tuple[str, ...], Any] = settings.setdefault("gpushare", {})
    else:
        try:
            store = _without_hub.setdefault(asyncio.get_running_loop(), {})
        except RuntimeError:
            store = _without_loop
    if key not in store:
        store[key] = make()
    instance: Shared = store[key]
    return instance


def hub_runs(user: Any, name: str, server: str) -> bool:
    """Return whether the server of user ``name`` runs, starts or stops, according to the hub of ``user``."""
    owner = user.settings["users"].get(name)
    if owner is None:
        return False
    if server in owner.spawners and owner.spawners[server].active:
        return True
    stored = owner.orm_spawners.get(server)
    return stored is not None and stored.server is not None


@dataclass(frozen=True)
class ShareAdvice:
    """The service's advice on a user's share with a template."""

    units: int
    advised_units: int
    text: str
    """A sentence."""


class ServiceAdvice:
    """The service's advice on shares, by user and template, for the form. The form shows what has arrived.

    The requests use the service's own token, which the hub has. Without the service, or if it does not answer, there is
    no advice.
    """

    def __init__(self, service: Any, internal_tls: tuple[str, str, str] | None, log: Any) -> None:
        """Ask a service. ``service``: the hub's record of it.

        ``internal_tls``: key, certificate and authority for requests; None: the hub and its services use no TLS.
        """
        self._service = service
        self._tls = internal_tls
        self._log = log
        # not the hub's client: it has few connections, which a service that hangs would hold, and can be pycurl, which
        # ignores `ssl_options`
        self._client = SimpleAsyncHTTPClient(force_instance=True)
        self._known: dict[str, tuple[float, Mapping[str, ShareAdvice]]] = {}
        """When it was asked for (`time.monotonic`), and the advice by template."""
        self._asking: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def of(cls, settings: Mapping[str, Any], log: Any) -> ServiceAdvice | None:
        """Return the client with a hub's settings; None if the hub does not start the service."""
        service = settings.get("services", {}).get(SERVICE)
        if service is None or not service.url or not service.api_token:
            return None
        keys = ("internal_ssl_key", "internal_ssl_cert", "internal_ssl_ca")
        return cls(service, tuple(settings[key] for key in keys) if settings.get("internal_ssl") else None, log)

    def request(self, user: str) -> None:
        """Ask for a user's advice, unless the last answer is recent. Does not wait."""
        asked_at = self._known.get(user, (float("-inf"), {}))[0]
        if user not in self._asking and time.monotonic() - asked_at >= ADVICE_FRESH:
            task = asyncio.ensure_future(self._ask(user))
            self._asking[user] = task
            task.add_done_callback(lambda _: self._asking.pop(user, None))

    async def first(self, user: str) -> None:
        """Wait shortly for the first answer about a user; later forms show the last one."""
        if user in self._asking and user not in self._known:
            await asyncio.wait([self._asking[user]], timeout=ADVICE_WITHIN)

    def known(self, user: str) -> Mapping[str, ShareAdvice]:
        """Return the last advice by template; empty: none."""
        return self._known.get(user, (0.0, {}))[1]

    async def _ask(self, user: str) -> None:
        advice: Mapping[str, ShareAdvice] = self.known(user)
        try:
            answer = await self._client.fetch(
                f"{self._address}api/v1/advice?user={quote(user, safe='')}",
                headers={"Authorization": f"token {self._service.api_token}"},
                connect_timeout=ADVICE_TIMEOUT,
                request_timeout=ADVICE_TIMEOUT,
                ssl_options=self._ssl_options,
            )
            entries = [entry for entry in json.loads(answer.body)["advice"] if entry["user"] == user and entry["text"]]
            names = [field.name for field in fields(ShareAdvice)]
            advice = {str(entry["template"]): ShareAdvice(*(entry[name] for name in names)) for entry in entries}
        except (HTTPClientError, OSError, ValueError, KeyError, TypeError) as error:
            self._log.debug("The service gave no advice on shares: %s", error)
        now = time.monotonic()
        self._known = {name: kept for name, kept in self._known.items() if now - kept[0] < ADVICE_KEPT}
        self._known[user] = now, advice

    @property
    def _address(self) -> str:
        url, command = urlsplit(self._service.url), self._service.command or ()
        # a service that the hub starts is on its machine, and with this option it listens on all addresses
        local = url._replace(netloc=f"127.0.0.1:{url.port}") if "--ip=*" in command else url
        return f"{local.scheme}://{local.netloc}{self._service.prefix}"

    @property
    def _ssl_options(self) -> ssl.SSLContext | None:
        if self._tls is None or not self._service.url.startswith("https:"):
            return None
        key, certificate, authority = self._tls
        context: ssl.SSLContext = make_ssl_context(key, certificate, cafile=authority, purpose=ssl.Purpose.SERVER_AUTH)
        return context


SERVICE = "gpushare"
"""The service's name in our config files and values."""
ADVICE_FRESH, ADVICE_KEPT = 600.0, 86400.0
"""Seconds after which a user's advice is requested again, and forgotten. The service computes it every few hours."""
ADVICE_WITHIN = 0.2
"""Seconds for which a user's first form waits for the advice, beside its wait for free capacity."""
ADVICE_TIMEOUT = 5.0
"""Seconds after which a request has failed."""


HUB_PAGES = str(Path(__file__).parent / "pages" / "hub")
"""Folder for ``c.JupyterHub.template_paths``."""


_SPAWN_EXCEPTION: type[HTTPError] | None = getattr(jupyterhub.spawner, "SpawnException", None)
"""JupyterHub 6's exception for refusals that do not count as failures; None on 5.x."""

_Base: Any = _SPAWN_EXCEPTION or HTTPError


class SpawnRefused(_Base):  # type: ignore[misc]
    """A refused spawn. The hub shows ``message`` on the form, on the spawn page and in the API response.

    ``reason`` is a short word for metrics. ``retry_after`` (seconds) is sent as the header of that name.
    """

    def __init__(
        self, message: str, *, reason: str, status: int = 400, retry_after: int | None = None, log_message: str = ""
    ) -> None:
        if _SPAWN_EXCEPTION is not None:
            super().__init__(message, reason=reason, log_message=log_message or message, status_code=status)
        else:
            super().__init__(status, log_message or message)
        self.refusal = reason
        # the attribute that the hub's pages and API of every version show
        self.jupyterhub_message = message
        self.headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}


@contextlib.contextmanager
def refusals_reported(spawner: Any) -> Iterator[None]:
    """Log a refusal in this part of a spawn, and do not let JupyterHub 5 count it as a failed start.

    JupyterHub 5 counts every start that raises, including refusals, toward ``consecutive_failure_limit`` and exits at
    the limit (zero-to-jupyterhub sets it to 5). The hub adds 1 after the spawn has raised, so this function subtracts 1
    beforehand.
    """
    try:
        yield
    except SpawnRefused as error:
        spawner.log.warning("Not starting %s: %s", spawner._log_name, error.jupyterhub_message)
        if spawner.handler is not None and _SPAWN_EXCEPTION is None:
            settings = spawner.handler.settings
            settings["failure_count"] = settings.get("failure_count", 0) - 1
        raise
