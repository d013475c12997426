"""Each reason for slow GPU work is said while it holds, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.model.share_status import GpuTimeStatus, ShareStatus
from gpushare_spawner.wording.share_status import why_slow
from tests.notebook.scripted_agent import GIB, GPU, OTHER_GPU, Script


def reasons(**changes: Any) -> list[str]:
    """The reasons at a status in which, but for the changes, nobody works and all memory is on the GPU."""
    quiet: dict[str, Any] = {"with_work": 0, "memory": GIB, "resident": GIB}
    return why_slow(Script(**quiet | changes).status())


def test_without_gpu_work_the_program_itself_is_the_reason() -> None:
    assert reasons() == [
        "You have no GPU work now, and no other session has: your program computes on the CPU, or waits for data."
    ]


def test_alone_on_the_gpu_the_program_itself_is_the_reason() -> None:
    (said,) = reasons(lease="held", with_work=1)
    assert said.startswith("No other session computes, and your memory is on the GPU")


@pytest.mark.parametrize(
    ("lease", "with_work", "said"),
    [
        ("waiting", 2, "Your GPU work waits for the GPU: 1 other session computes there now."),
        ("waiting", 3, "Your GPU work waits for the GPU: 2 other sessions compute there now."),
        ("held", 3, "2 other sessions compute on the GPU now."),
        ("none", 2, "2 other sessions compute on the GPU now."),
    ],
)
def test_other_sessions_that_compute_are_counted_without_this_one(lease: str, with_work: int, said: str) -> None:
    assert reasons(lease=lease, with_work=with_work, sessions=4) == [f"{said} You are guaranteed 0.25 GPU meanwhile."]


def test_memory_that_is_not_on_the_gpu_is_a_reason() -> None:
    (said,) = reasons(memory=3 * GIB)
    assert said.startswith("2 GiB of your 3 GiB is not on the GPU: it is paged out, or not used yet.")
    assert "not on" not in reasons(memory=GIB + 2**20)[0], "so little is there within milliseconds"


def test_with_several_gpus_each_reason_names_its_gpu() -> None:
    said = reasons(gpus=[GPU, OTHER_GPU], memory=3 * GIB)
    assert [text.partition(" is not on ")[2].partition(":")[0] for text in said] == ["GPU 0", "GPU 1"]


def test_beside_another_layer_its_trouble_and_its_terms_are_said() -> None:
    kept = "Each session is kept within its part of the GPU's memory and time."
    assert reasons(layer="mps", memory=3 * GIB) == [kept], "what our arbiter would do is no reason"
    down = "The MPS daemon of GPU 0 is not running, and GPU work fails: it ended."
    assert reasons(layer="mps", layer_trouble=down, with_work=2) == [
        down,
        "2 other sessions compute on the GPU now.",
        kept,
    ]
    # this session's own work has just ended, or still runs
    assert reasons(layer="mps", quiet=0.0, with_work=2) == ["1 other session computes on the GPU now.", kept]


def test_without_an_agent_nobody_says_that_others_compute() -> None:
    status = ShareStatus(share_units=25, layer="time-slicing", layer_gpus=1)
    assert why_slow(status) == [
        "Nothing measures this server's GPU work. It is unknown here whether other sessions compute on the GPU.",
        "The share counts when GPUs are assigned. While sessions work, nothing keeps them within their shares.",
    ]


def test_gpu_time_below_the_promise_is_a_reason() -> None:
    (said,) = reasons(delivered=(100.0, 80.0, 1, 0.1, 0.1))
    assert said.startswith("So far, you have received 80 % of the GPU time that you were entitled to")
    for enough in ((100.0, 96.0, 1, 0.1, 0.1), (0.5, 0.1, 1, 0.1, 0.1)):
        assert "entitled" not in reasons(delivered=enough)[0]
    on_each = (GpuTimeStatus(100.0, 100.0), GpuTimeStatus(10.0, 5.0), GpuTimeStatus(0.5, 0.0))
    (said,) = reasons(delivered=(110.5, 105.0, 1, 0.1, 0.1), delivered_on=on_each)
    assert "50 % of the GPU time that you were entitled to on GPU 1 while others competed" in said, "95 % in all"


def test_units_that_their_owners_reclaimed_are_a_reason() -> None:
    assert "the owners of the lent units have reclaimed the rest" in reasons(borrowed=15, guaranteed=10)[0]
    assert "reclaimed" not in reasons(borrowed=15, guaranteed=25)[0]


def test_nothing_is_said_of_a_share_that_is_unknown() -> None:
    assert why_slow(ShareStatus(problem="away")) == why_slow(ShareStatus(shared=False)) == []
