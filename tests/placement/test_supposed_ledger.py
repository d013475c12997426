"""What would be free if idle actions with a notice happened, and where a request would fit first."""

from __future__ import annotations

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier
from gpushare_spawner.placement.feed import SupposedLedger, helpful_actions
from gpushare_spawner.placement.feed import first_to_fit as looking_for_first
from gpushare_spawner.placement.ledger import Ledger, NodeHold
from gpushare_spawner.placement.request import PlacementRequest
from tests.placement.reports import active, gpu, ledger_of, report, request


def stop(at: float) -> Notice:
    return Notice(tier=Tier.STOPPED, at=at, reason="idle")


def downgrade(at: float, to: int) -> Notice:
    return Notice(tier=Tier.DOWNGRADED, at=at, reason="idle", effective_units=to)


def first_to_fit(ledger: Ledger, asked: PlacementRequest, notices: list[tuple[str, Notice]]) -> NodeHold | None:
    """Look at the actions that may help, as a pass over the queue does."""
    helpful = [action for actions in helpful_actions(ledger, [asked], notices) for action in actions]
    *before, last = [None, *looking_for_first(ledger, asked, helpful)]
    assert not any(before)
    return last


def two_nodes() -> Ledger:
    """Each with one GPU that one session holds whole."""
    held = {"n1": active("ada", "a", 100), "n2": active("bob", "b", 100)}
    return ledger_of([report("n1", [gpu("a")], [held["n1"]]), report("n2", [gpu("b")], [held["n2"]])])


def test_the_action_that_comes_first_decides() -> None:
    hold = first_to_fit(two_nodes(), request(50), [("ada", stop(200)), ("bob", stop(100))])
    assert hold is not None
    assert (hold.node, hold.gpus, hold.demand.units) == ("n2", ("b",), 50)


def test_an_action_that_frees_too_little_helps_nobody() -> None:
    notices = [("ada", downgrade(100, to=51)), ("bob", downgrade(200, to=50))]
    hold = first_to_fit(two_nodes(), request(50), notices)
    assert hold is not None
    assert hold.node == "n2"
    assert first_to_fit(two_nodes(), request(51), notices) is None


def test_two_actions_on_one_node_add_up() -> None:
    held = [active("ada", "a", 50), active("bob", "a", 50)]
    ledger = ledger_of([report("n", [gpu("a")], held)])
    assert first_to_fit(ledger, request(80), [("ada", stop(1))]) is None
    hold = first_to_fit(ledger, request(80), [("ada", stop(1)), ("bob", stop(2))])
    assert hold is not None
    assert hold.node == "n"


def test_sessions_that_the_ledger_does_not_know_are_passed_over() -> None:
    notices = [("gone", stop(1)), ("ada", stop(2))]
    hold = first_to_fit(two_nodes(), request(100), notices)
    assert hold is not None
    assert hold.node == "n1"


def test_a_node_that_the_request_must_not_use_does_not_count() -> None:
    notices = [("ada", stop(1)), ("bob", stop(2))]
    for where in ({"left_out": frozenset({"n1"})}, {"node": "n2"}):
        hold = first_to_fit(two_nodes(), request(50, **where), notices)
        assert hold is not None
        assert hold.node == "n2"


def test_the_ledger_itself_stays_as_it_is() -> None:
    ledger = two_nodes()
    assert first_to_fit(ledger, request(50), [("ada", stop(1))]) is not None
    assert ledger.free_units("a") == 0
    assert list(ledger.allocations) == ["ada", "bob"]
    assert not ledger.holds


def test_an_action_that_frees_nothing_names_no_node() -> None:
    supposed = SupposedLedger(two_nodes())
    assert supposed.happens("ada", downgrade(1, to=100)) is None
    assert supposed.happens("nobody", stop(1)) is None
    assert supposed.happens("ada", stop(1)) == "n1"
    assert supposed.happens("ada", stop(1)) is None, "it is gone"


def test_what_is_placed_counts_for_the_next_one() -> None:
    supposed = SupposedLedger(two_nodes())
    supposed.happens("ada", stop(1))
    assert supposed.place("eve", request(60), "n1") is not None
    assert supposed.place("max", request(60), "n1") is None
    assert supposed.place("max", request(40), "n1") is not None
    assert supposed.place("kim", request(1), "n1") is None


def test_a_name_that_is_placed_anew_gives_up_what_it_claimed_before() -> None:
    supposed = SupposedLedger(two_nodes())
    supposed.happens("ada", stop(1))
    assert supposed.place("eve", request(60), "n1") is not None
    assert supposed.place("eve", request(80), "n1") is not None
    assert supposed.place("max", request(30), "n1") is None


def helped(ledger: Ledger, notices: list[tuple[str, Notice]], *asked: PlacementRequest) -> list[str]:
    return [session for actions in helpful_actions(ledger, asked, notices) for session, _ in actions]


def test_actions_on_nodes_where_no_request_can_fit_are_left_out() -> None:
    """Such nodes need not be copied to find out."""
    notices = [("ada", downgrade(1, to=60)), ("bob", stop(2)), ("gone", stop(3))]
    ledger = two_nodes()
    assert helped(ledger, notices, request(40)) == ["ada", "bob"]
    assert helped(ledger, notices, request(41)) == ["bob"]
    assert helped(ledger, notices, request(41), request(10)) == ["ada", "bob"]
    assert helped(ledger, notices, request(41, left_out=frozenset({"n2"}))) == []
    assert helped(ledger, notices, request(41, node="n1")) == []
    assert helped(ledger, notices, request(count=2)) == []
    assert helped(ledger, notices, request(41, "T4")) == []


def test_a_hold_on_a_node_does_not_rule_its_actions_out() -> None:
    """It can be the hold of the request itself."""
    ledger = two_nodes()
    ledger.hold("max", NodeHold("n2", ("b",), request(100).demand))
    assert helped(ledger, [("bob", stop(2))], request(100)) == ["bob"]


def test_what_is_gone_between_two_pieces_helps_nobody() -> None:
    ledger = two_nodes()
    pieces = helpful_actions(ledger, [request(50)], [("ada", stop(1)), ("bob", stop(2))])
    assert next(pieces) == []
    ledger.remove("ada")
    ledger.put_node("n2", [])
    assert [session for actions in pieces for session, _ in actions] == ["ada"], "its node is free now"
