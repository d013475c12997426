"""A real `gpushare agent --kubernetes` of a node of the tests' cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, REPORT_KEY, REPORT_SELECTOR, resource_limits
from gpushare_spawner.model.report import Report, SessionReport
from tests.agent.agent_process import AgentProcess

from .pod_account import pod_account
from .standin.client import path
from .standin.cluster import Cluster, a_pod
from .standin.kubelet import StandInKubelet


class ClusterAgent(AgentProcess):
    """Started with what a DaemonSet would give it."""

    def __init__(self, folder: Path, cluster: Cluster, kubelet: StandInKubelet, token: str, gpus: int = 1) -> None:
        super().__init__(folder, gpus=gpus)
        self.cluster, self.kubelet, self.token = cluster, kubelet, token
        self.account: Path | None = None
        self.environment |= {
            "KUBECONFIG": str(cluster.kubeconfig(token)), "NODE_NAME": kubelet.name, "POD_NAMESPACE": cluster.namespace,
        }  # fmt: skip
        self.host_dir = folder / "state"

    def command(self, *options: str) -> list[str]:
        command = super().command(
            "--kubernetes",
            "--kubelet-dir",
            str(self.kubelet.folder),
            "--device-plugins-dir",
            str(self.kubelet.folder / "device-plugins"),
            "--host-dir",
            str(self.host_dir),
            *options,
        )
        del command[command.index("--node") : command.index("--node") + 2]
        if self.account is not None:
            module = command.index("gpushare_spawner.cli")
            command[module : module + 1] = ["tests.kubernetes.gpushare_in_pod", str(self.account)]
        return command

    @contextlib.asynccontextmanager
    async def in_pod(self) -> AsyncIterator[None]:
        """Start it as in a pod: over TLS with a service account, without a kubeconfig and what reads one."""
        account = self.folder / "account"
        async with pod_account(account, self.cluster.url, self.token) as environment:
            self.environment |= environment
            del self.environment["KUBECONFIG"]
            self.account = account
            await self.start()
            try:
                yield
            finally:
                if self.process is not None and self.process.poll() is None:
                    self.end()

    async def pod(self, name: str, share: int = 25, index: int = 0) -> str:
        """A running pod with a session on the GPU of that index; the path of its socket."""
        gpu = (await self.client.report()).gpus[index]
        said = SessionAnnotations(
            session=name, template="quarter-gpu", share_units=share, gpus=(gpu.uuid,), gpu_indices=(index,),
            tier_since=time.time(), effective_units=share,
        )  # fmt: skip
        limits = resource_limits(said.share, (index,))
        manifest = a_pod(
            name, limits=limits, annotations=said.annotations(), labels=labels(),
            nodeSelector={HOSTNAME_LABEL: self.kubelet.name},
        )  # fmt: skip
        await self.cluster.admin.create(path("pods", self.cluster.namespace), manifest)
        await self.cluster.wait_for_phase(name, "Running")
        await self.session(name, lambda session: True)
        worker = self.kubelet.worker(self.cluster.namespace, name)
        return str(self.kubelet.plugins.given(worker.pod["metadata"]["uid"], "notebook").envs["GPUSHARE_SOCKET"])

    async def session(self, name: str, holds: Callable[[SessionReport], bool], within: float = 30.0) -> SessionReport:
        """The agent's session once it is as wanted."""
        end = time.monotonic() + within
        while True:
            found = (await self.client.report()).session(name)
            if found is not None and holds(found):
                return found
            assert time.monotonic() < end, f"after {within:.0f} s session {name} is {found}\n{self.log.read_text()}"
            await asyncio.sleep(0.025)

    async def published(self, holds: Callable[[Report], bool], within: float = 40.0) -> Report:
        """What the node's agent has published, once it is as wanted."""
        end = time.monotonic() + within
        while True:
            for found in await self.cluster.config_maps(REPORT_SELECTOR):
                report = Report.model_validate_json(found["data"][REPORT_KEY])
                if report.node == self.kubelet.name and holds(report):
                    return report
            assert time.monotonic() < end, f"after {within:.0f} s it is not published\n{self.log.read_text()}"
            await asyncio.sleep(0.05)
