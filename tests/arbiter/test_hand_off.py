"""A hand-off moves what must move, in bulk, and nothing else; the model of what is on the GPU follows the reports."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageOut, Revoke, RevokeReason

GIB = 2**30


class Desk:
    """An arbiter and three sessions with one client each, and no credit."""

    def __init__(self, names: str = "abc", **settings: object) -> None:
        self.arbiter = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=0.0, **settings))  # type: ignore[arg-type]
        self.lease: dict[str, int] = {}
        self.now = 0.0
        for name in names:
            self.arbiter.add_session(name, 50, 0.0)
            self.arbiter.connect(name, name, 0.0)

    def note(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, LeaseGrant):
                self.lease[str(decision.client)] = decision.lease
        return decisions

    def ask(self, name: str, gib: float, plain: float = 0.0) -> list[Decision]:
        self.now += 0.01
        return self.note(self.arbiter.request(name, int(gib * GIB), int(plain * GIB), self.now))

    def quiet(self, name: str) -> list[Decision]:
        self.now += 0.01
        return self.note(self.arbiter.idle(name, self.lease[name], 0.01, 0.001, self.now))

    def give_back(self, name: str) -> list[Decision]:
        self.now += 0.01
        return self.note(self.arbiter.release(name, self.lease[name], 0.01, self.now))

    def resident(self, name: str) -> float:
        return self.arbiter.session_snapshot(name).resident_bytes / GIB


def test_the_next_is_granted_on_release_and_the_page_out_follows() -> None:
    desk = Desk()
    (first,) = desk.ask("a", 12)
    assert isinstance(first, LeaseGrant)
    assert (first.client, first.lease, first.prefetch) == ("a", 1, 0)  # nothing of it was ever anywhere else
    desk.ask("b", 10)
    (revoke,) = desk.quiet("a")
    assert revoke == Revoke("a", 1, 6 * GIB, RevokeReason.IDLE)
    (grant,) = desk.give_back("a")
    assert isinstance(grant, LeaseGrant)
    assert (grant.client, grant.prefetch) == ("b", 0)
    assert desk.resident("a") == 6
    assert desk.resident("b") == 10


def test_coming_back_brings_in_only_what_left() -> None:
    desk = Desk()
    desk.ask("a", 12)
    desk.ask("b", 10)
    desk.quiet("a")
    desk.give_back("a")
    desk.arbiter.paged_out("a", 6 * GIB, 0.5, desk.now)
    desk.ask("a", 12)
    (revoke,) = desk.quiet("b")
    assert isinstance(revoke, Revoke)
    assert revoke.page_out == 6 * GIB
    (grant,) = desk.give_back("b")
    assert isinstance(grant, LeaseGrant)
    assert grant.prefetch == 6 * GIB


def test_nothing_moves_where_there_is_room() -> None:
    desk = Desk()
    desk.ask("a", 6)
    desk.give_back("a")
    (grant,) = desk.ask("b", 10)
    assert isinstance(grant, LeaseGrant)
    assert desk.resident("a") == 6
    desk.give_back("b")
    (again,) = desk.ask("a", 6)
    assert isinstance(again, LeaseGrant)
    assert again.prefetch == 0


def test_those_without_a_lease_make_room_first_the_longest_quiet_before_the_others() -> None:
    desk = Desk("abcd")
    for name in "ab":
        desk.ask(name, 4)
    for name in "ab":
        desk.give_back(name)
    desk.ask("c", 8)
    desk.ask("d", 14)
    decisions = desk.quiet("c")
    # d lacks 14, nothing is free: a and b give all they have, and c the rest.
    assert decisions == [
        Revoke("c", desk.lease["c"], 6 * GIB, RevokeReason.IDLE),
        PageOut("a", 4 * GIB),
        PageOut("b", 4 * GIB),
    ]


def test_a_lone_working_set_larger_than_the_gpu_fills_it() -> None:
    desk = Desk()
    desk.ask("a", 4)
    desk.give_back("a")
    decisions = desk.ask("b", 40)
    assert PageOut("a", 4 * GIB) in decisions
    assert [d.client for d in decisions if isinstance(d, LeaseGrant)] == ["b"]
    assert desk.resident("b") == 16
    desk.ask("a", 4)
    assert desk.quiet("b") == [Revoke("b", desk.lease["b"], 4 * GIB, RevokeReason.IDLE)]
    desk.give_back("b")
    desk.arbiter.paged_out("b", 4 * GIB, 0.3, desk.now)
    desk.give_back("a")
    order, grant = desk.ask("b", 40)
    assert order == PageOut("a", 4 * GIB)
    assert isinstance(grant, LeaseGrant)
    assert grant.prefetch == 4 * GIB


def test_confirmed_plain_memory_is_on_the_gpu_and_leaves_less_for_the_rest() -> None:
    desk = Desk()
    desk.arbiter.device_memory("a", 6 * GIB, 0, 0.0)
    desk.ask("a", 0, plain=6)
    desk.give_back("a")
    desk.ask("b", 8)
    desk.give_back("b")
    decisions = desk.ask("c", 12)
    assert PageOut("b", 8 * GIB) in decisions  # 10 GiB are left for all of c's 12
    assert desk.resident("a") == 6
    assert desk.resident("c") == 10


def test_a_growing_holder_makes_the_quiet_page_out_in_bulk() -> None:
    desk = Desk()
    desk.ask("a", 8)
    desk.give_back("a")
    desk.ask("b", 8)
    (order,) = desk.note(desk.arbiter.memory("b", 8 * GIB + 4096, 0, desk.now))
    assert order == PageOut("a", ArbiterSettings().page_out_step + 4096)
    assert desk.arbiter.memory("b", 8 * GIB + 8192, 0, desk.now) == []


def test_a_page_out_that_did_less_than_ordered_is_reckoned_with() -> None:
    desk = Desk()
    desk.ask("a", 12)
    desk.ask("b", 10)
    desk.quiet("a")
    desk.give_back("a")
    assert desk.resident("a") == 6
    desk.arbiter.paged_out("a", 2 * GIB, 0.2, desk.now)
    assert desk.resident("a") == 10


def test_a_page_out_that_nobody_ordered_is_ignored() -> None:
    desk = Desk()
    desk.ask("a", 12)
    desk.give_back("a")
    desk.arbiter.paged_out("a", 12 * GIB, 1.0, desk.now)
    assert desk.resident("a") == 12


def test_a_page_out_counts_up_to_its_order() -> None:
    desk = Desk()
    desk.ask("a", 12)
    desk.ask("b", 10)
    desk.quiet("a")
    desk.give_back("a")
    desk.arbiter.paged_out("a", 2**63, 0.2, desk.now)
    assert desk.resident("a") == 6


def test_a_page_out_answered_after_the_next_grant_is_fetched_back() -> None:
    desk = Desk()
    desk.ask("a", 6)
    desk.give_back("a")
    desk.ask("b", 12)  # a is told to page out 2 GiB
    assert desk.resident("a") == 4
    desk.give_back("b")
    grants = [d for d in desk.ask("a", 6) if isinstance(d, LeaseGrant)]
    assert [grant.prefetch for grant in grants] == [2 * GIB]
    desk.arbiter.paged_out("a", GIB, 0.1, desk.now)
    assert desk.resident("a") == 6


def test_freed_memory_is_not_on_the_gpu() -> None:
    desk = Desk()
    desk.ask("a", 12)
    desk.arbiter.memory("a", GIB, 0, desk.now)
    assert desk.resident("a") == 1


def test_a_released_session_keeps_its_pages_until_somebody_needs_the_memory() -> None:
    desk = Desk()
    desk.ask("a", 5)
    desk.ask("b", 5)
    desk.give_back("b")
    assert desk.arbiter.set_weight("a", 0, desk.now) == [Revoke("a", desk.lease["a"], 0, RevokeReason.RELEASED)]
    assert desk.give_back("a") == []
    assert desk.arbiter.set_weight("b", 0, desk.now) == []
    assert desk.resident("a") == desk.resident("b") == 5
    desk.ask("c", 8)
    assert (desk.resident("a"), desk.resident("b")) == (5, 3)
    desk.arbiter.set_weight("a", 50, desk.now)
    (grant,) = [d for d in desk.ask("a", 5) if isinstance(d, LeaseGrant)]
    assert grant.prefetch == 0


def test_the_least_recently_used_pages_leave_first_released_or_not() -> None:
    desk = Desk("abcd")
    for name in "ab":
        desk.ask(name, 4)
    desk.give_back("b")
    desk.arbiter.set_weight("a", 0, desk.now)
    desk.give_back("a")  # granted first, used last
    desk.ask("c", 10)
    assert (desk.resident("a"), desk.resident("b")) == (4, 2)


def test_a_lease_revoked_before_its_session_was_released_pages_out_what_was_needed_and_no_more() -> None:
    desk = Desk()
    desk.ask("a", 12)
    desk.ask("b", 10)
    desk.quiet("a")
    assert desk.arbiter.set_weight("a", 0, desk.now) == []
    decisions = desk.give_back("a")
    assert [(type(d), d.client) for d in decisions] == [(LeaseGrant, "b")]
    assert desk.resident("a") == 6


def test_a_released_session_comes_back_with_its_weight() -> None:
    desk = Desk()
    desk.ask("a", 5)
    desk.arbiter.set_weight("a", 0, desk.now)
    desk.give_back("a")
    desk.ask("b", 15)  # pages out 4 of a's 5
    desk.give_back("b")
    desk.arbiter.set_weight("a", 50, desk.now)
    (grant,) = [d for d in desk.ask("a", 5) if isinstance(d, LeaseGrant)]
    assert grant.prefetch == 4 * GIB


def test_several_clients_of_one_session_come_and_go_together_where_they_fit() -> None:
    desk = Desk("ab")
    desk.arbiter.connect("a2", "a", 0.0)
    desk.ask("a", 5)
    desk.ask("a2", 5)
    assert desk.arbiter.holders() == ("a",)
    desk.ask("b", 14)
    assert desk.quiet("a") == []  # giving back the one alone would help nobody
    decisions = desk.quiet("a2")
    assert sorted(str(d.client) for d in decisions if isinstance(d, Revoke)) == ["a", "a2"]
    desk.give_back("a")
    assert [d.client for d in desk.give_back("a2") if isinstance(d, LeaseGrant)] == ["b"]


def test_gpu_seconds_are_what_was_reported_and_never_more_than_the_lease_lasted() -> None:
    desk = Desk()
    desk.ask("a", 1)
    start = desk.now
    desk.arbiter.idle("a", desk.lease["a"], 2.0, 0.5, start + 3.0)
    view = desk.arbiter.session_snapshot("a")
    assert view.gpu_seconds == 2.0
    assert view.last_activity == pytest.approx(start + 2.5)
    assert not view.running
    assert view.held
    desk.arbiter.busy("a", desk.lease["a"], start + 4.0)
    assert desk.arbiter.session_snapshot("a").running
    desk.arbiter.release("a", desk.lease["a"], 1e9, start + 5.0)
    view = desk.arbiter.session_snapshot("a")
    assert view.gpu_seconds == pytest.approx(5.0)
    assert view.last_activity == pytest.approx(start + 5.0)
    assert not view.held
