"""The hub's API under good and bad conditions."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import pytest
from tornado.httpclient import HTTPRequest

from gpushare_spawner.service.hub.client import Hub, HubFailed, ScopeMissing
from gpushare_spawner.service.hub.roles import missing
from tests.service.fake_hub import TOKEN, FakeHub


async def test_servers_with_their_activity(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.add("ann", started=100.0, last_activity=250.5, user_options={"profile": "quarter"})
    hub_server.add("ann", "two", started=100.0, last_activity=None, pending="stop")
    hub_server.add("bob", None, admin=True)
    (ann,) = await hub.users()
    first, second = ann.servers
    assert (first.name, first.last_activity, first.seen, first.profile, first.not_pending) == (
        "",
        250.5,
        250.5,
        "quarter",
        True,
    )
    assert (second.name, second.seen, second.not_pending, second.label) == ("two", 100.0, False, "ann/two")
    assert [user.name for user in await hub.users(with_ready_servers=False)] == ["ann", "bob"]


async def test_pages_are_followed_by_offset_and_never_to_another_host(hub_server: FakeHub) -> None:
    for number in range(7):
        hub_server.add(f"user-{number}")
    client = Hub(hub_server.url, TOKEN, page_size=3)
    assert [user.name for user in await client.users()] == [f"user-{number}" for number in range(7)]
    assert [path for _, path, _ in hub_server.asked] == [
        "/users?state=ready&limit=3",
        "/users?state=ready&offset=3&limit=3",
        "/users?state=ready&offset=6&limit=3",
    ]


async def test_a_page_of_five_thousand_users(hub_server: FakeHub) -> None:
    hub_server.page_limit = 10_000
    for number in range(5000):
        hub_server.add(f"user-{number:05}")
    client = Hub(hub_server.url, TOKEN, page_size=10_000)
    assert len(await client.users()) == 5000
    assert len(hub_server.asked) == 1


@pytest.mark.parametrize("faults", [[429], [500, 502, 503], [504, "hang"]])
async def test_a_busy_hub_is_asked_again(hub: Hub, hub_server: FakeHub, faults: list[int | str]) -> None:
    hub_server.add("ann")
    hub_server.faults = list(faults)
    assert [user.name for user in await hub.users()] == ["ann"]
    assert len(hub_server.asked) == len(faults) + 1


async def test_retry_after_is_heeded(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.faults = [(429, {"Retry-After": "0.3"})]
    began = time.monotonic()
    await hub.users()
    assert time.monotonic() - began >= 0.3


async def test_a_hub_that_stays_broken_is_given_up_with_its_own_words(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.faults = [500] * 4
    with pytest.raises(HubFailed, match=r"GET /users.* with 500: no, 500"):
        await hub.users()
    assert len(hub_server.asked) == 4


async def test_no_hub_at_all() -> None:
    client = Hub("http://127.0.0.1:9/hub/api", TOKEN, backoff=0.01, attempts=2)
    with pytest.raises(HubFailed, match=r"127\.0\.0\.1:9"):
        await client.users()


async def test_a_failure_without_a_text_is_named_all_the_same(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(request: HTTPRequest) -> NoReturn:
        raise TimeoutError

    monkeypatch.setattr(hub._client, "fetch", fetch)
    with pytest.raises(HubFailed, match=r"cannot be reached: TimeoutError\.$"):
        await hub.users()


async def test_a_missing_scope_is_not_asked_for_again(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.faults = [403]
    with pytest.raises(ScopeMissing, match="scope"):
        await hub.users()
    assert len(hub_server.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"items": [{}], "_pagination": {}}',
        b'{"items": [{"name": "a", "servers": 3}], "_pagination": {}}',
        b'{"items": [{"name": "a", "created": "yesterday"}], "_pagination": {}}',
    ],
)
async def test_answers_that_make_no_sense(hub: Hub, hub_server: FakeHub, answer: bytes) -> None:
    hub_server.faults = [answer]
    with pytest.raises(HubFailed, match=r"unknown form|cannot be read"):
        await hub.users()


async def test_pages_that_go_round_in_a_circle(hub: Hub, hub_server: FakeHub) -> None:
    page = b'{"items": [], "_pagination": {"next": {"offset": 5, "limit": 5}}}'
    hub_server.faults = [page, page]
    with pytest.raises(HubFailed, match="repeat at offset"):
        await hub.users()


async def test_stopping_quotes_names_and_removes_only_named_servers(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.add("a/b@x y")
    hub_server.add("a/b@x y", "é/1")
    await hub.stop("a/b@x y", "", remove=True)
    await hub.stop("a/b@x y", "é/1", remove=True)
    assert hub_server.asked == [
        ("DELETE", "/users/a%2Fb%40x%20y/server", None),
        ("DELETE", "/users/a%2Fb%40x%20y/servers/%C3%A9%2F1", {"remove": True}),
    ]
    assert hub_server.users["a/b@x y"]["servers"] == {}


async def test_what_is_gone_already_is_no_error(hub: Hub, hub_server: FakeHub) -> None:
    await hub.stop("nobody", "")
    assert await hub.server("nobody", "") is None


async def test_few_requests_at_a_time(hub_server: FakeHub) -> None:
    hub_server.delay = 0.02
    for number in range(12):
        hub_server.add(f"user-{number}")
    client = Hub(hub_server.url, TOKEN, concurrency=3)
    await asyncio.gather(*(client.stop(f"user-{number}", "") for number in range(12)))
    assert hub_server.most_in_flight == 3
    assert len(hub_server.deleted) == 12


async def test_the_services_scopes(hub: Hub, hub_server: FakeHub) -> None:
    assert missing(await hub.own_scopes()) == []
    hub_server.scopes = ["list:users", "read:servers", "delete:servers!group=ml", "servers", "read:users:groups"]
    assert missing(await hub.own_scopes()) == []
    hub_server.scopes = ["list:users", "read:users:groups"]
    activity, deletion, start = missing(await hub.own_scopes())
    assert activity.startswith("The service lacks the scope read:servers: it cannot read the servers' last activity")
    assert deletion.startswith("The service lacks the scope delete:servers: no server is stopped after")
    assert start.startswith("The service lacks the scope start:servers: no server can be restarted")
    assert any("delete:users" in sentence for sentence in missing(await hub.own_scopes(), cull_users=True))
