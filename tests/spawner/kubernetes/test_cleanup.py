"""Pods that stand in the way, and which of them are removed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gpushare_spawner.clients.api import ApiFailure
from gpushare_spawner.spawner.kubernetes.owned_objects import ORPHANS_EVERY, PodObjects

from .parts import FakeReservations, pod, share

HUB = "http://hub/api"


class FakeApi:
    """The API server, as far as it is asked. ``failure``: what it raises."""

    def __init__(self) -> None:
        self.deleted: list[tuple[str, str]] = []
        self.failure: Exception | None = None

    async def delete(self, path: str, options: dict[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        self.deleted.append((path.removeprefix("/api/v1/namespaces/hub/pods/"), options["preconditions"]["uid"]))


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def reservations() -> FakeReservations:
    return FakeReservations()


@pytest.fixture
def cleanup(api: FakeApi, reservations: FakeReservations) -> PodObjects:
    return PodObjects(api, reservations, logging.getLogger("test"))  # type: ignore[arg-type]


def test_a_share_that_no_pod_was_made_from_is_free_at_once(cleanup: PodObjects, reservations: FakeReservations) -> None:
    cleanup.give_back(share(), perhaps_created=False)
    assert (reservations.given_back, reservations.lingering) == (["token-1"], [])


async def test_a_pod_that_shows_after_its_start_has_failed_is_removed(
    cleanup: PodObjects, reservations: FakeReservations, api: FakeApi
) -> None:
    reservations.seen = [pod()]
    cleanup.give_back(share(), perhaps_created=True)
    assert (reservations.given_back, reservations.lingering) == ([], ["token-1"])
    await reservations.finish()
    assert api.deleted == [("jupyter-ada", "u-1")]


@pytest.mark.parametrize("runs", [True, False])
async def test_an_orphan_is_removed_and_the_pod_of_a_server_is_not(
    cleanup: PodObjects, reservations: FakeReservations, api: FakeApi, runs: bool
) -> None:
    reservations.seen = [pod("Running")]
    cleanup.remove_orphans_soon(HUB, lambda user, server: runs)
    await reservations.finish()
    assert bool(api.deleted) is not runs


async def test_orphans_are_looked_for_now_and_then(cleanup: PodObjects, reservations: FakeReservations) -> None:
    reservations.seen = [pod("Running")]
    cleanup.remove_orphans_soon(HUB, lambda user, server: False)
    cleanup.remove_orphans_soon(HUB, lambda user, server: False)
    assert len(reservations.tasks) == 1
    cleanup._searched_at -= ORPHANS_EVERY
    cleanup.remove_orphans_soon(HUB, lambda user, server: False)
    assert len(reservations.tasks) == 2
    await reservations.finish()


async def test_a_pod_that_cannot_be_removed_is_logged(
    cleanup: PodObjects, reservations: FakeReservations, api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.failure = ApiFailure(500, "the API server says 500: Internal")
    reservations.seen = [pod("Running")]
    cleanup.remove_orphans_soon(HUB, lambda user, server: False)
    await reservations.finish()
    assert "is not removed yet: the API server says 500: Internal" in caplog.text


@pytest.mark.parametrize(
    ("left", "stops"),
    [
        (None, 0),
        (pod("Running"), 1),
        (pod("Succeeded"), 0),
        ({**pod("Running"), "metadata": {**pod()["metadata"], "deletionTimestamp": "now"}}, 0),
    ],
)
async def test_what_an_earlier_start_left_is_stopped_while_it_holds_a_share(
    cleanup: PodObjects, left: Any, stops: int
) -> None:
    stopped = []

    async def stop() -> None:
        stopped.append(1)
        raise RuntimeError("a failure is only logged")

    await cleanup.remove_leftover(left, stop)
    assert len(stopped) == stops
