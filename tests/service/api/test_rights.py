"""Who may do what: each operation of the OpenAPI document, as each kind of caller."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from gpushare_spawner.model.quota import Quotas
from tests.service.api.clients import CALLERS, DOCUMENT, Client
from tests.service.api.conftest import Machine, StandInAgent
from tests.service.dashboards import NOW, afternoon
from tests.service.fake_hub import FakeHub

Statuses = dict[str, int]


def everybody(status: int) -> Statuses:
    """The status of all who are logged in; 403 without a login."""
    return dict.fromkeys(CALLERS, status) | {"nobody": 403}


SEE_ALL = ("a service with read", "a service with act", "an admin in a browser", "a full token of an admin")
SHOWN = everybody(200)
SHOWN_TO_ANN = everybody(404) | dict.fromkeys(
    ("ann in a browser", "a token of ann without a scope", "a token of ann with act-own", *SEE_ALL), 200
)
SHOWN_TO_USERS = SHOWN | dict.fromkeys(("a service without a scope", "a service with drain"), 403)
"""History: a program that is no user has none of its own."""


OF_ANN = ("ann in a browser", "a token of ann with act-own")
SEES_AND_MAY_NOT = ("a token of ann without a scope", "a service with read")
ACTS_ON_ALL = ("a service with act", "an admin in a browser", "a full token of an admin")
ON_OWN = everybody(404) | dict.fromkeys(SEES_AND_MAY_NOT, 403) | dict.fromkeys((*OF_ANN, *ACTS_ON_ALL), 200)
"""What is not a caller's is not there; what a caller may only see is forbidden."""
ON_ALL = everybody(403) | dict.fromkeys(ACTS_ON_ALL, 200)

ON_NODES = everybody(403) | dict.fromkeys(
    ("a service with drain", "an admin in a browser", "a full token of an admin"), 200
)
GRANT = {"hours": 2, "until": 4e9, "reason": "Paper"}
BUDGETS = {
    "groups": {"ml": {"budget": {"hours": 1, "window": "day"}, "per_user": {"budget": {"hours": 1, "window": "day"}}}}
}


@dataclass(frozen=True)
class Expected:
    """How an operation is asked for in this test, and what each caller gets. Sessions and spawns are ann's."""

    path: str
    statuses: Statuses
    body: Any = None


