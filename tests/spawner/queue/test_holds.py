"""A spawn that waits has the GPUs kept that will fit it first; others use the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier
from gpushare_spawner.placement.ledger import NodeHold
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.spawner.queue.availability import AvailabilityNow
from gpushare_spawner.spawner.queue.queue import PAUSE_SECONDS, UNKNOWN_HOLD_SECONDS, LoopBreaks, Ticket
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST

from .machine import Machine


async def one_pass(machine: Machine) -> dict[str, str]:
    """Where each ticket of the queue was placed."""
    placer, placed = machine.placer(), {}
    for ticket in machine.queue:
        place = placer.place(ticket)
        if place is None:
            await placer.hold(ticket, LoopBreaks())
            continue
        name, units = ticket.request.session, ticket.request.share.units
        held = Allocation(name, place.gpus, units, 0, units, 0.0)
        placer.gave(held)
        machine.held.append(held)
        machine.queue.leave(ticket)
        placed[name] = place.node
    return placed


def holds(machine: Machine) -> list[str]:
    return [hold.node for hold in machine.feed.ledger.holds.values()]


def hold_of(machine: Machine, ticket: Ticket) -> NodeHold | None:
    return machine.feed.ledger.holds.get(ticket.hold_name)


async def test_a_spawn_that_waits_keeps_the_gpu_of_which_least_has_to_become_free() -> None:
    machine = Machine()
    machine.hold("a", 80)
    machine.hold("b", 50)
    machine.join("big", count=1)
    machine.join("small", 0.2)
    assert await one_pass(machine) == {"small": "a"}
    assert holds(machine) == ["b"]
    late = machine.join("late", 0.2)
    assert await one_pass(machine) == {}
    assert late.hint == EARLIER_FIRST


async def test_a_rebuilt_ledger_with_as_many_changes_gives_no_place_of_before() -> None:
    machine = Machine(nodes={"a": ("A100",)})
    ticket = machine.join("big", count=1)
    check = machine.check()
    ledger, request = check.ledger, check.request_of(ticket)
    for cpu in (4000, 8000):
        machine.cpu("a", cpu)
    assert check.verdict(request).placement is not None
    version = ledger.capacity.version
    there = machine.hold("a", 50)
    ledger.make_anew({"a": machine.reports[0].gpus}, [there])
    assert ledger.capacity.version == version
    assert check.verdict(request).placement is None


async def test_a_rebuilt_ledger_with_as_many_changes_gives_no_nodes_of_before() -> None:
    machine = Machine(nodes={"a": ("A100",)})
    placer, ledger = machine.placer(), machine.feed.ledger
    request = machine.check().request_of(machine.join("big", count=1))
    for cpu in range(4000, 4020):
        machine.cpu("a", cpu)
    version = ledger.capacity.version
    assert placer._yielding_nodes(request) == ("a",)
    ledger.make_anew({"other": machine.reports[0].gpus}, [])
    while ledger.capacity.version < version:
        machine.cpu("other", ledger.capacity.version)
    assert ledger.capacity.version == version
    assert placer._yielding_nodes(request) == ("other",)


async def test_a_known_idle_action_decides_which_gpu_is_kept() -> None:
    machine = Machine()
    machine.hold("a", 80)
    machine.hold("b", 50)
    machine.notify("a", Tier.RELEASED, at=300.0)
    machine.join("big", count=1)
    machine.join("small", 0.2)
    assert await one_pass(machine) == {"small": "b"}
    assert holds(machine) == ["a"]
    machine.notices.clear()
    assert await one_pass(machine) == {}
    assert holds(machine) == ["b"]


async def test_idle_actions_that_are_called_off_again_and_again_do_not_keep_a_spawn_waiting() -> None:
    machine = Machine(length=99)
    ends = {machine.hold("ba"[turn % 2], 50, f"s{turn}").session: turn for turn in range(3, 7)}
    machine.join("big", count=1)
    for turn in range(1, 30):
        machine.held = [held for held in machine.held if ends[held.session] > turn]
        # the users of one GPU are told, and work again before it happens; then those of the other
        told, stop = f"GPU-{'ab'[turn % 2]}", Notice(tier=Tier.STOPPED, at=300.0, reason="idle", effective_units=0)
        machine.notices = [(held.session, stop) for held in machine.held if held.gpus == (told,)]
        machine.join(f"small{turn}", 0.5)
        placed = await one_pass(machine)
        # a part of the other GPU comes free meanwhile, each time when it is not kept
        ends |= dict.fromkeys(placed, turn + 4)
        if "big" in placed:
            return
    raise AssertionError("passed by all others")


async def test_of_several_idle_actions_the_first_one_that_makes_it_fit_decides() -> None:
    machine = Machine(nodes={"a": ("A100", "A100"), "b": ("A100", "A100")})
    for gpu in ("a", "a-1", "b", "b-1"):
        machine.hold(gpu, 100)
    machine.notify("a", Tier.RELEASED, at=100.0)
    machine.notify("b", Tier.STOPPED, at=200.0)
    machine.notify("b-1", Tier.DOWNGRADED, at=250.0, units=10)
    machine.join("two", count=2)
    await one_pass(machine)
    # what the notices free is enough on no node: all are alike
    assert holds(machine) == ["a"]
    machine.notify("b-1", Tier.RELEASED, at=300.0)
    await one_pass(machine)
    assert holds(machine) == ["b"]


async def test_what_is_kept_is_given_to_the_spawn_itself() -> None:
    machine = Machine()
    machine.hold("a", 80)
    machine.hold("b", 50)
    machine.join("big", count=1)
    await one_pass(machine)
    machine.held.pop()
    assert await one_pass(machine) == {"big": "b"}
    assert not holds(machine)


async def test_an_earlier_spawn_is_not_kept_from_what_a_later_one_claims() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 100)
    machine.join("first", count=1)
    only = machine.join("only-b", 0.5, node="b")
    machine.join("third", 0.5)
    await one_pass(machine)
    # a spawn has a hold where it is the first that could use some node
    assert holds(machine) == ["a"]
    assert hold_of(machine, only) is None
    machine.held.pop()
    assert await one_pass(machine) == {"first": "b"}
    assert holds(machine) == ["b", "a"]


async def test_a_spawn_that_waits_for_one_node_holds_up_nobody_who_cannot_use_it() -> None:
    machine = Machine(length=9, nodes={"labelled": ("A100",), "plain": ("A100",), "other": ("A100",)})
    for gpu, units in (("labelled", 90), ("plain", 50), ("other", 60)):
        machine.hold(gpu, units)
    special = machine.join("special", count=1, ineligible=["plain", "other"])
    whole = machine.join("whole", count=1, ineligible=["labelled"])
    machine.join("small", 0.1, ineligible=["labelled"])
    assert await one_pass(machine) == {"small": "other"}
    wanted = hold_of(machine, special)
    assert wanted is not None
    assert wanted.node == "labelled"
    # and it is not passed by everybody either, although another spawn waits before it
    kept = hold_of(machine, whole)
    assert kept is not None
    assert kept.node == "plain"


async def test_sixty_quarters_go_on_while_one_spawn_waits_for_eight_gpus() -> None:
    machine = Machine(length=99, nodes=dict.fromkeys("abcdef", ("A100",) * 8))
    for node in "abcdef":
        machine.hold(f"{node}-3", 25)
    big = machine.join("big", count=8)
    await one_pass(machine)
    kept = hold_of(machine, big)
    assert kept is not None
    for number in range(60):
        machine.join(f"quarter-{number}", 0.25)
    placed = await one_pass(machine)
    assert len(placed) == 60
    assert kept.node not in placed.values()
    machine.held = [held for held in machine.held if held.gpus != (f"GPU-{kept.node}-3",)]
    assert await one_pass(machine) == {"big": kept.node}


async def test_cpu_is_kept_with_the_gpus() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 100)
    for node in ("a", "b"):
        machine.cpu(node, 4000)
    big = machine.join("big", 0.5, cpu=3)
    await one_pass(machine)
    kept = hold_of(machine, big)
    assert kept is not None
    assert kept.node == "a"
    machine.held = [held for held in machine.held if held.gpus != ("GPU-a",)]
    machine.hold("a", 75)
    machine.join("greedy", 0.25, cpu=2)
    assert await one_pass(machine) == {}
    assert machine.feed.ledger.capacity.nodes["a"].resources.cpu == 1000


NOW = 100_000.0


def expecting() -> Machine:
    """Sessions of 3600 s on both nodes, of which the one on b began first; they end at NOW + 3000 and NOW + 600."""
    machine = Machine(length=9)
    machine.expect(NOW, long=3600.0, short=300.0)
    machine.hold("a", 60, opened_at=NOW - 600, template="long")
    machine.hold("b", 80, opened_at=NOW - 3000, template="long")
    return machine


async def test_a_spawn_holds_the_node_that_is_expected_to_empty_first() -> None:
    machine = expecting()
    big = machine.join("big", count=1)
    await one_pass(machine)
    # less has to become free on a
    assert holds(machine) == ["b"]
    assert big.start is not None
    assert set(big.start.at) == {NOW + 600}


async def test_a_late_hold_is_given_up_for_the_node_that_is_expected_to_empty_first_then() -> None:
    machine = expecting()
    machine.held.pop(0)
    machine.hold("a", 100, opened_at=NOW, template="long")
    big, also = machine.join("big", count=1), machine.join("also-big", count=1)
    short = machine.join("short", 0.2, template="short")
    assert await one_pass(machine) == {"short": "b"}
    machine.held.pop()
    machine.now = NOW + 600 + 300 - 1
    late = machine.join("late", 0.2, template="short")
    assert await one_pass(machine) == {}
    assert holds(machine) == ["b"]
    # half of the expected wait later, the estimate was wrong: b is expected to empty 70 min later, a 45 min
    machine.now += 1
    assert await one_pass(machine) == {"late": "b"}
    kept = hold_of(machine, big)
    assert kept is not None
    assert (kept.node, kept.start) == ("a", NOW + 3600)
    assert (hold_of(machine, also), big.moves) == (None, 0)
    assert short not in machine.queue
    assert late not in machine.queue


async def test_a_late_hold_pauses_if_its_node_is_still_the_one_expected_to_empty_first() -> None:
    machine = Machine(length=9, nodes={"b": ("A100",)})
    machine.expect(NOW, long=3600.0)
    machine.hold("b", 60, opened_at=NOW - 3000, template="long")
    big = machine.join("big", count=1)
    await one_pass(machine)
    machine.now = NOW + 600 + 300 - 1
    machine.join("small", 0.2, template="long")
    assert await one_pass(machine) == {}
    assert holds(machine) == ["b"]
    machine.now += 1
    assert await one_pass(machine) == {"small": "b"}
    assert big.start is not None, "its user sees when it starts"
    machine.held.pop()
    for seconds, held in ((0, []), (PAUSE_SECONDS - 1, []), (1, ["b"])):
        machine.now += seconds
        await one_pass(machine)
        assert holds(machine) == held
    assert big.moves == 0


async def test_sessions_that_pass_a_hold_do_not_let_others_pass_for_longer() -> None:
    machine = expecting()
    machine.held.pop(0)
    machine.hold("a", 100, opened_at=NOW, template="long")
    big = machine.join("big", count=1)
    machine.join("short", 0.1, template="short")
    assert await one_pass(machine) == {"short": "b"}
    # it lasts longer than expected
    machine.held[-1] = replace(machine.held[-1], template="short", opened_at=NOW)
    machine.now = NOW + 550
    machine.join("late", 0.1, template="short")
    assert await one_pass(machine) == {}
    kept = hold_of(machine, big)
    assert kept is not None
    assert big.start is not None
    assert kept.start == NOW + 600 < big.start.at.likely


async def test_a_hold_of_which_nothing_is_expected_ends_too() -> None:
    machine = Machine()
    machine.expect(NOW)
    machine.hold("a", 80, opened_at=NOW - 60)
    machine.hold("b", 100, opened_at=NOW - 60)
    big = machine.join("big", count=1)
    await one_pass(machine)
    assert (holds(machine), big.start) == (["a"], None)
    machine.join("small", 0.2)
    machine.now += UNKNOWN_HOLD_SECONDS
    assert await one_pass(machine) == {"small": "a"}
    machine.now += PAUSE_SECONDS - 1
    await one_pass(machine)
    assert holds(machine) == []
    machine.now += 1
    await one_pass(machine)
    assert hold_of(machine, big) is not None


async def test_nothing_is_kept_for_a_spawn_whose_wait_ends_before_it_can_start() -> None:
    machine = expecting()
    big = machine.join("big", count=1)
    big.ends = NOW + 500
    machine.join("small", 0.4)
    assert await one_pass(machine) == {"small": "a"}
    assert holds(machine) == []
    big.ends = NOW + 600
    await one_pass(machine)
    assert holds(machine) == ["b"]


async def test_a_session_that_ends_before_the_start_may_use_what_is_kept() -> None:
    machine = expecting()
    machine.held.pop(0)
    machine.hold("a", 100)
    machine.join("big", count=1)
    machine.join("long", 0.1, template="long")
    machine.join("short", 0.1, template="short")
    assert await one_pass(machine) == {"short": "b"}
    check_ledger(machine.feed.ledger)
    # its card says so too
    available = AvailabilityNow(machine.check(), machine.queue)
    cards = [machine.join("x", 0.1, template=template).request.template for template in ("short", "long")]
    assert [available.availability(card).kind for card in cards] == ["now", "wait"]
    machine.now = NOW + 301
    machine.join("too-late", 0.1, template="short")
    assert "too-late" not in await one_pass(machine)


async def test_a_hold_moves_only_where_the_wait_is_expected_to_be_half_as_long() -> None:
    machine = expecting()
    machine.join("big", count=1)
    await one_pass(machine)
    machine.notify("a", Tier.STOPPED, at=NOW + 400)
    await one_pass(machine)
    assert holds(machine) == ["b"]
    machine.notices.clear()
    machine.notify("a", Tier.STOPPED, at=NOW + 250)
    await one_pass(machine)
    assert holds(machine) == ["a"]


async def test_a_hold_leaves_a_node_that_the_spawn_can_no_longer_use() -> None:
    machine = expecting()
    big = machine.join("big", count=1)
    await one_pass(machine)
    assert holds(machine) == ["b"]
    # the node was tainted
    big.request = replace(big.request, ineligible=lambda: frozenset({"b"}))
    await one_pass(machine)
    assert holds(machine) == ["a"]


async def test_a_spawn_whose_wait_ends_before_it_can_start_does_not_keep_the_next_from_a_hold() -> None:
    machine = expecting()
    machine.join("first", count=1).ends = NOW + 500
    second = machine.join("second", count=1)
    machine.join("small", 0.2)
    assert await one_pass(machine) == {"small": "a"}
    assert hold_of(machine, second) is not None
    assert holds(machine) == ["b"]


async def test_a_hold_that_an_earlier_spawn_took_begins_anew() -> None:
    machine = expecting()
    low = machine.join("low", count=1)
    await one_pass(machine)
    high = machine.join("high", count=1)
    machine.queue.arrange([high, low])
    machine.now += 500
    await one_pass(machine)
    assert (hold_of(machine, low), low.held_node) == (None, "")
    machine.queue.leave(high)
    machine.feed.hold(high.hold_name, None)
    machine.held = [replace(held, opened_at=NOW - 600) for held in machine.held]
    await one_pass(machine)
    kept = hold_of(machine, low)
    assert kept is not None
    assert kept.start == NOW + 3000
    assert low.hold_ends == NOW + 3000 + 600


async def test_time_in_which_an_earlier_spawn_has_the_hold_does_not_count() -> None:
    machine = Machine()
    machine.expect(NOW)
    machine.hold("a", 80)
    machine.hold("b", 100)
    low = machine.join("low", count=1)
    await one_pass(machine)
    high = machine.join("high", count=1)
    machine.queue.arrange([high, low])
    await one_pass(machine)
    assert hold_of(machine, low) is None
    assert hold_of(machine, high) is not None
    machine.queue.leave(high)
    machine.feed.hold(high.hold_name, None)
    machine.now += UNKNOWN_HOLD_SECONDS
    await one_pass(machine)
    assert hold_of(machine, low) is not None


NODES = {"a": ("A100", "A100"), "b": ("A100", "A100", "A100"), "c": ("L4",), "d": ("A100", "L4")}
LONGEST = 6
"""Passes that a session lasts at most."""


@dataclass(frozen=True)
class Spawn:
    """One spawn of a simulation."""

    share: float | int
    """A fraction of one GPU, or a number of whole GPUs."""
    models: tuple[str, ...]
    ineligible: frozenset[str]
    lasts: int
    """Passes for which its session runs."""


@dataclass
class Day:
    """Spawns that come and end, pass by pass, in virtual time."""

    machine: Machine = field(default_factory=lambda: Machine(length=10**6, nodes=NODES))
    spawns: dict[str, Spawn] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    now: int = 0

    def join(self, spawn: Spawn) -> None:
        name = f"s{len(self.spawns)}"
        gpu = {"count": spawn.share} if isinstance(spawn.share, int) else {"fraction": spawn.share}
        self.spawns[name], self.came[name] = spawn, self.now
        ticket = self.machine.join(name, ineligible=spawn.ineligible, models=list(spawn.models), **gpu)
        self.tickets[name] = ticket

    def lacking(self, hold: NodeHold, without: Collection[str] = ()) -> int:
        """Units that have to become free for a hold, if these sessions did not exist."""
        there = [held for held in self.machine.held if held.session not in without]
        units = [sum(held.share_units for held in there if gpu in held.gpus) for gpu in hold.gpus]
        return sum(max(0, held + hold.demand.units - 100) for held in units)

    async def passes(self) -> dict[str, str]:
        """End what is over, and do one pass; return who was placed where."""
        self.now += 1
        machine = self.machine
        machine.held = [held for held in machine.held if self.ends[held.session] > self.now]
        queued = [name for name, ticket in self.tickets.items() if ticket in machine.queue]
        placed = await one_pass(machine)
        self.ends |= {name: self.now + self.spawns[name].lasts for name in placed}
        check_ledger(machine.feed.ledger)
        self.nobody_was_delayed(queued, placed)
        self.what_fits_is_used(queued, placed)
        return placed

    def nobody_was_delayed(self, queued: list[str], placed: dict[str, str]) -> None:
        ledger = self.machine.feed.ledger
        for place, name in enumerate(queued):
            hold = hold_of(self.machine, self.tickets[name])
            later = {other for other in queued[place + 1 :] if other in placed}
            if hold is not None:
                assert self.lacking(hold) == self.lacking(hold, without=later)
            if name not in placed:
                # one that asks for the same never goes first
                assert not [other for other in later if self.same(other, name)]
        # every node that a waiting spawn could use has somebody for whom GPUs are kept
        for name in queued:
            if name not in placed and not self.tickets[name].result.done():
                able = self.able(name)
                first = [n for n in queued if hold_of(self.machine, self.tickets[n]) and self.able(n) & able]
                assert first
        assert len(ledger.holds) <= len(NODES)

    def what_fits_is_used(self, queued: list[str], placed: dict[str, str]) -> None:
        """A spawn waits only where earlier ones have the GPUs or a hold on them."""
        ledger = self.machine.feed.ledger
        earlier: list[str] = []
        for name in queued:
            ticket = self.tickets[name]
            if name not in placed and not ticket.result.done():
                request = ticket.request.placement_request(self.machine.check().snapshot)
                for node in self.able(name):
                    alone = ledger.of_node(node)
                    for hold_name in list(alone.holds):
                        if hold_name not in earlier:
                            alone.hold(hold_name, None)
                    assert alone.place(request) is None
            earlier.append(ticket.hold_name)

    def able(self, name: str) -> set[str]:
        spawn = self.spawns[name]
        count = spawn.share if isinstance(spawn.share, int) else 1
        enough = {node for node, models in NODES.items() if max(models.count(one) for one in spawn.models) >= count}
        return enough - spawn.ineligible

    def same(self, one: str, other: str) -> bool:
        first, second = self.spawns[one], self.spawns[other]
        return (first.share, first.models, first.ineligible) == (second.share, second.models, second.ineligible)


def spawns(*shares: float) -> st.SearchStrategy[Spawn]:
    return st.builds(
        Spawn,
        share=st.sampled_from(shares),
        models=st.sampled_from([("A100",), ("L4",), ("A100", "L4")]),
        ineligible=st.sampled_from([frozenset(), frozenset(), frozenset("ac"), frozenset("bcd")]),
        lasts=st.integers(1, LONGEST),
    )


FRACTIONS = spawns(0.1, 0.25, 0.25, 0.5, 0.75)
SPAWNS = FRACTIONS | spawns(1, 2, 3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(SPAWNS, max_size=6), max_size=12))
def test_no_spawn_starves_and_nobody_delays_the_one_that_gpus_are_kept_for(arrivals: list[list[Spawn]]) -> None:
    async def happens() -> None:
        day = Day()
        for coming in arrivals:
            for spawn in coming:
                day.join(spawn)
            await day.passes()
        for _ in range((LONGEST + 1) * (len(day.spawns) + 1)):
            await day.passes()
        assert not [name for name, ticket in day.tickets.items() if ticket in day.machine.queue and not over(ticket)]

    asyncio.run(happens())


@settings(max_examples=15, deadline=None)
@given(st.lists(SPAWNS, max_size=6), st.sampled_from([2, 3]), st.lists(FRACTIONS, min_size=2, max_size=6))
def test_a_stream_of_fractions_does_not_keep_whole_gpus_from_a_spawn(
    before: list[Spawn], count: int, stream: list[Spawn]
) -> None:
    async def happens() -> None:
        day = Day()
        for spawn in before:
            day.join(spawn)
        await day.passes()
        earlier = list(day.tickets.values())
        day.join(Spawn(count, ("A100",), frozenset(), 1))
        name = list(day.tickets)[-1]
        waited, placed = 0, dict[str, str]()
        for _ in range((LONGEST + 1) * (len(before) + 1)):
            # those before it may each take their turn; then it waits no longer than the longest session
            waited = 0 if any(ticket in day.machine.queue and not over(ticket) for ticket in earlier) else waited + 1
            assert waited <= LONGEST + 1
            for spawn in stream:
                day.join(spawn)
            placed = await day.passes()
            if name in placed:
                return
        assert name in placed

    asyncio.run(happens())


def over(ticket: Ticket) -> bool:
    """Whether the spawn was refused: nothing can take it."""
    return ticket.result.done()


async def test_a_spawn_that_waits_names_the_nodes_with_cpu_that_no_earlier_spawn_takes() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 100)
    machine.cpu("a", 500)
    machine.cpu("b", 1000)
    first, second = machine.join("first", 0.5, cpu=1.0), machine.join("second", 0.25, cpu=0.5)
    last = machine.join("last", 0.25)
    for _ in range(2):
        assert await one_pass(machine) == {}
        nodes = (first.nodes, second.nodes, last.nodes)
        assert nodes == (("b",), ("a",), ("a", "b")), "its own hold counts for others only"
    first.publish(0.0)
    assert first.status is not None
    assert first.status.nodes == ("b",)
