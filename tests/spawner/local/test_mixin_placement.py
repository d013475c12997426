"""An admin names the GPU of one user, of a group, or of one spawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse

from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import Browser, RunningHub, until

FIRST, SECOND = (f"GPU-0000000{number}-0000-5000-8000-0123456789ab" for number in (0, 1))
NOWHERE = "GPU-99999999-0000-5000-8000-0123456789ab"


@pytest.fixture(autouse=True)
def _real_uuids(agent: FakeAgent) -> None:
    pairs = zip(agent.gpus, (FIRST, SECOND), strict=True)
    agent.gpus = tuple(gpu.model_copy(update={"uuid": uuid}) for gpu, uuid in pairs)


def write(templates: Path, **pins: Any) -> None:
    """placement.yaml, which is read again without a restart of the hub."""
    (templates / "placement.yaml").write_text(json.dumps(pins))


async def gpu_of(hub: RunningHub, agent: FakeAgent, user: str, options: Any = None) -> str:
    answer = await hub.start_server(user, options if options is not None else {"profile": "quarter-gpu"})
    assert answer.code == 201, answer.body
    await hub.started(user)
    return agent.sessions[user].gpus[0]


def message(answer: HTTPResponse) -> str:
    return str(json.loads(answer.body)["message"])


async def test_sessions_of_a_pinned_user_and_of_a_groups_members_are_on_that_gpu(
    hub: RunningHub, templates: Path, agent: FakeAgent
) -> None:
    write(templates, users={"ada": {"gpu": SECOND}}, groups={"ml-course": {"gpu": SECOND}})
    agent.occupy("there", 50, gpus=(FIRST,))
    assert await gpu_of(hub, agent, "zoe") == FIRST, "the fullest GPU, as without a pin"
    assert await gpu_of(hub, agent, "ada") == SECOND
    assert await gpu_of(hub, agent, "mia") == SECOND
    await hub.stop_server("ada")
    write(templates, users={})
    assert await gpu_of(hub, agent, "ada") == FIRST


async def test_form_and_waiting_page_name_the_pinned_gpu_that_is_full(
    hub: RunningHub, templates: Path, agent: FakeAgent
) -> None:
    write(templates, users={"ada": {"gpu": SECOND}})
    agent.occupy("there", 90, gpus=(SECOND,))
    await hub.add_user("ada")
    browser = Browser(hub)
    await browser.log_in("ada")
    why = f"Not enough free capacity: this needs 0.25 GPU, and at most 0.10 GPU is free on GPU {SECOND}."
    page = (await browser.open("/hub/spawn/ada")).body.decode().replace("\u00a0", " ")
    assert why in page
    hub.answer_at_once()
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    await until(lambda: [ticket.hint for ticket in hub.reservations.queue] == [why])
    agent.sessions.pop("there")
    await hub.started("ada")
    assert agent.sessions["ada"].gpus == (SECOND,)


async def test_template_that_contradicts_a_pin_is_refused_with_both_rules(
    hub: RunningHub, templates: Path, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    (templates / "exam.yaml").write_text(
        f"{{name: exam, display_name: Exam, gpu: {{fraction: 0.25}}, placement: {{gpu: {FIRST}}}}}"
    )
    write(templates, users={"ada": {"gpu": SECOND}, "bob": {"gpu": FIRST, "nodes": ["elsewhere"]}})
    answer = await hub.start_server("ada", {"profile": "exam"})
    why = (
        f"Exam cannot start here: it asks for GPU {FIRST}, and not for GPU {SECOND}, as placement.yaml (users.ada) "
        "says. Choose another template, or ask the admin."
    )
    assert (answer.code, message(answer)) == (409, why)
    answer = await hub.start_server("ada", {"profile": "three-gpus"})
    assert "its share is 3 GPUs, and not one GPU" in message(answer)
    browser = Browser(hub)
    await browser.log_in("ada")
    page = (await browser.open("/hub/spawn/ada")).body.decode().replace("\u00a0", " ")
    assert why in page
    said = "placement.yaml:1: users.ada: cannot use the template exam: it asks for GPU"
    assert any(said in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    answer = await hub.start_server("bob", {"profile": "exam"})
    assert f"This server needs GPU {FIRST} on elsewhere, and no agent reports it." in message(answer)
    assert agent.sessions == {}


async def test_pin_to_a_gpu_that_does_not_exist_is_logged_once_and_told_to_its_user(
    hub: RunningHub, templates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(templates, users={"ada": {"gpu": NOWHERE}})
    await hub.add_user("ada")
    browser = Browser(hub)
    await browser.log_in("ada")
    for _ in range(2):
        page = (await browser.open("/hub/spawn/ada")).body.decode()
        assert f"This server needs GPU {NOWHERE}, and no agent reports it." in page.replace("\u00a0", " ")
    logged = [record.getMessage() for record in caplog.records if NOWHERE in record.getMessage()]
    assert logged == [f"placement.yaml (users.ada) asks for GPU {NOWHERE}, and no agent reports it"]


async def test_admin_names_the_gpu_of_one_spawn_and_its_user_cannot(
    hub: RunningHub, templates: Path, agent: FakeAgent
) -> None:
    agent.occupy("there", 50, gpus=(FIRST,))
    options = {"profile": "quarter-gpu", "placement": {"gpu": SECOND}}
    assert await gpu_of(hub, agent, "ada", options) == SECOND
    await hub.stop_server("ada")
    assert await gpu_of(hub, agent, "ada", "") == FIRST, "the hub reuses the options for a spawn without options"
    await hub.stop_server("ada")
    token = hub.user("ada").new_api_token()
    request = HTTPRequest(
        f"{hub.url}/api/users/ada/server", method="POST", body=json.dumps(options),
        headers={"Authorization": f"token {token}"}, request_timeout=40,
    )  # fmt: skip
    refused = await AsyncHTTPClient(force_instance=True).fetch(request, raise_error=False)
    why = "Only an admin can choose the GPU of a server: remove the option placement."
    assert (refused.code, message(refused)) == (403, why)
    assert "ada" not in agent.sessions
    wrong = await hub.start_server("ada", {"profile": "quarter-gpu", "placement": {"gpu": "0"}})
    assert (wrong.code, "placement" in message(wrong), "nvidia-smi -L" in message(wrong)) == (400, True, True)
    write(templates, users={"ada": {"gpu": FIRST}})
    both = await hub.start_server("ada", options)
    assert f"it asks for GPU {FIRST}, and not for GPU {SECOND}, as the option placement says" in message(both)
