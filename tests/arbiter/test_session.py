"""Clients, sessions and decisions: what a new one is, and what follows from a client's state."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from gpushare_spawner.arbiter.session import (
    ArbitratedSession,
    Client,
    LeaseGrant,
    Pace,
    PageOut,
    Revoke,
    RevokeReason,
    SessionView,
)

LONG_AGO = float("-inf")


def client(**state: object) -> Client:
    return Client("a", ArbitratedSession("a", 50), **state)  # type: ignore[arg-type]


def test_a_new_client_has_nothing_and_does_nothing() -> None:
    new = client()
    for amount in ("allocated", "working_set", "stated_plain", "plain", "unconfirmed", "shown", "lease", "order"):
        assert getattr(new, amount) == 0, amount
    for unknown in ("device_memory", "touched", "proven", "revoked", "quiet_since", "last_quiet"):
        assert getattr(new, unknown) is None, unknown
    for state in ("doubted", "waiting", "overdue", "again", "displaced", "forced_in", "early", "parked"):
        assert getattr(new, state) is False, state
    for never in ("proven_at", "grown_at", "worked_until"):
        assert getattr(new, never) == LONG_AGO, never
    for zero in ("busy_reported", "busy_before_burst", "burst_so_far", "expected_until", "paging_until", "pace"):
        assert getattr(new, zero) == 0.0, zero
    for zero in ("waiting_since", "owed_at_request", "granted_at", "came_at", "revoke_deadline", "burst_since"):
        assert getattr(new, zero) == 0.0, zero
    assert new.last_granted < 0
    assert new.last_used < 0
    assert new.gaps.typical is None


def test_a_new_session_comes_after_an_endless_pause_and_has_had_nothing() -> None:
    new = ArbitratedSession("a", 50)
    assert (new.paused, new.pause, new.attained) == (True, float("inf"), 0.0)
    assert (new.gpu_seconds, new.last_activity, new.quiet_from, new.doubted_at) == (0.0, None, None, LONG_AGO)
    assert (new.clients, new.left_behind, new.bursts.typical, new.waits.counts) == ({}, {}, None, ())
    assert ArbitratedSession("b", 1).clients is not new.clients


@pytest.mark.parametrize(("share", "weight"), [(0, 1), (1, 1), (2, 2), (50, 50)])
def test_a_released_session_has_a_weight_of_1(share: int, weight: int) -> None:
    assert ArbitratedSession("a", share).weight == weight


def test_two_clients_of_the_same_state_are_two() -> None:
    session = ArbitratedSession("a", 50)
    assert Client("a", session) != Client("a", session)
    assert ArbitratedSession("a", 50) != session
    assert len({Client("a", session), Client("a", session), session}) == 3


@pytest.mark.parametrize(
    ("state", "held", "member", "wants_memory", "occupies_memory", "bursting"),
    [
        ({}, False, False, False, False, False),
        ({"waiting": True}, False, False, True, False, False),
        ({"lease": 1}, True, True, True, True, True),
        ({"lease": 1, "quiet_since": 0.0}, True, True, True, True, False),
        ({"lease": 1, "revoked": RevokeReason.IDLE}, False, False, True, True, True),
        ({"lease": 1, "revoked": RevokeReason.TIME_SLICE, "overdue": True}, False, False, True, False, True),
        ({"parked": True}, False, True, True, True, False),
        (
            {"parked": True, "lease": 1, "revoked": RevokeReason.TIME_SLICE, "overdue": True},
            False,
            True,
            True,
            True,
            True,
        ),
    ],
)
def test_what_follows_from_a_clients_state(
    state: dict[str, object], held: bool, member: bool, wants_memory: bool, occupies_memory: bool, bursting: bool
) -> None:
    made = client(**state)
    assert (made.held, made.member, made.wants_memory) == (held, member, wants_memory)
    assert (made.occupies_memory, made.bursting) == (occupies_memory, bursting)


def test_a_client_at_work_needs_its_working_set_and_what_the_driver_does_not_confirm() -> None:
    assert client(allocated=90, working_set=50, plain=20, unconfirmed=7).footprint == 57


def test_the_reasons_of_a_revocation_have_the_numbers_of_the_wire_protocol() -> None:
    assert [(reason.name, reason.value) for reason in RevokeReason] == [
        ("IDLE", 0),
        ("TIME_SLICE", 1),
        ("GUARANTEE", 2),
        ("RELEASED", 3),
    ]


def test_decisions_and_views_are_facts_that_nobody_changes() -> None:
    view = SessionView(False, False, False, 0, 0, 0.0, None)
    assert view.paged_out_bytes == 0
    assert LeaseGrant("a", 1, 0.0, 0).pace == 0.0
    facts: list[Any] = [
        view,
        LeaseGrant("a", 1, 0.0, 0),
        Revoke("a", 1, 0, RevokeReason.IDLE),
        PageOut("a", 1),
        Pace("a", 1, 0.0),
    ]
    for fact in facts:
        with pytest.raises(FrozenInstanceError):
            fact.client = "b"
