"""Which sessions over quota make way for the spawns in quota that wait, and by how much.

Where a spawn would fit is not known here: the caller says so (`Gpus`). When a session makes way: idle/policy.py.
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
    """A session over quota that can make way. Units of 1 %, on each of its GPUs."""

    session: str
    account: str
    """The account's key."""
    node: str
    units: int
    """What it holds now, at least 1."""
    steps: Sequence[int]
    """What it can keep instead, the most first."""
    idle_since: float | None
    """Seconds since the epoch; None: it is active."""
    told: bool = False
    """Its user has a notice of this already."""
    opened_at: float = 0.0

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts those that make way first to the front.

        These are sessions that were told, else work would pass the notice on to others again and again, and the spawn
        would wait without end. Then idle ones, the longest idle first; then active ones, the newest first.
        """
        if self.told:
            return (0, self.opened_at, self.session)
        if self.idle_since is not None:
            return (1, self.idle_since, self.session)
        return (2, -self.opened_at, self.session)


class Gpus(Protocol[SpawnIn]):
    """The GPUs, and what is supposed to have happened on them so far."""

    def kind(self, spawn: SpawnIn) -> Hashable:
        """Return what is equal for spawns that need the same."""

    def place(self, spawn: SpawnIn) -> bool:
        """Place a spawn where it fits without anybody's making way, and keep its place; return whether it fits."""

    def fits(self, spawn: SpawnIn, node: str, kept: Mapping[str, int]) -> bool:
        """Return whether a spawn would fit on a node if sessions there kept only so many units."""

    def make_way(self, spawn: SpawnIn, node: str, kept: Mapping[str, int]) -> None:
        """Suppose that these sessions keep only so many units, and that the spawn has its place there."""


def reclaimed(asking: Iterable[Asking[Spawn]], sessions: Iterable[OverQuota], gpus: Gpus[Spawn]) -> dict[str, int]:
    """Return what sessions over quota keep, for those that make way. ``asking``: spawns in quota, in queue order.

    Each spawn takes only as much as it needs, of the sessions that come first, and nothing from sessions of its own
    account. What one spawn gets is not there for the next one, so one that needs the same as a spawn in vain is not
    tried again.
    """
    kept: dict[str, int] = {}
    in_vain: set[tuple[str, Hashable]] = set()
    ranked = sorted(sessions, key=lambda one: one.rank)
    for one in asking:
        what = one.account.key, gpus.kind(one.spawn)
        if gpus.place(one.spawn) or what in in_vain:
            continue
        others = [session for session in ranked if session.session not in kept and session.account != one.account.key]
        found = _least(one.spawn, others, gpus)
        if found is None:
            in_vain.add(what)
            continue
        node, taken = found
        gpus.make_way(one.spawn, node, taken)
        kept |= taken
    return kept


def _least(spawn: Spawn, ranked: Sequence[OverQuota], gpus: Gpus[Spawn]) -> tuple[str, dict[str, int]] | None:
    """Return the node where the first sessions that make way are enough, and what they keep; None: nowhere."""
    on_node: dict[str, list[OverQuota]] = {}
    for session in ranked:
        here = on_node.setdefault(session.node, [])
        here.append(session)
        kept = {one.session: one.steps[-1] for one in here}
        if gpus.fits(spawn, session.node, kept):
            return session.node, _spared(spawn, here, kept, gpus)
    return None


def _spared(spawn: Spawn, here: Sequence[OverQuota], kept: dict[str, int], gpus: Gpus[Spawn]) -> dict[str, int]:
    """Leave out the sessions that need not make way, and let the others keep what they can.

    Those that would make way last are spared first.
    """
    for one in reversed(here):
        without = {session: units for session, units in kept.items() if session != one.session}
        if gpus.fits(spawn, one.node, without):
            kept = without
    for one in reversed(here):
        if one.session not in kept:
            continue
        low, high = 0, len(one.steps) - 1
        while low < high:
            middle = (low + high) // 2
            if gpus.fits(spawn, one.node, kept | {one.session: one.steps[middle]}):
                high = middle
            else:
                low = middle + 1
        kept[one.session] = one.steps[high]
    return kept
