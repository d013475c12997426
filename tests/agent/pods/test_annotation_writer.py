"""Patches of pods are tried until the API server takes them, and no faster than that helps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from gpushare_spawner.agent.kubernetes.pods import annotations as pod_annotations
from gpushare_spawner.agent.kubernetes.pods.annotations import AnnotationWriter
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod
from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.clients.api import ApiFailure, Json
from tests.agent.conftest import Eventually, eventually, request_for  # noqa: F401
from tests.agent.peers import FIRST

POD = Pod(namespace="jupyter", name="ada", uid="uid-1", annotations={}, created=0.0)
PATCH: dict[str, str | None] = {"gpushare-spawner.io/tier": "active"}


class World:
    """An API server that fails as told, and a session whose pod lacks `missing`."""

    def __init__(self) -> None:
        self.session = Session(SessionRecord.opened(request_for(), 0.0), (FIRST,))
        self.missing = PATCH
        self.pod: Pod | None = POD
        self.failures: list[Exception] = []
        self.bodies: list[Json] = []
        self.written: list[Json] = []
        self.ended = 0
        self.writer = AnnotationWriter(
            self,  # type: ignore[arg-type]
            lambda session: self.pod,
            lambda session: self.missing,
            self._written,
            self._ended,
        )

    async def patch(self, path: str, patch: Json) -> Json:
        await asyncio.sleep(0)
        self.bodies.append(patch)
        assert path == POD.path
        if self.failures:
            raise self.failures.pop(0)
        return {"metadata": {"uid": POD.uid}}

    def _written(self, session: Session, item: Json) -> None:
        self.written.append(item)
        self.missing = {}

    def _ended(self) -> None:
        self.ended += 1


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(pod_annotations, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pod_annotations, "LONGEST_PAUSE", 0.02)
    world = World()
    yield world
    await world.writer.close()


async def test_patch_names_the_uid_of_the_pod(world: World, eventually: Eventually) -> None:  # noqa: F811
    world.writer.patch_if_needed(world.session)
    await eventually(lambda: world.ended == 1)
    assert world.bodies == [{"metadata": {"uid": "uid-1", "annotations": PATCH}}]
    assert world.written == [{"metadata": {"uid": "uid-1"}}]


async def test_session_without_a_difference_is_not_patched(world: World) -> None:
    world.missing = {}
    world.writer.patch_if_needed(world.session)
    await asyncio.sleep(0.03)
    assert (world.bodies, world.ended) == ([], 0)


async def test_one_patch_of_a_session_is_on_its_way_at_a_time(world: World, eventually: Eventually) -> None:  # noqa: F811
    for _ in range(3):
        world.writer.patch_if_needed(world.session)
    await eventually(lambda: world.ended == 1)
    assert len(world.bodies) == 1


async def test_patch_is_tried_until_the_api_server_answers(
    world: World,
    eventually: Eventually,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world.failures = [ApiFailure(500, "no"), ApiFailure(0, "no answer")]
    world.writer.patch_if_needed(world.session)
    await eventually(lambda: world.ended == 1)
    assert len(world.bodies) == 3
    assert [record.message for record in caplog.records] == [
        "cannot write tiers to pods' annotations; retrying: no",
        "tiers can be written to pods' annotations again",
    ]


@pytest.mark.parametrize(
    "failure", [ApiFailure(404, "not found"), ApiFailure(409, "conflict"), ApiFailure(422, "metadata.uid: immutable")]
)
async def test_pod_that_was_replaced_is_no_trouble(
    world: World,
    eventually: Eventually,  # noqa: F811
    failure: ApiFailure,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world.failures = [failure]
    world.writer.patch_if_needed(world.session)
    await eventually(lambda: len(world.bodies) == 1)
    # the watch says that the pod is gone
    world.pod = None
    await eventually(lambda: world.ended == 1)
    assert (len(world.bodies), caplog.records) == (1, [])


async def test_patch_that_fails_by_a_fault_of_ours_is_logged(
    world: World,
    eventually: Eventually,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    world.failures = [RuntimeError("a fault")]
    world.writer.patch_if_needed(world.session)
    await eventually(lambda: world.ended == 1)
    assert [record.message for record in caplog.records] == ["the pod of session ada cannot be patched"]


async def test_closed_writer_gives_up_its_patches(world: World) -> None:
    world.failures = [ApiFailure(500, "no")] * 1000
    world.writer.patch_if_needed(world.session)
    await asyncio.sleep(0.03)
    await world.writer.close()
    tried = len(world.bodies)
    await asyncio.sleep(0.05)
    assert len(world.bodies) == tried
