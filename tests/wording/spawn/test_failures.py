"""Why a spawn that was placed fails, in words."""

from __future__ import annotations

import pytest

from gpushare_spawner.wording import spawn_failures as words


def test_a_server_that_is_too_slow_says_what_it_waits_for_where_that_is_known() -> None:
    assert words.too_slow(300, "") == "The server did not start within 5 min. Try again, or tell the admin."
    assert words.too_slow(300, "no image") == (
        "The server did not start within 5 min (no image). Try again, or tell the admin."
    )


def test_the_last_node_that_refuses_says_that_nothing_is_reserved() -> None:
    assert words.not_admitted("Node a refuses the pod", 4) == (
        "Node a refuses the pod. This was the last of 4 attempts. Nothing is reserved for you. "
        "Try again in a minute. Tell the admin if the problem persists."
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("NodeShutdown", "was shut down"),
        ("Evicted", "evicted the server"),
        ("OutOfmemory", "does not have enough memory left for the server"),
        ("SomethingNew", "ended the server"),
        ("", "ended the server"),
    ],
)
def test_the_kubelets_reason_becomes_half_a_sentence_about_the_node(reason: str, said: str) -> None:
    assert words.what_node_did(reason) == said


def test_an_ended_pod_is_told_with_the_clusters_own_words() -> None:
    assert (
        words.pod_ended("node-a", "Evicted", "low on disk") == "Node node-a evicted the server (Evicted: low on disk)"
    )
    assert words.pod_ended("", "", "") == "The node ended the server (no reason given)"
