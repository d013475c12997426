"""Chooses the sessions over quota that make way for waiting spawns in quota, and the units that they keep.

The caller decides where a spawn fits (`Gpus`). idle/policy.py decides when a session makes way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpushare_spawner.quota.order import Asking

Spawn = TypeVar("Spawn")
SpawnIn = TypeVar("SpawnIn", contravariant=True)


@dataclass(frozen=True)
class OverQuota:
    """A session over quota that can make way. Units are on each of its GPUs."""

    session: str
    account: str
    """The account's key."""
    node: str
    units: int
    """Current units, at least 1."""
    steps: Sequence[int]
    """The units that it could keep instead, in descending order."""
    idle_since: float | None
    """Seconds since the epoch; None if it is active."""
    notified: bool = False
    """Whether its user has a notice that it makes way."""
    opened_at: float = 0.0

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: the first session to make way comes first.

        Sessions with a notice come first. Otherwise, work in one session would repeatedly move the notice to another,
        and the spawn would never start. Idle sessions follow, longest idle first, then active sessions, newest first.
        """
        if self.notified:
            return (0, self.opened_at, self.session)
        if self.idle_since is not None:
            return (1, self.idle_since, self.session)
        return (2, -self.opened_at, self.session)


class Gpus(Protocol[SpawnIn]):
    """The GPUs after the changes simulated so far."""

    def kind(self, spawn: SpawnIn) -> Hashable:
        """Return a key that is equal for spawns with equal needs."""

    def place(self, spawn: SpawnIn) -> bool:
        """Place a spawn on free units, and record its placement. Return whether it fits."""

    def fits(self, spawn: SpawnIn, node: str, kept: Mapping[str, int]) -> bool:
        """Return whether a spawn would fit on a node if its sessions were reduced to the units in ``kept``."""

    def make_way(self, spawn: SpawnIn, node: str, kept: Mapping[str, int]) -> None:
        """Simulate the reduction of the sessions to the units in ``kept``, and the spawn's placement on the node."""


def reclaimed(asking: Iterable[Asking[Spawn]], sessions: Iterable[OverQuota], gpus: Gpus[Spawn]) -> dict[str, int]:
    """Return the sessions that make way, with the units that they keep. ``asking``: spawns in quota, in queue order.

    Each spawn takes only the units that it needs, from the first sessions by rank, and never from its own account.
    Units go to one spawn only, so a spawn with the same needs as a rejected spawn is not tried.
    """
    kept: dict[str, int] = {}
    rejected: set[tuple[str, Hashable]] = set()
    ranked = sorted(sessions, key=lambda session: session.rank)
    for request in asking:
        needs = request.account.key, gpus.kind(request.spawn)
        if gpus.place(request.spawn) or needs in rejected:
            continue
        others = [
            session for session in ranked if session.session not in kept and session.account != request.account.key
        ]
        match = _least(request.spawn, others, gpus)
        if match is None:
            rejected.add(needs)
            continue
        node, taken = match
        gpus.make_way(request.spawn, node, taken)
        kept |= taken
    return kept


def _least(spawn: Spawn, ranked: Sequence[OverQuota], gpus: Gpus[Spawn]) -> tuple[str, dict[str, int]] | None:
    """Return the first node on which enough sessions can make way, and the units that they keep.

    Return None if there is no such node.
    """
    on_node: dict[str, list[OverQuota]] = {}
    for session in ranked:
        here = on_node.setdefault(session.node, [])
        here.append(session)
        kept = {session.session: session.steps[-1] for session in here}
        if gpus.fits(spawn, session.node, kept):
            return session.node, _spared(spawn, here, kept, gpus)
    return None


def _spared(spawn: Spawn, here: Sequence[OverQuota], kept: dict[str, int], gpus: Gpus[Spawn]) -> dict[str, int]:
    """Spare sessions that need not make way, and let the others keep as many units as possible.

    The last sessions by rank are spared first.
    """
    for candidate in reversed(here):
        without = {session: units for session, units in kept.items() if session != candidate.session}
        if gpus.fits(spawn, candidate.node, without):
            kept = without
    for candidate in reversed(here):
        if candidate.session not in kept:
            continue
        low, high = 0, len(candidate.steps) - 1
        while low < high:
            middle = (low + high) // 2
            if gpus.fits(spawn, candidate.node, kept | {candidate.session: candidate.steps[middle]}):
                high = middle
            else:
                low = middle + 1
        kept[candidate.session] = candidate.steps[high]
    return kept
