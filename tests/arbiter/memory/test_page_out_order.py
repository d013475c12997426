"""The order of page-outs: many sessions that lack a little, before one that lacks all."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.memory import Residency, page_out_order
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client, PageOut
from tests.arbiter.virtual_gpu import GIB

SETTINGS = ArbiterSettings(unnoticed_page_in=0.5, long_pause=30.0)
CAPACITY, BANDWIDTH = 1000, 20.0
"""Bytes, and bytes per second: a page-in of 10 bytes is not noticed."""
NOW = 100.0


class Board:
    """Clients of 100 bytes each that are on the GPU, in the order of their last use."""

    def __init__(self, **last_used: float) -> None:
        self.residency = Residency()
        self.clients = {}
        for name, instant in last_used.items():
            client = Client(name, ArbitratedSession(name, 1), allocated=100, working_set=100, last_used=instant)
            self.clients[name] = client
            self.residency.add(client)
            self.residency.granted(client, CAPACITY, instant)

    def paged_out(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self.residency.order_out(self.clients[name], amount, NOW)

    def order(self, settings: ArbiterSettings = SETTINGS) -> list[tuple[object, int]]:
        found = page_out_order(self.clients.values(), self.residency, CAPACITY, BANDWIDTH, NOW, settings)
        return [(client.id, amount) for client, amount in found]


def test_idle_sessions_page_out_first_what_nobody_notices_and_then_all_the_least_recently_used_before_the_others() -> (
    None
):
    board = Board(a=50.0, b=40.0, c=60.0)
    assert board.order() == [("b", 10), ("a", 10), ("c", 10), ("b", CAPACITY), ("a", CAPACITY), ("c", CAPACITY)]


def test_what_a_session_lacks_already_counts() -> None:
    board = Board(a=40.0, b=50.0, c=60.0)
    board.paged_out(a=4, b=10)
    assert board.order()[:2] == [("a", 6), ("c", 10)]


def test_a_session_whose_return_would_be_noticed_pages_out_the_rest_before_the_others_begin() -> None:
    board = Board(a=40.0, b=50.0, c=60.0)
    board.paged_out(b=11, c=30)
    assert board.order() == [
        ("b", CAPACITY), ("c", CAPACITY), ("a", 10), ("a", CAPACITY), ("b", CAPACITY), ("c", CAPACITY),
    ]  # fmt: skip


@pytest.mark.parametrize(("last_used", "idle"), [(70.0, True), (70.1, False)])
def test_a_session_in_a_short_pause_pages_out_only_when_all_idle_ones_have(last_used: float, idle: bool) -> None:
    board = Board(a=last_used)
    assert board.order() == [*([("a", 10)] if idle else []), ("a", CAPACITY)]


def test_clients_that_wait_page_out_last_and_parked_ones_after_them() -> None:
    board = Board(parked=10.0, waiting=20.0, idle=30.0)
    board.clients["parked"].parked = True
    board.clients["waiting"].waiting = True
    board.paged_out(parked=50, waiting=50)
    assert board.order() == [("idle", 10), ("idle", CAPACITY), ("waiting", CAPACITY), ("parked", CAPACITY)]


def test_a_client_that_never_had_a_lease_is_asked_like_any_other_in_the_end_only() -> None:
    assert Board(a=-1.0).order() == [("a", CAPACITY)]
    assert Board(a=0.0).order() == [("a", 10), ("a", CAPACITY)], "used at the clock's first instant"


def test_without_unnoticed_bytes_the_least_recently_used_page_out_all() -> None:
    board = Board(a=40.0, b=30.0)
    settings = ArbiterSettings(unnoticed_page_in=0.0)
    assert board.order(settings) == [("b", CAPACITY), ("a", CAPACITY)]


def test_a_newcomer_takes_a_little_from_each_idle_session_and_each_returns_unnoticed() -> None:
    """Four idle sessions of 4 GiB fill the GPU; at 8 GiB/s 0.1 s are 0.8 GiB of each."""
    settings = ArbiterSettings(bandwidth_guess=8 * GIB, unnoticed_page_in=0.1)
    arbiter = GpuArbiter(16 * GIB, settings)
    for number in range(4):
        name = str(number)
        arbiter.add_session(name, 25, 0.0)
        arbiter.connect(name, name, 0.0)
        (grant,) = arbiter.request(name, 4 * GIB, 0, float(number))
        arbiter.release(name, grant.lease, 0.5, number + 0.5)  # type: ignore[union-attr]
    arbiter.add_session("new", 25, 100.0)
    arbiter.connect("new", "new", 100.0)
    orders = [one for one in arbiter.request("new", 3 * GIB, 0, 100.0) if isinstance(one, PageOut)]
    step = int(0.8 * GIB)
    assert orders == [PageOut("0", step), PageOut("1", step), PageOut("2", step), PageOut("3", 3 * GIB - 3 * step)]
