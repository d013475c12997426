"""A stand-in cluster as a process of its own: ``python -m tests.kubernetes.standin.serve --nodes 20 --gpus 8``.

It prints one line of JSON: url, admin_token, namespace, kubeconfig, the nodes' names. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from gpushare_spawner.model.kubernetes.objects import resource_name

from .cluster import standin_cluster
from .programs import Listeners, Processes


async def serve(options: argparse.Namespace) -> None:
    async with standin_cluster() as cluster:
        cluster.faults.latency = options.latency
        units = {resource_name(index): options.units for index in range(options.gpus)}
        listeners = Listeners(start_seconds=options.start_seconds, container_seconds=options.container_seconds)
        programs = Processes() if options.processes else listeners
        for _ in range(options.nodes):
            await cluster.make_node(static_resources=units, programs=programs, pods="1000")
        said = {
            "url": cluster.url,
            "admin_token": cluster.admin_token,
            "namespace": cluster.namespace,
            "kubeconfig": str(cluster.kubeconfig()),
            "nodes": list(cluster.nodes),
        }
        print(json.dumps(said), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node, as resources without a device plugin")
    parser.add_argument("--units", type=int, default=100, help="units of each GPU")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that every call takes longer")
    parser.add_argument("--processes", action="store_true", help="pods run their command, not just a listener")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="what a listener takes until it listens")
    parser.add_argument("--container-seconds", type=float, default=0.0, help="what a pod takes until it runs")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
