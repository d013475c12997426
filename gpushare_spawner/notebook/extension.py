"""The Jupyter Server extension: sends the kernels' activity to the agent, and serves status and requests.

It answers GET <base_url>gpushare/status and POST <base_url>gpushare/ask. Installing the package enables it, see
jupyter_server_config.json in this folder. Without a share, the status only states that there is none.

`offered_asks` and `missing_asks` choose the requests that JupyterLab offers; the service decides on each request.

Without an agent, `keep_active_while_busy` counts a kernel that runs a cell as activity of the server. Otherwise, a cell
that prints nothing for hours would not count: the hub would list the server as idle, and the idle culler would stop a
training run. With an agent, session_client.py reports the kernels to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, MutableMapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from gpushare_spawner.model.layers import FRAMEWORK_DEFAULTS, LAYER_VARIABLE, LAYERS, IdleReach, LayerName
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.share_status import ControlsStatus, ShareStatus
from gpushare_spawner.notebook.client import AgentUnavailable
from gpushare_spawner.notebook.pod_annotations import PodAnnotations
from gpushare_spawner.notebook.session_client import (
    KernelActivity,
    NoAnswer,
    ServiceAsk,
    SessionClient,
    WrongAsk,
    kernel_activity,
)
from gpushare_spawner.wording import notices, share_status
from gpushare_spawner.wording.actions import out_of_reach
from gpushare_spawner.wording.amounts import unbroken
from gpushare_spawner.wording.layers import NO_AGENT, other_layer
from gpushare_spawner.wording.share_status import why_slow


def offered_asks(status: ShareStatus) -> list[str]:
    """Return the names, in POST gpushare/ask, of the requests that the user can send to the service."""
    layer = other_layer(status.layer)
    reach = (layer or LAYERS[LayerName.NATIVE]).reach
    decided = status.controls or ControlsStatus()
    offered = {
        "keep": True,
        "end-keep": True,
        "release": IdleReach.RELEASE in reach,
        "share": IdleReach.RESIZE in reach and decided.largest_share_units > 0,
        "stop": True,
    }
    return [name for name, possible in offered.items() if possible and status.takes_asks]


def missing_asks(status: ShareStatus) -> str:
    """Return why the user cannot send some requests; empty if the user can send all or the layer is unknown."""
    layer = other_layer(status.layer)
    if layer is None:
        return ""
    if not status.takes_asks:
        return NO_AGENT
    return out_of_reach(layer) if not layer.reach.issuperset(IdleReach) else ""


def notice_asks(status: ShareStatus) -> list[str]:
    """Return the requests that can replace the idle action in the notice: a keep, or an immediate release.

    A keep does not prevent a stop at the maximum age, or an action for spawns in quota.
    """
    action = status.notice
    if action is None or action.cause is not IdleCause.IDLE:
        return []
    useful = {"keep"} if action.tier is Tier.STOPPED else {"keep", "release"}
    return [name for name in offered_asks(status) if name in useful]


POLL_SECONDS = 30.0
"""Seconds between reads of the kernels' state. The hub gets the activity every 5 minutes (JupyterHub's
`SingleUserNotebookApp.hub_activity_interval`)."""
ACTIVITY = "gpushare_kernels"
"""The key in jupyter_server's setting `last_activity_times`; its latest time is the server's last activity."""


async def keep_active_while_busy(
    read: Callable[[], KernelActivity],
    times: MutableMapping[str, Any],
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    every: float = POLL_SECONDS,
) -> None:
    """Write the last time at which a kernel was busy into ``times``, until cancelled."""
    while True:
        with contextlib.suppress(Exception):  # an unknown kernel manager must not end this loop
            if read().busy:
                times[ACTIVITY] = clock()
        await asyncio.sleep(every)


READ_SECONDS = 1.0
"""Seconds between reads of the kernels' activity. Each change is sent to the agent."""
SEND_SECONDS = 10.0
"""Maximum seconds between two messages about the activity to the agent."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "gpushare_spawner.notebook.extension"}]


def _load_jupyter_server_extension(server: Any) -> None:
    client = SessionClient(log=server.log, pod=PodAnnotations.of(os.environ))
    handlers = {"status": StatusHandler, "ask": AskHandler}
    url = url_path_join(server.web_app.settings["base_url"], "gpushare")
    server.web_app.add_handlers(
        ".*$", [(url_path_join(url, name), handler, {"client": client}) for name, handler in handlers.items()]
    )
    if client.shared:
        # not in the pod's manifest, where it would override the image's settings; kernels and terminals inherit this
        # process's environment
        for name, value in FRAMEWORK_DEFAULTS.items():
            os.environ.setdefault(name, value)
    if client.shared or os.environ.get(LAYER_VARIABLE):
        server.io_loop.add_callback(_start, server, client)  # the loop is not running yet


async def _start(server: Any, client: SessionClient) -> None:
    settings = server.web_app.settings

    def read() -> KernelActivity:
        return kernel_activity(server.kernel_manager)

    if client.shared:
        work = [client.run(), watch_kernels(read, client)]
    else:
        work = [keep_active_while_busy(read, settings.setdefault("last_activity_times", {}))]
    # asyncio keeps no strong references to tasks, so the server's settings hold them
    settings["gpushare_tasks"] = [asyncio.create_task(coroutine) for coroutine in work]


async def watch_kernels(read: Callable[[], KernelActivity], client: SessionClient) -> None:
    """Send the kernels' activity to the agent, on every change and every SEND_SECONDS, until cancelled."""
    sent: KernelActivity | None = None
    sent_at = 0.0
    while True:
        with contextlib.suppress(Exception):  # an unknown kernel manager must not end this loop
            now, at = read(), asyncio.get_running_loop().time()
            if now != sent or at - sent_at >= SEND_SECONDS:
                await client.tell_kernels(now)
                sent, sent_at = now, at
        await asyncio.sleep(READ_SECONDS)


