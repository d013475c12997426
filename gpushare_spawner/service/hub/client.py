"""Client for the parts of the hub's REST API that the service needs: list, start and stop servers, delete a user.

`ServerNotes` puts notes on the hub's pages about why a spawn was cancelled or a server was stopped. The hub has no
route for notes, so the spawner gets each note with a spawn request that it refuses. If a note fails, the history still
has the action.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse

from gpushare_spawner.background import pauses
from gpushare_spawner.model.controls import MAX_LETTERS, SpawnNote
from gpushare_spawner.wording import stops
from gpushare_spawner.wording.amounts import reason

log = logging.getLogger("gpushare.service.hub")

PAGINATED = "application/jupyterhub-pagination+json"
STOPPED_EVERY = 0.5
"""Seconds between checks of whether a server has stopped."""
MOST_STREAMS = 200
"""Maximum number of followed streams of progress events. Our choice: four times the queue's usual length."""
_RETRIED = {429, 500, 502, 503, 504, 599}
_MAX_PAUSE = 30.0
_MAX_PAGE_BYTES = 256 * 1024 * 1024


class HubFailed(Exception):
    """A failed request to the hub; the text has the reason, for admins.

    ``to_users``: the reason without internal network addresses. Not given: the text has none.
    """

    def __init__(self, text: str, to_users: str | None = None) -> None:
        super().__init__(text)
        self.to_users = to_users if to_users is not None else text


class ScopeMissing(HubFailed):
    """A request that failed because the service's role lacks a scope."""


@dataclass(frozen=True)
class HubServer:
    """One notebook server in the hub's list. Instants are seconds since the epoch."""

    user: str
    name: str
    """The server's name; empty for the default server."""
    ready: bool = True
    pending: str | None = None
    """The hub's current action on it: "spawn", "stop", ..."""
    started: float | None = None
    last_activity: float | None = None
    profile: str | None = None
    """The template that its user chose, or the default: ``user_options["profile"]``."""
    quota: str = ""
    """The quota that its user chose: ``user_options["quota"]``; empty: none."""
    groups: tuple[str, ...] | None = None
    """Its user's groups; None if the service lacks the scope ``read:users:groups``."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    """The user's choices: ``user_options``."""

    def with_instants(self, changed: Callable[[float], float]) -> HubServer:
        """Return the server with converted instants."""
        return replace(
            self, started=_changed(self.started, changed), last_activity=_changed(self.last_activity, changed)
        )

    @property
    def seen(self) -> float | None:
        """Time of the last activity, or of the start if there was none."""
        return self.last_activity if self.last_activity is not None else self.started

    @property
    def label(self) -> str:
        """Name for logs: the user, and the server if it has a name."""
        return f"{self.user}/{self.name}" if self.name else self.user

    @property
    def not_pending(self) -> bool:
        """Whether the server runs and the hub is not starting or stopping it."""
        return self.ready and not self.pending


@dataclass(frozen=True)
class HubUser:
    """One user. Fields that the service's scopes do not show are None."""

    name: str
    admin: bool | None = None
    created: float | None = None
    last_activity: float | None = None
    servers: tuple[HubServer, ...] = field(default=())

    def with_instants(self, changed: Callable[[float], float]) -> HubUser:
        """Return the user with converted instants, including those of the servers."""
        return replace(
            self,
            created=_changed(self.created, changed),
            last_activity=_changed(self.last_activity, changed),
            servers=tuple(server.with_instants(changed) for server in self.servers),
        )


