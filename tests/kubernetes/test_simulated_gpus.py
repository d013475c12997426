"""helm-values/simulated-gpus.yaml: the container that the chart makes of it serves a notebook of another user.

Each container is a process in a pid namespace of its own, as on a node.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.demo.machine import free_ports
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels
from tests.agent.conftest import short_folder  # noqa: F401

from .agent_account import agent_token
from .charts import VALUES, load, merged, one, render
from .cluster_agent import ClusterAgent
from .node_agent import GPU_0
from .standin.client import path
from .standin.cluster import Cluster, a_pod
from .standin.kubelet import StandInKubelet

NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
MOUNTS = """
grant=${GPUSHARE_SOCKET%/*}
mount --bind "$grant" /mnt && mount -t tmpfs none "${grant%/*/*}" && mkdir -p "$grant" && mount --move /mnt "$grant" &&
    exec "$@"
"""
"""What a container runtime does with the folder of the session: its parents are root's alone, and not to be seen."""
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
PYTHON = "/usr/bin/python3"
"""Of the system: nobody may not read everybody's virtual environments."""


def containers_can_be_made() -> bool:
    if os.getuid() != 0 or not all(shutil.which(tool) for tool in ("setpriv", "unshare", PYTHON)):
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not containers_can_be_made(), reason="needs root, and a pid namespace of its own")


class AgentOfChart(ClusterAgent):
    """The agent's container as rendered, with the image's environment."""

    def __init__(self, folder: Path, cluster: Cluster, kubelet: StandInKubelet, token: str) -> None:
        super().__init__(folder, cluster, kubelet, token)
        values = {
            "node": {
                "hostDir": str(self.host_dir),
                "kubeletDir": str(kubelet.folder),
                "devicePluginsDir": str(kubelet.folder / "device-plugins"),
            },
            "metrics": {"port": free_ports(1)[0]},
        }
        simulated = merged(load(VALUES / "simulated-gpus.yaml"), values)
        daemon_set = one(render(simulated, namespace=cluster.namespace), "DaemonSet")
        (self.container,) = daemon_set["spec"]["template"]["spec"]["containers"]
        for name in ("SIMGPU_STATE", "SIMGPU_DEVICES"):
            del self.environment[name]
        self.environment |= {
            variable["name"]: variable["value"] for variable in self.container["env"] if "value" in variable
        }

    def command(self, *options: str) -> list[str]:
        module = ["-m", "tests.kubernetes.gpushare_in_pod", str(self.account)]
        return [*NAMESPACE, *NO_CAPABILITIES, sys.executable, *module, *self.container["args"], *options]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """As the kubelet: the signal goes to the container's first process, and unshare ends with its status."""
        assert self.process is not None
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), number)
        return self.process.wait(timeout=30)

    def is_ready(self) -> bool:
        """What the readiness probe of the container says."""
        _, *arguments = self.container["readinessProbe"]["exec"]["command"]
        return subprocess.run([sys.executable, *arguments], timeout=20).returncode == 0


@pytest.mark.slow
async def test_container_of_the_chart_serves_a_notebook_of_another_user(cluster: Cluster, short_folder: Path) -> None:  # noqa: F811
    short_folder.chmod(0o755)
    kubelet = await cluster.make_node()
    agent = AgentOfChart(short_folder, cluster, kubelet, await agent_token(cluster, kubelet.name))
    async with agent.in_pod():
        await cluster.wait_for_allocatable(kubelet.name, GPU_0, 100)
        assert agent.is_ready()
        report = await agent.client.report()
        assert [gpu.simulated for gpu in report.gpus] == [True, True]
        await cluster.admin.create(path("pods", cluster.namespace), notebook(report.gpus[0].uuid))
        session = await agent.session("ada", lambda session: session.processes == 1 and session.memory_bytes >= 2**20)
        assert session.bypassing_pids == ()
        await agent.published(lambda report: report.session("ada") is not None)
        log = kubelet.worker(cluster.namespace, "ada").folder / "notebook.log"
        deadline = time.monotonic() + 20
        while "right" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.05)
        assert agent.end() == 0


def notebook(gpu: str) -> dict[str, Any]:
    said = SessionAnnotations(
        session="ada", template="quarter-gpu", share_units=25, gpus=(gpu,), gpu_indices=(0,),
        tier_since=time.time(), effective_units=25,
    )  # fmt: skip
    return a_pod(
        "ada", command=[*NAMESPACE, "sh", "-c", MOUNTS, "sh", *NOBODY, PYTHON, "-u", "-c", PROGRAM],
        limits={GPU_0: 25}, annotations=said.annotations(), labels=labels(),
    )  # fmt: skip


PROGRAM = """
import ctypes, os, time
assert os.getuid() == 65534
assert "libgpushare" in open("/proc/self/maps").read()
cuda = ctypes.CDLL("libcuda.so.1")
def check(result):
    assert result == 0, result
check(cuda.cuInit(0))
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
check(cuda.cuMemsetD32_v2(memory, ctypes.c_uint(0x12345678), ctypes.c_size_t(1 << 18)))
back = ctypes.create_string_buffer(1 << 20)
check(cuda.cuMemcpyDtoH_v2(back, memory, ctypes.c_size_t(1 << 20)))
assert back.raw == (0x12345678).to_bytes(4, "little") * (1 << 18)
print("right")
time.sleep(300)
"""
