"""How many earlier spawns could use the same GPUs."""

from __future__ import annotations

from gpushare_spawner.placement.node import NodeResources
from gpushare_spawner.spawner.queue.queue import Positions, Ticket

from .machine import Machine


def full() -> Machine:
    machine = Machine(length=10)
    machine.hold("a", 100)
    machine.hold("b", 100)
    return machine


def ahead(machine: Machine, ticket: Ticket) -> int:
    check = machine.check()
    return Positions(check, machine.queue).ahead_of(ticket.request.placement_request(check.snapshot), ticket)


async def test_a_spawn_that_can_use_other_nodes_only_is_not_ahead() -> None:
    machine = full()
    machine.join("on-a", 0.5, ineligible={"b"})
    on_b = machine.join("on-b", 0.5, ineligible={"a"})
    anywhere = machine.join("anywhere", 0.5)
    assert ahead(machine, on_b) == 0
    assert ahead(machine, anywhere) == 2


async def test_a_spawn_that_must_use_another_node_is_not_ahead() -> None:
    machine = full()
    machine.join("on-a", 0.5, node="a")
    assert ahead(machine, machine.join("on-b", 0.5, node="b")) == 0
    assert ahead(machine, machine.join("on-a-too", 0.5, node="a")) == 1


async def test_a_node_that_is_too_small_for_a_spawn_is_not_shared_with_it() -> None:
    machine = full()
    for node, cpu in (("a", 4000), ("b", 16_000)):
        machine.feed.resources(node, NodeResources.of_empty_node(cpu, 2**40))
    machine.join("large", 0.5, cpu=8)
    assert ahead(machine, machine.join("small", 0.5, cpu=1, ineligible={"b"})) == 0
    assert ahead(machine, machine.join("other", 0.5, cpu=1)) == 2


async def test_spawns_for_other_models_on_the_same_node_are_not_ahead() -> None:
    machine = Machine(length=10, nodes={"a": ("A100", "T4")})
    machine.hold("a", 100)
    machine.hold("a-1", 100)
    machine.join("large", 0.5, models=["A100"])
    assert ahead(machine, machine.join("small", 0.5, models=["T4"])) == 0
    assert ahead(machine, machine.join("any", 0.5)) == 2


async def test_spawns_of_the_same_models_that_no_node_can_take_now_are_ahead_of_each_other() -> None:
    """They wait for GPUs to become healthy."""
    machine = full()
    machine.join("first", 0.5, ineligible={"a", "b"})
    assert ahead(machine, machine.join("second", 0.5, ineligible={"a", "b"})) == 1
