"""The bounds that docs/explanation/arbiter.md states, computed independently of the arbiter."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_spawner.arbiter import ArbiterSettings


def longest_request(weights: Mapping[str, int], hand_off: Mapping[str, float], settings: ArbiterSettings) -> float:
    """R: the time in which everybody's request is served once, in seconds. `hand_off`: seconds in and out again, by
    session."""
    round_seconds = sum(hand_off.values()) / settings.overhead_bound
    total = sum(weights.values())
    return max(
        max(round_seconds * weight / total, hand_off[session] + settings.min_quantum) * total / weight
        for session, weight in weights.items()
    )


def longest_wait(weights: Mapping[str, int], hand_off: Mapping[str, float], settings: ArbiterSettings) -> float:
    """Seconds within which everybody who asks has a lease: twice its request's time, a turn of everybody, slow
    answers, and what it owes the others.

    For sessions of one process each; k processes of a session take turns within it, and wait up to k times as long.
    """
    answers = len(weights) * (settings.revoke_timeout + max(hand_off.values()))
    longest = longest_request(weights, hand_off, settings)
    return 3 * longest + answers + max(2 * longest, settings.max_debt)
