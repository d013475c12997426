"""How a node ended a pod, in words."""

import pytest

from gpushare_spawner.wording import ended_pods


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("NodeShutdown", "was shut down"),
        ("Evicted", "evicted the server"),
        ("OutOfmemory", "has not enough memory left for the server"),
        ("SomethingNew", "ended the server"),
        ("", "ended the server"),
    ],
)
def test_the_kubelets_reason_becomes_half_a_sentence_about_the_node(reason: str, said: str) -> None:
    assert ended_pods.what_happened(reason) == said


def test_an_ended_pod_is_told_with_the_clusters_own_words() -> None:
    assert (
        ended_pods.ended("node-a", "Evicted", "low on disk") == "Node node-a evicted the server (Evicted: low on disk)"
    )
    assert ended_pods.ended("", "", "") == "The node ended the server (no reason given)"
