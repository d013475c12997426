"""What `gpushare agent` asks of a cluster: interfaces, so that the command knows none.

`agent.kubernetes.options` implements them. cli.py puts the two together.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.periodic import GpuSource
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.sockets.session_endpoint import SessionEndpoints
from gpushare_spawner.agent.state.state_folder import StateFolder
from gpushare_spawner.model.protocol.control import Request

Answer = Callable[[Request], Awaitable[dict[str, Any]]]
"""Answers the control socket's requests. Raises ControlRefused."""


class Unusable(RuntimeError):
    """An option of the command cannot be used; the text says which and why."""


class Cluster(Protocol):
    """A cluster that this machine is a node of, as the options describe it."""

    @property
    def host_dir(self) -> Path:
        """The folder of the node that the agent keeps its state in."""

    @property
    def observes(self) -> bool:
        """Whether the agent gives out no GPU, and only observes the sessions of another layer."""

    def claimed(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Return the GPUs that this agent may give out. Raises NoGpu."""

    def whole_devices(self, units: int) -> int:
        """Return the units of a GPU that devices can be made of."""

    def source(self, nvml: GpuSource, gpus: tuple[Gpu, ...]) -> GpuSource:
        """Return NVML as far as it can be matched with the processes that connect."""

    def endpoints(self, folder: StateFolder) -> SessionEndpoints:
        """Return what makes the sockets of sessions."""

    def joined(self, node: Node, libraries: Libraries, source: GpuSource) -> AbstractAsyncContextManager[Answer]:
        """Make the started node part of the cluster while the context is open. `source`: the node's NVML.

        Raises Unusable or OSError.
        """


class ClusterOptions(Protocol):
    """The options of `gpushare agent` that concern a cluster."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def read(self, options: argparse.Namespace) -> Cluster | None:
        """Return the cluster that the options describe; None for a single machine. Raises Unusable."""
