"""Clients that try to do more than they may, or to keep the service busy."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from jupyterhub.services.auth import HubOAuth
from tornado.httpclient import AsyncHTTPClient
from tornado.testing import bind_unused_port

from gpushare_spawner.service import command
from gpushare_spawner.service.api.api import OPERATIONS
from gpushare_spawner.service.api.entries import address_of, server_of
from gpushare_spawner.service.api.snapshots import ServiceSnapshots
from gpushare_spawner.service.command import MOST_BODY_BYTES
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.web.app import Page
from tests.service.api.clients import ADMIN, ANN, BOB, PREFIX, Client, check_documented
from tests.service.api.conftest import Machine
from tests.service.fake_hub import FakeHub


async def test_a_token_in_an_address_becomes_no_login(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = HubOAuth(api_token="x", oauth_client_id="service-gpushare", base_url=PREFIX, allow_token_in_url=True)

    async def user_for_token(token: str, **_: Any) -> Mapping[str, Any] | None:
        # a token of an admin that may do nothing but look
        return {"kind": "user", "name": "boss", "admin": True, "scopes": ["access:services!service=gpushare"]}

    monkeypatch.setattr(hub, "user_for_token", user_for_token)
    monkeypatch.setattr(hub, "access_scopes", {"access:services!service=gpushare"})
    monkeypatch.setattr(Page, "_hub_auth", hub)
    answer = await AsyncHTTPClient().fetch(f"{api.url}viewer?token=narrow", raise_error=False)
    assert "service-gpushare" not in " ".join(answer.headers.get_list("Set-Cookie"))
    assert answer.code == 403
    by_header = await AsyncHTTPClient().fetch(f"{api.url}viewer", headers={"Authorization": "token narrow"})
    assert b'"act_all":false' in by_header.body


async def test_the_api_says_of_which_server_a_spawn_is(api: Client, hub_server: FakeHub) -> None:
    hub_server.add("ann", "~", ready=False, pending="spawn", user_options={"profile": "half"})
    for name in ("", "~", "~~", "~x", "x~", "a/b", "ü"):
        part = address_of("ann", name).rpartition("/")[2]
        assert "/" not in part
        assert part
    named = address_of("ann", "~")
    assert named != address_of("ann", "")
    await api.ask("DELETE", named, ANN)
    assert hub_server.deleted == ["/users/ann/servers/~"]


@pytest.mark.parametrize("name", ["", "~", "~~", "~x", "x", "x~", ".."])
def test_the_name_of_a_server_is_read_from_its_address(name: str) -> None:
    assert server_of(address_of("ann", name).rpartition("/")[2]) == name


async def test_refused_requests_do_not_make_the_service_ask_all_agents(
    api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    outdated = 0

    def counted(self: ServiceSnapshots) -> None:
        nonlocal outdated
        outdated += 1

    monkeypatch.setattr(ServiceSnapshots, "outdated", counted)
    for _ in range(3):
        assert (await api.ask("POST", "sessions/bob/keep", BOB, {"hours": 1000})).status == 409
        assert (await api.ask("POST", "sessions/ann/release", ANN)).status == 409
    assert outdated == 0
    assert (await api.ask("POST", "sessions/bob/keep", BOB, {"hours": 1})).status == 200
    assert outdated == 1


async def test_a_user_who_acts_without_pause_is_refused_and_told_when_to_go_on(api: Client) -> None:
    for _ in range(30):
        assert (await api.ask("DELETE", "sessions/bob/keep", BOB)).status == 200
    for _ in range(30):  # the budget grows while the test runs
        got = await api.ask("DELETE", "sessions/bob/keep", BOB)
        if got.status != 200:
            break
    assert (got.status, got.body["code"], got.headers["Retry-After"]) in [
        (429, "too-many", "1"), (429, "too-many", "2")
    ]  # fmt: skip
    assert got.message.startswith("You have sent many actions in a short time. Try again in ")
    assert (await api.ask("GET", "sessions/bob", BOB)).status == 200, "reading costs nothing"
    assert (await api.ask("DELETE", "sessions/bob/keep", ADMIN)).status == 200


async def test_an_answer_that_is_repeated_costs_no_budget(api: Client) -> None:
    for _ in range(60):
        got = await api.ask("DELETE", "sessions/bob/keep", BOB, headers={"Idempotency-Key": "again"})
        assert got.status == 200


@dataclass(frozen=True)
class LargeBody:
    """A way to send a body of 200,000 bytes."""

    headers: str
    parts: tuple[bytes, ...]

    async def answer(self, url: str, method: str) -> tuple[int, Any]:
        """Send everything, then read: (status, JSON)."""
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(
            f"{method} {address.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{self.headers}\r\n\r\n".encode()
        )
        for part in self.parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(5):
            said = await reader.read()
        writer.close()
        head, _, body = said.partition(b"\r\n\r\n")
        assert said.count(b"HTTP/1.1 ") == 1, said
        return int(head.split()[1]), json.loads(body)


LARGE_BODIES = {
    "with its length": LargeBody("Content-Length: 200000", (b"x" * 200_000,)),
    "in chunks": LargeBody(
        "Transfer-Encoding: chunked", (*(b"2710\r\n" + b"x" * 10_000 + b"\r\n" for _ in range(20)), b"0\r\n\r\n")
    ),
    "that waits to be asked for": LargeBody("Content-Length: 200000\r\nExpect: 100-continue", ()),
    "of more than a number": LargeBody("Content-Length: 99999999999999999999", ()),
}


@pytest.mark.parametrize("way", LARGE_BODIES)
async def test_each_operation_refuses_a_large_body_with_a_sentence(api: Client, way: str) -> None:
    for operation in OPERATIONS:
        path = re.sub(r"\{\w+\}", "x", operation.path)
        status, said = await LARGE_BODIES[way].answer(api.url + path, operation.method)
        assert (status, said["code"], said["message"]) == (
            413, "bad-request", "The body is too large: it may have 16,384 bytes."
        ), path  # fmt: skip
        check_documented(operation.method, path, status, said)


async def test_a_body_of_the_largest_size_is_read(api: Client) -> None:
    body = b'{"hours": 1' + b" " * (MOST_BODY_BYTES - 12) + b"}"
    assert (await api.ask("POST", "sessions/bob/keep", BOB, body)).status == 200
    assert (await api.ask("POST", "sessions/bob/keep", BOB, body + b" ")).status == 413
    assert (await api.ask("GET", "sessions/bob", BOB)).status == 200, "the service goes on"


async def test_a_large_body_is_not_read_before_the_login(
    machine: Machine, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, port = bind_unused_port()
    socket.close()
    monkeypatch.setenv("JUPYTERHUB_SERVICE_URL", f"http://127.0.0.1:{port}")
    server = command._listen(machine.sources(hub), None, None)
    assert server is not None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST {PREFIX}api/v1/sessions/x/keep HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n".encode()
        )
        async with asyncio.timeout(2):
            assert b" 413 " in await reader.readline()
        writer.close()
    finally:
        server.stop()
        await server.close_all_connections()


async def test_texts_of_admins_cannot_command_a_terminal(api: Client, machine: Machine) -> None:
    text = (
        "\x1b]0;gotcha\x07Hello\u202e\u2066 dlrow\x9b2J\r\nfamily \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"
    )
    assert (await api.ask("POST", "sessions/bob/message", ADMIN, {"text": text})).status == 200
    shown = (await api.get("sessions/bob", BOB))["message"]["text"]
    assert shown == "]0;gotcha Hello dlrow 2J\nfamily \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"
    assert (await api.ask("PUT", "sessions/bob/exemption", ADMIN, {"reason": "a\x1b[8mb"})).status == 200
    assert (await api.get("sessions/bob", BOB))["exemption"]["reason"] == "a [8mb"
    assert (await api.ask("POST", "sessions/bob/message", ADMIN, {"text": "\x07\u202e"})).status == 400
    assert (await api.ask("POST", "sessions/bob/message", ADMIN, b'{"text": "\\ud800"}')).status == 400


async def test_the_largest_numbers_are_answered(api: Client) -> None:
    for number in (2**31, 2**63, 10**100):
        assert (await api.get(f"sessions?offset={number}"))["sessions"] == []
        assert (await api.get(f"nodes?offset={number}"))["nodes"] == []
    for wrong in ("offset=-1", f"offset={'9' * 5000}", "limit=0", "limit=1001", "sort=keep", "sort=--user", "tier=x"):
        assert (await api.ask("GET", f"sessions?{wrong}", BOB)).status == 400, wrong
