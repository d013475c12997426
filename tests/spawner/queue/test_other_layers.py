"""Spawns that other sharing layers serve, in the queue and on the cards, without a cluster."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace

import pytest

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayerOptions
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import LayerRequest
from gpushare_spawner.spawner.form import Form
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.options import Profile
from gpushare_spawner.spawner.queue.availability import (
    FEWEST_WAITS,
    AvailabilityNow,
    WaitEstimates,
    after_idle_actions,
    after_pending_stops,
)
from gpushare_spawner.spawner.queue.queue import (
    MOST_OVERTAKEN,
    UNKNOWN_HOLD_SECONDS,
    LoopBreaks,
    PlacementCheck,
    Placer,
    Ticket,
)
from gpushare_spawner.spawner.queue.snapshot import (
    NO_HOLDS,
    GpuSnapshot,
    LayerHolds,
    LayerOffer,
    LayerOutcome,
    LayerVerdict,
    SpawnRequest,
)
from tests.placement.instances import PROFILES
from tests.spawner.queue.machine import Machine


class Layers:
    """KAI serves templates that name it, and those that accept any GPU after the GPUs with an agent."""

    gpus = 2
    free_from: float | None = None
    """When one server more can be placed; each further one 100 s later."""

    def __init__(self, outcome: LayerOutcome, why: str = "", known: bool = True) -> None:
        self.outcome, self.why, self.known = outcome, why, known

    def names(self, template: Template) -> tuple[LayerName, ...]:
        gpu = template.gpu
        return (LayerName.KAI,) if gpu is not None and (gpu.layer is LayerName.KAI or not gpu.models) else ()

    def native(self, template: Template) -> bool:
        return template.gpu is not None and template.gpu.layer is None

    def starts_by(self, asked: SpawnRequest, servers: int) -> float | None:
        return None if self.free_from is None else self.free_from + 100.0 * (servers - 1)

    def least_used(self, nodes: Set[str]) -> str:
        return min(nodes)

    def verdict(self, asked: SpawnRequest, holds: LayerHolds = NO_HOLDS) -> LayerVerdict:
        offer = LayerOffer(LayerName.KAI, LayerRequest(asked.tenant, asked.template, LayerOptions()))
        return LayerVerdict(self.outcome, offer, self.why, self.known, profile=PROFILES["2g.20gb"])


def check(machine: Machine, layers: Layers) -> PlacementCheck:
    made = machine.check()
    snapshot = GpuSnapshot(made.snapshot.inventory, made.snapshot.awaited, layers=layers)
    return PlacementCheck(snapshot, made.ledger, made.strategy)


def placed(machine: Machine, layers: Layers, ticket: Ticket) -> tuple[str, LayerName | None]:
    """The node and the layer of the place that a ticket gets; empty: none."""
    found = Placer(check(machine, layers), machine.feed, machine.queue, "this cluster").place(ticket)
    layer = ticket.offer.layer if ticket.offer is not None else None
    return found.node if found is not None else "none", layer


async def test_a_layer_s_free_place_goes_to_the_first_in_the_queue() -> None:
    machine = Machine()
    assert placed(machine, Layers(LayerOutcome.NOW), machine.join("ada", 0.5, layer="kai")) == ("", LayerName.KAI)


async def test_gpus_with_an_agent_serve_what_the_layer_cannot_now() -> None:
    machine = Machine()
    assert placed(machine, Layers(LayerOutcome.WAIT, "Full."), machine.join("ada", 0.5)) == ("a", None)
    assert placed(machine, Layers(LayerOutcome.NEVER, "None."), machine.join("bob", 0.5)) == ("a", None)


async def test_positions_count_spawns_with_a_layer_in_common() -> None:
    machine = Machine()
    layers = Layers(LayerOutcome.WAIT, "Full.")
    for gpu in ("a", "b"):
        machine.hold(gpu, 100)
    tickets = [
        machine.join("ada", 0.5, layer="kai"),
        machine.join("bob", 0.5, models=["*A100*"]),
        machine.join("cyd", 0.5, layer="kai"),
        machine.join("dan", 0.5),
    ]
    for ticket in tickets:
        assert placed(machine, layers, ticket) == ("none", None)
    assert [ticket.ahead for ticket in tickets] == [0, 0, 1, 3]
    assert [ticket.hint for ticket in tickets] == [
        "Full.",
        "Not enough free capacity: this needs 0.50 GPU, and none is free.",
        "Full.",
        "Full.",
    ]


async def test_a_spawn_that_no_layer_can_ever_serve_is_refused_with_its_reason() -> None:
    machine = Machine()
    ticket = machine.join("ada", 0.5, layer="kai")
    assert placed(machine, Layers(LayerOutcome.NEVER, "KAI Scheduler has no GPU here."), ticket) == ("none", None)
    refused = ticket.result.exception()
    assert isinstance(refused, SpawnRefused)
    assert refused.jupyterhub_message == "T cannot be started on this cluster: KAI Scheduler has no GPU here."


async def test_a_spawn_that_waits_already_is_not_refused_when_its_nodes_are_gone() -> None:
    machine = Machine()
    ticket = machine.join("ada", 0.5, layer="kai")
    placed(machine, Layers(LayerOutcome.WAIT, "Full."), ticket)
    placed(machine, Layers(LayerOutcome.NEVER, "No node."), ticket)
    assert (ticket.result.done(), ticket.hint) == (False, "No node.")


async def test_a_full_queue_refuses_a_spawn_that_would_wait_for_a_layer() -> None:
    machine = Machine(length=0)
    ticket = machine.join("ada", 0.5, layer="kai")
    placed(machine, Layers(LayerOutcome.WAIT, "Full."), ticket)
    refused = ticket.result.exception()
    assert isinstance(refused, SpawnRefused)
    assert refused.refusal == "queue-full"


async def test_spawns_that_wait_for_another_layer_take_no_place_in_the_queue_of_gpus_with_an_agent() -> None:
    machine = Machine(length=1)
    for gpu in ("a", "b"):
        machine.hold(gpu, 100)
    layers = Layers(LayerOutcome.WAIT, "Full.")
    tickets = [
        machine.join("ada", 0.5, layer="kai"),
        machine.join("bob", 0.5, models=["*A100*"]),
        machine.join("cyd", 0.5, layer="kai"),
        machine.join("dan", 0.5, models=["*A100*"]),
        # both could serve it
        machine.join("eve", 0.5),
    ]
    for ticket in tickets:
        placed(machine, layers, ticket)
    refused = [ticket.result.exception() if ticket.result.done() else None for ticket in tickets]
    assert [getattr(one, "refusal", None) for one in refused] == [None, None, "queue-full", "queue-full", "queue-full"]


async def test_a_spawn_for_another_layer_holds_no_gpu_and_has_no_estimate_by_idle_actions() -> None:
    machine = Machine()
    for gpu in ("a", "b"):
        machine.hold(gpu, 100)
    made = check(machine, Layers(LayerOutcome.WAIT, "Full."))
    ticket = machine.join("ada", 0.5, layer="kai")
    placer = Placer(made, machine.feed, machine.queue, "this cluster")
    assert placer.place(ticket) is None
    await placer.hold(ticket, LoopBreaks())
    assert not machine.feed.ledger.holds
    assert await after_idle_actions(made, machine.queue, LoopBreaks()) == {}


class OneNode(Layers):
    """KAI serves each template on one node, which is full."""

    def names(self, template: Template) -> tuple[LayerName, ...]:
        return (LayerName.KAI,)

    def verdict(self, asked: SpawnRequest, holds: LayerHolds = NO_HOLDS) -> LayerVerdict:
        return replace(super().verdict(asked, holds), able=frozenset({"k"}))


async def test_a_node_of_a_layer_is_held_for_a_stated_time_also_if_gpus_with_an_agent_might_serve_the_spawn() -> None:
    machine, held = Machine(), []
    ticket = machine.join("ada", 0.5, models=["*H100*"])
    ticket.overtaken = MOST_OVERTAKEN
    for machine.now in (0.0, UNKNOWN_HOLD_SECONDS - 1.0, UNKNOWN_HOLD_SECONDS):
        made = check(machine, OneNode(LayerOutcome.WAIT, "Full."))
        made = replace(made, now=machine.now, monotonic=machine.now)
        placer = Placer(made, machine.feed, machine.queue, "this cluster")
        assert placer.place(ticket) is None
        await placer.hold(ticket, LoopBreaks())
        held.append(ticket.held_elsewhere)
    assert held == ["k", "k", ""]


async def test_a_spawn_that_only_another_layer_can_serve_now_has_no_expected_start_on_gpus_with_an_agent() -> None:
    machine = Machine()
    machine.expect(1000.0, x=100.0)
    for gpu in ("a", "b"):
        machine.hold(gpu, 100, opened_at=950.0, template="x")
    ticket = machine.join("ada", 0.5)
    placer = machine.placer()
    assert placer.place(ticket) is None
    await placer.hold(ticket, LoopBreaks())
    assert ticket.start is not None
    layers = Layers(LayerOutcome.WAIT, "Full.")
    layers.native = lambda template: False  # type: ignore[method-assign]
    await Placer(check(machine, layers), machine.feed, machine.queue, "this cluster").hold(ticket, LoopBreaks())
    assert ticket.start is None


async def test_announced_stops_are_an_estimate_for_the_first_spawns_of_a_layer() -> None:
    machine, estimates = Machine(), WaitEstimates()
    layers = Layers(LayerOutcome.WAIT, "Full.")
    small, large, other = (
        machine.join("ada", 0.5, layer="kai"), machine.join("bob", count=1, layer="kai"), machine.join("cyd", 0.5),
    )  # fmt: skip
    for ticket in (small, large):
        placed(machine, layers, ticket)
    assert await estimates.intervals(check(machine, layers), machine.queue, 0.0, 0.0, LoopBreaks()) == {}
    layers.free_from = 60.0
    found = await after_pending_stops(check(machine, layers).snapshot, machine.queue, LoopBreaks())
    # half a GPU is ahead of the second, and one and a half are ahead of the third
    assert found == {small: 60.0, large: 160.0, other: 360.0}
    waits = await estimates.intervals(check(machine, layers), machine.queue, 0.0, 0.0, LoopBreaks())
    assert waits == {small: (0, 1, 1), large: (3, 3, 3)}


async def test_recent_waits_for_a_layer_are_an_estimate_for_the_same_models_of_it() -> None:
    machine, estimates = Machine(), WaitEstimates()
    layers = Layers(LayerOutcome.WAIT, "Full.")
    for number in range(FEWEST_WAITS):
        ticket = machine.join(f"before-{number}", 0.5, layer="kai", models=["*A100*"])
        ticket.first_since = 0.0
        estimates.placed(ticket, check(machine, layers).snapshot, 600.0)
        machine.queue.leave(ticket)
    same, model, native = (
        machine.join("ada", 0.5, layer="kai", models=["*A100*"]),
        machine.join("bob", 0.5, layer="kai", models=["*T4*"]),
        machine.join("cyd", 0.5, models=["*A100*"]),
    )
    for ticket in (same, model, native):
        placed(machine, layers, ticket)
        ticket.ahead = 0
        ticket.publish(600.0)
    waits = await estimates.intervals(check(machine, layers), machine.queue, 600.0, 0.0, LoopBreaks())
    assert waits == {same: (10, 10, 10)}
    assert [ticket.status is not None and ticket.status.elsewhere for ticket in (same, model, native)] == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "kind", "text"),
    [
        (Layers(LayerOutcome.NOW), "now", "Starts now"),
        (Layers(LayerOutcome.NOW, known=False), "unknown", "Unknown"),
        (Layers(LayerOutcome.WAIT, "Full."), "wait", "First in queue"),
        (Layers(LayerOutcome.NEVER, "None."), "never", "No suitable GPU"),
    ],
)
def test_cards_say_what_a_spawn_would_meet(layers: Layers, kind: str, text: str) -> None:
    machine = Machine()
    template = Template.model_validate({"name": "t", "display_name": "T", "gpu": {"fraction": 0.5, "layer": "kai"}})
    now = AvailabilityNow(check(machine, layers), machine.queue, "this cluster")
    found = now.availability(template)
    assert (found.kind, found.text, found.layer) == (kind, text, LayerName.KAI)
    assert found.profile == (PROFILES["2g.20gb"] if kind != "never" else None)
    assert now.startable([now.request(template)]) == ((template,) if kind == "now" else ())


def test_a_card_of_a_template_that_both_can_serve_says_the_better_of_the_two() -> None:
    machine = Machine()
    template = Template.model_validate({"name": "t", "display_name": "T", "gpu": {"fraction": 0.5}})
    now = AvailabilityNow(check(machine, Layers(LayerOutcome.WAIT, "Full.")), machine.queue, "this cluster")
    assert (now.availability(template).kind, now.availability(template).layer) == ("now", None)


def test_quotas_count_the_gpus_of_all_layers() -> None:
    assert check(Machine(), Layers(LayerOutcome.NOW)).snapshot.capacity_units == 400


def test_the_form_says_by_what_the_gpu_is_shared_and_promises_no_more() -> None:
    machine = Machine()
    template = Template.model_validate(
        {"name": "t", "display_name": "T", "gpu": {"fraction": 0.5, "layer": "kai"}, "idle": {"stop_after": "8h"}}
    )
    now = AvailabilityNow(check(machine, Layers(LayerOutcome.NOW)), machine.queue, "this cluster")
    html = Form().render([Profile.of_template(template)], {}, now)
    text = " ".join(re.sub(r"<[^>]*>", " ", html).replace("\N{NO-BREAK SPACE}", " ").split())
    assert "Sharing By KAI Scheduler." in text
    assert "Guaranteed" not in text
    assert "after 8 h, the server is stopped" in text
