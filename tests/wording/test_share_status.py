"""The share in words, where the figures decide the sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.model.share_status import CellsStatus, CellStatus
from gpushare_spawner.wording.actions import closed
from gpushare_spawner.wording.amounts import near_clock
from gpushare_spawner.wording.share_status import cell_cost, cells_page, received_time


@pytest.mark.parametrize(
    ("received", "entitled", "said"),
    [
        (7.0, 7.0, "all that it was entitled to (7 s)"),
        (9.0, 7.0, "all that it was entitled to (7 s)"),
        (6.99, 7.0, "all that it was entitled to (7 s)"),
        (3.0, 7.0, "3 s of the 7 s that it was entitled to"),
    ],
)
def test_received_time_is_compared_with_what_the_session_was_entitled_to(
    received: float, entitled: float, said: str
) -> None:
    assert received_time(received, entitled) == said


@pytest.mark.parametrize(
    ("drain", "reason", "said"),
    [
        (True, "kernel update", "Draining (admin: kernel update). No new sessions."),
        (False, "", "Cordoned (admin). No new sessions."),
    ],
)
def test_a_closed_gpu_says_by_whom_and_why(drain: bool, reason: str, said: str) -> None:
    assert closed(drain, "admin", reason) == said


COSTLY = CellStatus(1, 50, 3, at=1000.0, seconds=12.0, running=False, gpu_seconds=3.21)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "GPU time 3.2 s"),
        (
            {"on_gpu_bytes": 3 * 2**30, "paged_out_bytes": 2**28, "lease_seconds": 0.4, "memory_seconds": 1.25},
            "GPU time 3.2 s · at most 3 GiB on the GPU and 256 MiB paged out · waited 400 ms for the GPU and 1.2 s for "
            "memory",
        ),
        ({"paged_out_bytes": 2**28, "memory_seconds": 0.004}, "GPU time 3.2 s · at most 256 MiB paged out"),
        (
            {"divided_seconds": 1.0},
            "GPU time 3.2 s · 1.0 s of the GPU time divided evenly with cells that ran meanwhile",
        ),
        ({"gpu_seconds": 0.004, "on_gpu_bytes": 2**30}, ""),
        ({"gpu_seconds": 0.0, "lease_seconds": 2.0}, "GPU time 0 ms · waited 2.0 s for the GPU"),
    ],
)
def test_the_line_under_a_cell(changes: dict[str, float], line: str) -> None:
    assert cell_cost(replace(COSTLY, **changes)) == line  # type: ignore[arg-type]


def test_the_page_of_cells_has_a_line_for_each_and_the_sums() -> None:
    now = 2000.0
    others = [
        replace(COSTLY, number=2, pid=60, count=0, gpu_seconds=0.0, running=True, seconds=0.5),
        replace(COSTLY, number=3, gpu_seconds=0.001),
    ]
    cells = CellsStatus((COSTLY, *others), earlier=12, earlier_seconds=40.0, outside_seconds=0.1, gpu_seconds=43.311)
    at = near_clock(1000.0, now)
    assert cells_page(cells, {50: "the kernel of a.ipynb"}, now).splitlines() == [
        f"{at}  the kernel of a.ipynb [3] took 12.0 s: GPU time 3.2 s",
        f"{at}  a kernel runs for 500 ms: no GPU work",
        f"{at}  the kernel of a.ipynb [3] took 12.0 s: GPU time below 5 ms",
        "GPU time 43.3 s: 3.2 s in 3 cells, 40.0 s in 12 earlier cells, 100 ms outside of cells.",
    ]
    assert cells_page(CellsStatus(), {}, now) == "GPU time 0 ms: 0 ms in 0 cells, 0 ms outside of cells."
