"""The ledger: where shares go, and why they do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Gpu
from gpushare_spawner.placement import BestFit, FreeCapacity, Ledger, LedgerError, Reason
from tests.placement.reports import active, gpu, report


def two_gpus(*allocations, capacity: int = 100) -> Ledger:
    """A node with the GPUs a and b."""
    return Ledger.of([report("n", [gpu("a", 0, capacity=capacity), gpu("b", 1, capacity=capacity)], allocations)])


def test_best_fit_takes_the_fullest_gpu_that_has_room():
    ledger = two_gpus(active("s", "b", 50))
    assert ledger.place(Share(50)).gpus == ("b",)
    assert ledger.place(Share(51)).gpus == ("a",)


def test_ties_go_to_the_first_node_and_index():
    nodes = [report(node, [gpu(f"{node}1", 1), gpu(f"{node}0", 0)]) for node in ("n2", "n1")]
    ledger = Ledger.of(nodes)
    assert {ledger.place(Share(10)).gpus for _ in range(5)} == {("n10",)}
    assert ledger.place(Share(10)).node == "n1"


def test_unowned_units_are_preferred_to_lent_ones():
    idle = active("idle", "a", 100).with_effective(10)
    ledger = two_gpus(idle, active("s", "b", 50))
    first = ledger.place(Share(40))
    assert (first.gpus, first.borrowed) == (("b",), 0)
    second = ledger.place(Share(60))
    assert (second.gpus, second.borrowed) == (("a",), 60)
    assert ledger.place(Share(91)) is None


def test_as_few_lent_units_as_possible():
    a = active("on-a", "a", 80).with_effective(0)
    b = active("on-b", "b", 60).with_effective(0)
    placement = two_gpus(a, b).place(Share(50))
    assert (placement.gpus, placement.borrowed) == (("b",), 10)


def test_the_owner_comes_back_and_the_borrower_yields():
    owner = active("owner", "a", 75).with_effective(0)
    ledger = Ledger.of([report("n", [gpu("a")], [owner])])
    placement = ledger.place(Share(50))
    assert placement.borrowed == 25
    ledger.add(active("guest", placement.gpus, 50, placement.borrowed, opened_at=1.0))
    assert ledger.guaranteed("guest") == 50
    ledger.replace(owner.with_effective(75))
    assert (ledger.guaranteed("owner"), ledger.guaranteed("guest")) == (75, 25)
    ledger.check()
    ledger.remove("owner")
    assert ledger.settle() == {"guest": 0}
    assert ledger.allocations["guest"].owned_units == 50
    assert ledger.unowned_units("a") == 50
    ledger.check()


def test_several_whole_gpus_lie_on_one_node_and_are_of_one_model():
    ledger = Ledger.of(
        [
            report("big", [gpu(f"big{i}", i) for i in range(4)]),
            report("mixed", [gpu("m0", 0), gpu("m1", 1, model="T4")]),
            report("small", [gpu("small0", 0), gpu("small1", 1)]),
        ]
    )
    assert ledger.place(Share(count=2)).gpus == ("small0", "small1")
    ledger.add(active("s", "small0", 1))
    assert ledger.place(Share(count=2)).gpus == ("big0", "big1")
    assert ledger.place(Share(count=5)) is None
    assert ledger.refusal(Share(count=5)).reason is Reason.TOO_BIG


def test_several_whole_gpus_may_be_lent_ones():
    ledger = two_gpus(active("idle", "a", 30).with_effective(0))
    placement = ledger.place(Share(count=2))
    assert (set(placement.gpus), placement.borrowed) == ({"a", "b"}, 30)
    ledger.add(active("guest", placement.gpus, 100, placement.borrowed, opened_at=1.0))
    ledger.check()
    ledger.replace(active("idle", "a", 30))
    assert ledger.guaranteed("guest") == 70


def test_unhealthy_gpus_get_nothing():
    ledger = Ledger.of([report("n", [gpu("a", healthy=False)])])
    assert ledger.place(Share(1)) is None
    assert ledger.free_units("a") == 0
    refusal = ledger.refusal(Share(1))
    assert refusal.reason is Reason.UNHEALTHY
    assert refusal.may_pass


def test_only_accepted_models():
    wanted = Gpu(fraction=0.5, models=("*h100*",))
    ledger = Ledger.of([report("n", [gpu("a", 0, "NVIDIA A100"), gpu("h", 1, "NVIDIA H100 80GB")])])
    assert ledger.place(Share(50), wanted.accepts).gpus == ("h",)
    refusal = Ledger.of([report("n", [gpu("a", 0, "NVIDIA A100")])]).refusal(Share(50), wanted.accepts)
    assert refusal.reason is Reason.NO_MODEL
    assert "NVIDIA A100" in str(refusal)
    assert not refusal.may_pass


def test_a_share_bigger_than_any_gpu():
    refusal = two_gpus(capacity=50).refusal(Share(75))
    assert refusal.reason is Reason.TOO_BIG
    assert (refusal.share, refusal.most_units) == (Share(75), 50)


def test_full_says_how_much_is_free_at_best():
    ledger = two_gpus(active("s", "a", 80), active("t", "b", 70))
    assert ledger.place(Share(50)) is None
    refusal = ledger.refusal(Share(50))
    assert (refusal.reason, refusal.best_units, refusal.best_count) == (Reason.FULL, 30, 0)
    assert refusal.may_pass


def test_gpus_out_of_order_may_get_well():
    ledger = Ledger.of([report("n", [gpu("a", 0), gpu("b", 1, healthy=False)])])
    assert ledger.refusal(Share(count=2)).reason is Reason.UNHEALTHY


def test_no_agent_no_gpu():
    assert Ledger.of([]).place(Share(1)) is None
    assert Ledger.of([]).refusal(Share(1)).reason is Reason.NO_GPUS


def test_overcommitted_gpus_hold_more():
    ledger = two_gpus(active("s", "a", 100), capacity=150)
    assert ledger.place(Share(50)).gpus == ("a",)
    assert ledger.place(Share(51)).gpus == ("b",)


def test_reservations_count_until_they_are_reported():
    gpus = [gpu("a")]
    reservation = active("s", "a", 60)
    before = Ledger.of([report("n", gpus)], [reservation])
    assert before.free_units("a") == 40
    after = Ledger.of([report("n", gpus, [reservation])], [reservation])
    assert after.free_units("a") == 40


def test_the_newest_report_of_a_node_counts():
    old = report("n", [gpu("a")], [active("s", "a", 60)], at=1.0)
    new = report("n", [gpu("a")], at=2.0)
    assert Ledger.of([new, old]).free_units("a") == 100


def test_a_session_on_a_gpu_that_is_gone_disturbs_nobody():
    ledger = Ledger.of([report("n", [gpu("a")], [active("s", "lost", 60)])])
    assert ledger.free_units("a") == 100
    assert ledger.guaranteed("s") == 0
    ledger.remove("s")
    ledger.check()


def test_a_session_enters_once():
    ledger = two_gpus(active("s", "a", 10))
    with pytest.raises(ValueError, match="already"):
        ledger.add(active("s", "b", 10))
    assert ledger.remove("nobody") is None


def test_too_much_owned_is_found():
    ledger = two_gpus(active("s", "a", 60), active("t", "a", 60))
    with pytest.raises(LedgerError, match="120 units are owned"):
        ledger.check()


@dataclass
class Always:
    """A strategy with one answer."""

    gpus: tuple[str, ...]

    def choose(self, capacity: FreeCapacity, share: Share, models) -> tuple[str, ...]:
        return self.gpus


def test_another_strategy_can_be_used_and_is_checked():
    ledger = two_gpus(active("s", "a", 60))
    assert ledger.place(Share(30), strategy=Always(("b",))).gpus == ("b",)
    assert ledger.place(Share(30), strategy=BestFit()).gpus == ("a",)
    for wrong in (("a",), ("b", "b"), ("a", "b")):
        with pytest.raises(LedgerError, match="not possible"):
            ledger.place(Share(50), strategy=Always(wrong))


def test_a_strategy_is_not_asked_where_no_gpu_is_of_an_accepted_model():
    assert two_gpus().place(Share(30), lambda model: False, Always(("a",))) is None


def test_a_wrong_choice_is_named_with_the_share():
    with pytest.raises(LedgerError, match=r"^Always\(gpus=\('a', 'b'\)\) chose a, b for 0\.50 GPU: not possible$"):
        two_gpus().place(Share(50), strategy=Always(("a", "b")))


def test_a_full_gpu_has_nothing_free_and_nothing_unowned_and_neither_has_an_unknown_one():
    ledger = two_gpus(active("s", "a", 100))
    assert (ledger.free_units("a"), ledger.unowned_units("a")) == (0, 0)
    assert (ledger.free_units("lost"), ledger.unowned_units("lost")) == (0, 0)
    over = two_gpus(active("s", "a", 100), active("t", "a", 30))
    assert (over.free_units("a"), over.unowned_units("a")) == (0, 0)


def test_the_check_names_the_gpu_and_what_is_wrong_with_it():
    ledger = Ledger.of([report("n", [gpu("a", 3)], [active("s", "a", 60), active("t", "a", 60)])])
    with pytest.raises(LedgerError, match=r"^GPU 3 of n \(a\): 120 units are owned, its capacity is 100$"):
        ledger.check()
    ledger = Ledger.of([report("n", [gpu("a", 3)], [active("s", "a", 60)])])
    ledger.capacity.update("a", 41, 40)
    with pytest.raises(
        LedgerError, match=r"^GPU 3 of n \(a\): 41 unowned and 40 free units are out of step with its sessions$"
    ):
        ledger.check()
