"""One GPU's units as a bar."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.report import GpuReport, SessionReport
from gpushare_spawner.service.units import Segment, gpu_bar, units_of
from tests.placement.instances import instance
from tests.service.dashboards import afternoon, session


def test_owners_first_then_borrowers_then_what_is_lent_then_what_is_free() -> None:
    report = afternoon()
    full, half_empty = report.gpus
    assert gpu_bar(full, report.sessions) == [
        Segment("owned", 25, "ann"),
        Segment("owned", 10, "bob"),
        Segment("borrowed", 25, "dave"),
        Segment("lent", 40, "carol"),
    ]
    assert gpu_bar(half_empty, report.sessions) == [Segment("owned", 10, "erin"), Segment("free", 90)]


def test_a_borrower_gives_way_when_the_owner_is_back() -> None:
    report = afternoon()
    changes = {"carol": {"effective_units": 50, "guaranteed_units": 50}, "dave": {"guaranteed_units": 15}}
    back = [one.model_copy(update=changes.get(one.user, {})) for one in report.sessions]
    assert gpu_bar(report.gpus[0], back) == [
        Segment("owned", 25, "ann"),
        Segment("owned", 10, "bob"),
        Segment("owned", 50, "carol"),
        Segment("borrowed", 15, "dave"),
    ]


def test_the_last_gpu_of_a_share_can_have_fewer_units() -> None:
    gpus = [GpuReport(index=k, uuid=f"GPU-{k}", model="x", memory_bytes=1) for k in range(2)]
    more = session("ann", gpus=("GPU-0", "GPU-1"), share_units=100, effective_units=100, last_units=50)
    released = more.model_copy(update={"effective_units": 0, "guaranteed_units": 0})
    assert [gpu_bar(gpu, [more]) for gpu in gpus] == [
        [Segment("owned", 100, "ann")],
        [Segment("owned", 50, "ann"), Segment("free", 50)],
    ]
    assert [gpu_bar(gpu, [released])[0] for gpu in gpus] == [Segment("lent", 100, "ann"), Segment("lent", 50, "ann")]


def test_an_empty_gpu_that_may_be_overcommitted() -> None:
    gpu = GpuReport(index=0, uuid="GPU-0", model="x", memory_bytes=1, capacity_units=150)
    assert gpu_bar(gpu, []) == [Segment("free", 150)]


@st.composite
def neighbours(draw: st.DrawFn) -> list[SessionReport]:
    """Sessions whose owned and guaranteed units each fit on one GPU."""
    owned_left = guaranteed_left = 100
    found = []
    for number in range(draw(st.integers(0, 8))):
        share = draw(st.integers(1, 100))
        borrowed = max(draw(st.integers(0, share)), share - owned_left)
        effective = draw(st.integers(0, share))
        guaranteed = draw(st.integers(0, min(effective, guaranteed_left)))
        owned_left -= share - borrowed
        guaranteed_left -= guaranteed
        found.append(
            session(
                f"user-{number}", share_units=share, borrowed_units=borrowed, effective_units=effective,
                guaranteed_units=guaranteed, opened_at=float(number),
            )
        )  # fmt: skip
    return found


@given(neighbours())
def test_the_bar_is_as_long_as_the_gpu_and_shows_what_everybody_gets(sessions: list[SessionReport]) -> None:
    gpu = GpuReport(index=0, uuid="GPU-0", model="x", memory_bytes=1)
    bar = gpu_bar(gpu, sessions)
    assert sum(segment.units for segment in bar) == 100
    assert all(segment.units > 0 for segment in bar)
    assert units_of(bar, "owned") + units_of(bar, "borrowed") == sum(one.guaranteed_units for one in sessions)


def test_session_has_all_of_its_instance() -> None:
    here = instance("MIG-3", "3g.40gb")
    assert gpu_bar(here, []) == [Segment("free", 42)]
    assert gpu_bar(here, [session("ann", gpus=("MIG-3",), share_units=10)]) == [Segment("owned", 42, "ann")]
