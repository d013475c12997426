"""One pass over the queue on one snapshot, without an agent, a clock or a hub."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.model.layers import Placement
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.queue.queue import Ticket

from .machine import Machine


def refusal(ticket: Ticket) -> SpawnRefused:
    error = ticket.result.exception()
    assert isinstance(error, SpawnRefused)
    return error


async def test_a_spawn_that_fits_gets_a_place() -> None:
    machine = Machine()
    machine.hold("a", 60)
    assert machine.placer().place(machine.join("ada", 0.25)) == Placement("a", ("GPU-a",))


async def test_a_taint_refuses_a_newcomer_and_no_spawn_that_was_told_to_wait() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 100)
    waits = machine.join("ada", 0.5)
    assert machine.placer().place(waits) is None
    newcomer = machine.join("bob", 0.5)
    for ticket in (waits, newcomer):
        ticket.request = replace(ticket.request, ineligible=lambda: frozenset({"a", "b"}))
        assert machine.placer().place(ticket) is None
    assert not waits.result.done()
    assert "taints or labels" in waits.hint
    assert "taints or labels" in str(refusal(newcomer))


async def test_what_was_given_counts_for_the_next_one() -> None:
    machine = Machine()
    first, second = machine.join("ada", count=1), machine.join("bob", count=1)
    placer = machine.placer()
    place = placer.place(first)
    assert place is not None
    placer.gave(Allocation("ada", place.gpus, 100, 0, 100, 0.0))
    other = placer.place(second)
    assert other is not None
    assert {place.node, other.node} == {"a", "b"}


async def test_spawns_without_a_place_know_their_positions_and_what_they_wait_for() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 90)
    first, second = machine.join("ada", 0.5), machine.join("bob", 0.25)
    placer = machine.placer()
    assert placer.place(first) is None
    assert placer.place(second) is None
    assert (first.ahead, second.ahead) == (0, 1)
    assert "at most 0.10 GPU is free" in first.hint


async def test_what_no_wait_would_help_is_refused_unless_gpus_are_missing_for_a_moment() -> None:
    machine = Machine()
    ticket = machine.join("ada", count=3)
    assert machine.placer().place(ticket) is None
    assert refusal(ticket).refusal == "no-such-gpu"
    assert refusal(ticket).jupyterhub_message.startswith("T cannot be started on this place: ")
    machine = Machine(awaited="Node c says nothing.")
    ticket = machine.join("ada", count=3)
    assert machine.placer().place(ticket) is None
    assert not ticket.result.done()
    assert ticket.hint == "Node c says nothing."


@pytest.mark.parametrize(("node", "place"), [("b", Placement("b", ("GPU-b",))), ("c", None)])
async def test_a_spawn_that_is_pinned_to_a_node_gets_no_other(node: str, place: Placement | None) -> None:
    machine = Machine()
    machine.hold("a", 60)
    ticket = machine.join("ada", 0.25, node=node)
    assert machine.placer().place(ticket) == place
    if place is None:
        assert f"node {node}, the only node that your server may use" in refusal(ticket).jupyterhub_message


async def test_the_queue_is_full_for_those_that_come_and_not_for_those_that_wait() -> None:
    machine = Machine(length=1)
    machine.hold("a", 100)
    machine.hold("b", 100)
    first, second = machine.join("ada", 0.25), machine.join("bob", 0.25)
    placer = machine.placer()
    assert placer.place(first) is None
    assert placer.place(second) is None
    assert not first.result.done()
    assert refusal(second).refusal == "queue-full"
    assert placer.place(first) is None
    assert not first.result.done()