class Hub:
    """A client of the hub. Each method raises HubFailed (ScopeMissing for a 403) with a sentence for people.

    A GET that fails because the hub is busy or restarting (429, 5xx, timeouts, refused connections) is tried
    ``attempts`` times in total, with pauses that double from ``backoff`` seconds, or the hub's Retry-After. Starts and
    deletions are not repeated, because an idle server may be in use by then. At most ``concurrency`` requests run at
    the same time (0: no limit).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        concurrency: int = 10,
        page_size: int = 0,
        request_timeout: float = 60.0,
        ssl_options: ssl.SSLContext | None = None,
        attempts: int = 5,
        backoff: float = 0.5,
        since_set: Callable[[float], float] = lambda instant: instant,
    ) -> None:
        """Create a client. ``since_set``: `WallClock.since_set`, for instants in the hub's database."""
        self._since_set = since_set
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"token {token}", "Accept": "application/json"}
        self._page_size = page_size
        self._timeout = request_timeout
        self._ssl = ssl_options
        self._attempts = attempts
        self._backoff = backoff
        # Tornado counts the time in its own queue as connection time, so that queue must stay empty.
        self._slots = asyncio.Semaphore(concurrency or 1000)
        self._client = AsyncHTTPClient(
            force_instance=True,
            max_clients=concurrency or 1000,
            max_buffer_size=_MAX_PAGE_BYTES,
            max_body_size=_MAX_PAGE_BYTES,
        )
        self._streams = AsyncHTTPClient(force_instance=True, max_clients=MOST_STREAMS)

    async def own_scopes(self) -> frozenset[str]:
        """Return the scopes of the service's token, expanded."""
        return frozenset(str(scope) for scope in (await self._json("GET", "/user")).get("scopes") or ())

    def _user(self, item: dict[str, Any]) -> HubUser:
        return _user(item).with_instants(self._since_set)

    async def users(self, with_ready_servers: bool = True) -> list[HubUser]:
        """Return the users with a ready server, or all users. Needs list:users and read:servers."""
        query = {"state": "ready"} if with_ready_servers else {}
        return [self._user(item) async for item in self._pages("/users", query)]

    async def pending_spawns(self) -> list[HubServer]:
        """Return the servers that the hub is starting. Needs list:users and read:servers."""
        # The hub has no filter for only these.
        users = [self._user(item) async for item in self._pages("/users", {"state": "active"})]
        return [server for user in users for server in user.servers if server.pending == "spawn"]

    async def server(self, user: str, name: str) -> HubServer | None:
        """Return one server's current state; None if the hub has no such server."""
        return next((server for server in await self.servers(user) if server.name == name), None)

    async def servers(self, user: str) -> tuple[HubServer, ...]:
        """Return a user's servers that run, start or stop; empty if the hub has no such user."""
        try:
            return self._user(await self._json("GET", f"/users/{quote(user, safe='')}")).servers
        except _NotFound:
            return ()

    async def progress(self, user: str, name: str, take: Callable[[bytes], None], longest: float) -> None:
        """Pass a pending spawn's progress events to ``take``, in parts as they arrive. Needs read:servers.

        Returns when the spawn has ended, or after ``longest`` seconds. The request does not count toward
        ``concurrency``, because the hub keeps it open like a browser's request.
        """
        path = f"{_server_path(user, name)}/progress"
        request = self._request("GET", path, request_timeout=longest, streaming_callback=take)
        fetching = asyncio.ensure_future(self._streams.fetch(request))
        # asyncio must not log an exception that no task awaits any longer
        fetching.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            # tornado logs the error of a request with a cancelled future as a bug
            await asyncio.shield(fetching)
        except HTTPClientError as error:
            if error.code != 599:
                raise _refused(error, "GET", path) from None
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from None

    async def start(self, user: str, name: str, options: Mapping[str, Any]) -> None:
        """Start a server with these user options. Needs start:servers (before JupyterHub 6: servers).

        The hub may still be starting the server when this returns. Raises HubFailed, also if the spawner refuses.
        """
        # The body is the options themselves, as JupyterHub 5 requires. JupyterHub 6 accepts both forms.
        await self._ask("POST", _server_path(user, name), dict(options))

    async def stopped(self, user: str, name: str, patience: float) -> bool:
        """Wait up to ``patience`` seconds until a server has stopped. Return whether it has."""
        deadline = time.monotonic() + patience
        while (server := await self.server(user, name)) is not None and (server.ready or server.pending):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(STOPPED_EVERY)
        return True

    async def stop(self, user: str, name: str, remove: bool = False) -> None:
        """Stop a server, and remove a named server if ``remove`` is set. Needs delete:servers.

        It is not an error if the server has already stopped. The hub may still be stopping it when this returns.
        """
        try:
            await self._ask("DELETE", _server_path(user, name), {"remove": True} if name and remove else None)
        except _NotFound:
            log.debug("The server of %s has stopped already", user)

    async def delete_user(self, user: str) -> None:
        """Delete a user without servers. Needs delete:users or admin:users."""
        try:
            await self._ask("DELETE", f"/users/{quote(user, safe='')}")
        except _NotFound:
            log.debug("User %s is deleted already", user)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._streams.close()

    async def _pages(self, path: str, query: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        offset, limit = 0, self._page_size
        while True:
            parameters = query | ({"offset": str(offset)} if offset else {}) | ({"limit": str(limit)} if limit else {})
            page = await self._json("GET", f"{path}?{urlencode(parameters)}" if parameters else path, accept=PAGINATED)
            for item in page["items"]:
                yield item
            # The offset, not the URL in "next", because behind a proxy that URL is the public one.
            following = page["_pagination"].get("next")
            if not following:
                return
            if int(following["offset"]) <= offset:
                raise HubFailed(f"The hub's pages of {path} repeat at offset {offset}.")
            offset, limit = int(following["offset"]), int(following.get("limit") or limit)

    async def _json(self, method: str, path: str, accept: str | None = None) -> dict[str, Any]:
        response = await self._ask(method, path, accept=accept)
        try:
            answer = json.loads(response.body)
            if not isinstance(answer, dict):
                raise TypeError(f"a JSON object was expected, not {type(answer).__name__}")
            if accept == PAGINATED and not (
                isinstance(answer.get("items"), list) and isinstance(answer.get("_pagination"), dict)
            ):
                raise TypeError("a page needs items and _pagination")
        except (TypeError, ValueError) as error:
            raise HubFailed(f"The hub's answer to {method} {path} cannot be read: {error}.") from None
        return answer

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, accept: str | None = None
    ) -> HTTPResponse:
        attempts = self._attempts if method == "GET" else 1
        for attempt, pause in zip(range(1, attempts + 1), pauses(self._backoff, _MAX_PAUSE), strict=False):
            request = self._request(
                method,
                path,
                headers={"Accept": accept} if accept else {},
                body=None if body is None else json.dumps(body),
                request_timeout=self._timeout,
            )
            try:
                async with self._slots:
                    return await self._client.fetch(request)
            except HTTPClientError as error:
                if error.code not in _RETRIED or attempt == attempts:
                    raise _refused(error, method, path) from None
                problem, requested_pause = f"{error.code}", _retry_after(error)
            except (OSError, ValueError) as error:
                # also ssl.SSLError; tornado's StreamClosedError is an OSError
                if attempt == attempts:
                    raise self._unreachable(error) from None
                problem, requested_pause = reason(error), None
            wait = min(_MAX_PAUSE, requested_pause if requested_pause is not None else pause)
            log.info("%s %s: %s; trying again in %.1f s", method, path, problem, wait)
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _request(
        self, method: str, path: str, request_timeout: float, headers: Mapping[str, str] | None = None, **more: Any
    ) -> HTTPRequest:
        return HTTPRequest(
            self.url + path,
            method=method,
            headers={**self._headers, **(headers or {})},
            allow_nonstandard_methods=True,
            request_timeout=request_timeout,
            connect_timeout=min(20.0, self._timeout),
            follow_redirects=False,
            ssl_options=self._ssl,
            **more,
        )

    def _unreachable(self, error: Exception) -> HubFailed:
        return HubFailed(f"The hub at {self.url} cannot be reached: {reason(error)}.", "The hub cannot be reached.")


