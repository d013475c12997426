"""The model of which pages are where: what is missing, what is fetched, which clients page out."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.memory import Answered, Residency
from gpushare_spawner.arbiter.session import ArbitratedSession, Client


def client(name: str, working_set: int, allocated: int | None = None) -> Client:
    return Client(name, ArbitratedSession(name, 1), allocated=allocated or working_set, working_set=working_set)


class Pages(Residency):
    """A GPU of 100 bytes with clients by name."""

    def __init__(self, **working_sets: int) -> None:
        super().__init__()
        self.clients = {name: client(name, size) for name, size in working_sets.items()}
        for one in self.clients.values():
            self.add(one)

    def __getitem__(self, name: str) -> Client:
        return self.clients[name]

    def state(self, name: str) -> tuple[int, int]:
        """Bytes of a client on the GPU, and bytes that were paged out."""
        return self.of(self[name]), self.in_host_memory(self[name])


def test_a_new_client_has_nothing_there_and_nothing_to_fetch() -> None:
    pages = Pages(a=60)
    assert pages.state("a") == (0, 0)
    assert (pages.missing(pages["a"], 100), pages.missing(pages["a"], 40)) == (60, 40)
    assert pages.prefetch(pages["a"], 100) == 0


def test_a_lease_brings_the_working_set_in_as_far_as_it_fits() -> None:
    pages = Pages(a=60, b=70)
    pages.granted(pages["a"], 100, 0.0)
    assert pages.state("a") == (60, 0)
    assert (pages.missing(pages["a"], 100), pages.free(100)) == (0, 40)
    pages.granted(pages["b"], 40, 0.0)
    assert pages.state("b") == (40, 0)
    assert pages.free(90) == -10
    pages.remove(pages["a"])
    assert pages.free(100) == 60


def test_only_what_was_paged_out_is_fetched() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    assert pages.order_out(pages["a"], 25, 1.0) == 25
    assert pages.of(pages["a"]) == 35
    assert pages.in_host_memory(pages["a"]) == 0  # still on its way
    assert pages.paged_out(pages["a"], 25, 0.5, 2.0) == Answered(25, 0.5)
    assert pages.state("a") == (35, 25)
    assert pages.prefetch(pages["a"], 100) == 25
    assert pages.prefetch(pages["a"], 45) == 10
    pages.granted(pages["a"], 45, 3.0)
    assert pages.state("a") == (45, 15)
    assert pages.paged_in(pages["a"], 99, 99.0, 5.0) == Answered(10, 2.0)
    assert pages.paged_in(pages["a"], 10, 1.0, 6.0) is None


def test_nobody_pages_out_more_than_it_has_and_an_order_for_nothing_is_none() -> None:
    pages = Pages(a=60)
    assert pages.order_out(pages["a"], 10, 0.0) == 0
    assert pages.paged_out(pages["a"], 10, 1.0, 2.0) is None
    pages.granted(pages["a"], 100, 0.0)
    assert pages.order_out(pages["a"], 99, 0.0) == 60
    assert pages.state("a") == (0, 0)
    pages.paged_out(pages["a"], 60, 1.0, 2.0)
    assert pages.state("a") == (0, 60)


@pytest.mark.parametrize(
    ("amount", "seconds", "answer"),
    [(2**63, 2.0**64, Answered(20, 3.0)), (-5, -1.0, Answered(0, 0.0)), (15, 2.5, Answered(15, 2.5))],
)
def test_an_answer_counts_within_the_bytes_and_the_time_of_its_order(
    amount: int, seconds: float, answer: Answered
) -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages.order_out(pages["a"], 20, 1.0)
    assert pages.paged_out(pages["a"], amount, seconds, 4.0) == answer


def test_what_did_not_leave_is_still_there() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages.order_out(pages["a"], 20, 1.0)
    pages.paged_out(pages["a"], 5, 1.0, 2.0)
    assert pages.state("a") == (55, 5)
    # orders are answered in their order, each by itself
    pages.order_out(pages["a"], 10, 3.0)
    pages.order_out(pages["a"], 7, 4.0)
    pages.paged_out(pages["a"], 10, 1.0, 5.0)
    assert pages.state("a") == (38, 15)
    pages.paged_out(pages["a"], 0, 1.0, 6.0)
    assert pages.state("a") == (45, 15)


def test_a_lease_that_comes_before_the_answer_has_counted_the_pages_already() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages.order_out(pages["a"], 20, 1.0)
    pages.granted(pages["a"], 100, 2.0)
    assert pages.state("a") == (60, 0)
    pages.paged_out(pages["a"], 0, 1.0, 3.0)
    assert pages.state("a") == (60, 0)
    assert pages.paged_in(pages["a"], 20, 0.5, 4.0) == Answered(20, 0.5)


def test_pages_that_a_lease_left_out_stay_away_whatever_the_order_before_it_comes_to() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages.order_out(pages["a"], 20, 1.0)
    pages.granted(pages["a"], 50, 2.0)
    assert pages.state("a") == (50, 10)
    pages.paged_out(pages["a"], 0, 1.0, 3.0)
    assert pages.state("a") == (50, 10)


def test_a_page_out_that_moved_nothing_leaves_nothing_away() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages.order_out(pages["a"], 20, 1.0)
    pages.paged_out(pages["a"], 0, 1.0, 2.0)
    assert pages.state("a") == (60, 0)


def test_a_single_byte_counts() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    assert pages.order_out(pages["a"], 1, 1.0) == 1
    assert pages.of(pages["a"]) == 59
    assert pages.free_memory(42, 100, [(pages["a"], 100)], 2.0) == [(pages["a"], 1)]


def test_a_lease_that_fetches_nothing_expects_no_answer() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    assert pages.paged_in(pages["a"], 60, 1.0, 1.0) is None


def test_a_client_that_grows_while_it_holds_the_gpu_has_the_new_bytes_there() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages["a"].working_set = pages["a"].allocated = 90
    pages.resized(pages["a"], 100, 0)
    assert pages.of(pages["a"]) == 60
    pages.resized(pages["a"], 100, 20)
    assert pages.of(pages["a"]) == 80
    pages.resized(pages["a"], 85, 20)
    assert pages.of(pages["a"]) == 85
    pages.resized(pages["a"], 100, 20)
    assert pages.of(pages["a"]) == 90


def test_freed_memory_is_neither_there_nor_away() -> None:
    pages = Pages(a=60)
    pages.granted(pages["a"], 100, 0.0)
    pages.order_out(pages["a"], 40, 1.0)
    pages.paged_out(pages["a"], 40, 1.0, 2.0)
    assert pages.state("a") == (20, 40)
    pages["a"].working_set = pages["a"].allocated = 50
    pages.resized(pages["a"], 100, 0)
    assert pages.state("a") == (20, 30)
    pages["a"].working_set = pages["a"].allocated = 10
    pages.resized(pages["a"], 100, 0)
    assert pages.state("a") == (10, 0)


def test_memory_is_freed_in_the_order_of_the_candidates_and_no_more_than_needed() -> None:
    pages = Pages(a=30, b=20, c=40, new=100)
    for name in "abc":
        pages.granted(pages[name], 100, 0.0)
    candidates = [(pages[name], 100) for name in ("b", "new", "a", "c")]
    assert pages.free(100) == 10
    assert pages.free_memory(10, 100, candidates, 1.0) == []
    assert pages.free_memory(35, 100, candidates, 1.0) == [(pages["b"], 20), (pages["a"], 5)]
    assert pages.free(100) == 35
    assert pages.free_memory(200, 100, candidates, 2.0) == [(pages["a"], 25), (pages["c"], 40)]
    assert pages.free_memory(100, 100, candidates, 2.0) == []
    assert pages.paged_out(pages["a"], 5, 9.0, 3.0) == Answered(5, 2.0)
    assert pages.paged_out(pages["a"], 25, 9.0, 3.0) == Answered(25, 1.0)


def test_a_client_pages_out_no_more_than_its_part_and_what_is_lacking_when_it_comes_up_again_in_one_order() -> None:
    pages = Pages(a=30, b=20, c=40)
    for name in "abc":
        pages.granted(pages[name], 100, 0.0)
    order = [(pages["a"], 5), (pages["b"], 5), (pages["a"], 100), (pages["c"], 100)]
    assert pages.free_memory(18, 100, order, 1.0) == [(pages["a"], 5), (pages["b"], 3)]
    assert pages.free_memory(43, 100, order, 2.0) == [(pages["a"], 20), (pages["b"], 5)]
    assert (pages.of(pages["a"]), pages.of(pages["b"]), pages.of(pages["c"])) == (5, 12, 40)
    assert pages.paged_out(pages["a"], 5, 0.5, 3.0) == Answered(5, 0.5)
    assert pages.paged_out(pages["a"], 99, 0.5, 3.0) == Answered(20, 0.5), "one order for both times"
    assert pages.free(100) == 43
    order = [(pages["a"], 3), (pages["a"], 9), (pages["b"], 100)]
    assert pages.free_memory(50, 100, order, 4.0) == [(pages["a"], 5), (pages["b"], 2)], "a has no more"


def test_what_the_driver_has_not_seen_of_an_unproven_client_frees_nothing() -> None:
    pages = Pages(a=50, b=50)
    for name in "ab":
        pages.granted(pages[name], 100, 0.0)
    pages["a"].touched, pages["a"].shown = 20, 10
    assert pages.free_memory(40, 100, [(pages["a"], 100), (pages["b"], 100)], 1.0) == [
        (pages["a"], 10),
        (pages["b"], 30),
    ]


def test_a_holder_that_fills_the_room_has_its_working_set_there_as_far_as_it_fits() -> None:
    pages = Pages(a=60)
    pages.filled(pages["a"], 40)
    assert pages.of(pages["a"]) == 40
    pages.filled(pages["a"], 100)
    assert pages.of(pages["a"]) == 60
