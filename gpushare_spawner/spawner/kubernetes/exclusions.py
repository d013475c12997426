"""Nodes that one server's spawns avoid for minutes, because its pod was not admitted there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpushare_spawner.spawner.queue.queue import SpawnRequest

LEFT_OUT_SECONDS = 180.0
"""How long a node is left out. Ours: a user who tries again after a failed spawn gets another node; a node that has
become free is not missed for long."""


@dataclass(frozen=True)
class _LeftOut:
    until: float
    missing: str


class Exclusions:
    """Nodes by server and template: another server may ask for less, and the node takes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[tuple[str, str], dict[str, _LeftOut]] = {}

    def leave_out(self, request: SpawnRequest, node: str, missing: str) -> None:
        """Avoid a node for this request. ``missing``: what it lacks, as half a sentence."""
        key = _key(request)
        self._nodes.setdefault(key, {})[node] = _LeftOut(self._clock() + LEFT_OUT_SECONDS, missing)

    def of(self, request: SpawnRequest) -> Mapping[str, str]:
        """Return what is missing on each node that this request avoids now."""
        self._forget_old()
        return {node: left.missing for node, left in self._nodes.get(_key(request), {}).items()}

    def _forget_old(self) -> None:
        now = self._clock()
        for key, nodes in list(self._nodes.items()):
            for node in [node for node, left in nodes.items() if left.until <= now]:
                del nodes[node]
            if not nodes:
                del self._nodes[key]


def _key(request: SpawnRequest) -> tuple[str, str]:
    return request.session, request.template.name
