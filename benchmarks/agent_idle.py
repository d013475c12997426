"""What an agent on a node of a cluster costs while its sessions idle.

    .venv/bin/python -m benchmarks.agent_idle [--json] [--sessions 50] [--seconds 60]

A real `gpushare agent --kubernetes` on four simulated GPUs, with the stand-in API server and kubelet of the tests. Each
session is a pod with a CUDA process that has worked once and a notebook server, both connected; the notebook server
says every ten seconds how its kernels are. Measured: processor time of the agent over the given time, in per cent of
one core, and its memory: resident, and the part that is its own (proportional set size).

The bars: 1 % of a core, 150 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.kubernetes import PodSession
from tests.agent.agent_process import AgentProcess
from tests.agent.peers import Peer
from tests.kubernetes.agent_account import AGENT_RULES
from tests.kubernetes.standin.client import path
from tests.kubernetes.standin.cluster import Cluster, a_pod, standin_cluster
from tests.kubernetes.standin.kubelet import StandInKubelet

BAR_PERCENT, BAR_MB = 1.0, 150.0
GPUS = 4
SAY_EVERY = 10.0
"""Seconds between two words of a notebook server about its kernels."""
SETTLE = 25.0
"""Seconds after the last session before the measurement; records of what was done are written within ten."""


def main() -> int:
    """Print the figures; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--sessions", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measurement (default: %(default)s)")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.sessions, options.seconds))
    print(f"agent on simulated GPUs, {options.sessions} idle sessions, {options.seconds:g} s:")
    print(f"  processor  {figures['cpu_percent']:6.2f} % of a core  (bar {BAR_PERCENT:g} %)")
    print(f"  memory     {figures['rss_mb']:6.1f} MB resident, {figures['pss_mb']:.1f} MB its own  (bar {BAR_MB:g} MB)")
    print(f"  API calls  {figures['api_calls_per_minute']:6.1f} a minute")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["cpu_percent"] < BAR_PERCENT and figures["rss_mb"] < BAR_MB else 1


async def measure(sessions: int, seconds: float) -> dict[str, float]:
    """The figures by name."""
    # short: Unix sockets lie in it
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    try:
        async with standin_cluster() as cluster:
            kubelet = await cluster.make_node()
            agent = _agent(folder, cluster, kubelet, await cluster.service_account("agent", AGENT_RULES))
            await agent.start(
                "--kubernetes", "--kubelet-dir", str(kubelet.folder),
                "--device-plugins-dir", str(kubelet.folder / "device-plugins"), "--host-dir", str(folder / "state"),
            )  # fmt: skip
            try:
                return await _with_sessions(agent, cluster, kubelet, sessions, seconds)
            finally:
                agent.end(signal.SIGTERM)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _agent(folder: Path, cluster: Cluster, kubelet: StandInKubelet, token: str) -> AgentProcess:
    agent = AgentProcess(folder, gpus=GPUS)
    agent.environment |= {
        "KUBECONFIG": str(cluster.kubeconfig(token)), "POD_NAMESPACE": cluster.namespace,
    }  # fmt: skip
    original = agent.command
    agent.command = lambda *more: [  # type: ignore[method-assign]
        kubelet.name if word == "here" else word for word in original(*more)
    ]
    return agent


async def _with_sessions(
    agent: AgentProcess, cluster: Cluster, kubelet: StandInKubelet, sessions: int, seconds: float
) -> dict[str, float]:
    gpus = (await agent.client.report()).gpus
    for gpu in gpus:
        await cluster.wait_for_allocatable(kubelet.name, kubernetes.resource_name(gpu.index), 100)
    share = 100 // math.ceil(sessions / len(gpus))
    for number in range(sessions):
        gpu = gpus[number % len(gpus)]
        said = PodSession(
            session=f"user-{number}", template="small", share_units=share, gpus=(gpu.uuid,),
            gpu_indices=(gpu.index,), tier_since=time.time(), effective_units=share,
        )  # fmt: skip
        pod = a_pod(
            f"user-{number}", command=["sleep", "3600"], annotations=said.annotations(), labels=kubernetes.labels(),
            limits=kubernetes.resource_limits(share, said.gpu_indices),
            nodeSelector={kubernetes.HOSTNAME_LABEL: kubelet.name},
        )  # fmt: skip
        await cluster.admin.create(path("pods", cluster.namespace), pod)
    async with asyncio.timeout(60 + sessions):
        while len((await agent.client.report()).sessions) < sessions:
            await asyncio.sleep(0.2)
    peers = [await _peers(cluster, kubelet, f"user-{number}", gpus[number % len(gpus)].uuid)
             for number in range(sessions)]  # fmt: skip
    speaking = asyncio.get_running_loop().create_task(_speak([observer for _, observer in peers]))
    await asyncio.sleep(SETTLE)
    assert agent.process is not None
    calls = _agent_calls(cluster)
    began, processor = time.monotonic(), _processor_seconds(agent.process.pid)
    await asyncio.sleep(seconds)
    passed, used = time.monotonic() - began, _processor_seconds(agent.process.pid) - processor
    figures = {
        "sessions": float(len((await agent.client.report()).sessions)),
        "cpu_percent": round(100 * used / passed, 3),
        **_memory(agent.process.pid),
        "api_calls_per_minute": round(60 * (_agent_calls(cluster) - calls) / passed, 1),
    }
    speaking.cancel()
    await asyncio.wait([speaking])
    for pair in peers:
        for peer in pair:
            peer.close()
    return figures


async def _peers(cluster: Cluster, kubelet: StandInKubelet, name: str, gpu: str) -> tuple[Peer, Peer]:
    """A CUDA process that has worked, and a notebook server."""
    worker = kubelet.worker(cluster.namespace, name)
    socket = kubelet.plugins.given(worker.pod["metadata"]["uid"], "notebook").envs["GPUSHARE_SOCKET"]
    cuda, observer = Peer(socket), Peer(socket)
    await cuda.connect(Role.CUDA)
    await observer.connect(Role.OBSERVER)
    cuda.send(Kind.REQUEST, 2**30, 0, gpu=gpu)
    grant = await cuda.until(Kind.GRANT)
    cuda.send(Kind.IDLE, grant.fields[0], 1_000_000, 1_000_000, gpu=gpu)
    return cuda, observer


async def _speak(observers: list[Peer]) -> None:
    while True:
        for observer in observers:
            observer.send(Kind.KERNELS, 0, 1, time.time_ns())
            await asyncio.sleep(SAY_EVERY / len(observers))


def _agent_calls(cluster: Cluster) -> int:
    """Of the kinds that only the agent makes."""
    assert cluster.server is not None
    kinds = (("patch", "configmaps"), ("create", "configmaps"), ("patch", "pods"))
    return sum(cluster.server.calls.get(kind, 0) for kind in kinds)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> dict[str, float]:
    """In MB of 1,000,000 bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return {"rss_mb": round(kib["Rss"] * 1024 / 1e6, 1), "pss_mb": round(kib["Pss"] * 1024 / 1e6, 1)}


if __name__ == "__main__":
    sys.exit(main())