def answer(status: ShareStatus) -> dict[str, Any]:
    """Return the answer for the browser: the status, and its sentences with no line breaks between numbers and units.

    Its type in the browser: lab/src/status.ts.
    """
    action, hit = status.notice, status.limit_hit
    sentences = {
        "line": share_status.line(status),
        "explanation": share_status.explanation(status),
        "changed_text": notices.changed(status) if status.known else "",
        "notice_text": notices.notice(status, action) if action is not None else "",
        "reclaimed_text": notices.reclaimed(status),
        "limit_text": share_status.refused(status, hit) if hit is not None else "",
    }
    decided = status.controls or ControlsStatus()
    return {
        **status.as_json(),
        **{name: unbroken(text) for name, text in sentences.items()},
        "dashboard": dashboard(),
        "summary": [unbroken(sentence) for sentence in share_status.summary(status)],
        "terms": [{**asdict(term), "text": unbroken(term.text)} for term in share_status.terms(status)],
        "why_slow": [unbroken(reason) for reason in why_slow(status)],
        **asdict(decided),
        "asks": offered_asks(status),
        "asks_text": unbroken(missing_asks(status)),
        "notice_controls": notice_asks(status),
    }


def dashboard() -> str:
    """Return the address of the dashboard; empty without a hub.

    The address includes the hub's host if servers have their own hosts. The service's name is that in our config files
    and values.
    """
    prefix = os.environ.get("JUPYTERHUB_BASE_URL")
    return f"{os.environ.get('JUPYTERHUB_HOST', '')}{url_path_join(prefix, 'services/gpushare')}/" if prefix else ""


class ShareHandler(APIHandler):
    """A handler that uses the connection to the agent."""

    auth_resource = "server"

    def initialize(self, client: SessionClient) -> None:
        """Store the client."""
        self._client = client


class StatusHandler(ShareHandler):
    """Handler that returns the share's status as JSON, like `gpushare status --json`, with JupyterLab's sentences.

    A request does not count as user activity, so an open tab does not keep a server running.
    """

    # an open tab sends a request every few seconds
    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with `answer`."""
        status = await self._client.query()
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(answer(status)))


class AskHandler(ShareHandler):
    """Handler that passes a user's request to the service and answers with the result: {"done": bool, "text": str}."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Answer 400 for an invalid request, 503 without an agent, and 504 if the service does not answer in time."""
        try:
            body = json.loads(self.request.body)
        except ValueError:
            body = None
        try:
            answered = await self._client.ask(ServiceAsk.from_json(body))
        except WrongAsk as error:
            self._finish(400, False, str(error))
        except NoAnswer as error:
            self._finish(504, False, str(error))
        except AgentUnavailable as error:
            self._finish(503, False, str(error))
        else:
            self._finish(200, answered.done, answered.text)

    def _finish(self, code: int, done: bool, text: str) -> None:
        self.set_status(code)
        self.finish(json.dumps({"done": done, "text": unbroken(text)}))
