"""Allowances of device memory, without an agent around them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.agent.session_limit import PIECES, SMALLEST_PIECE, Allowances

GIB = 2**30
LIMIT = 8 * GIB
PIECE = LIMIT // PIECES

MIB = 2**20


def allowances(*processes: str, limit: int = LIMIT) -> Allowances[str]:
    found = Allowances[str](limit)
    for process in processes:
        found.join(process)
    return found


def test_a_process_gets_what_it_wants_and_a_piece_more() -> None:
    one = allowances("a")
    assert one.grant("a", GIB, one.left_for("a")) == GIB + PIECE
    assert one.grant("a", GIB, one.left_for("a")) == 0, "it has that much already"


def test_the_last_piece_ends_at_the_limit() -> None:
    one = allowances("a")
    assert one.grant("a", LIMIT - 1, one.left_for("a")) == LIMIT
    assert one.left_for("a") == LIMIT


def test_a_small_limit_has_pieces_worth_asking_for() -> None:
    one = allowances("a", limit=16 * 2**20)
    assert one.grant("a", 1, one.left_for("a")) == 1 + SMALLEST_PIECE


def test_what_one_process_may_have_another_may_not() -> None:
    both = allowances("a", "b")
    both.grant("a", 7 * GIB, both.left_for("a"))
    assert both.left_for("b") == LIMIT - 7 * GIB - PIECE
    both.gives_back("a", PIECE)
    assert both.left_for("b") == GIB
    both.leave("a")
    assert both.left_for("b") == LIMIT


def test_memory_beyond_an_allowance_counts_too() -> None:
    """A process that ran without the agent, or one of an older version that reserves nothing."""
    both = allowances("a", "b")
    assert both.states("a", 7 * GIB)
    assert not both.states("a", 7 * GIB), "no news"
    assert both.left_for("b") == GIB
    both.states("a", 9 * GIB)
    assert both.left_for("b") == -GIB
    assert both.grant("b", GIB, both.left_for("b")) == 0


def test_only_others_with_an_allowance_are_asked_to_give_back() -> None:
    three = allowances("a", "b", "c")
    three.grant("b", GIB, three.left_for("b"))
    three.states("c", GIB)
    assert three.recallable("a") == ["b"]
    assert three.recallable("b") == []


def test_plain_memory_is_part_of_what_is_allocated() -> None:
    one = allowances("a")
    one.states("a", 3 * GIB, plain=GIB)
    assert one.of("a").plain == GIB
    one.states("a", GIB // 2)
    assert one.of("a").plain == GIB // 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["grant", "allocate", "return"]),
                          st.integers(0, 4 * GIB)), max_size=60))  # fmt: skip
def test_processes_that_keep_to_their_allowances_never_exceed_the_limit(steps: list[tuple[str, str, int]]) -> None:
    book = allowances(*"abc")
    known = dict.fromkeys("abc", 0)
    used = dict.fromkeys("abc", 0)
    for process, step, amount in steps:
        if step == "grant":
            known[process] += book.grant(process, amount, book.left_for(process))
        elif step == "allocate":
            used[process] = min(amount, known[process])
            book.states(process, used[process])
        else:
            back = min(amount, known[process] - used[process])
            known[process] -= back
            book.gives_back(process, back)
        assert book.counted <= LIMIT
        assert sum(used.values()) <= sum(known.values()) <= book.counted


def test_what_processes_state_counts_together_within_the_limit() -> None:
    made = Allowances[str](100 * MIB)
    for name in "abc":
        made.join(name)
    assert [made.accept(name, 2**62, reserves=False) for name in "abc"] == [100 * MIB, 0, 0]
    assert made.accept("a", 10 * MIB, reserves=False) == 10 * MIB
    assert made.accept("b", 2**62, reserves=False) == 90 * MIB


def test_what_a_process_that_reserves_states_counts_within_its_allowance() -> None:
    made = Allowances[str](100 * MIB)
    made.join("a")
    assert made.accept("a", 2**62, reserves=True) == 0
    added = made.grant("a", 30 * MIB, 100 * MIB)
    assert made.accept("a", 2**62, reserves=True) == added
    assert made.accept("a", 5 * MIB, reserves=True) == 5 * MIB


def test_what_the_driver_shows_counts_beyond_the_limit_for_as_long_as_it_is_stated() -> None:
    made = Allowances[str](100 * MIB)
    made.join("a")
    made.states("a", 300 * MIB)
    made.driver_shows("a", 200 * MIB)
    made.driver_shows("a", 50 * MIB)  # paged out meanwhile
    assert made.accept("a", 300 * MIB, reserves=True) == 200 * MIB
    assert made.accept("a", 20 * MIB, reserves=True) == 20 * MIB
    assert made.accept("a", 300 * MIB, reserves=True) == 20 * MIB


def test_the_spare_bytes_of_a_session_count_once() -> None:
    made = Allowances[str](100 * MIB)
    for name in "ab":
        made.join(name)
    assert [made.accept(name, 2**62, reserves=True, spare=7 * MIB) for name in "ab"] == [7 * MIB, 0]
