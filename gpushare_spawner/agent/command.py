"""The commands ``gpushare agent`` and ``gpushare agent resume``.

``gpushare agent`` runs the agent of a GPU machine; ``gpushare agent resume`` resumes the processes that the agent left
suspended. The protocol `AgentCluster` describes a cluster; `agent.kubernetes.options` implements it, and cli.py
connects the two.

`prefer_this_thread` raises the CPU priority of the agent: a lease must not wait for notebooks that keep all cores busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import math
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from gpushare_spawner import native
from gpushare_spawner.agent.control_socket import CannotListen, ControlSocket
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, NoGpu, Nvml, RecordedGpus, all_gpus
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.session_socket import SessionEndpoints
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.sessions.host_memory import HostMemorySettings
from gpushare_spawner.agent.state_folder import AlreadyRunning, PathTooLong, StateFolder
from gpushare_spawner.agent.suspend.checkpoints import DriverCheckpoints
from gpushare_spawner.agent.suspend.steps import resume_all
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.descriptors import allow_many
from gpushare_spawner.model.control import Request
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import MOST_OVERCOMMIT
from gpushare_spawner.model.share import UNITS_PER_GPU

log = logging.getLogger(__name__)


Answer = Callable[[Request], Awaitable[dict[str, Any]]]
"""Function that answers the control socket's requests. Raises ControlRefused."""


class Unusable(RuntimeError):
    """Error for an unusable option of the command. The text names the option and the reason."""


