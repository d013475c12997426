"""Why a spawn waits or fails, in words."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.obstacles import Lacking, Reason, Shortage, Unplaceable
from gpushare_spawner.wording import spawn_failures


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (
            Unplaceable(Reason.NO_GPUS, Share(1)),
            "No GPU is known: no agent has reported one. Ask the admin whether the agent is running.",
        ),
        (
            Unplaceable(Reason.NO_MODEL, Share(1), models=("A100", "T4")),
            "No GPU is of a model that the template asks for. Available models: A100, T4. "
            "Choose another template, or ask the admin.",
        ),
        (
            Unplaceable(Reason.UNHEALTHY, Share(1), suitable=2),
            "No suitable GPU is healthy (2 found). Ask the admin: the agent's log says why.",
        ),
        (
            Unplaceable(Reason.UNHEALTHY, Share(count=2), suitable=2),
            "Too few suitable GPUs are healthy: this needs 2 GPUs on one node. "
            "Ask the admin: the agent's log says why.",
        ),
        (
            Unplaceable(Reason.TOO_BIG, Share(count=3), most_count=1),
            "This needs 3 GPUs on one node, and no node has more than 1 of one model. "
            "Choose a template with a smaller share.",
        ),
        (
            Unplaceable(Reason.TOO_BIG, Share(51), most_units=50),
            "This needs 0.51 GPU, and a GPU here can give at most 0.50 GPU. Choose a template with a smaller share.",
        ),
        (
            Unplaceable(Reason.INELIGIBLE, Share(50)),
            "The nodes with suitable GPUs accept no server of this template, because of their taints or labels. "
            "Ask the admin.",
        ),
        (
            Unplaceable(Reason.NOT_ADMITTED, Share(count=2), left_out=("node-a", "node-b")),
            "node-a, node-b did not admit this server just now, and no other node has 2 GPUs free.",
        ),
        (
            Unplaceable(
                Reason.NODES_FULL,
                Share(50),
                cpu=1500,
                memory=4 * 2**30,
                shortages=(
                    Shortage(Lacking.CPU, 3, 500),
                    Shortage(Lacking.MEMORY, 1, 2**30),
                    Shortage(Lacking.PODS, 1, 0),
                ),
            ),
            "Nodes with 0.50 GPU free lack another resource: this needs 1.5 CPU, and at most 0.5 is free "
            "on 3 nodes; this needs 4 GiB of memory, and at most 1 GiB is free on 1 node; 1 node cannot run more pods.",
        ),
        (
            Unplaceable(
                Reason.NODES_TOO_SMALL,
                Share(50),
                cpu=64_000,
                memory=2**40,
                shortages=(Shortage(Lacking.MOST_CPU, 2, 32_000), Shortage(Lacking.MOST_MEMORY, 1, 2**38)),
            ),
            "This needs 64 CPU, and a node with suitable GPUs has at most 32 CPU, even when nothing runs there; "
            "this needs 1 TiB of memory, and a node with suitable GPUs has at most 256 GiB, even when nothing runs "
            "there. Choose a template that asks for less CPU and memory, or ask the admin.",
        ),
        (
            Unplaceable(Reason.FULL, Share(50), best_units=40),
            "Not enough free capacity: this needs 0.50 GPU, and at most 0.40 GPU is free on any GPU.",
        ),
        (Unplaceable(Reason.FULL, Share(50)), "Not enough free capacity: this needs 0.50 GPU, and none is free."),
        (
            Unplaceable(Reason.FULL, Share(count=2), best_units=99),
            "Not enough free capacity: this needs 2 GPUs on one node, and no whole GPU is free on any node.",
        ),
        (
            Unplaceable(Reason.FULL, Share(count=3), best_units=100, best_count=2),
            "Not enough free capacity: this needs 3 GPUs on one node, and at most 2 are free on any node.",
        ),
    ],
)
def test_a_refusal_says_what_is_needed_and_what_there_is(why: Unplaceable, said: str) -> None:
    assert spawn_failures.capacity(why) == said


def test_a_full_queue_and_a_long_wait_say_what_helps() -> None:
    assert spawn_failures.queue_full(Share(25), 50) == (
        "The queue is full (50 spawns). Try again in a few minutes, or choose a template without a GPU."
    )
    assert spawn_failures.waited_too_long(Share(25), "10 min", "All is full.") == (
        "No free capacity for 0.25 GPU after 10 min in the queue. All is full. Nothing stays reserved. "
        "Try again later, or choose a smaller share."
    )


def test_nodes_without_reports_are_named_or_counted_with_the_age_of_the_latest_report() -> None:
    assert (
        spawn_failures.nodes_without_reports(["node-a"], 75)
        == "Node node-a sends no reports; the last one is 1 min 15 s old."
    )
    assert (
        spawn_failures.nodes_without_reports(["a", "b"], 600) == "2 nodes send no reports; the last one is 10 min old."
    )
