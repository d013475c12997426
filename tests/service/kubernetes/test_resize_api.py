"""Whether the API server can resize pods: asked for rarely, and what goes wrong is logged once."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.service.kubernetes.released_requests import ASK_AGAIN_AFTER, PROBE_AGAIN_AFTER, ResizeApi

HAS_NOT = {"resources": [{"name": "pods"}]}
HAS = {"resources": [{"name": "pods"}, {"name": "pods/resize"}]}


class Server:
    """Answers what it is told to; raises it where it is an exception."""

    def __init__(self) -> None:
        self.answer: Any = HAS
        self.asked = 0
        self.now = 0.0
        log = logging.getLogger("gpushare.test.resize")
        log.setLevel(logging.INFO)
        self.resize = ResizeApi(cast(ClusterApi, self), lambda: self.now, log)

    async def get(self, path: str) -> Any:
        assert path == "/api/v1"
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def later(self, seconds: float = PROBE_AGAIN_AFTER) -> bool:
        self.now += seconds
        return await self.resize.available()


async def test_a_server_that_has_it_is_asked_once() -> None:
    server = Server()
    assert await server.resize.available()
    assert await server.later(10 * ASK_AGAIN_AFTER)
    assert server.asked == 1


async def test_a_server_without_it_is_asked_again_after_minutes() -> None:
    server = Server()
    server.answer = HAS_NOT
    assert not await server.resize.available()
    server.answer = HAS
    assert not await server.later(ASK_AGAIN_AFTER / 2)
    assert server.asked == 1
    assert await server.later(ASK_AGAIN_AFTER / 2)


async def test_a_server_that_does_not_answer_is_logged_once_for_each_cause_and_its_recovery_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = Server()
    server.answer = ApiFailure(503, "the API server says 503: unavailable")
    for _ in range(3):
        assert not await server.later()
    server.answer = ApiFailure(0, "nobody listens")
    for _ in range(3):
        assert not await server.later()
    assert not await server.later(PROBE_AGAIN_AFTER / 2)
    assert server.asked == 6, "not more often than this"
    server.answer = HAS
    assert await server.later()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, said
    assert "does not say whether it can resize pods (pods/resize): the API server says 503: unavailable" in said[0]
    assert "nobody listens" in said[1]
    assert "now says whether it can resize pods" in said[2]
