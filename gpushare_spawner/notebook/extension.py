"""The Jupyter Server extension: keeps the agent informed about the kernels and answers GET <base_url>gpushare/status.

Installing the package enables it, see jupyter_server_config.json beside this file. Without a share it only answers
that there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from gpushare_spawner.model.frameworks import choose_frameworks_defaults
from gpushare_spawner.model.share_status import ShareStatus
from gpushare_spawner.notebook.kernels import KernelActivity, kernel_activity
from gpushare_spawner.notebook.session_client import SessionClient
from gpushare_spawner.wording import memory_limits, notices, share_status

LOOK_SECONDS = 1.0
"""How often the kernels are looked at; the agent is told when something changed."""
TELL_SECONDS = 10.0
"""The agent is told at least this often."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "gpushare_spawner.notebook.extension"}]


def _load_jupyter_server_extension(server: Any) -> None:
    client = SessionClient(log=server.log)
    url = url_path_join(server.web_app.settings["base_url"], "gpushare", "status")
    server.web_app.add_handlers(".*$", [(url, StatusHandler, {"client": client})])
    if client.shared:
        # here and not in the pod's manifest, where it would override the image's own choice; kernels and terminals
        # inherit this process's environment
        choose_frameworks_defaults(os.environ)
        server.io_loop.add_callback(_start, server, client)  # the loop does not run yet


async def _start(server: Any, client: SessionClient) -> None:
    watching = watch_kernels(lambda: kernel_activity(server.kernel_manager), client)
    # asyncio does not keep tasks alive, the server's settings do
    server.web_app.settings["gpushare_tasks"] = [asyncio.create_task(client.run()), asyncio.create_task(watching)]


async def watch_kernels(look: Callable[[], KernelActivity], client: SessionClient) -> None:
    """Tell the agent what the kernels do, on change and every TELL_SECONDS, until cancelled."""
    told: KernelActivity | None = None
    told_at = 0.0
    while True:
        with contextlib.suppress(Exception):  # another kernel manager than we know must not end this
            now, at = look(), asyncio.get_running_loop().time()
            if now != told or at - told_at >= TELL_SECONDS:
                await client.tell_kernels(now)
                told, told_at = now, at
        await asyncio.sleep(LOOK_SECONDS)


def answer(status: ShareStatus) -> dict[str, Any]:
    """What the browser gets: the status, and the words for it, so that all places say the same."""
    step, hit = status.announced, status.limit_hit
    return {
        **status.as_json(),
        "line": share_status.line(status),
        "explanation": share_status.explanation(status),
        "changed_text": notices.changed(status) if status.known else "",
        "announcement_text": notices.notice(status, step) if step is not None else "",
        "limit_text": memory_limits.refused(status, hit) if hit is not None else "",
    }


class StatusHandler(APIHandler):
    """The status of the share as JSON, as `gpushare status --json` prints it, and the sentences that JupyterLab shows.

    A request is no activity of the user: an open tab does not keep a server alive.
    """

    auth_resource = "server"
    # an open tab asks every few seconds; that is no activity of the user
    _track_activity = False

    def initialize(self, client: SessionClient) -> None:
        """Remember whom to ask."""
        self._client = client

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with `answer`."""
        status = await self._client.query()
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(answer(status)))
