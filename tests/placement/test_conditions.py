"""Conditions of templates for the choice of GPUs: which GPU is chosen, and why none is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import NO_NEIGHBOUR_RULES, NeighbourRules, Share, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import SupposedLedger
from gpushare_spawner.placement.ledger import Ledger, able_nodes, cheapest_hold
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.obstacles import Reason
from gpushare_spawner.placement.request import UNCONDITIONAL, Conditions, PlacementRequest
from gpushare_spawner.wording.spawn_failures import capacity
from tests.placement.reports import active, gpu, ledger_of, report

EXAM, COURSE = NeighbourRules(labels=("exam",)), NeighbourRules(labels=("course",))
NOT_EXAM = NeighbourRules(apart_from=("exam",))
ALONE = NeighbourRules(alone=True)
NEAR_COURSE = Conditions(near=frozenset({"course"}))


def on(uuid: str, rules: NeighbourRules, units: int = 25, **other: object) -> Allocation:
    return active(f"on-{uuid}", uuid, units, neighbours=rules, **other)  # type: ignore[arg-type]


def cluster(*sessions: Allocation) -> Ledger:
    """Two nodes of two GPUs: a and b, c and d. The fullest suitable GPU is chosen; of equal ones c."""
    nodes = [report("n", [gpu("a", 0), gpu("b", 1)]), report("m", [gpu("c", 0), gpu("d", 1)])]
    return ledger_of(nodes, sessions)


def wanted(conditions: Conditions, units: int = 25, **other: object) -> PlacementRequest:
    return PlacementRequest(Share(units), conditions=conditions, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sessions", "conditions", "uuid"),
    [
        ((on("b", COURSE),), NEAR_COURSE, "b"),
        ((on("a", EXAM), on("d", COURSE)), NEAR_COURSE, "d"),
        ((on("a", EXAM),), NEAR_COURSE, "a"),
        ((on("c", EXAM), on("d", COURSE)), Conditions(NOT_EXAM), "d"),
        ((on("c", NOT_EXAM),), Conditions(EXAM), "d"),
        ((on("c", NOT_EXAM),), Conditions(COURSE), "c"),
        ((on("c", NO_NEIGHBOUR_RULES),), Conditions(ALONE), "d"),
        ((on("c", ALONE),), UNCONDITIONAL, "d"),
        ((on("c", NO_NEIGHBOUR_RULES),), Conditions(gpu="b"), "b"),
        ((on("c", NO_NEIGHBOUR_RULES),), Conditions(nodes=frozenset({"n", "x"})), "a"),
    ],
)
def test_the_gpu_keeps_the_rules_of_both_sides(
    sessions: Iterable[Allocation], conditions: Conditions, uuid: str
) -> None:
    place = cluster(*sessions).place(wanted(conditions))
    assert place is not None
    assert place.gpus == (uuid,)


STOP = Notice(tier=Tier.STOPPED, at=0.0, reason="idle")
FULL = tuple(on(uuid, NO_NEIGHBOUR_RULES, 90) for uuid in "abcd")


@pytest.mark.parametrize(
    ("sessions", "conditions", "reason", "text"),
    [
        (
            (on("b", COURSE, 90),),
            NEAR_COURSE,
            Reason.NEIGHBOURS,
            "No GPU with a session labelled course has 0.25 GPU free.",
        ),
        (
            tuple(on(uuid, EXAM) for uuid in "abcd"),
            Conditions(NOT_EXAM),
            Reason.NEIGHBOURS,
            "No GPU without a session labelled exam has 0.25 GPU free.",
        ),
        (
            tuple(on(uuid, NOT_EXAM) for uuid in "abcd"),
            Conditions(EXAM),
            Reason.NEIGHBOURS,
            "No GPU with sessions that accept the label exam has 0.25 GPU free.",
        ),
        (
            tuple(on(uuid, NO_NEIGHBOUR_RULES) for uuid in "abcd"),
            Conditions(ALONE),
            Reason.NEIGHBOURS,
            "All suitable GPUs have sessions, and the template wants 0.25 GPU alone.",
        ),
        (
            (on("b", NO_NEIGHBOUR_RULES),),
            Conditions(ALONE, gpu="b"),
            Reason.NEIGHBOURS,
            "GPU b is shared, and the template wants 0.25 GPU alone.",
        ),
        (
            (on("b", EXAM),),
            Conditions(NOT_EXAM, gpu="b"),
            Reason.NEIGHBOURS,
            "GPU b has 0.25 GPU free, and the template asks for a GPU without a session labelled exam.",
        ),
        (
            FULL,
            Conditions(NOT_EXAM),
            Reason.FULL,
            "Not enough free capacity: this needs 0.25 GPU, and at most 0.10 GPU is free on any GPU.",
        ),
        (
            (on("b", NO_NEIGHBOUR_RULES, 90),),
            Conditions(gpu="b"),
            Reason.FULL,
            "Not enough free capacity: this needs 0.25 GPU, and at most 0.10 GPU is free on GPU b.",
        ),
        (
            (),
            Conditions(gpu="x", nodes=frozenset({"n", "m"})),
            Reason.NOT_NAMED,
            "This server needs GPU x on m or n, and no agent reports it. Choose another template, or ask the admin.",
        ),
        (
            (),
            Conditions(nodes=frozenset({"x"})),
            Reason.NOT_NAMED,
            "This server needs node x, and no agent reports it. Choose another template, or ask the admin.",
        ),
    ],
)
def test_a_refusal_names_the_rule_that_keeps_the_share_from_free_units(
    sessions: Iterable[Allocation], conditions: Conditions, reason: Reason, text: str
) -> None:
    ledger = cluster(*sessions)
    assert ledger.place(wanted(conditions)) is None
    why = ledger.why_unplaceable(wanted(conditions))
    assert why.reason is reason
    assert why.may_pass is (reason is not Reason.NOT_NAMED)
    assert capacity(why) == text


def test_the_end_of_the_last_labelled_session_lets_its_followers_go_anywhere() -> None:
    ledger = cluster(on("b", COURSE, 90))
    assert ledger.place(wanted(NEAR_COURSE)) is None
    ledger.remove("on-b")
    assert ledger.place(wanted(NEAR_COURSE)) is not None


def test_a_session_of_which_nobody_wants_to_be_a_neighbour_keeps_lent_units_too() -> None:
    ledger = cluster(*(on(uuid, ALONE).with_effective(0) for uuid in "abcd"))
    assert ledger.place(wanted(UNCONDITIONAL)) is None


def test_a_hold_of_a_request_that_would_be_alone_keeps_the_gpu_with_the_fewest_units_whole() -> None:
    ledger = cluster(
        on("a", NO_NEIGHBOUR_RULES, 30),
        on("b", NO_NEIGHBOUR_RULES, 50),
        on("c", NO_NEIGHBOUR_RULES, 10),
        on("d", NO_NEIGHBOUR_RULES, 40),
    )
    request = wanted(Conditions(ALONE))
    hold = cheapest_hold(ledger.capacity, request)
    assert hold is not None
    assert hold.gpus == ("c",)
    ledger.hold("w", hold)
    ledger.remove("on-c")
    place = ledger.place(wanted(UNCONDITIONAL))
    assert place is not None
    assert place.gpus != ("c",)
    assert ledger.place(request) is None
    assert ledger.fits_without(request, ["w"])


def test_only_named_nodes_and_gpus_beside_labelled_sessions_are_held() -> None:
    ledger = cluster(*(on(uuid, rules, 90) for uuid, rules in zip("abcd", (EXAM, COURSE, EXAM, EXAM), strict=True)))
    assert able_nodes(ledger.capacity, wanted(Conditions(nodes=frozenset({"m"})))) == {"m"}
    assert able_nodes(ledger.capacity, wanted(NEAR_COURSE)) == {"n"}
    hold = cheapest_hold(ledger.capacity, wanted(NEAR_COURSE))
    assert hold is not None
    assert hold.gpus == ("b",)


def test_a_supposed_end_of_a_session_on_one_node_leaves_labelled_sessions_elsewhere() -> None:
    ledger = cluster(on("a", NO_NEIGHBOUR_RULES, 90), on("d", COURSE, 90))
    supposed = SupposedLedger(ledger)
    supposed.happens("on-a", STOP)
    assert supposed.place("w", wanted(NEAR_COURSE), "n") is None
    supposed.happens("on-d", STOP)
    assert supposed.place("w", wanted(UNCONDITIONAL), "n") is not None


def test_conditions_of_a_template_come_from_its_labels_and_its_placement() -> None:
    def conditions(**fields: object) -> Conditions:
        return Conditions.of(
            Template.model_validate({"name": "t", "display_name": "T", "gpu": {"fraction": 0.1}, **fields})
        )

    assert conditions() is UNCONDITIONAL
    given = {"near": ["course"], "apart_from": ["exam"], "nodes": ["n"]}
    assert conditions(labels=["quiet"], placement=given) == Conditions(
        NeighbourRules(("quiet",), ("exam",)), frozenset({"course"}), nodes=frozenset({"n"})
    )
