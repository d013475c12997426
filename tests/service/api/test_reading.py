"""What the operations that show something answer."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.service.api.reading import SessionsQuery
from tests.placement.instances import instance
from tests.service.api.clients import ADMIN, ANN, BOB, As, Client
from tests.service.api.conftest import Machine
from tests.service.dashboards import GIB, NOW, afternoon, session


async def users(api: Client, query: str, caller: As | None = ADMIN) -> list[str]:
    return [one["user"] for one in (await api.get(f"sessions?{query}", caller))["sessions"]]


async def test_a_summary_counts_everything(api: Client) -> None:
    found = await api.get("summary", ANN)
    assert found["units"] == {"owned": 45, "borrowed": 25, "lent": 40, "free": 90}
    assert sum(found["units"].values()) == found["capacity_units"] == 200
    assert found["available_units"] == 130
    assert found["sessions"] == {"active": 3, "downgraded": 1, "released": 1}
    assert (found["own_sessions"], found["working"], found["waiting"], found["queue"]) == (1, 2, 1, 2)
    assert (found["gpus"], found["unhealthy_gpus"], found["nodes"]) == (2, 0, 1)
    assert found["resident_bytes"] == 14 * GIB
    assert found["problems"] == []
    assert (await api.get("summary"))["problems"] == ["The service lacks the scope x: y."]


async def test_a_session_says_what_the_dashboard_says_of_it(api: Client) -> None:
    found = await api.get("sessions/bob")
    assert found == (await api.get("sessions?user=bob"))["sessions"][0]
    assert (found["tier"], found["effective_units"], found["share_units"]) == ("downgraded", 10, 25)
    assert found["next"]["action"] == "release of the share"
    assert found["next"]["notified"]
    assert (found["id"], found["node"], found["display_name"]) == ("bob", "workstation", "0.25 GPU")
    assert found["may_act"]
    assert found["own"] is False
    assert (found["quota"], found["in_quota"]) == ("the default quota of user bob", False)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", ["ann", "bob", "carol", "dave", "erin"]),
        ("sort=-user", ["erin", "dave", "carol", "bob", "ann"]),
        ("sort=tier", ["ann", "dave", "erin", "bob", "carol"]),
        ("sort=-share", ["carol", "ann", "bob", "dave", "erin"]),
        ("sort=-memory", ["carol", "ann", "bob", "dave", "erin"]),
        ("sort=-idle", ["carol", "bob", "erin", "ann", "dave"]),
        ("sort=delivered&limit=1", ["ann"]),
        ("sort=-opened&limit=1", ["dave"]),
        ("sort=next&limit=1", ["bob"]),
        ("sort=-kernels&limit=1", ["carol"]),
        ("offset=1&limit=2", ["bob", "carol"]),
        ("offset=9", []),
        ("q=THES", ["bob"]),
        ("q=0.10", ["erin"]),
        ("q=workstation&tier=active", ["ann", "dave", "erin"]),
        ("template=half", ["carol"]),
        ("node=elsewhere", []),
        ("user=dave", ["dave"]),
        ("own=true", []),
        ("group=optics", []),
    ],
)
async def test_sessions_are_filtered_sorted_and_paged(api: Client, query: str, wanted: list[str]) -> None:
    assert await users(api, query) == wanted


async def test_the_total_counts_all_pages(api: Client) -> None:
    page = await api.get("sessions?limit=1&tier=active")
    assert (page["total"], page["offset"], page["others"], len(page["sessions"])) == (3, 0, 0, 1)
    own = await api.get("sessions?limit=1", BOB)
    assert (own["total"], own["others"]) == (1, 4)


def test_every_column_can_be_sorted_by_in_both_directions() -> None:
    from typing import get_args

    from gpushare_spawner.service.api import reading

    columns = set(get_args(reading.Column))
    assert columns == reading._KEYS.keys()
    assert set(get_args(SessionsQuery.model_fields["sort"].annotation)) == columns | {f"-{one}" for one in columns}


async def test_groups_are_those_of_the_quotas(api: Client, machine: Machine) -> None:
    machine.agent.now = afternoon(session("zoe", quota="group:optics", gpus=("GPU-1",)))
    assert await users(api, "group=optics") == ["zoe"]
    assert await users(api, "q=optic") == ["zoe"]


async def test_gpus_with_their_bars(api: Client, machine: Machine) -> None:
    report = afternoon()
    machine.agent.now = report.model_copy(
        update={
            "gpus": (
                report.gpus[0].model_copy(update={"utilisation": 0.5, "temperature_celsius": 61, "power_watts": 233.5}),
                *report.gpus[1:],
            )
        }
    )
    (node,) = (await api.get("nodes", BOB))["nodes"]
    first, second = node["gpus"]
    figures = ("utilisation", "temperature_celsius", "power_watts")
    assert [first[name] for name in figures] == [0.5, 61, 233.5]
    assert [second[name] for name in figures] == [None, None, None]
    assert [(part["kind"], part["units"], part["user"]) for part in first["bar"]] == [
        ("owned", 25, None), ("owned", 10, "bob"), ("borrowed", 25, None), ("lent", 40, None)
    ]  # fmt: skip
    assert second["units"]["free"] == 90
    assert node == await api.get("nodes/workstation", BOB)


@pytest.mark.parametrize(("query", "number"), [("", 1), ("q=WORK", 1), ("q=gpu-1", 1), ("q=h100", 0), ("offset=1", 0)])
async def test_nodes_are_searched(api: Client, query: str, number: int) -> None:
    assert len((await api.get(f"nodes?{query}"))["nodes"]) == number


async def test_the_queue_has_positions_and_addresses(api: Client, machine: Machine) -> None:
    found = await api.get("queue")
    assert [(one["position"], one["user"], one["address"]) for one in found["spawns"]] == [
        (1, "ann", "queue/ann/second"),
        (2, "fay", "queue/fay/~"),
    ]
    own = await api.get("queue", ANN)
    assert ([one["user"] for one in own["spawns"]], own["others"]) == (["ann"], 1)
    assert own["spawns"][0]["may_act"]
    machine.pending = None
    assert await api.get("queue") == {"known": False, "spawns": [], "others": 0}


async def test_quotas_with_what_is_used_of_them(api: Client, machine: Machine) -> None:
    machine.agent.now = afternoon(session("zoe", quota="group:optics", gpus=("GPU-1",)))

    async def seen(caller: As | None) -> dict[str, Any]:
        return {f"{one['kind']} {one['name']}": one for one in (await api.get("quotas", caller))["quotas"]}

    everything = await seen(ADMIN)
    optics = everything["group optics"]
    assert (optics["guaranteed_units"], optics["used_units"], optics["over_units"]) == (200, 25, 0)
    assert everything["default carol"]["over_units"] == 50
    assert list(await seen(As("zoe"))) == ["group optics"], "charged to it"
    assert list(await seen(As("yan", groups=("optics",)))) == ["group optics"], "a member"
    assert list(await seen(BOB)) == ["default bob", "user bob"]
    machine.quotas = None
    assert await api.get("quotas") == {"known": False, "quotas": [], "budgets": []}


async def test_budgets_with_what_is_left_of_them(api: Client, machine: Machine) -> None:
    daily = {"budget": {"hours": 2, "window": "day"}}
    machine.quotas = Quotas.model_validate({"groups": {"ml": {**daily, "per_user": daily}}, "users": {"bob": daily}})
    grant = {"hours": 3, "until": 4e9, "reason": "Paper"}
    assert (await api.ask("PUT", "budgets/group:ml/grant", ADMIN, grant)).status == 400, "not read yet"
    await machine.budgets.refresh()
    answer = (await api.ask("PUT", "budgets/group:ml/grant", ADMIN, grant)).body
    assert answer["message"].startswith("3.00 GPU-hours more are granted to the quota of group ml until 2096-")
    assert (await api.ask("PUT", "budgets/group:ml/users/ann/grant", ADMIN, grant)).status == 200
    assert machine.recorded[-1].action == "grant"

    async def seen(caller: As | None) -> dict[tuple[str, str], float]:
        listed = (await api.get("quotas", caller))["budgets"]
        return {(one["account"], one["user"]): one["left"] for one in listed}

    everything = {("group:ml", ""): 5, ("group:ml", "ann"): 5, ("user:bob", ""): 2}
    assert await seen(ADMIN) == everything
    assert await seen(BOB) == {("user:bob", ""): 2}
    assert await seen(As("yan", groups=("ml",))) == {("group:ml", ""): 5}
    assert (await api.ask("DELETE", "budgets/group:ml/grant", ADMIN)).body["message"] == "The grant is ended."
    assert (await seen(ADMIN))["group:ml", ""] == 2


async def test_quotas_of_every_level_with_cpu_and_memory(api: Client, machine: Machine) -> None:
    machine.agent.now = afternoon(session("zoe", quota="group:optics", gpus=("GPU-1",)))
    machine.quotas = Quotas.model_validate(
        {
            "groups": {
                "science": {
                    "cpu": {"guarantee": 8, "maximum": 16},
                    "teams": {"physics": {"teams": {"optics": {"memory": {"maximum": "64Gi"}}}}},
                }
            }
        }
    )
    found = {one["name"]: one for one in (await api.get("quotas"))["quotas"] if one["kind"] == "group"}
    assert found["optics"]["department"] == "science / physics"
    assert [found[name]["used_units"] for name in ("science", "physics", "optics")] == [25, 25, 25]
    assert [found[name]["over_units"] for name in ("science", "physics", "optics")] == [25, 25, 25]
    assert [found[name]["sessions"] for name in ("science", "physics", "optics")] == [1, 1, 1]
    assert (found["science"]["cpu"]["guaranteed"], found["science"]["cpu"]["maximum"]) == (8000, 16000)
    assert found["optics"]["cpu"]["maximum"] is None
    assert found["optics"]["memory"]["maximum"] == 64 * GIB


async def test_history_and_actions_as_json_and_csv(api: Client) -> None:
    assert [row["user"] for row in (await api.get("history?by=user"))["rows"]] == ["ann", "bob"]
    assert [row["user"] for row in (await api.get("history?by=user", ANN))["rows"]] == ["ann"]
    assert [one["user"] for one in (await api.get("actions?limit=1"))["actions"]] == ["bob"]
    sheet = await api.ask("GET", "history?by=user&format=csv")
    assert sheet.headers["Content-Disposition"].startswith("attachment")
    assert sheet.body.splitlines()[0].startswith("user,reserved,idle")


async def test_an_unhealthy_gpu_and_an_agent_without_an_answer(api: Client, machine: Machine) -> None:
    gpu = GpuReport(index=2, uuid="GPU-2", model="x", memory_bytes=GIB, healthy=False)
    report = afternoon()
    machine.agent.now = report.model_copy(update={"gpus": (*report.gpus, gpu), "published_at": NOW})
    assert (await api.get("summary"))["unhealthy_gpus"] == 1
    (node,) = (await api.get("nodes"))["nodes"]
    assert [one["healthy"] for one in node["gpus"]] == [True, True, False]
    assert (await api.get("summary"))["available_units"] == 130, "no session can come to the unhealthy one"


@pytest.mark.parametrize(("where", "left"), [("GPU-0", 90), ("", 0)])
async def test_what_is_cordoned_is_not_available(api: Client, machine: Machine, where: str, left: int) -> None:
    cordon = Cordon(gpu=where, by="root", since=NOW)
    machine.agent.now = afternoon().with_cordons([cordon]).model_copy(update={"published_at": NOW})
    found = await api.get("summary")
    assert found["units"]["lent"] + found["units"]["free"] == 130
    assert found["available_units"] == left


async def test_instances_of_a_gpu_are_one_gpu_in_the_totals(api: Client, machine: Machine) -> None:
    report = afternoon()
    instances = (instance("MIG-1", "1g.10gb"), instance("MIG-3", "3g.40gb", healthy=False))
    machine.agent.now = report.model_copy(update={"gpus": (*report.gpus, *instances)})
    found = await api.get("summary")
    assert (found["gpus"], found["unhealthy_gpus"], found["capacity_units"]) == (3, 1, 256)
