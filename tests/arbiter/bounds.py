"""The bounds that docs/explanation/arbiter.md states, computed independently of the arbiter."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_spawner.arbiter.session import ArbiterSettings


def longest_round(weights: Mapping[str, int], hand_off: Mapping[str, float], settings: ArbiterSettings) -> float:
    """R: the time in which each session's time slice is served once, in seconds. `hand_off`: seconds in and out
    again, by session."""
    round_seconds = sum(hand_off.values()) / settings.overhead_bound
    total = sum(weights.values())
    return max(
        max(round_seconds * weight / total, hand_off[session] + settings.min_time_slice) * total / weight
        for session, weight in weights.items()
    )


def longest_wait(weights: Mapping[str, int], hand_off: Mapping[str, float], settings: ArbiterSettings) -> float:
    """Seconds within which each client that asks has a lease: twice its time slice's round, a time slice of all others,
    slow answers, and what it owes the others.

    For sessions of one process each; k processes of a session divide its time slice, and wait up to k times as long.
    """
    answers = len(weights) * (settings.revoke_timeout + max(hand_off.values()))
    longest = longest_round(weights, hand_off, settings)
    return 3 * longest + answers + max(2 * longest, settings.max_debt)
