"""The state of one spawn of a pod: which requests it repeats, which events it tells, and how its pod has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes_asyncio.client.rest import ApiException
from traitlets.config import LoggingConfigurable

from gpushare_spawner.model.kubernetes.annotations import LAYER
from gpushare_spawner.spawner.attempt import SpawnPhase
from gpushare_spawner.spawner.kubernetes.attempt import PodAttempt, request_succeeded
from gpushare_spawner.spawner.options import Choice, Overrides, Profile

from .parts import HALF, not_admitted, pod, share

LOG = logging.getLogger("test")


@pytest.fixture
def attempt() -> PodAttempt:
    return PodAttempt(Overrides(LoggingConfigurable()), lambda share, created: None)


async def answer(status: int) -> bool:
    """The API's answer to a request; 201 is a success."""
    if status != 201:
        raise ApiException(status=status, reason="no")
    return True


async def test_a_failure_that_passes_is_asked_again_and_may_have_created_the_pod(attempt: PodAttempt) -> None:
    attempt.reserved(share())
    assert not await attempt.pod_created(answer(500), "jupyter-ada", LOG)
    assert attempt.perhaps_created


async def test_a_pod_that_the_api_refuses_for_good_does_not_exist(attempt: PodAttempt) -> None:
    attempt.reserved(share())
    with pytest.raises(ApiException):
        await attempt.pod_created(answer(403), "jupyter-ada", LOG)
    assert not attempt.perhaps_created


async def test_an_earlier_request_without_an_answer_counts_after_a_later_refusal(attempt: PodAttempt) -> None:
    attempt.reserved(share())
    await attempt.pod_created(answer(500), "jupyter-ada", LOG)
    with pytest.raises(ApiException):
        await attempt.pod_created(answer(403), "jupyter-ada", LOG)
    assert attempt.perhaps_created


async def test_requests_for_pods_without_a_share_fail_as_kubespawner_has_it(attempt: PodAttempt) -> None:
    with pytest.raises(ApiException):
        await attempt.pod_created(answer(500), "jupyter-ada", LOG)
    assert await attempt.pod_created(answer(201), "jupyter-ada", LOG)


async def test_a_request_that_fails_for_a_moment_has_not_succeeded_yet() -> None:
    assert not await request_succeeded(answer(503), "Pod jupyter-ada is not deleted yet", LOG)


def test_a_pod_that_its_node_ended_is_reported_unless_the_server_starts(attempt: PodAttempt) -> None:
    ended = attempt.ended_by_node(not_admitted())
    assert ended is not None
    assert (ended.reason, ended.exit_code) == ("UnexpectedAdmissionError", None)
    attempt.phase = SpawnPhase.STARTING
    assert attempt.ended_by_node(not_admitted()) is None
    assert attempt.ended_by_node(pod("Running")) is None
    assert attempt.ended_by_node(None) is None


@pytest.mark.parametrize(("labels", "counts"), [({LAYER: "kai"}, True), ({}, False)])
def test_a_pod_of_another_layer_that_its_node_ended_is_reported_too(
    attempt: PodAttempt, labels: dict[str, str], counts: bool
) -> None:
    found = not_admitted()
    found["metadata"]["labels"] = labels
    assert (attempt.ended_by_node(found) is not None) is counts


def test_the_template_of_a_running_server_is_learnt_from_its_pod(attempt: PodAttempt) -> None:
    found = pod("Running")
    found["metadata"]["annotations"]["gpushare-spawner.io/template"] = "half-gpu"
    attempt.ended_by_node(found)
    assert attempt.template_name == "half-gpu"


async def told(events: AsyncIterator[dict[str, Any]]) -> list[str]:
    return [event["message"] async for event in events]


async def of_pod() -> AsyncIterator[dict[str, Any]]:
    yield {"message": "pulling"}


async def test_the_placement_is_told_before_the_pods_events(attempt: PodAttempt) -> None:
    attempt.progress.add("First in queue.")
    attempt.progress.end()
    assert await told(attempt.events(True, of_pod())) == ["First in queue.", "pulling"]
    assert await told(attempt.events(False, of_pod())) == ["pulling"]


async def test_nodes_that_refuse_the_pod_are_told_beside_its_events(attempt: PodAttempt) -> None:
    attempt.choice = Choice(Profile.of_template(HALF))
    attempt.retry_events.add("Looking for another node.")
    attempt.retry_events.end()
    heard: list[str] = []

    async def until_refused() -> AsyncIterator[dict[str, Any]]:
        yield {"message": "pulling"}
        async with asyncio.timeout(2):
            while len(heard) < 2:
                await asyncio.sleep(0)

    async for event in attempt.events(False, until_refused()):
        heard.append(event["message"])
    assert sorted(heard) == ["Looking for another node.", "pulling"]
