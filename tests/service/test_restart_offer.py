"""A borrower whose lender has returned is offered a restart where it would own its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.units import UnitsToOwn
from tests.placement.instances import instance
from tests.service.dashboards import NOW, TEMPLATES, afternoon, page, session, shown

QUARTER = TEMPLATES["quarter"]


def borrower(**changes: Any) -> SessionReport:
    """25 units, 15 of them borrowed, which their owner has reclaimed."""
    return session("hugo", **({"borrowed_units": 15, "guaranteed_units": 10} | changes))


def node(name: str, *sessions: SessionReport, gpus: int = 1, **changes: Any) -> Report:
    made = [
        GpuReport(**({"index": at, "uuid": f"{name}-{at}", "model": "A100", "memory_bytes": 2**34} | changes))
        for at in range(gpus)
    ]
    return Report(node=name, published_at=0.0, gpus=tuple(made), sessions=sessions)


def node_to_own(one: SessionReport, template: Template | None, reports: Sequence[Report]) -> str | None:
    return UnitsToOwn(reports).node_for(one, template)


def full(name: str, owned: int) -> Report:
    return node(name, session("other", gpus=(f"{name}-0",), share_units=owned, effective_units=owned))


def test_the_first_node_with_enough_units_that_nobody_owns_is_named() -> None:
    assert node_to_own(borrower(), QUARTER, [full("a", 76), full("b", 75), full("c", 0)]) == "b"
    assert node_to_own(borrower(), QUARTER, [full("a", 76)]) is None
    assert node_to_own(borrower(), QUARTER, []) is None


def test_lent_units_are_no_offer() -> None:
    lender = session("idle", gpus=("a-0",), share_units=100, tier=Tier.RELEASED, effective_units=0)
    assert node_to_own(borrower(), QUARTER, [node("a", lender)]) is None


def test_its_own_units_come_free_with_the_restart() -> None:
    here = borrower(gpus=("a-0",))
    other = session("other", gpus=("a-0",), share_units=75, effective_units=75)
    assert node_to_own(here, QUARTER, [node("a", here, other)]) == "a"


@pytest.mark.parametrize("changes", [{"healthy": False}, {"capacity_units": 24}])
def test_a_gpu_that_could_not_take_it_is_no_offer(changes: dict[str, Any]) -> None:
    assert node_to_own(borrower(), QUARTER, [node("a", **changes)]) is None
    assert node_to_own(borrower(), QUARTER, [node("a")]) == "a"


def test_the_templates_models_count() -> None:
    picky = Template(name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25, "models": ["*H100*"]})
    assert node_to_own(borrower(), picky, [node("a"), node("b", model="NVIDIA H100")]) == "b"
    assert node_to_own(borrower(), None, [node("a")]) is None


def test_several_gpus_are_of_one_node_and_model() -> None:
    two = borrower(gpus=("x", "y"))
    pair = Template(name="quarter", display_name="2 GPUs", gpu={"count": 2})
    assert node_to_own(two, pair, [node("a"), node("b", gpus=2)]) == "b"


@pytest.mark.parametrize(
    "changes",
    [
        {"guaranteed_units": 25},
        {"borrowed_units": 0, "guaranteed_units": 25},
        {"tier": Tier.RELEASED, "effective_units": 0, "guaranteed_units": 0},
    ],
)
def test_a_session_that_has_its_units_or_is_idle_gets_no_offer(changes: dict[str, Any]) -> None:
    assert node_to_own(borrower(**changes), QUARTER, [node("a")]) is None


def test_sessions_are_counted_once_for_all_borrowers() -> None:
    looked = 0

    class Counted(tuple[SessionReport, ...]):
        def __iter__(self) -> Iterator[SessionReport]:
            nonlocal looked
            looked += 1
            return super().__iter__()

    reports = [full(name, 100) for name in "abc"]
    to_own = UnitsToOwn([one.model_copy(update={"sessions": Counted(one.sessions)}) for one in reports])
    assert to_own.node_for(session("owner"), QUARTER) is None
    assert looked == 0, "nobody has borrowed"
    assert [to_own.node_for(borrower(), QUARTER) for _ in range(10)] == [None] * 10
    assert looked == 3


def test_the_dashboard_makes_the_offer() -> None:
    said = "After a restart the server would own its full share"
    assert said not in page()
    borrowing = afternoon(borrower(gpus=("GPU-0",)))
    dashboard = shown(borrowing)
    (told,) = [one["offer"] for one in dashboard["sessions"] if one["user"] == "hugo"]
    assert "node workstation has units that nobody owns" in told
    assert page(borrowing).count(said) == 1


def test_there_is_no_offer_while_a_spawn_waits() -> None:
    waits = HubServer("zoe", "", ready=False, pending="spawn", started=NOW - 60, profile="quarter")
    dashboard = shown(afternoon(borrower(gpus=("GPU-0",))), pending=(waits,))
    assert not [one["offer"] for one in dashboard["sessions"] if one["offer"]]


def test_the_template_counts_as_it_is_now() -> None:
    memory = Template(name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25, "memory": {"guarantee": "20Gi"}})
    assert node_to_own(borrower(), memory, [node("a"), node("b", memory_bytes=2**36)]) == "b"
    half = Template(name="quarter", display_name="0.5 GPU", gpu={"fraction": 0.5})
    assert node_to_own(borrower(), half, [full("a", 75), full("b", 50)]) == "b"


def test_instance_is_no_offer_for_a_borrower() -> None:
    report = Report(node="a", published_at=0.0, gpus=(instance("MIG-7", "7g.80gb"),))
    assert node_to_own(borrower(), QUARTER, [report]) is None
