"""Requests that are repeated with their keys."""

from __future__ import annotations

import asyncio

import pytest

from gpushare_spawner.service.api import router as module
from gpushare_spawner.service.api.router import KEPT_SECONDS, Idempotency, KeyReused
from tests.service.conftest import Clock


class Counted:
    def __init__(self) -> None:
        self.done = 0

    async def __call__(self) -> int:
        await asyncio.sleep(0)
        self.done += 1
        return self.done


async def test_a_repeated_request_is_carried_out_once_also_while_it_runs(clock: Clock) -> None:
    kept, act = Idempotency[int](clock), Counted()
    both = [kept.once("ann", "k", "stop x", act) for _ in range(3)]
    assert await asyncio.gather(*both) == [1, 1, 1]
    assert await kept.once("ann", "k", "stop x", act) == 1
    assert await kept.once("bob", "k", "stop x", act) == 2
    clock.forward(KEPT_SECONDS + 1)
    assert await kept.once("ann", "k", "stop x", act) == 3


async def test_a_key_is_for_one_request(clock: Clock) -> None:
    kept, act = Idempotency[int](clock), Counted()
    await kept.once("ann", "k", "stop x", act)
    with pytest.raises(KeyReused):
        await kept.once("ann", "k", "stop y", act)


async def test_a_request_that_failed_can_be_repeated(clock: Clock) -> None:
    kept, act = Idempotency[int](clock), Counted()

    async def fails() -> int:
        await asyncio.sleep(0)
        raise RuntimeError("no")

    first, second = await asyncio.gather(
        kept.once("ann", "k", "x", fails), kept.once("ann", "k", "x", fails), return_exceptions=True
    )
    assert (str(first), str(second)) == ("no", "no")
    assert await kept.once("ann", "k", "x", act) == 1


async def test_old_keys_make_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    kept, act = Idempotency[int](clock), Counted()
    for key in "abc":
        await kept.once("ann", key, "x", act)
    assert await kept.once("ann", "c", "x", act) == 3
    assert await kept.once("ann", "a", "x", act) == 4


async def test_a_request_that_fails_after_others_have_pushed_its_key_out_says_why(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    kept, act, end = Idempotency[int](clock), Counted(), asyncio.Event()

    async def fails() -> int:
        await end.wait()
        raise RuntimeError("no")

    slow = [asyncio.ensure_future(kept.once("ann", "k", "restart x", fails)) for _ in range(2)]
    await asyncio.sleep(0)
    for number in range(3):
        await kept.once("bob", str(number), "release y", act)
    end.set()
    async with asyncio.timeout(1):
        both = await asyncio.gather(*slow, return_exceptions=True)
    assert [str(one) for one in both] == ["no", "no"]
