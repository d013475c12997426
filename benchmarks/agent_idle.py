"""What an agent on a node of a cluster costs while its sessions idle.

    .venv/bin/python -m benchmarks.agent_idle [--json] [--sessions 50] [--gpus 4] [--seconds 60]

A real `gpushare agent --kubernetes` on simulated GPUs, with a service account, and with the stand-in API server (TLS)
and kubelet of the tests. Each session is a pod with a CUDA process that has worked once and a notebook server, both
connected; the notebook server says every ten seconds how its kernels are. Measured: processor time of the agent over
the given time, in per cent of one core, and its memory: resident, and its part of it (pages that processes share count
in parts).

The bars: 1 % of a core, 80 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.kubernetes.objects import resource_name
from tests.agent.peers import Peer, session_processes
from tests.kubernetes.agent_account import AGENT_RULES
from tests.kubernetes.cluster_agent import ClusterAgent
from tests.kubernetes.standin.cluster import Cluster, standin_cluster

BAR_PERCENT, BAR_MIB = 1.0, 80.0
SAY_EVERY = 10.0
"""Seconds between two words of a notebook server about its kernels."""
SETTLE = 25.0
"""Seconds after the last session before the measurement; records of what was done are written within ten."""


def main() -> int:
    """Print the figures; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--sessions", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--gpus", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measurement (default: %(default)s)")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.sessions, options.gpus, options.seconds))
    print(f"agent, {options.sessions} idle sessions on {options.gpus} simulated GPUs, {options.seconds:g} s:")
    print(f"  processor  {figures['cpu_percent']:6.2f} % of a core  (bar {BAR_PERCENT:g} %)")
    print(
        f"  memory     {figures['rss_mib']:6.1f} MiB resident, {figures['pss_mib']:.1f} its part  (bar {BAR_MIB:g} MiB)"
    )
    print(f"  API calls  {figures['api_calls_per_minute']:6.1f} a minute")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["cpu_percent"] < BAR_PERCENT and figures["rss_mib"] < BAR_MIB else 1


async def measure(sessions: int, gpus: int, seconds: float) -> dict[str, float]:
    """The figures by name."""
    # short: Unix sockets lie in it
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    try:
        async with standin_cluster() as cluster:
            kubelet = await cluster.make_node()
            token = await cluster.service_account("agent", AGENT_RULES)
            agent = ClusterAgent(folder, cluster, kubelet, token, gpus)
            async with agent.in_pod():
                return await _with_sessions(agent, sessions, seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _with_sessions(agent: ClusterAgent, sessions: int, seconds: float) -> dict[str, float]:
    gpus = (await agent.client.report()).gpus
    for gpu in gpus:
        await agent.cluster.wait_for_allocatable(agent.kubelet.name, resource_name(gpu.index), 100)
    share = 100 // math.ceil(sessions / len(gpus))
    peers = []
    for number in range(sessions):
        gpu = gpus[number % len(gpus)]
        socket = await agent.pod(f"user-{number}", share, gpu.index)
        peers.append(await session_processes(socket, gpu.uuid))
    speaking = asyncio.get_running_loop().create_task(_speak([observer for _, observer in peers]))
    await asyncio.sleep(SETTLE)
    calls = _agent_calls(agent.cluster)
    began, processor = time.monotonic(), agent.cpu_seconds()
    await asyncio.sleep(seconds)
    passed, used = time.monotonic() - began, agent.cpu_seconds() - processor
    memory = agent.memory_bytes()
    figures = {
        "sessions": float(len((await agent.client.report()).sessions)),
        "cpu_percent": round(100 * used / passed, 3),
        "rss_mib": round(memory["Rss"] / 2**20, 1),
        "pss_mib": round(memory["Pss"] / 2**20, 1),
        "api_calls_per_minute": round(60 * (_agent_calls(agent.cluster) - calls) / passed, 1),
    }
    speaking.cancel()
    await asyncio.wait([speaking])
    for pair in peers:
        for peer in pair:
            peer.close()
    return figures


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


if __name__ == "__main__":
    sys.exit(main())