EXPECTED: dict[str, Expected] = {
    "viewer": Expected("viewer", SHOWN),
    "summary": Expected("summary", SHOWN),
    "nodes": Expected("nodes", SHOWN),
    "node": Expected("nodes/workstation", SHOWN),
    "sessions": Expected("sessions", SHOWN),
    "session": Expected("sessions/ann", SHOWN_TO_ANN),
    "queue": Expected("queue", SHOWN),
    "quotas": Expected("quotas", SHOWN),
    "history": Expected("history?by=user", SHOWN_TO_USERS),
    "actions": Expected("actions", SHOWN_TO_USERS),
    "advice": Expected("advice", SHOWN_TO_USERS),
    "events": Expected("events", SHOWN),
    "openapi": Expected("openapi.json", SHOWN),
    "keep": Expected("sessions/ann/keep", ON_OWN, {"hours": 1}),
    "end_keep": Expected("sessions/ann/keep", ON_OWN),
    "release": Expected("sessions/ann/release", ON_OWN),
    "stop": Expected("sessions/ann/stop", ON_OWN),
    "restart": Expected("sessions/ann/restart", ON_OWN, {"template": "half"}),
    "cancel": Expected("queue/ann/second", ON_OWN),
    "requeue": Expected("queue/ann/second/requeue", ON_ALL),
    "share": Expected("sessions/ann/share", ON_OWN, {"fraction": 0.1}),
    **{
        name: Expected(f"nodes/workstation{gpu}/{what}", ON_NODES, body)
        for gpu, names in (
            ("", ("cordon_node", "uncordon_node", "drain_node", "end_drain_of_node")),
            ("/gpus/GPU-1", ("cordon_gpu", "uncordon_gpu", "drain_gpu", "end_drain_of_gpu")),
        )
        for name, what, body in zip(
            names,
            ("cordon", "cordon", "drain", "drain"),
            ({"reason": "Fan"}, None, {"reason": "Fan"}, None),
            strict=True,
        )
    },
    "grant": Expected("budgets/group:ml/grant", ON_ALL, GRANT),
    "end_grant": Expected("budgets/group:ml/grant", ON_ALL),
    "grant_to_user": Expected("budgets/group:ml/users/ann/grant", ON_ALL, GRANT),
    "end_grant_to_user": Expected("budgets/group:ml/users/ann/grant", ON_ALL),
    "tier": Expected("sessions/ann/tier", ON_ALL, {"tier": "downgraded"}),
    "exempt": Expected("sessions/ann/exemption", ON_ALL, {"reason": "Paper"}),
    "end_exemption": Expected("sessions/ann/exemption", ON_ALL),
    "withdraw_message": Expected("sessions/ann/message", ON_ALL),
    "message": Expected("sessions/ann/message", ON_ALL, {"text": "Hello"}),
}
OPERATIONS = {
    operation["operationId"]: (method.upper(), address, operation)
    for address, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


@pytest.fixture
def machine() -> Machine:
    """Ann's GPU is idle, so that her share can be released."""
    idle = {"gpu_busy": False, "last_gpu_activity": NOW - 60}
    sessions = [one.model_copy(update=idle) if one.user == "ann" else one for one in afternoon().sessions]
    agent = StandInAgent(afternoon().model_copy(update={"sessions": tuple(sessions)}))
    return Machine(agent, quotas=Quotas.model_validate(BUDGETS))


def test_every_operation_has_its_expectations() -> None:
    assert EXPECTED.keys() == OPERATIONS.keys()
    assert all(one.statuses.keys() == CALLERS.keys() for one in EXPECTED.values())


@pytest.mark.parametrize("name", OPERATIONS)
async def test_each_caller_gets_what_is_theirs(api: Client, hub_server: FakeHub, name: str) -> None:
    method, _, operation = OPERATIONS[name]
    wanted = EXPECTED[name]
    streams = "text/event-stream" in operation["responses"]["200"]["content"]
    running = json.dumps(hub_server.users)
    for who, caller in CALLERS.items():
        hub_server.users = json.loads(running)
        if streams and wanted.statuses[who] == 200:
            continue  # test_events.py
        got = await api.ask(method, wanted.path, caller, wanted.body)
        assert got.status == wanted.statuses[who], (who, got)
        if got.status in (403, 404):
            assert got.body["code"] in ("login", "forbidden", "unknown")


async def test_a_cookie_without_the_xsrf_token_is_no_login_and_the_answer_says_why(api: Client) -> None:
    got = await api.ask("GET", "viewer", None, headers={"Cookie": "jupyterhub-session-id=x"})
    assert (got.status, got.body["code"]) == (403, "xsrf")
    assert "Reload the page" in got.message


async def test_users_see_no_names_of_others(api: Client) -> None:
    for path in ("sessions", "nodes", "queue", "summary", "quotas", "actions", "history?by=user", "nodes/workstation"):
        said = str(await api.get(path, CALLERS["a token of ann without a scope"]))
        for other in ("bob", "carol", "dave", "erin", "fay", "lacks"):
            assert other not in said, path


async def test_rights_are_said_to_the_page(api: Client) -> None:
    async def rights(who: str) -> list[str]:
        return [name for name, has in (await api.get("viewer", CALLERS[who]))["may"].items() if has]

    assert await rights("ann in a browser") == ["act_own"]
    assert await rights("a token of ann without a scope") == []
    assert await rights("a token of ann with act-own") == ["act_own"]
    assert await rights("a service with read") == ["read_all"]
    assert await rights("a service with act") == ["read_all", "act_all"]
    assert await rights("a service with drain") == ["drain"]
    assert await rights("an admin in a browser") == ["read_all", "act_own", "act_all", "drain"]
    assert await rights("a full token of an admin") == ["read_all", "act_own", "act_all", "drain"]
    assert await rights("a narrowed token of an admin") == []
