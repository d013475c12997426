"""Chooses the sessions that make way for waiting spawns, and the units that they keep.

For each spawn one plan for one node: it disturbs the fewest working users, then the fewest users, and takes the fewest
units. The caller knows the nodes (`Gpus`). idle/policy.py decides when a session makes way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import combinations, groupby
from math import comb
from typing import NamedTuple, Protocol, TypeVar

from gpushare_spawner.model.template import PRIORITIES
from gpushare_spawner.quota.entitlement import LEAST_EXCHANGED
from gpushare_spawner.quota.order import Asking

Spawn = TypeVar("Spawn")
SpawnIn = TypeVar("SpawnIn", contravariant=True)

NORMAL = PRIORITIES.index("normal")
MOST_TOGETHER = 4096
"""Sets of sessions, times choices of GPUs, that are all compared on one node. If there are more, each GPU is planned by
itself. After so many plans no further node is searched for the spawn. Our value: at most 0.3 s."""
MOST_SEARCHED = 20
"""Nodes that are searched so for one spawn, the best first. Our value."""


@dataclass(frozen=True)
class OverQuota:
    """Session over quota that can make way. Units of 1 %, on each of its GPUs."""

    session: str
    account: str
    """The account's key."""
    node: str
    units: int
    """Current units, at least 1."""
    steps: Sequence[int]
    """The units that it could keep instead, in descending order: all between two bounds, or single steps."""
    idle_since: float | None
    """Seconds since the epoch; None if it is active."""
    user: str
    gpus: Sequence[str]
    """UUIDs of its GPUs."""
    notified: bool = False
    """Whether its user has a notice that it makes way."""
    opened_at: float = 0.0
    had_minimum_run: bool = True
    """Whether it can lose units to accounts over quota: it has not lost or gained units for `MINIMUM_RUN`."""

    priority: int = NORMAL
    """See `Template.rank`."""
    last_units: int = 0
    """Units of its share on the last GPU if these are fewer; 0: as many."""

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: the first session to make way comes first.

        Sessions with a notice come first. Idle sessions follow, longest idle first, then active sessions, newest first.
        """
        if self.notified:
            return (0, self.opened_at, self.session)
        if self.idle_since is not None:
            return (1, self.idle_since, self.session)
        return (2, -self.opened_at, self.session)

    @property
    def most(self) -> int:
        """The most units that it can give up."""
        return self.units - self.steps[-1]

    def on(self, gpu: str) -> OverQuota | None:
        """Return the session with its units on one of its GPUs; None if it can give up none there."""
        if not self._unused(gpu):
            return self
        steps = [step for step in self.steps if step < self.last_units]
        return replace(self, units=self.last_units, steps=steps, last_units=0) if steps else None

    def freed(self, gpu: str, given: int) -> int:
        """Return the units that are free on one of its GPUs when it gives up so many on each."""
        return max(0, given - self._unused(gpu))

    def freed_on_all(self, given: int) -> int:
        """Return the units that are free on all its GPUs together when it gives up so many on each."""
        return sum(self.freed(gpu, given) for gpu in self.gpus)

    def steps_within(self, most: float) -> Sequence[int]:
        """Return the steps that free at most so many units on all its GPUs together."""
        return self.steps[: bisect_right(self.steps, most, key=lambda step: self.freed_on_all(self.units - step))]

    def to_free(self, gpu: str, units: int) -> int:
        """Return the units that it must give up on each GPU for so many on this one."""
        return units + self._unused(gpu) if units > 0 else 0

    def _unused(self, gpu: str) -> int:
        """Return its units that it does not have on this GPU."""
        return max(0, self.units - self.last_units) if self.last_units and gpu == self.gpus[-1] else 0

    @property
    def works(self) -> bool:
        """Whether it makes way while its user works, and without a notice so far."""
        return self.idle_since is None and not self.notified


@dataclass(frozen=True)
class MissingUnits:
    """GPUs of one node and model, of which a spawn needs some."""

    count: int
    """GPUs that the spawn needs."""
    units: Mapping[str, int]
    """Units that sessions on each GPU must give up; 0 or less: none."""
    last_resort: bool = False
    """Whether the node is chosen only if no other node has a plan."""


class Gpus(Protocol[SpawnIn]):
    """The GPUs after the changes simulated so far."""

    def kind(self, spawn: SpawnIn) -> Hashable:
        """Return a key that is equal for spawns with equal needs."""

    def place(self, spawn: SpawnIn) -> str | None:
        """Place a spawn on free units, and record its placement. Return the node; None if it does not fit."""

    def lacking(self, spawn: SpawnIn, node: str) -> Iterable[MissingUnits]:
        """Return the GPUs of a node that could take a spawn; none if it lacks anything that no session gives up."""

    def make_way(self, spawn: SpawnIn, node: str, units_left: Mapping[str, int]) -> None:
        """Simulate the reduction of the sessions to ``units_left``, and the spawn's placement on the node."""


