"""Watches that have died, that were never dated, and that do not come."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.spawner.kubernetes.cluster import reflectors as module
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import Watches

KEY = ("pods", "hub")


class FakeKube:
    """KubeSpawner's private methods. ``fail``: how often pods cannot be watched."""

    def __init__(self, fail: int = 0) -> None:
        self.started: list[tuple[str, Any, bool]] = []
        self.fail, self.start_fails = fail, 0
        self.asked = 0

    def reflector_key(self, kind: str) -> tuple[str, str]:
        return (kind, "hub")

    async def start_reflector(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> str:
        self.started.append((kind, reflector_class, replace))
        await asyncio.sleep(0)
        if len(self.started) <= self.start_fails:
            raise RuntimeError("no API server")
        return "started"

    async def watch_pods(self) -> None:
        self.asked += 1
        if self.asked <= self.fail:
            raise RuntimeError("no API server")


class Undated:
    """A reflector of another spawner class."""


def make(kube: FakeKube, reflectors: dict[Any, Any]) -> Watches:
    return Watches(kube, reflectors, "hub", logging.getLogger("test"))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))


async def test_a_reflector_without_dates_is_replaced() -> None:
    kube = FakeKube()
    await make(kube, {KEY: Undated()}).start("pods", "dated", False)
    assert kube.started == [("pods", "dated", True)]


async def test_concurrent_starts_replace_a_reflector_without_dates_once() -> None:
    kube = FakeKube()
    reflectors = {KEY: Undated()}
    starts = [make(kube, reflectors).start("pods", "dated", False) for _ in range(20)]
    assert await asyncio.gather(*starts) == ["started"] * 20
    assert kube.started == [("pods", "dated", True)]


async def test_a_replacement_that_failed_is_tried_again() -> None:
    kube = FakeKube()
    reflectors = {KEY: Undated()}
    kube.start_fails = 1
    answers = await asyncio.gather(
        *(make(kube, reflectors).start("pods", "dated", False) for _ in range(3)), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["no API server"] * 3
    assert await make(kube, reflectors).start("pods", "dated", False) == "started"
    assert len(kube.started) == 2


async def test_a_watch_that_lives_is_shared() -> None:
    kube = FakeKube()
    task = asyncio.ensure_future(asyncio.sleep(60))
    known = SimpleNamespace(watch_task=task)
    assert await make(kube, {("events", "hub"): known}).start("events", "theirs", False) is known
    assert not kube.started
    task.cancel()


async def test_a_start_that_is_called_off_goes_on_for_the_others() -> None:
    kube = FakeKube()
    starting = asyncio.ensure_future(make(kube, {}).start("events", "theirs", False))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    await asyncio.sleep(0)
    assert kube.started == [("events", "theirs", False)]


async def test_pods_are_asked_for_several_times_and_then_the_failure_is_raised() -> None:
    kube = FakeKube(fail=2)
    await make(kube, {}).pods_patiently()
    assert kube.asked == 3
    with pytest.raises(RuntimeError, match="no API server"):
        await make(FakeKube(fail=3), {}).pods_patiently()


async def test_reports_are_watched_once_and_pods_that_cannot_be_watched_stop_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reflectors: dict[Any, Any] = {}
    one = make(FakeKube(fail=9), reflectors)
    await one.ensure(("reports", "hub"), lambda: "first")
    await one.ensure(("reports", "hub"), lambda: "second")
    assert reflectors == {("reports", "hub"): "first"}
    assert "Pods in hub are not watched yet: no API server" in caplog.text
