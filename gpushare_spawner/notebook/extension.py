"""The Jupyter Server extension: sends the kernels' activity to the agent, and serves status and requests.

It answers GET <base_url>gpushare/status and gpushare/cells, and POST <base_url>gpushare/ask. Installing the package
enables it, see jupyter_server_config.json in this folder. Without a share, the status only states that there is none.

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
import secrets
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.services.kernels.connection.base import deserialize_msg_from_ws_v1
from jupyter_server.utils import url_path_join
from tornado import web

from gpushare_spawner.model.frames import CellEvent
from gpushare_spawner.model.layers import FRAMEWORK_DEFAULTS, LAYER_VARIABLE, LAYERS, IdleReach, LayerName
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.share_status import ControlsStatus, ShareStatus
from gpushare_spawner.notebook.client import AgentUnavailable
from gpushare_spawner.notebook.pod_annotations import PodAnnotations
from gpushare_spawner.notebook.session_client import (
    MOST_EXECUTIONS,
    Execution,
    KernelActivity,
    NoAnswer,
    ServiceAsk,
    SessionClient,
    WrongAsk,
    kernel_activity,
    number_of,
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


class CellWatch:
    """Reports the executions of cells in the kernels of this server to the agent, whichever frontend requests them.

    The kernels' iopub messages show when an execution starts and ends. `watched` shows the request itself, before the
    kernel has it, if it comes through a websocket of this server. The agent gets a keyed hash of the cell's text.
    """

    def __init__(self, kernels: Any, client: SessionClient) -> None:
        """Start without kernels. ``kernels``: the server's kernel manager."""
        self._kernels = kernels
        self._client = client
        self._key = secrets.token_bytes(16)
        self._executions: dict[str, Execution] = {}
        """Executions that have not ended, by message ID."""
        self.known: dict[int, Execution] = {}
        """The most recent executions by number."""
        self._streams: dict[str, tuple[Any, list[int], Any]] = {}
        """Each kernel's manager, its ports and our stream of its iopub messages, by kernel ID."""

    def watched(self, connection: type) -> type:
        """Return a class of websocket connections that also reports the execution requests that it receives."""

        def handle_incoming_message(self_: Any, incoming: Any) -> None:
            with contextlib.suppress(Exception):  # the message must reach the kernel
                self.received(self_.kernel_id, self_.subprotocol, incoming)
            connection.handle_incoming_message(self_, incoming)  # type: ignore[attr-defined]

        return type(connection.__name__, (connection,), {"handle_incoming_message": handle_incoming_message})

    def received(self, kernel_id: str, subprotocol: str | None, message: Any) -> None:
        """Report a websocket message if it requests an execution."""
        if subprotocol == "v1.kernel.websocket.jupyter.org":
            channel, parts = deserialize_msg_from_ws_v1(message)  # type: ignore[no-untyped-call]
            if channel != "shell" or b"execute_request" not in bytes(parts[0]):
                return
            header, metadata, content = (json.loads(bytes(parts[part])) for part in (0, 2, 3))
        else:
            if isinstance(message, bytes) or "execute_request" not in message:
                return  # a message in bytes has buffers, which an execute_request has not
            whole = json.loads(message)
            header, metadata, content = (whole[part] for part in ("header", "metadata", "content"))
        if header["msg_type"] == "execute_request" and not content.get("silent"):
            self.follow()
            if kernel_id not in self._streams:
                return  # nothing would report its start and end
            cell_id = metadata.get("cellId")
            execution = self._execution(header["msg_id"], kernel_id, content["code"])
            execution = replace(execution, cell_id=cell_id if isinstance(cell_id, str) else "")
            self._tell(CellEvent.SUBMITTED, execution)

    def follow(self) -> None:
        """Watch new kernels, and end the executions of kernels that have ended or were restarted."""
        alive = set(self._kernels.list_kernel_ids())
        for kernel_id in [*self._streams]:
            kernel, ports, stream = self._streams[kernel_id]
            if kernel_id not in alive or kernel.ports != ports:
                stream.close()
                del self._streams[kernel_id]
        for kernel_id in alive - self._streams.keys():
            kernel = self._kernels.get_kernel(kernel_id)
            if any(kernel.ports):  # the kernels of a gateway have none here, and use GPUs elsewhere
                stream = kernel.connect_iopub()
                stream.on_recv(partial(self._from_kernel, kernel_id, kernel))
                self._streams[kernel_id] = kernel, list(kernel.ports), stream
        for execution in [*self._executions.values()]:
            pid = self._pid(execution.kernel_id)
            if execution.kernel_id not in alive or (execution.pid and pid != execution.pid):
                self._tell(CellEvent.ENDED, execution)

    def _from_kernel(self, kernel_id: str, kernel: Any, message: list[Any]) -> None:
        """Report an iopub message if an execution starts or ends with it."""
        with contextlib.suppress(Exception):  # a kernel can send anything
            _, parts = kernel.session.feed_identities(message)
            unpack = kernel.session.unpack
            header = unpack(parts[1])
            if header["msg_type"] not in ("status", "execute_input"):
                return
            parent, content = (unpack(parts[part]) for part in (2, 4))
            state, message_id, at = content.get("execution_state"), parent.get("msg_id"), _instant(header.get("date"))
            if header["msg_type"] == "execute_input":
                before = self._executions.get(message_id)
                execution = before or self._execution(message_id, kernel_id, content["code"])
                if before is None:  # from another frontend, from before this watch, or one of too many that wait
                    submitted = self.known.get(execution.number, execution)
                    execution = replace(execution, cell_id=submitted.cell_id)
                    self._tell(CellEvent.SUBMITTED, execution)
                count, subshell = int(content.get("execution_count") or 0), str(parent.get("subshell_id") or "")
                for other in [*self._executions.values()]:
                    # a shell runs one cell at a time: the message about the other's end was lost
                    if other.count and (other.kernel_id, other.subshell) == (kernel_id, subshell):
                        self._tell(CellEvent.ENDED, other, at)
                execution = replace(execution, count=count, subshell=subshell)
                self._tell(CellEvent.STARTED, execution, at)
            elif state == "idle" and message_id in self._executions:
                self._tell(CellEvent.ENDED, self._executions[message_id], at)
            elif state == "starting":
                for execution in [*self._executions.values()]:
                    # the new process may already have requests
                    if execution.kernel_id == kernel_id and execution.count:
                        self._tell(CellEvent.ENDED, execution)
                self.follow()

    def _execution(self, message_id: str, kernel_id: str, code: str) -> Execution:
        return Execution(message_id, kernel_id, number_of(code, self._key), self._pid(kernel_id))

    def _pid(self, kernel_id: str) -> int:
        with contextlib.suppress(Exception):  # a kernel that has ended; not every provisioner has a local process
            return int(self._kernels.get_kernel(kernel_id).provisioner.pid or 0)
        return 0

    def _tell(self, event: CellEvent, execution: Execution, at: float = 0.0) -> None:
        self._executions.pop(execution.message_id, None)
        if event is not CellEvent.ENDED:
            self._executions[execution.message_id] = execution
            if len(self._executions) > MOST_EXECUTIONS:
                del self._executions[next(iter(self._executions))]
            self.known[execution.number] = execution
            if len(self.known) > 2 * MOST_EXECUTIONS:
                del self.known[next(iter(self.known))]
        self._client.tell_cell(event, execution, at)