class AgentCluster(Protocol):
    """The cluster of this machine, as described by the options."""

    @property
    def host_dir(self) -> Path:
        """The node's folder for the agent's state."""

    @property
    def observes(self) -> bool:
        """Whether the agent allocates no GPUs and only observes another layer's sessions."""

    def allocatable(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Return the GPUs that this agent may allocate. Raises NoGpu."""

    def whole_devices(self, units: int) -> int:
        """Return the number of a GPU's units that devices can represent."""

    def source(self, nvml: GpuSource, gpus: tuple[Gpu, ...]) -> GpuSource:
        """Return NVML, limited to processes that can be matched with connections."""

    def endpoints(self, folder: StateFolder) -> SessionEndpoints:
        """Return the factory of session sockets."""

    def joined(self, node: Node) -> AbstractAsyncContextManager[Answer]:
        """Add the started node to the cluster while the context is open. Raises Unusable or OSError."""


NICE = -10
SLICE_NS = 200_000
"""Scheduler slice. The kernel runs a process with a short slice sooner after it wakes up, for less time."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""`struct sched_attr` of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period."""


def prefer_this_thread() -> None:
    """Raise the priority of this thread and its later threads, as permitted by its rights and the kernel.

    A nice value needs root or CAP_SYS_NICE. A slice needs no rights; kernels before 6.12 ignore it.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) > NICE:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except OSError as error:
        log.debug("cannot raise the agent's priority: %s", error.strerror)
    _shorten_slice()


def _shorten_slice() -> None:
    number = _SET_ATTRIBUTES.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(0), attributes, ctypes.c_uint(0)) != 0:
        log.debug("cannot shorten the agent's scheduler slice: %s", os.strerror(ctypes.get_errno()))


CONTEXT_BYTES = 512 * 2**20
"""GPU memory of each CUDA process in addition to its allocations; simulated GPUs need none.

CUDA 12 contexts take about 250 to 600 MiB, depending on GPU and program. Too high a value wastes little; too low a
value causes page faults in neighbors.
"""


def configure(parser: argparse.ArgumentParser, configure_cluster: Callable[[argparse.ArgumentParser], None]) -> None:
    """Declare the options of ``gpushare agent``. `configure_cluster` declares the options for a cluster."""
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="folder that stores the sessions across restarts; its path must be short, because the path of a Unix "
        "socket has at most 107 bytes (default: /run/gpushare for root, else $XDG_RUNTIME_DIR/gpushare)",
    )
    parser.add_argument(
        "--control-socket",
        type=Path,
        metavar="PATH",
        help="socket for the requests of the spawner and the service (default: $GPUSHARE_CONTROL, else control.sock in "
        "the state folder)",
    )
    parser.add_argument(
        "--node",
        default=os.environ.get("NODE_NAME") or socket.gethostname(),
        metavar="NAME",
        help="name of this machine in reports (default: $NODE_NAME, else its host name)",
    )
    parser.add_argument(
        "--overcommit",
        type=_overcommit,
        default=1.0,
        metavar="FACTOR",
        help="guarantee up to FACTOR times the units of each GPU, 1 to 10. With 1.5, three shares of 0.50 fit on one "
        "GPU, and each guarantees two thirds of its units (default: 1.0)",
    )
    parser.add_argument(
        "--host-memory",
        type=_host_memory,
        default="50%",
        metavar="SIZE",
        help="host memory for paged-out GPU memory, in bytes or as a part of the machine's memory; allocations beyond "
        "it fail. off: no budget for the node, and none for sessions with a memory limit (default: 50%%)",
    )
    parser.add_argument(
        "--exclusive",
        action="store_true",
        help="run one session at a time on each GPU, even if the memory of all sessions fits: slower, for measurements",
    )
    parser.add_argument("--metrics-port", type=_port, metavar="PORT", help="serve Prometheus metrics on this port")
    parser.add_argument(
        "--metrics-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address on which to serve the metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-token-file",
        type=Path,
        metavar="PATH",
        help="file with a token. Requests with the token (Authorization: Bearer TOKEN) also get the metrics of "
        "sessions, which name users and templates. Without a file no request gets them",
    )
    configure_cluster(parser)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: %(default)s"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=False, help="default: run the agent")
    resume = actions.add_parser(
        "resume",
        help="resume the processes that a stopped agent has left suspended",
        description="Resumes the processes that were suspended when the agent was stopped. Run this command before "
        "you remove the agent permanently, and while no agent is running. The exit status is 1 if a process stays "
        "suspended, for example because its GPU has too little free memory.",
    )
    resume.add_argument(
        "--state-dir",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="state folder of the agent (default: as for the agent)",
    )


ReadCluster = Callable[[argparse.Namespace], AgentCluster | None]
"""Function that returns the cluster described by the options; None for a single machine. Raises Unusable."""


def run(options: argparse.Namespace, read_cluster: ReadCluster) -> int:
    """Run until SIGTERM or SIGINT, or resume suspended processes.

    Returns 1 if the agent cannot start, with a sentence on standard error, or if a process stays suspended.
    """
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        if options.action == "resume":
            return 0 if asyncio.run(_resume(options)) else 1
        asyncio.run(_serve(options, read_cluster))
    except PermissionError as error:
        trouble = f"{error.filename} may not be used by uid {os.geteuid()}: {error.strerror}"
    except (AlreadyRunning, CannotListen, NoGpu, PathTooLong, OSError, Unusable) as error:
        trouble = str(error)
    else:
        return 0
    print(f"gpushare agent: {trouble}", file=sys.stderr)
    return 1


async def _serve(options: argparse.Namespace, read_cluster: ReadCluster) -> None:
    cluster = read_cluster(options)
    state_dir = Path(os.path.abspath(options.state_dir or (cluster.host_dir if cluster else _default_state_dir())))
    control_path = options.control_socket or Path(os.environ.get("GPUSHARE_CONTROL") or state_dir / "control.sock")
    allow_many()
    prefer_this_thread()
    async with contextlib.AsyncExitStack() as stack:
        folder = StateFolder(state_dir)
        stack.callback(folder.close)
        recorded = RecordedGpus(folder.gpus)
        nvml = Nvml(patient=bool(recorded))
        stack.callback(nvml.close)
        # on Kubernetes, NVIDIA's device plugin assigns MIG instances to pods, which an agent can only observe
        with_instances = cluster is None or cluster.observes
        try:
            gpus = all_gpus(lambda: nvml.gpus(with_instances), recorded, nvml.answers)
        except NoGpu as error:
            if cluster is None or not cluster.observes:
                raise
            log.warning("%s: only GPU work reported by programs with the library is counted", error)
            gpus = ()
        capacity = round(options.overcommit * UNITS_PER_GPU)
        if cluster is not None:
            gpus = cluster.allocatable(gpus) if gpus else ()
            capacity = cluster.whole_devices(capacity)
        simulated_driver = native.simulated_driver() if any(gpu.simulated for gpu in gpus) else None
        libraries = Libraries(native.preload_library(), simulated_driver)
        settings = NodeSettings(
            name=options.node,
            capacity_units=capacity,
            host_memory=HostMemorySettings(node=options.host_memory),
            arbiter=ArbiterSettings(exclusive=options.exclusive, context_bytes=CONTEXT_BYTES),
        )
        source = nvml if cluster is None else cluster.source(nvml, gpus)
        endpoints = None if cluster is None else cluster.endpoints(folder)
        instances = nvml.instances if cluster is None else None
        node = Node(settings, gpus, source, folder, libraries, endpoints, instances)
        answer: Answer = node.requests.answer
        await node.start()
        stack.push_async_callback(node.close)
        if cluster is not None:
            answer = await stack.enter_async_context(cluster.joined(node))
        control = ControlSocket(Path(os.path.abspath(control_path)), answer)
        await control.start()
        stack.push_async_callback(control.close)
        if options.metrics_port is not None:
            stack.callback(_serve_metrics(options, node))
        for gpu in gpus:
            log.info("GPU %d: %s, %.1f GiB, %s", gpu.index, gpu.model, gpu.memory_bytes / 2**30, gpu.uuid)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        log.info("ready on %s, state in %s", control.path, state_dir)
        await stop.wait()
        log.info("stopping; %d sessions stay in %s", len(node.report().sessions), state_dir)


def _serve_metrics(options: argparse.Namespace, node: Node) -> Callable[[], None]:
    """Serve the metrics. Return the function that stops the server. Raises Unusable."""
    from gpushare_spawner.agent.metrics import serve_metrics

    address, port = options.metrics_address, options.metrics_port
    try:
        return serve_metrics(port, node.report, address, options.metrics_token_file)
    except OSError as error:
        where = error.filename or f"{address}:{port}"
        raise Unusable(f"cannot serve metrics: {where}: {error.strerror}") from None
    except ValueError as error:
        raise Unusable(f"--metrics-token-file: {error}") from None


async def _resume(options: argparse.Namespace) -> bool:
    state_dir = Path(os.path.abspath(options.state_dir or _default_state_dir()))
    if not (state_dir / "records").is_dir():
        trouble = "has no folder records" if state_dir.is_dir() else "does not exist"
        raise Unusable(f"{state_dir} {trouble}: no agent has stored sessions there. Set --state-dir")
    async with contextlib.AsyncExitStack() as stack:
        folder = StateFolder(state_dir)
        stack.callback(folder.close)
        nvml = Nvml()
        stack.callback(nvml.close)
        checkpoints = DriverCheckpoints()
        stack.push_async_callback(checkpoints.close)
        sentences: list[str] = []

        def say(sentence: str) -> None:
            sentences.append(sentence)
            print(sentence)

        complete = await resume_all(folder.records, nvml.gpus(), nvml, checkpoints, say)
        if not sentences:
            print("No process is suspended.")
        return complete


def _default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/run/gpushare")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise Unusable("XDG_RUNTIME_DIR is not set: set --state-dir to a folder with a short path")
    return Path(runtime) / "gpushare"


def _overcommit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MOST_OVERCOMMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor from 1 to {MOST_OVERCOMMIT}, like 1.5")
    return value


def _host_memory(text: str) -> str:
    try:
        if text != "off" and resolve_bytes(text, 2**40) <= 0:
            raise ValueError(f"{text!r} leaves no memory")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; give bytes like 64Gi, a part like 50%, or off") from None
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)
