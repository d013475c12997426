"""Whether the API server can resize pods: asked for rarely, and what goes wrong is logged once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes_asyncio.client import ApiException, CoreV1Api

from gpushare_spawner.service.kubernetes.released_requests import ASK_AGAIN_AFTER, PROBE_AGAIN_AFTER, ResizeApi

HAS_NOT = SimpleNamespace(resources=[SimpleNamespace(name="pods")])
HAS = SimpleNamespace(resources=[SimpleNamespace(name="pods"), SimpleNamespace(name="pods/resize")])


class Server:
    """Answers what it is told to; raises it where it is an exception."""

    def __init__(self) -> None:
        self.answer: Any = HAS
        self.asked = 0
        self.now = 0.0
        log = logging.getLogger("gpushare.test.resize")
        log.setLevel(logging.INFO)
        self.resize = ResizeApi(cast(CoreV1Api, self), lambda: self.now, log)

    async def get_api_resources(self, _request_timeout: float) -> Any:
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
    server.answer = ApiException(status=503, reason="Service Unavailable")
    for _ in range(3):
        assert not await server.later()
    server.answer = ConnectionRefusedError("nobody listens")
    for _ in range(3):
        assert not await server.later()
    assert not await server.later(PROBE_AGAIN_AFTER / 2)
    assert server.asked == 6, "not more often than this"
    server.answer = HAS
    assert await server.later()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, said
    assert "does not say whether it can resize pods (pods/resize): 503 Service Unavailable" in said[0]
    assert "nobody listens" in said[1]
    assert "has said whether it can resize pods" in said[2]