class _NotFound(HubFailed):
    pass


def _server_path(user: str, name: str) -> str:
    return f"/users/{quote(user, safe='')}/server" + (f"s/{quote(name, safe='')}" if name else "")


def _refused(error: HTTPClientError, method: str, path: str) -> HubFailed:
    if error.code == 404:
        return _NotFound(f"The hub has no {path}.")
    if error.code == 403:
        return ScopeMissing(f"The hub forbids {method} {path}: the service's role lacks a scope ({_message(error)}).")
    return HubFailed(f"The hub answered {method} {path} with {error.code}: {_message(error)}.")


def _message(error: HTTPClientError) -> str:
    """Return the hub's message from an error, on one line."""
    try:
        message = str(json.loads(error.response.body)["message"]) if error.response is not None else ""
    except (ValueError, KeyError, TypeError):
        message = ""
    return (message or error.message or "no reason given")[:300].rstrip(".")


def _retry_after(error: HTTPClientError) -> float | None:
    if error.response is None:
        return None
    try:
        return max(0.0, float(error.response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def _user(item: dict[str, Any]) -> HubUser:
    try:
        name = str(item["name"])
        servers = item.get("servers") or {}
        return HubUser(
            name=name,
            admin=item.get("admin"),
            created=_instant(item.get("created")),
            last_activity=_instant(item.get("last_activity")),
            servers=tuple(_server(name, key, value, item.get("groups")) for key, value in servers.items()),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise HubFailed(f"The hub's answer describes a user in an unknown form: {error!r}.") from None


def _server(user: str, name: str, item: dict[str, Any], groups: list[str] | None) -> HubServer:
    options = item.get("user_options")
    chosen = options if isinstance(options, dict) else {}
    profile, quota = chosen.get("profile"), chosen.get("quota")
    return HubServer(
        user=user,
        name=name,
        ready=bool(item.get("ready")),
        pending=item.get("pending") or None,
        started=_instant(item.get("started")),
        last_activity=_instant(item.get("last_activity")),
        profile=profile if isinstance(profile, str) else None,
        quota=quota if isinstance(quota, str) else "",
        groups=tuple(map(str, groups)) if groups is not None else None,
        options=chosen,
    )


def _changed(instant: float | None, changed: Callable[[float], float]) -> float | None:
    return changed(instant) if instant is not None else None


def _instant(text: str | None) -> float | None:
    """Return a time from the hub (ISO 8601, UTC if without a zone) in seconds since the epoch. Raises ValueError."""
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


PATIENCE = 60.0
"""Maximum seconds to wait for a server to stop: the sum of the hub's settings `slow_stop_timeout` and
`poll_interval`."""
AT_A_TIME = 8
"""Maximum number of servers awaited at the same time. Our choice: each costs two requests per second, and a node's
drain stops many."""


class ServerNotes:
    """Notes for the hub's pages. ``patience``: maximum seconds to wait for a server to stop."""

    def __init__(self, hub: Hub, patience: float = PATIENCE) -> None:
        self._hub = hub
        self._patience = patience
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self._under_way: set[asyncio.Task[None]] = set()

    def stopped(self, server: HubServer, why: str, at: float) -> None:
        """Show on the hub's pages why a server was stopped, once it has stopped. ``at``: seconds since the epoch."""
        note = SpawnNote(text=stops.note(why, at)[:MAX_LETTERS], stopped=True)
        task = asyncio.create_task(self._in_turn(server, note))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def cancelled(self, server: HubServer, why: str) -> None:
        """Show on the hub's page why a spawn was cancelled."""
        await self._leave(server, SpawnNote(text=why[:MAX_LETTERS], cancelled=True))

    async def _in_turn(self, server: HubServer, note: SpawnNote) -> None:
        async with self._slots:
            try:
                await self._leave(server, note)
            except Exception:
                log.exception("The hub's pages do not say why the server of %s was stopped", server.label)

    async def _leave(self, server: HubServer, note: SpawnNote) -> None:
        try:
            if await self._hub.stopped(server.user, server.name, self._patience):
                await self._hub.start(server.user, server.name, note.within(server.options))
        except HubFailed as error:
            # including the spawner's refusal, which is expected
            log.debug("The note on the server of %s: %s", server.label, error)
