"""A kubelet's accounts of devices: what plugins offer, who holds what, and which are handed out next.

It counts ids and does no arithmetic, as a kubelet does: ids that are held but no longer offered make nothing scarcer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Held = dict[str, dict[str, set[str]]]
"""Container -> resource -> ids."""

STOPPED_PLUGIN_GRACE = 300.0
"""Seconds after which the devices of a plugin that has gone no longer count as capacity."""


class AdmissionError(Exception):
    """A pod cannot run here; `reason` and the message go into its status."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Offer:
    """What the plugin of one resource offers."""

    healthy: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    stopped_at: float | None = None
    """When its plugin went away."""


@dataclass
class Devices:
    """`checkpoint` survives restarts of the kubelet."""

    checkpoint: Path
    offers: dict[str, Offer] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    """By pod uid."""
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name by pod uid."""
    given: dict[str, bytes] = field(default_factory=dict)
    """What plugins answered, by pod uid/container/resource, serialised."""

    def load(self) -> None:
        """After a start: nobody offers anything, pods hold what they held."""
        self.offers, self.held = {}, {}
        if not self.checkpoint.exists():
            return
        saved = json.loads(self.checkpoint.read_text())
        for resource in saved["resources"]:
            self.offers[resource] = Offer(stopped_at=time.monotonic())
        self.given = {key: bytes.fromhex(answer) for key, answer in saved["given"].items()}
        self.names = {uid: (namespace, name) for uid, (namespace, name) in saved["names"].items()}
        self.held = {
            uid: {container: {name: set(ids) for name, ids in held.items()} for container, held in containers.items()}
            for uid, containers in saved["held"].items()
        }

    def save(self) -> None:
        held = {
            uid: {
                container: {name: sorted(ids) for name, ids in held.items()} for container, held in containers.items()
            }
            for uid, containers in self.held.items()
        }
        given = {key: answer.hex() for key, answer in self.given.items()}
        saved = {"resources": sorted(self.offers), "held": held, "names": self.names, "given": given}
        self.checkpoint.write_text(json.dumps(saved))

    def offered(self, resource: str, healthy: Iterable[str], unhealthy: Iterable[str]) -> None:
        """A plugin's message: it replaces the lists."""
        self.offers[resource] = Offer(set(healthy), set(unhealthy))
        self.save()

    def plugin_gone(self, resource: str) -> None:
        offer = self.offers.get(resource)
        if offer is not None:
            offer.unhealthy |= offer.healthy
            offer.healthy = set()
            offer.stopped_at = time.monotonic()

    def amounts(self) -> dict[str, tuple[int, int]]:
        """(capacity, allocatable) of each resource that a plugin has ever offered."""
        found = {}
        for resource, offer in self.offers.items():
            if offer.stopped_at is not None and time.monotonic() - offer.stopped_at > STOPPED_PLUGIN_GRACE:
                offer.unhealthy = set()
            found[resource] = len(offer.healthy) + len(offer.unhealthy), len(offer.healthy)
        return found

    def in_use(self, resource: str) -> set[str]:
        return {
            one for containers in self.held.values() for held in containers.values() for one in held.get(resource, ())
        }

    def missing(self, uid: str, container: str, resource: str, needed: int) -> int:
        """How many ids a container still needs. Raises AdmissionError when what it holds or needs is not to be had."""
        offer = self.offers[resource]
        holds = self.held.get(uid, {}).get(container, {}).get(resource, set())
        if not offer.healthy:
            raise allocation_failed(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if not holds <= offer.healthy:
            raise allocation_failed(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            )
        missing = max(needed - len(holds), 0)
        available = len(offer.healthy - self.in_use(resource))
        if missing > available:
            raise allocation_failed(
                f"requested number of devices unavailable for {resource}. Requested: {missing}, Available: {available}"
            )
        return missing

    async def choose(
        self, resource: str, count: int, prefer: Callable[[list[str]], Awaitable[list[str]]] | None
    ) -> set[str]:
        """Free ids: those that the plugin prefers, else any."""
        free = sorted(self.offers[resource].healthy - self.in_use(resource))
        chosen: list[str] = []
        if prefer is not None:
            chosen = [one for one in await prefer(free) if one in free][:count]
        others = [one for one in free if one not in chosen]
        return {*chosen, *random.sample(others, count - len(chosen))}

    def hold(self, pod: dict[str, Any], container: str, resource: str, ids: set[str], answer: bytes) -> None:
        """The ids are the container's until its pod ends; `answer` is what the plugin said, serialised."""
        metadata = pod["metadata"]
        containers = self.held.setdefault(metadata["uid"], {})
        containers.setdefault(container, {}).setdefault(resource, set()).update(ids)
        self.given[f"{metadata['uid']}/{container}/{resource}"] = answer
        self.names[metadata["uid"]] = metadata["namespace"], metadata["name"]
        self.save()

    def free(self, uid: str) -> None:
        """The pod has ended."""
        self.names.pop(uid, None)
        self.given = {key: answer for key, answer in self.given.items() if not key.startswith(f"{uid}/")}
        if self.held.pop(uid, None) is not None:
            self.save()


def allocation_failed(why: str) -> AdmissionError:
    """As a kubelet words it."""
    return AdmissionError(
        "UnexpectedAdmissionError", f"Pod was rejected: Allocate failed due to {why}, which is unexpected"
    )
