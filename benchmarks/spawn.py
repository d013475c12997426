"""What sharing costs a hub on Kubernetes: spawn time, the form, and memory, beside plain KubeSpawner.

``python -m benchmarks.spawn [--json]``. Both spawners run on one stand-in API server, scheduler and kubelets (those of
the tests, in a process of their own on this machine; API calls are 5 ms late, containers take 0.8 s to start) in one
run, take turns, and ask the same of the cluster. A spawn is what a hub does of it: pre-spawn hook, place, pod, until
the pod runs; of 64 at once it is the mean. Memory is that of a process of its own with all pods in view.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubespawner.spawner
from jupyterhub.objects import Hub
from kubespawner import KubeSpawner
from traitlets.config import Config

from benchmarks.handoff import spinning
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, resource_name
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner
from gpushare_spawner.templates.folder import SETTLING_SECONDS
from tests.kubernetes.pod_account import write_certificate
from tests.kubernetes.sharing_hub import GpuNodes, gpu, kube_access
from tests.kubernetes.standin.client import path
from tests.kubernetes.standin.cluster import Cluster, standin_cluster
from tests.kubernetes.standin.faults import Faults

API_LATENCY = 0.005
CONTAINER_START = 0.8
"""Seconds; a pod with a share ran 0.9 s after it was created, at the earliest, on a real kubelet (1.20, containerd 1.6,
one node, the image there). The stand-ins take the other 0.1 s for the rest of it."""
GPUS_PER_NODE = 8
TEMPLATE = (
    "name: {name}\ndisplay_name: {name}\ndescription: Room for a model of {units} %.\ngpu: {{fraction: {part}}}\n"
)
QUARTER = "quarter-gpu"


def make(kind: type, cluster_namespace: str, user: str, templates: Path | None) -> Any:
    """A spawner as the hub makes it."""
    config = Config()
    config.KubeSpawner.namespace = cluster_namespace
    config.KubeSpawner.cmd = ["jupyterhub-singleuser"]
    config.KubeSpawner.delete_grace_period = 0
    config.KubeSpawner.start_timeout = 60
    if templates is not None:
        config.GPUShareSpawner.templates_dir = str(templates)
    # one store of what spawners share, as in a hub
    person = SimpleNamespace(
        name=user, id=1, url=f"/user/{user}", escaped_name=user, settings=_SETTINGS, groups=[], spawners={}
    )
    return kind(hub=Hub(), user=person, config=config, api_token="abc", oauth_client_id="x")


_SETTINGS: dict[str, Any] = {}


@contextlib.contextmanager
def short_waits() -> Iterator[None]:
    """KubeSpawner looks at a pod after random waits that grow to seconds; here, for both, after 25 ms at most.

    Else what is measured is mostly how the dice fell.
    """
    usual = kubespawner.spawner.exponential_backoff
    kubespawner.spawner.exponential_backoff = functools.partial(usual, start_wait=0.01, max_wait=0.025)
    try:
        yield
    finally:
        kubespawner.spawner.exponential_backoff = usual


async def spawn(spawner: Any) -> None:
    """Start it as `jupyterhub.user.User.spawn` does."""
    spawner.user_options = {"profile": QUARTER} if isinstance(spawner, GPUShareSpawner) else {}
    spawner.clear_state()
    result = spawner.run_pre_spawn_hook()
    if asyncio.iscoroutine(result):
        await result
    await spawner.start()


async def spawn_seconds(kind: type, cluster: Cluster, nodes: GpuNodes, templates: Path, count: int, seed: int) -> float:
    """Mean seconds that ``count`` servers take that start at once; they are stopped afterwards."""
    spawners = [make(kind, cluster.namespace, f"u{number}", templates) for number in range(count)]
    if kind is KubeSpawner:
        # the same of the cluster: as much of a certain GPU of a certain node
        for number, spawner in enumerate(spawners):
            node, index = divmod(number // 4, GPUS_PER_NODE)
            spawner.node_selector = {HOSTNAME_LABEL: nodes.names[node]}
            spawner.extra_resource_limits = {resource_name(index): "25"}
    random.seed(seed)
    gc.collect()
    start = time.perf_counter()

    async def timed(spawner: Any) -> float:
        await spawn(spawner)
        return time.perf_counter() - start

    taken = await asyncio.gather(*(timed(spawner) for spawner in spawners))
    await asyncio.gather(*(spawner.stop(now=True) for spawner in spawners))
    for spawner in spawners:
        spawner.clear_state()
    return statistics.mean(taken)


async def compare(
    cluster: Cluster, nodes: GpuNodes, templates: Path, count: int, rounds: int
) -> tuple[float, float, float]:
    """Median seconds of KubeSpawner and of GPUShareSpawner, and the median ratio of the two in a round.

    They take turns, so that what else the machine does meets both.
    """
    kinds = (KubeSpawner, GPUShareSpawner)
    taken: dict[type, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for name in nodes.names:
            await nodes.report(name, [gpu(name, index) for index in range(GPUS_PER_NODE)])
        for kind in kinds if number % 2 else reversed(kinds):
            seconds = await spawn_seconds(kind, cluster, nodes, templates, count, number)
            if number:  # the first round starts reflectors and connections
                taken[kind].append(seconds)
    plain, share = taken[KubeSpawner], taken[GPUShareSpawner]
    ratio = statistics.median(after / before for before, after in zip(plain, share, strict=True))
    return statistics.median(plain), statistics.median(share), ratio


@contextlib.asynccontextmanager
async def running_cluster(nodes: int) -> AsyncIterator[tuple[Cluster, GpuNodes]]:
    """A stand-in cluster as a process of its own, so that its work is not the hub's; its nodes run pods."""
    command = [sys.executable, "-m", "tests.kubernetes.standin.serve", "--nodes", str(nodes)]
    command += [
        "--gpus",
        str(GPUS_PER_NODE),
        "--latency",
        str(API_LATENCY),
        "--container-seconds",
        str(CONTAINER_START),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = json.loads(await process.stdout.readline())
        with tempfile.TemporaryDirectory() as folder:
            async with (
                Cluster(said["url"], said["admin_token"], Path(folder), Faults()) as cluster,
                kube_access(cluster),
            ):
                yield cluster, GpuNodes(cluster, said["nodes"])
    finally:
        process.stdin.close()
        await process.wait()


@contextlib.asynccontextmanager
async def cluster_with_reports(nodes: int) -> AsyncIterator[Cluster]:
    """A stand-in cluster in this process; of its nodes there are but the reports."""
    async with standin_cluster() as cluster, kube_access(cluster):
        found = GpuNodes(cluster)
        for number in range(nodes):
            name = f"node-{number:03}"
            model = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "Tesla T4")[number % 4]
            await found.report(name, [gpu(name, index, model) for index in range(GPUS_PER_NODE)])
        yield cluster


