"""Sentences of the history: its entries, its page and its refusals."""

from __future__ import annotations

from gpushare_spawner.model.tier import Tier

NO_HISTORY = (
    "This service keeps no history. An admin can switch it on: leave out --history=false, or GPUSHARE_HISTORY=false in "
    "the hub's environment."
)

UNAVAILABLE = "The database of the history does not answer. The service keeps trying. Admins see the reason here."


def restored(was: Tier) -> str:
    """Return why an agent restored a share. ``was``: the tier before."""
    return f"The session was {was.value}, and works on the GPU again."


def not_a_time(name: str, text: str) -> str:
    """Return what is wrong with an instant in a request."""
    return f"{name}: {text!r} is not a time: write a date like 2026-11-01, or 2026-11-01T14:00:00Z."


def not_a_key(text: str, known: str) -> str:
    """Return what is wrong with what sums are to be divided by."""
    return f"by: {text!r} is not known: choose from {known}."


def period_ends_first() -> str:
    """Return that a period ends before it begins."""
    return "until: the period ends before it begins: give a later time than since."


def not_a_limit(text: str, most: int) -> str:
    """Return what is wrong with a number of entries."""
    return f"limit: {text!r} is not a number from 1 to {most}."


def not_yours() -> str:
    """Return that a viewer asked for somebody else's history."""
    return "user: the history of other users is for admins, and for tokens with the scope custom:gpushare:read."