Disturbed = tuple[int, int, int]
"""Working users without a notice, users without a notice, all users. A notice is not passed to other users
again and again: otherwise work would do so, and the spawn would never start."""
Order = tuple[tuple[int, float, str], ...]
"""Ranks of sessions, the most recent work first."""


class _Plan(NamedTuple):
    """Sessions of one node that make way for a spawn. The least plan is the best."""

    disturbed: Disturbed
    excess: int
    """Units beyond need."""
    order: Order
    units_left: tuple[tuple[str, int], ...] = ()
    """Units that each session keeps."""


@dataclass
class _Best:
    """The best plan of a node that is known."""

    plan: _Plan
    unsearched: list[tuple[MissingUnits, Sequence[OverQuota]]]
    """GPUs and sessions with sets that are not compared yet."""
    last_resort: bool
    """See `MissingUnits.last_resort`."""

    def search(self) -> int:
        """Compare all sets of sessions. Return the number of compared plans."""
        compared = 0
        for group, here in self.unsearched:
            for plan in _together(group, here, self.plan.disturbed):
                self.plan = min(self.plan, plan)
                compared += 1
        self.unsearched.clear()
        return compared


def reclaimed(asking: Iterable[Asking[Spawn]], sessions: Iterable[OverQuota], gpus: Gpus[Spawn]) -> dict[str, int]:
    """Return the sessions that make way, with the units that they keep. ``asking``: spawns in quota, in queue order.

    Sessions with a higher priority make way only if no plan without them exists. Each spawn takes only the units that
    it needs, and none from its own account. Units go to one spawn only. Plans for a node are valid until it changes.
    """
    units_left: dict[str, int] = {}
    on_node: dict[str, list[OverQuota]] = {}
    for session in sorted(sessions, key=lambda session: session.rank):
        on_node.setdefault(session.node, []).append(session)
    priorities = sorted({session.priority for here in on_node.values() for session in here})
    plans: dict[tuple[str, Hashable, int], dict[str, _Best | None]] = {}
    for request in asking:
        spawn, account = request.spawn, request.account.key
        changed = gpus.place(spawn)
        if changed is None:
            plans_here: list[tuple[_Best, str]] = []
            last_resorts: list[tuple[_Best, str]] = []
            for priority in priorities:
                by_node = plans.setdefault((account, gpus.kind(spawn), priority), {})
                for node in on_node.keys() - by_node.keys():
                    others = [
                        session
                        for session in on_node[node]
                        if session.account != account and session.priority <= priority
                    ]
                    by_node[node] = _best(gpus.lacking(spawn, node), others)
                plans_here = [(best, node) for node, best in by_node.items() if best is not None]
                if any(not best.last_resort for best, _ in plans_here):
                    break
                last_resorts = last_resorts or plans_here
            else:
                plans_here = last_resorts
            compared = 0
            for best, _ in nsmallest(MOST_SEARCHED, plans_here, key=_order):
                if compared < MOST_TOGETHER:
                    compared += best.search()
            if not plans_here:
                continue
            best, changed = min(plans_here, key=_order)
            taken = dict(best.plan.units_left)
            gpus.make_way(spawn, changed, taken)
            units_left |= taken
            on_node[changed] = list(_left(on_node[changed], taken))
        for by_node in plans.values():
            by_node.pop(changed, None)
    return units_left


