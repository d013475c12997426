"""Choice of the sessions over quota that make way for waiting spawns in quota, and of the units that these keep.

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
    """Session over quota that can make way. Units of 1 %, on each of its GPUs."""

    session: str
    account: str
    """The account's key."""
    node: str
    units: int
    """Units that it holds now, at least 1."""
    steps: Sequence[int]
    """Units that it can keep instead, the most first."""
    idle_since: float | None
    """Seconds since the epoch; None if it is active."""
    notified: bool = False
    """Whether its user has a notice of this."""
    opened_at: float = 0.0

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: the session that makes way first comes first.

        Notified sessions come first: otherwise work would pass the notice to other sessions again and again, and the
        spawn would never start. Then idle sessions, the longest idle first; then active sessions, the newest first.
        """
        if self.notified:
            return (0, self.opened_at, self.session)
        if self.idle_since is not None:
            return (1, self.idle_since, self.session)
        return (2, -self.opened_at, self.session)


class Gpus(Protocol[SpawnIn]):
    """GPUs with the changes simulated so far."""

    def kind(self, spawn: SpawnIn) -> Hashable:
        """Return a key that is equal for spawns with equal needs."""

    def place(self, spawn: SpawnIn) -> bool:
        """Place a spawn on free units and keep its place. Return whether it fits."""

    def fits(self, spawn: SpawnIn, node: str, kept: Mapping[str, int]) -> bool:
        """Return whether a spawn would fit on a node if these sessions kept only so many units."""

    def make_way(self, spawn: SpawnIn, node: str, kept: Mapping[str, int]) -> None:
        """Simulate that these sessions keep only so many units and that the spawn is placed there."""


def reclaimed(asking: Iterable[Asking[Spawn]], sessions: Iterable[OverQuota], gpus: Gpus[Spawn]) -> dict[str, int]:
    """Return the units that each session keeps if it makes way. ``asking``: spawns in quota, in queue order.

    Each spawn takes only the units that it needs, from the first sessions in order, and none from its own account.
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
    """Return the first node where enough sessions can make way, and the units that they keep.

    None if there is no such node.
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
    """Leave out sessions that need not make way. The others keep as many units as possible.

    Sessions that would make way last are spared first.
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