def _instant(date: Any) -> float:
    """Return the instant of a message, in seconds since the epoch; 0: unknown."""
    with contextlib.suppress(ValueError):
        date = datetime.fromisoformat(date) if isinstance(date, str) else date
    return date.timestamp() if isinstance(date, datetime) and date.tzinfo is not None else 0.0


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "gpushare_spawner.notebook.extension"}]


def _load_jupyter_server_extension(server: Any) -> None:
    client = SessionClient(log=server.log, pod=PodAnnotations.of(os.environ))
    cells = CellWatch(server.kernel_manager, client)
    handlers = {"status": StatusHandler, "cells": CellsHandler, "ask": AskHandler}
    url = url_path_join(server.web_app.settings["base_url"], "gpushare")
    parts = {"client": client, "cells": cells}
    server.web_app.add_handlers(
        ".*$", [(url_path_join(url, name), handler, parts) for name, handler in handlers.items()]
    )
    if client.shared:
        # not in the pod's manifest, where it would override the image's settings; kernels and terminals inherit this
        # process's environment
        for name, value in FRAMEWORK_DEFAULTS.items():
            os.environ.setdefault(name, value)
        connection = server.web_app.settings.get("kernel_websocket_connection_class")
        if connection is not None:
            server.web_app.settings["kernel_websocket_connection_class"] = cells.watched(connection)
    if client.shared or os.environ.get(LAYER_VARIABLE):
        server.io_loop.add_callback(_start, server, client, cells)  # the loop is not running yet


async def _start(server: Any, client: SessionClient, cells: CellWatch) -> None:
    settings = server.web_app.settings

    def read() -> KernelActivity:
        if client.shared:
            with contextlib.suppress(Exception):  # an unknown kernel manager
                cells.follow()
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

    def initialize(self, client: SessionClient, cells: CellWatch) -> None:
        """Store the client, and the executions of cells."""
        self._client = client
        self._cells = cells


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


class CellsHandler(ShareHandler):
    """Handler that returns the cells of one kernel: GET gpushare/cells?kernel=ID.

    Only the executions that this server has seen. A request does not count as user activity.
    """

    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer {"cells": [CellStatus with cell_id and line, without its numbers], "problem": ""}, earliest first."""
        kernel_id = self.get_query_argument("kernel", "")
        self.set_header("Cache-Control", "no-store")
        try:
            status = await self._client.cells()
        except AgentUnavailable as error:
            self.finish(json.dumps({"cells": [], "problem": str(error)}))
            return
        found = ((row, self._cells.known.get(row.number)) for row in status.cells)
        cells = [
            {**asdict(row), "cell_id": execution.cell_id, "line": unbroken(share_status.cell_cost(row))}
            for row, execution in found
            if execution is not None and execution.kernel_id == kernel_id and execution.cell_id
        ]
        for cell in cells:
            del cell["number"], cell["pid"]  # numbers of 64 bits are not exact in a browser
        self.finish(json.dumps({"cells": cells, "problem": ""}))


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