def in_excess(
    sessions: Iterable[OverQuota], excess: Mapping[str, float], lacking: float, units: int
) -> Iterator[OverQuota]:
    """Yield the sessions that can give units to an account that lacks its entitlement, with their possible gifts.

    Only accounts beyond their entitlements give: their excess, and what a spawn of ``units`` gets more than its account
    is ``lacking``. ``excess``: see `Entitlements.excess`.
    """
    left: dict[tuple[str, str], float] = {}
    for session in sorted(sessions, key=lambda session: session.rank):
        if not session.had_minimum_run or excess[session.account] < LEAST_EXCHANGED:
            continue
        key = session.account, session.node
        most = left.setdefault(key, excess[session.account] + max(0.0, units - lacking))
        steps = session.steps_within(most)
        if steps:
            left[key] -= session.freed_on_all(session.units - steps[-1])
            yield replace(session, steps=steps)


def _order(candidate: tuple[_Best, str]) -> tuple[bool, _Plan, str]:
    return candidate[0].last_resort, candidate[0].plan, candidate[1]


def _left(sessions: Iterable[OverQuota], taken: Mapping[str, int]) -> Iterator[OverQuota]:
    """Yield the sessions that can still make way. Sessions that make way already are preferred, as if notified."""
    for session in sessions:
        units = taken.get(session.session, session.units)
        steps = [step for step in session.steps if step < units]
        if units == session.units:
            yield session
        elif steps:
            yield replace(session, units=units, steps=steps, notified=True)


def _best(groups: Iterable[MissingUnits], sessions: Sequence[OverQuota]) -> _Best | None:
    """Return the best plan for a node by the best sets for each GPU; None if not enough sessions can make way."""
    plans: list[_Plan] = []
    unsearched: list[tuple[MissingUnits, Sequence[OverQuota]]] = []
    last_resort = False
    for group in groups:
        last_resort = group.last_resort
        here = [session for session in sessions if not group.units.keys().isdisjoint(session.gpus)]
        on_gpus: list[tuple[_Plan, str, Sequence[OverQuota]]] = []
        for gpu, units in group.units.items():
            able = [reduced for session in here if gpu in session.gpus if (reduced := session.on(gpu)) is not None]
            best_here = _on_gpu(units, able)
            if best_here is not None:
                names = {session.session for session in best_here}
                chosen = [session for session in here if session.session in names]
                on_gpus.append((_plan(chosen, {gpu: units}), gpu, chosen))
        if len(on_gpus) < group.count:
            continue
        best = nsmallest(group.count, on_gpus, key=lambda entry: entry[:2])
        together = {session.session: session for _, _, chosen in best for session in chosen}
        plans.append(_plan(together.values(), {gpu: group.units[gpu] for _, gpu, _ in best}))
        tried = 2 ** len(here) * comb(len(group.units), group.count)
        if group.count > 1 and tried <= MOST_TOGETHER and _share_users(here, group.units):
            unsearched.append((group, here))
    return _Best(min(plans), unsearched, last_resort) if plans else None


def _share_users(here: Iterable[OverQuota], units: Mapping[str, int]) -> bool:
    """Return whether a user has units of several GPUs: then the best sets of each GPU are not the best together."""
    of_user = {(session.user, gpu) for session in here for gpu in session.gpus if gpu in units}
    return any(count > 1 for count in Counter(user for user, _ in of_user).values())


def _plan(sessions: Collection[OverQuota], units: Mapping[str, int]) -> _Plan:
    """Return the plan in which these sessions give up the units that the GPUs lack.

    Sessions that would make way last keep as much as possible. Sessions that need not make way are left out.
    """
    given = {session.session: session.most for session in sessions}
    short = {
        gpu: units[gpu] - sum(session.freed(gpu, session.most) for session in sessions if gpu in session.gpus)
        for gpu in units
    }
    order = sorted(sessions, key=lambda session: (len(session.gpus), session.rank), reverse=True)
    for session in order:
        before = given[session.session]
        needed = max(
            session.to_free(gpu, session.freed(gpu, before) + short[gpu]) for gpu in session.gpus if gpu in short
        )
        gives = 0 if needed <= 0 else session.units - session.steps[_first_step(session, needed)]
        for gpu in session.gpus:
            if gpu in short:
                short[gpu] += session.freed(gpu, before) - session.freed(gpu, gives)
        given[session.session] = gives
    giving = [session for session in order if given[session.session]]
    taken = sum(session.freed_on_all(given[session.session]) for session in giving)
    return _Plan(
        _disturbed(giving),
        taken - sum(max(0, lacking) for lacking in units.values()),
        tuple(sorted((session.rank for session in giving), reverse=True)),
        tuple((session.session, session.units - given[session.session]) for session in giving),
    )


