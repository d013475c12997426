"""Faults on demand: calls that fail, answers that are lost, watches that end, latency, lists that are behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from .access import Ask

Fault = Literal["500", "429", "410", "reset", "lost"]
"""`reset`: the connection breaks and nothing was done. `lost`: it was done, and then the connection breaks.

`410`, of a list or a watch: the version that it goes on from is too old, as after etcd has been compacted.
"""

FAULTS: tuple[Fault, ...] = ("500", "429", "reset", "lost")


def _everything(ask: Ask) -> bool:
    return bool(ask.resource)


def by_service_accounts(ask: Ask) -> bool:
    """Calls of pods' service accounts: of the hub, the service and the agents, not of kubelets, scheduler and admin."""
    return bool(ask.resource) and ask.user.startswith("system:serviceaccount:")


@dataclass
class Faults:
    """What goes wrong from now on. Change it at any time; a new one does nothing."""

    rate: float = 0.0
    """The part of the calls that fail, 0 to 1."""
    kinds: tuple[Fault, ...] = FAULTS
    applies_to: Callable[[Ask], bool] = _everything
    """Which calls `rate` is for; `by_service_accounts` spares the stand-ins' own."""
    latency: float = 0.0
    """Seconds that every call takes longer."""
    stale_at: int | None = None
    """Lists that accept any version (resourceVersion=0) show this one, as a watch cache may that is behind."""
    seed: int = 1
    failed: int = 0
    """Calls that were made to fail so far."""
    on_cut: Callable[[], object] = lambda: None
    on_done: Callable[[Ask], object] = lambda ask: None
    """Called when a call (no watch) has been carried out, before it is answered."""
    _next: list[tuple[Callable[[Ask], bool], Fault]] = field(default_factory=list)
    _random: random.Random | None = None

    def fail_next(
        self, verb: str, resource: str, fault: Fault = "500", times: int = 1, of: Callable[[Ask], bool] = _everything
    ) -> None:
        """The next calls of this verb (as in a Role) for this resource fail, whatever the rate."""
        self._next += [(lambda ask: (ask.verb, ask.resource) == (verb, resource) and of(ask), fault)] * times

    def cut_watches(self) -> None:
        """End every watch that is open now, as when a load balancer closes its connections."""
        self.on_cut()

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self.rate, self.latency, self.stale_at = 0.0, 0.0, None
        self._next.clear()

    def draw(self, ask: Ask) -> Fault | None:
        """What goes wrong with this call."""
        for position, (applies, fault) in enumerate(self._next):
            if applies(ask):
                del self._next[position]
                self.failed += 1
                return fault
        if self._random is None:
            self._random = random.Random(self.seed)
        if self.rate and self.applies_to(ask) and self._random.random() < self.rate:
            self.failed += 1
            return self._random.choice(self.kinds)
        return None

    async def delay(self) -> None:
        if self.latency:
            await asyncio.sleep(self.latency)