async def spawn_times(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        templates = Path(folder)
        (templates / "quarter.yaml").write_text(TEMPLATE.format(name=QUARTER, units=25, part=0.25))
        async with running_cluster(4) as (cluster, found):
            # a file that was changed a moment ago is read again and again
            await asyncio.sleep(SETTLING_SECONDS)
            with short_waits():
                one = await compare(cluster, found, templates, 1, 4 * rounds)
                many = await compare(cluster, found, templates, 64, rounds)
    return {
        "plain_1_s": one[0],
        "share_1_s": one[1],
        "ratio_1": one[2],
        "plain_64_s": many[0],
        "share_64_s": many[1],
        "ratio_64": many[2],
    }


class LoopWatch:
    """What the event loop is blocked by: the longest time and the longest CPU time between two of its ticks."""

    TICK = 0.002

    def __init__(self) -> None:
        self.longest = self.longest_cpu = 0.0
        self._began = time.thread_time()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(self.TICK)
            self.longest = max(self.longest, time.perf_counter() - wall - self.TICK)
            self.longest_cpu = max(self.longest_cpu, time.thread_time() - cpu)

    def end(self) -> dict[str, float]:
        """Milliseconds."""
        self._task.cancel()
        return {
            "blocked_ms": self.longest * 1e3,
            "blocked_cpu_ms": self.longest_cpu * 1e3,
            "cpu_ms": (time.thread_time() - self._began) * 1e3,
        }


async def six_at_once(kind: str, templates: Path) -> dict[str, float]:
    """What six users who open the form and start do to the loop of a hub that has just begun, and then once more."""
    namespace = os.environ["POD_NAMESPACE"]
    found: dict[str, Any] = {}
    for when in ("first", "again"):
        spawners = [
            make(KubeSpawner if kind == "plain" else GPUShareSpawner, namespace, f"{when}-{number}", templates)
            for number in range(6)
        ]
        watch = LoopWatch()

        async def start(spawner: Any) -> None:
            await spawner.get_options_form()
            await spawn(spawner)

        await asyncio.gather(*(start(spawner) for spawner in spawners))
        found |= {f"{when}_{name}": value for name, value in watch.end().items()}
        await asyncio.gather(*(spawner.stop(now=True) for spawner in spawners))
    await KubeSpawner._stop_all_reflectors()
    return found


def with_authority(kubeconfig: Path, folder: Path) -> Path:
    """Name one CA in a kubeconfig, as a pod has it.

    Without one each client of kubernetes_asyncio loads all CAs of the system, in 30 ms of CPU time, and KubeSpawner's
    reflectors make one every 10 s.
    """
    write_certificate(folder)
    config = json.loads(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["certificate-authority"] = str(folder / "ca.crt")
    kubeconfig.write_text(json.dumps(config))
    return kubeconfig


async def loop_times(rounds: int) -> dict[str, float]:
    """The medians of both spawners, which take turns, each time in a process of its own, with all cores busy."""
    kinds = ("plain", "share")
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        templates = Path(folder)
        (templates / "quarter.yaml").write_text(TEMPLATE.format(name=QUARTER, units=25, part=0.25))
        async with running_cluster(4) as (cluster, nodes):
            await asyncio.sleep(SETTLING_SECONDS)
            environment = {
                **os.environ,
                "KUBECONFIG": str(with_authority(cluster.kubeconfig(), templates)),
                "POD_NAMESPACE": cluster.namespace,
            }
            with spinning():
                for number in range(rounds):
                    for kind in kinds if number % 2 else reversed(kinds):
                        for name in nodes.names:
                            await nodes.report(name, [gpu(name, index) for index in range(GPUS_PER_NODE)])
                        command = [sys.executable, "-m", "benchmarks.spawn", "--six-at-once", kind, str(templates)]
                        process = await asyncio.create_subprocess_exec(
                            *command, env=environment, stdout=subprocess.PIPE
                        )
                        answer, _ = await process.communicate()
                        for name, value in json.loads(answer).items():
                            found.setdefault(f"{kind}_{name}", []).append(value)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


async def form_time(gpus: int, count: int) -> dict[str, float]:
    """Median milliseconds to make the form, each time from what is known of pods and reports at that moment."""
    with tempfile.TemporaryDirectory() as folder:
        templates = Path(folder)
        for number in range(count):
            units = 1 + number % 100
            name = f"template-{number}"
            (templates / f"{name}.yaml").write_text(TEMPLATE.format(name=name, units=units, part=units / 100))
        async with cluster_with_reports(gpus // GPUS_PER_NODE) as cluster:
            spawner = make(GPUShareSpawner, cluster.namespace, "ada", templates)
            await asyncio.sleep(SETTLING_SECONDS)
            await spawner.get_options_form()
            taken = []
            for _ in range(15):
                spawner.reservations.cluster._last = None
                await asyncio.sleep(0.01)
                start = time.perf_counter()
                form = await spawner.get_options_form()
                taken.append((time.perf_counter() - start) * 1000)
            assert form.count("Starts now") == count
    return {"form_ms": statistics.median(taken), "form_bytes": len(form)}


async def memory(pods: int) -> dict[str, float]:
    """MB (10^6 bytes) of a process with all pods in view, and what of it is due to the pods."""
    with tempfile.TemporaryDirectory() as folder:
        templates = Path(folder)
        (templates / "quarter.yaml").write_text(TEMPLATE.format(name=QUARTER, units=25, part=0.25))
        async with cluster_with_reports(125) as cluster:
            spawner = make(GPUShareSpawner, cluster.namespace, "ada", templates)
            await fill(cluster, spawner, pods)
            kubeconfig = cluster.kubeconfig()
            used = {}
            for kind in ("plain", "share"):
                command = [sys.executable, "-m", "benchmarks.spawn", "--in-view", kind, str(templates)]
                environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": cluster.namespace}
                process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
                answer, _ = await process.communicate()
                seen, bytes_used = json.loads(answer)
                assert seen == pods, f"{seen} pods in view, not {pods}"
                used[kind] = bytes_used / 1e6
    return {"memory_plain_mb": used["plain"], "memory_share_mb": used["share"], "pods_in_view": pods}


async def fill(cluster: Cluster, spawner: Any, pods: int) -> None:
    """Pods as the spawner makes them, each with a quarter of some GPU."""
    spawner.user_options = {"profile": QUARTER}
    spawner.clear_state()
    await spawner.run_pre_spawn_hook()
    manifest = spawner.api.api_client.sanitize_for_serialization(await spawner.get_pod_manifest())
    manifest["spec"]["nodeName"] = "node-000"
    text = json.dumps({"apiVersion": "v1", "kind": "Pod", **manifest})
    where = path("pods", cluster.namespace)
    for start in range(0, pods, 50):
        await asyncio.gather(
            *(
                cluster.admin.create(where, json.loads(text.replace("jupyter-ada", f"jupyter-user-{number}")))
                for number in range(start, min(start + 50, pods))
            )
        )


async def in_view(kind: str, templates: Path) -> tuple[int, int]:
    """Pods in this process's view, and its resident memory in bytes."""
    namespace = os.environ["POD_NAMESPACE"]
    spawner = make(KubeSpawner if kind == "plain" else GPUShareSpawner, namespace, "eve", templates)
    await spawner._start_watching_pods()
    if isinstance(spawner, GPUShareSpawner):
        await spawner._watch()
        await spawner.reservations.availability_now()
    await asyncio.sleep(1)
    # KubeSpawner lists all pods again every 10 s: a second copy of each would show from then on only
    await spawner.pod_reflector._list_and_update()
    if isinstance(spawner, GPUShareSpawner):
        await spawner.reservations.availability_now()
    seen = len(spawner.pod_reflector.pods)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    await KubeSpawner._stop_all_reflectors()
    return seen, pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spawn", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds of 64 spawns (default 15), four times as many of one"
    )
    parser.add_argument("--pods", type=int, default=5000, help="pods in view (default 5000)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--six-at-once", nargs=2, metavar=("KIND", "TEMPLATES"), help=argparse.SUPPRESS)
    parser.add_argument("--loop", action="store_true", help="only the event loop of a hub during six spawns at once")
    parser.add_argument("--in-view", nargs=2, metavar=("KIND", "TEMPLATES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.in_view:
        print(json.dumps(asyncio.run(in_view(options.in_view[0], Path(options.in_view[1])))))
        return
    if options.six_at_once:
        print(json.dumps(asyncio.run(six_at_once(options.six_at_once[0], Path(options.six_at_once[1])))))
        return
    if options.loop:
        show_loop_times(asyncio.run(loop_times(options.rounds)), options.json)
        return
    found = asyncio.run(measure(options.rounds, options.pods))
    if options.json:
        print(json.dumps({"python": platform.python_version(), **found}))
        return
    print(f"Stand-in cluster: API calls {API_LATENCY * 1e3:.0f} ms late, containers start in {CONTAINER_START} s")
    for count in (1, 64):
        plain, share, ratio = found[f"plain_{count}_s"], found[f"share_{count}_s"], found[f"ratio_{count}"]
        print(f"{count:>3} at once: KubeSpawner {plain:.3f} s, GPUShareSpawner {share:.3f} s, ratio {ratio:.3f}")
    print(f"form, 1,000 GPUs and 200 templates: {found['form_ms']:.0f} ms, {found['form_bytes'] / 1e3:.0f} kB")
    print(
        f"memory, {found['pods_in_view']} pods in view: KubeSpawner {found['memory_plain_mb']:.0f} MB, "
        f"GPUShareSpawner {found['memory_share_mb']:.0f} MB"
    )


def show_loop_times(found: dict[str, float], as_json: bool) -> None:
    """Print them."""
    if as_json:
        print(json.dumps(found))
        return
    print("Six spawns at once, two spinning processes beside it for each core; medians, in ms")
    print(f"  {'':<54}{'KubeSpawner':>14}{'GPUShareSpawner':>18}")
    for when, words in (("first", "of a hub that has just begun"), ("again", "once more")):
        for name, what in (
            ("blocked_ms", "longest blockage"),
            ("blocked_cpu_ms", "longest CPU time at once"),
            ("cpu_ms", "CPU time of the loop"),
        ):
            plain, share = found[f"plain_{when}_{name}"], found[f"share_{when}_{name}"]
            print(f"  {what + ' ' + words:<54}{plain:>14.1f}{share:>18.1f}")


async def measure(rounds: int, pods: int) -> dict[str, float]:
    """Everything, one after the other."""
    found = await spawn_times(rounds)
    _SETTINGS.clear()
    found |= await form_time(1000, 200)
    _SETTINGS.clear()
    return found | await memory(pods)


if __name__ == "__main__":
    main()
