"""The queue in words."""

from __future__ import annotations

from gpushare_spawner.model.share import Share
from gpushare_spawner.wording import spawn_failures


def test_the_first_spawn_in_the_queue_has_position_1() -> None:
    assert spawn_failures.position(0) == "First in queue"
    assert spawn_failures.position(1) == "Position 2 in queue"


def test_a_waiting_spawn_is_told_its_position_the_reason_and_when_the_wait_ends() -> None:
    assert spawn_failures.waiting(2, Share(25), "Earlier spawns are placed first.", None) == (
        "Position 3 in queue, waiting for 0.25 GPU. Earlier spawns are placed first. "
        "No estimate: earlier spawns wait for the same GPUs. "
        "If the server cannot start by {time}, the spawn is cancelled."
    )
    assert spawn_failures.waiting(0, Share(25), "", None) == (
        "First in queue, waiting for 0.25 GPU. No estimate: when sessions end is unknown. "
        "If the server cannot start by {time}, the spawn is cancelled."
    )


def test_a_waiting_spawn_is_told_the_amount_once() -> None:
    why = "Not enough free capacity: this needs 0.25 GPU, and none is free."
    assert spawn_failures.waiting(0, Share(25), why, None) == (
        f"First in queue. {why} No estimate: when sessions end is unknown. "
        "If the server cannot start by {time}, the spawn is cancelled."
    )


def test_a_waiting_spawn_is_told_the_estimate_where_there_is_one() -> None:
    assert spawn_failures.waiting(0, Share(25), "", (75, 75, 75)) == (
        "First in queue, waiting for 0.25 GPU. Estimated wait: about 1 h 15 min. "
        "If the server cannot start by {time}, the spawn is cancelled."
    )


def test_an_uncertain_estimate_is_an_interval() -> None:
    assert spawn_failures.estimated_wait(5, 10, 20) == "Estimated wait: probably 5 min to 20 min"
    assert spawn_failures.estimated_wait(0, 10, 90) == "Estimated wait: probably at most 1 h 30 min"
    # a hub from before sends no interval
    assert spawn_failures.estimated_wait(None, 10, None) == "Estimated wait: about 10 min"


def test_a_spawn_for_another_layer_is_told_that_its_wait_is_unknown() -> None:
    assert spawn_failures.waiting(0, Share(25), "", None, elsewhere=True) == (
        "First in queue, waiting for 0.25 GPU. No estimate: when sessions end is unknown. "
        "If the server cannot start by {time}, the spawn is cancelled."
    )
    assert "about 5 min." in spawn_failures.waiting(0, Share(25), "", (5, 5, 5), elsewhere=True)


def test_the_user_of_a_waiting_spawn_is_told_what_would_start_now() -> None:
    assert spawn_failures.instead(()) == ""
    assert spawn_failures.instead(("CPU only",)) == (
        "CPU only would start now. To start it instead, cancel this spawn."
    )
    assert spawn_failures.instead(("CPU only", "0.10 GPU")) == (
        "These templates would start now: CPU only, 0.10 GPU. To start one of them instead, cancel this spawn."
    )


def test_a_placed_spawn_names_its_gpus_and_the_units_that_are_lent() -> None:
    two = spawn_failures.placed_on([(0, "NVIDIA L4"), (1, "NVIDIA L4")], "node-a")
    assert two == "GPU 0 (NVIDIA L4) and GPU 1 (NVIDIA L4) of node-a"
    assert spawn_failures.placed(two, Share(100, 2), 0) == f"Placed on {two}."
    assert spawn_failures.placed(spawn_failures.placed_on([(0, "NVIDIA L4")], ""), Share(25), 10) == (
        "Placed on GPU 0 (NVIDIA L4); idle sessions lend 10 % of each GPU and reclaim it when they work again. "
        "Guaranteed: 0.15 GPU while the rest is borrowed from idle sessions; 0.25 GPU after these have stopped."
    )