def _first_step(session: OverQuota, needed: int) -> int:
    """Return the number of the step that gives up at least the needed units."""
    return bisect_left(session.steps, needed, key=lambda step: session.units - step)


def _disturbed(sessions: Iterable[OverQuota]) -> Disturbed:
    works: dict[str, tuple[bool, bool]] = {}
    for session in sessions:
        before = works.get(session.user, (False, False))
        works[session.user] = (before[0] or session.works, before[1] or not session.notified)
    return sum(new for new, _ in works.values()), sum(new for _, new in works.values()), len(works)


class _Chosen(NamedTuple):
    """Some of the sessions of one GPU. The least is the best."""

    disturbed: Disturbed
    least: int
    """Units that they give up at least."""
    order: Order


_NOBODY = _Chosen((0, 0, 0), 0, ())


def _on_gpu(lacking: int, here: Sequence[OverQuota]) -> Sequence[OverQuota] | None:
    """Return the best sessions to give up the units that one GPU lacks; None if all together cannot.

    A knapsack, solved by dynamic programming over the units that the sessions can give up.
    """
    if lacking <= 0:
        return ()
    if sum(session.most for session in here) < lacking:
        return None
    best = {0: _NOBODY}
    for _, of_user in groupby(
        sorted(here, key=lambda session: (session.user, session.rank)), lambda session: session.user
    ):
        best = _with_user(best, tuple(of_user), lacking)
    names = {name for _, _, name in best[lacking].order}
    return [session for session in here if session.session in names]


def _with_user(best: Mapping[int, _Chosen], of_user: Sequence[OverQuota], lacking: int) -> dict[int, _Chosen]:
    """Return the best sessions for each number of units, with any of the sessions of one more user."""
    states: dict[tuple[int, bool, bool], _Chosen] = {}
    for session in of_user:
        before = [((units, False, False), chosen) for units, chosen in best.items()] + list(states.items())
        for (units, works, new), chosen in before:
            order = tuple(sorted((*chosen.order, session.rank), reverse=True))
            for least, most in _gifts(session):
                key = (min(lacking, units + most), works or session.works, new or not session.notified)
                more = _Chosen(chosen.disturbed, chosen.least + least, order)
                if key not in states or more < states[key]:
                    states[key] = more
    result = dict(best)
    for (units, works, new), chosen in states.items():
        working, fresh, users = chosen.disturbed
        more = _Chosen((working + works, fresh + new, users + 1), chosen.least, chosen.order)
        if units not in result or more < result[units]:
            result[units] = more
    return result


def _gifts(session: OverQuota) -> Iterable[tuple[int, int]]:
    """Return the least and the most units that a session can give up; several pairs if it has single steps."""
    steps = session.steps
    if steps[0] - steps[-1] == len(steps) - 1:
        return [(session.units - steps[0], session.most)]
    return [(session.units - step, session.units - step) for step in steps]


def _together(group: MissingUnits, here: Sequence[OverQuota], most: Disturbed) -> Iterator[_Plan]:
    """Yield the plans of all sets of sessions that free enough GPUs and disturb no more users than so many."""
    for sessions in _sets(here, (), most):
        given = Counter[str]()
        for session in sessions:
            given.update({gpu: session.freed(gpu, session.most) for gpu in session.gpus})
        free = [gpu for gpu, units in group.units.items() if units <= given[gpu]]
        for gpus in combinations(free, group.count):
            there = [session for session in sessions if not set(gpus).isdisjoint(session.gpus)]
            yield _plan(there, {gpu: group.units[gpu] for gpu in gpus})


def _sets(left: Sequence[OverQuota], chosen: tuple[OverQuota, ...], most: Disturbed) -> Iterator[tuple[OverQuota, ...]]:
    """Yield each set of sessions with the chosen ones that disturbs no more users than so many."""
    if _disturbed(chosen) > most:
        return
    yield chosen
    for number, session in enumerate(left):
        yield from _sets(left[number + 1 :], (*chosen, session), most)
