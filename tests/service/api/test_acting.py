"""Actions on sessions: what they change, what they answer, and what is in the history."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest
from tornado.httpclient import HTTPRequest

from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.hub.client import Hub
from tests.present import present
from tests.service.api.clients import ADMIN, ANN, BOB, CALLERS, Client
from tests.service.api.conftest import Machine
from tests.service.dashboards import NOW, TEMPLATES
from tests.service.fake_hub import FakeHub

HOUR = 3600.0


async def test_a_share_is_kept_and_shown_as_kept_at_once(api: Client, machine: Machine) -> None:
    got = await api.ask("POST", "sessions/bob/keep", BOB, {"hours": 4})
    assert got.body == {"changed": True, "message": "The GPU share is kept for 4 h. It is downgraded now: some "
                        "seconds of GPU time restore it."}  # fmt: skip
    shown = await api.get("sessions/bob", BOB)
    assert shown["keep"] == {"until": NOW + 4 * HOUR, "since": NOW, "by": "bob"}
    limits = {"longest_seconds": 8 * HOUR, "per_day": 3, "at_once": 2}
    assert shown["keep_limits"] == limits | {"left": 2, "again_at": None}
    again = await api.ask("POST", "sessions/bob/keep", BOB, {"until": NOW + 4 * HOUR})
    assert again.body["changed"] is False
    assert (await api.ask("DELETE", "sessions/bob/keep", ADMIN)).body["changed"]
    assert (await api.get("sessions/bob"))["keep"] is None
    assert [(one.action, one.actor, one.user) for one in machine.recorded] == [
        ("keep", "bob", "bob"), ("keep-ended", "boss", "bob")
    ]  # fmt: skip


async def test_what_is_left_of_keeps_is_shown_for_all_sessions_of_a_user_before_the_last_is_spent(api: Client) -> None:
    limits = {"longest_seconds": 8 * HOUR, "per_day": 3, "at_once": 2}
    for left, hours in ((3, 4), (2, 5), (1, 6)):
        shown = await api.get("sessions/bob", BOB)
        assert shown["keep_limits"] == limits | {"left": left, "again_at": None}
        await api.ask("POST", "sessions/bob/keep", BOB, {"hours": hours})
    for one in (await api.get("sessions", BOB))["sessions"]:
        assert one["keep_limits"] == limits | {"left": 0, "again_at": NOW + 24 * HOUR}, one["id"]


@pytest.mark.parametrize(
    ("id", "largest"),
    [
        ("ann", 65),  # works: 50 + 15 units are lent beside it, and 25 of them are borrowed
        ("bob", 25),  # idle: no units of its GPU are without an owner
        ("carol", 50),
        ("dave", 65),
        ("erin", 100),  # the rest of GPU 1 is free
    ],
)
async def test_the_largest_share_that_is_free_for_a_session_is_shown(api: Client, id: str, largest: int) -> None:
    assert (await api.get(f"sessions/{id}"))["largest_share_units"] == largest


async def test_limits_bind_users_and_not_admins(api: Client) -> None:
    refused = await api.ask("POST", "sessions/bob/keep", BOB, {"hours": 9})
    assert (refused.status, refused.body["code"]) == (409, "limit")
    assert "at most 8 h" in refused.message
    assert (await api.ask("POST", "sessions/bob/keep", ADMIN, {"hours": 9})).status == 200


async def test_a_busy_share_is_not_released(api: Client) -> None:
    refused = await api.ask("POST", "sessions/ann/release", ANN)
    assert (refused.status, refused.body["code"]) == (409, "busy")


async def test_tier_exemption_and_message(api: Client, machine: Machine) -> None:
    assert (await api.ask("PUT", "sessions/erin/tier", ADMIN, {"tier": "released"})).body["changed"]
    assert (await api.get("sessions/erin"))["tier"] == "released"
    assert (
        await api.ask("PUT", "sessions/erin/exemption", ADMIN, {"until": NOW + 60, "reason": "Paper"})
    ).status == 200
    assert (await api.ask("POST", "sessions/erin/message", ADMIN, {"text": "Hello"})).status == 200
    shown = await api.get("sessions/erin")
    assert shown["exemption"] == {"until": NOW + 60, "by": "boss", "reason": "Paper"}
    hello = {"text": "Hello", "by": "boss", "at": NOW, "cause": "admin"}
    told = {"text": "boss set the tier to released.", "by": "boss", "at": NOW, "cause": "action"}
    assert (shown["message"], shown["messages"]) == (hello, [told, hello])
    got = await api.ask("DELETE", "sessions/erin/message", ADMIN)
    assert got.body == {"changed": True, "message": "The message is withdrawn."}
    assert (await api.get("sessions/erin"))["messages"] == []
    assert not (await api.ask("DELETE", "sessions/erin/message", ADMIN)).body["changed"]
    assert [one.action for one in machine.recorded][-2:] == ["message", "message-withdrawn"]
    machine.now = NOW + 61
    assert (await api.get("sessions/erin"))["exemption"] is None
    assert present(machine.agent.now.session("erin")).tier is Tier.RELEASED


async def test_a_share_is_changed_within_templates_by_its_user_and_to_any_by_an_admin(
    api: Client, machine: Machine
) -> None:
    got = await api.ask("PUT", "sessions/erin/share", CALLERS["an admin in a browser"], {"fraction": 0.33})
    assert got.body == {"changed": True, "message": "The share is now 0.33 GPU (previously 0.10 GPU)."}
    shown = await api.get("sessions/erin")
    assert (shown["share_units"], shown["share_choices"]) == (33, [10, 25, 50])
    assert (await api.get("sessions/bob", BOB))["share_choices"] == [10, 50]
    refused = await api.ask("PUT", "sessions/bob/share", BOB, {"fraction": 0.33})
    assert (refused.status, refused.body["code"]) == (409, "limit")
    assert refused.message.startswith("You can change this share to 0.10 GPU or 0.50 GPU")
    assert (await api.ask("PUT", "sessions/bob/share", BOB, {"fraction": 0.1})).body["changed"]
    assert (await api.ask("PUT", "sessions/bob/share", BOB, {"fraction": 1.5})).status == 400
    assert [(one.action, one.actor, one.user) for one in machine.recorded] == [
        ("share", "boss", "erin"), ("share", "bob", "bob")
    ]  # fmt: skip


async def test_a_user_is_offered_shares_with_the_same_rules_and_an_admin_all(
    api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEMPLATES, "half", TEMPLATES["half"].model_copy(update={"labels": ("exam",)}))
    assert (await api.get("sessions/bob", BOB))["share_choices"] == [10]
    refused = await api.ask("PUT", "sessions/bob/share", BOB, {"fraction": 0.5})
    assert (refused.status, refused.body["code"]) == (409, "limit")
    assert (await api.get("sessions/bob"))["share_choices"] == [10, 50]
    assert (await api.ask("PUT", "sessions/bob/share", ADMIN, {"fraction": 0.5})).body["changed"]


async def test_a_server_is_stopped_through_the_hub(api: Client, hub_server: FakeHub) -> None:
    assert (await api.ask("POST", "sessions/bob/stop", BOB)).body["changed"]
    assert hub_server.deleted == ["/users/bob/servers/thesis"]
    assert (await api.ask("POST", "sessions/bob/stop", BOB)).body == {
        "changed": False, "message": "The server is not running."
    }  # fmt: skip


async def test_a_service_acts_under_its_own_name(api: Client, machine: Machine) -> None:
    await api.ask("POST", "sessions/bob/keep", CALLERS["a service with act"], {"hours": 1})
    assert machine.recorded[-1].actor == "service robot"


async def test_a_hub_or_an_agent_that_fails_is_said(api: Client, hub_server: FakeHub) -> None:
    hub_server.faults = [500] * 4
    got = await api.ask("POST", "sessions/bob/stop", BOB)
    assert (got.status, got.body["code"]) == (502, "hub-unavailable")
    assert got.message.startswith("Nothing was done.")


async def test_only_those_who_see_all_are_told_the_hubs_address(
    api: Client, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(request: HTTPRequest) -> NoReturn:
        raise ConnectionRefusedError(111, f"no connection to {hub.url}")

    monkeypatch.setattr(hub._client, "fetch", refuses)
    got = await api.ask("POST", "sessions/bob/stop", BOB)
    assert (got.status, got.message) == (502, "Nothing was done. The hub cannot be reached.")
    assert f"The hub at {hub.url} cannot be reached" in (await api.ask("POST", "sessions/bob/stop", ADMIN)).message
    assert not [one for one in machine.recorded if hub.url in one.reason], "users read the history"


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", "sessions/bob/keep", {}, "give either hours or until"),
        ("POST", "sessions/bob/keep", {"hours": 1, "until": NOW}, "give either hours or until"),
        ("POST", "sessions/bob/keep", {"hours": -1}, "hours: "),
        ("POST", "sessions/bob/keep", b'{"hours": NaN}', "hours: "),
        ("POST", "sessions/bob/keep", b'{"hours": 1e999}', "hours: "),
        ("POST", "sessions/bob/keep", {"hours": 1e18}, "A keep must end in the future"),
        ("POST", "sessions/bob/keep", {"until": NOW - 1}, "A keep must end in the future"),
        ("POST", "sessions/bob/keep", {"for": 1}, "for: extra inputs"),
        ("POST", "sessions/bob/keep", b"[1]", "The body is not a JSON object: it is a list."),
        ("POST", "sessions/bob/keep", b"{", "The body is not a JSON object"),
        ("POST", "sessions/bob/keep", b"[" * 9000, "The body is not a JSON object"),
        ("PUT", "sessions/bob/tier", {"tier": "stopped"}, "tier: input should be 'active', 'downgraded' or 'released'"),
        ("PUT", "sessions/bob/tier", {}, "tier: field required"),
        ("PUT", "sessions/bob/exemption", {"until": NOW - 1}, "An exemption must end in the future"),
        ("POST", "sessions/bob/message", {"text": "  "}, "The message is empty"),
        ("POST", "sessions/bob/message", {"text": "x" * 501}, "text: "),
    ],
)
async def test_a_wrong_body_says_what_is_wrong(api: Client, method: str, path: str, body: Any, said: str) -> None:
    got = await api.ask(method, path, ADMIN, body)
    assert got.status == 400, got
    assert said in got.message


async def test_a_huge_body_is_refused(api: Client) -> None:
    assert (await api.ask("POST", "sessions/bob/message", ADMIN, b'"' + b"x" * 20000 + b'"')).status == 413


async def test_a_request_that_is_repeated_with_its_key_acts_once(api: Client, machine: Machine) -> None:
    headers = {"Idempotency-Key": "4711"}

    async def keep(body: Any = None) -> Any:
        return (await api.ask("POST", "sessions/bob/keep", BOB, body or {"hours": 1}, headers)).body

    first, second = await asyncio.gather(keep(), keep())
    machine.now += 600
    assert first == second == await keep()
    assert first["changed"]
    assert len(machine.recorded) == 1
    assert (await keep({"hours": 2}))["code"] == "key-reused"
    assert (await api.ask("POST", "sessions/bob/keep", ADMIN, {"hours": 3}, headers)).body["changed"], "another caller"


async def test_a_server_restarts_with_another_template(api: Client, hub_server: FakeHub) -> None:
    got = await api.ask("POST", "sessions/bob/restart", BOB, {"template": "half"})
    assert got.body["changed"], got
    assert hub_server.users["bob"]["servers"]["thesis"]["user_options"] == {"profile": "half"}
    refused = await api.ask("POST", "sessions/erin/restart", ADMIN, {"template": "gold"})
    assert (refused.status, refused.body["code"]) == (400, "bad-request")


async def test_spawns_are_cancelled_and_queued_anew_by_their_addresses(api: Client, hub_server: FakeHub) -> None:
    mine, default = (one["address"] for one in (await api.get("queue"))["spawns"])
    assert (await api.ask("POST", f"{mine}/requeue", ADMIN)).body["message"] == "The spawn is at the end of the queue."
    assert (await api.ask("DELETE", mine, ANN)).body == {"changed": True, "message": "The spawn is cancelled."}
    assert (await api.ask("DELETE", default, ADMIN)).body["changed"]
    assert (await api.ask("DELETE", default, ANN)).status == 404
    assert hub_server.deleted == ["/users/ann/servers/second"] * 2 + ["/users/fay/server"]


async def test_a_gpu_is_drained_and_its_node_cordoned(api: Client) -> None:
    gpu = "nodes/workstation/gpus/GPU-1"
    got = await api.ask("PUT", f"{gpu}/drain", ADMIN, {"reason": "Fan.", "stop_after": 7200})
    assert got.body["message"].startswith("GPU 1 of node workstation gets no new servers.")
    assert (await api.ask("PUT", "nodes/workstation/cordon", ADMIN, {})).body["changed"]
    node = await api.get("nodes/workstation", ANN)
    cordon = {"by": "boss", "reason": "", "since": NOW, "drain": False, "stop_at": None}
    assert (node["cordoned"], node["drained"], node["cordon"]) == (True, False, cordon)
    drain = {"by": "boss", "reason": "Fan.", "since": NOW, "drain": True, "stop_at": NOW + 7200}
    assert [(one["cordoned"], one["drained"], one["cordon"]) for one in node["gpus"]] == [
        (True, False, None), (True, True, drain)
    ]  # fmt: skip
    assert (await api.ask("DELETE", "nodes/workstation/drain", ADMIN)).body["changed"]
    assert (await api.ask("DELETE", f"{gpu}/cordon", ADMIN)).body["changed"]
    assert not (await api.get("nodes/workstation"))["gpus"][1]["cordoned"]


@pytest.mark.parametrize("path", ["nodes/moon/cordon", "nodes/workstation/gpus/GPU-9/drain"])
async def test_what_is_not_there_is_not_cordoned(api: Client, path: str) -> None:
    assert (await api.ask("PUT", path, ADMIN, {})).status == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "sessions/{id}/keep", {"hours": True}),
        ("POST", "sessions/{id}/keep", {"hours": "4"}),
        ("PUT", "nodes/workstation/drain", {"stop_after": "7200"}),
        ("PUT", "nodes/workstation/drain", {"stop_after": True}),
        ("PUT", "nodes/workstation/cordon", {"reason": 7}),
    ],
)
async def test_a_value_of_another_json_type_is_refused(
    api: Client, method: str, path: str, body: dict[str, Any]
) -> None:
    session = (await api.get("sessions", ADMIN))["sessions"][0]["id"]
    got = await api.ask(method, path.format(id=session), ADMIN, body)
    assert (got.status, got.body["code"]) == (400, "bad-request")
