"""Quotas on one machine: from the file beside the templates to the session that the agent keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import Browser, RunningHub, until

QUOTAS = """\
groups:
  optics: {guarantee: 1, maximum: 1}
users:
  ada: {guarantee: 0.25, per_user: {servers: 1}}
"""


async def test_a_server_is_charged_to_the_quota_that_was_chosen_or_to_the_users_first(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    (templates / "quotas.yaml").write_text(QUOTAS)
    await hub.add_user("ada")
    assert (await hub.api("POST", "groups/optics")).code == 201
    await hub.api("POST", "groups/optics/users", {"users": ["ada"]})
    assert (await hub.start_server("ada", {"profile": "quarter-gpu", "quota": "theory"})).code == 400
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    await hub.started("ada")
    assert agent.sessions["ada"].quota == "user:ada"
    await hub.start_server("ada", {"profile": "half-gpu", "quota": "optics"}, "two")
    await hub.started("ada", "two")
    assert agent.sessions["ada+two"].quota == "group:optics"

    refused = await hub.start_server("ada", {"profile": "half-gpu"}, "three")
    assert refused.code == 409
    assert (
        "You have 1 server with a GPU in the quota of user ada, which allows 1" in json.loads(refused.body)["message"]
    )

    browser = Browser(hub)
    await browser.log_in("ada")
    page = (await browser.open("/hub/spawn/ada/four")).body.decode()
    assert "optics: in quota, 0.50" in page.replace("\u00a0", " ")


async def test_quotas_that_are_removed_refuse_nobody_any_longer(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    (templates / "quotas.yaml").write_text("default: {maximum: 0}\n")
    assert (await hub.start_server("bob", {"profile": "quarter-gpu"})).code == 409
    (templates / "quotas.yaml").unlink()
    hub.spawner("bob").policy_folder.load()
    assert (await hub.start_server("bob", {"profile": "quarter-gpu"})).code in (201, 202)
    await hub.started("bob")
    assert agent.sessions["bob"].quota == ""


CPU_QUOTAS = """\
groups:
  science:
    cpu: {maximum: 3}
    teams:
      optics: {memory: {guarantee: 2Gi, maximum: 4Gi}, guarantee: 1}
default: {cpu: {maximum: 2}}
"""
CPU_ONLY = "name: cpu-only\ndisplay_name: CPU only\nresources: {cpu: {guarantee: 2}, memory: {guarantee: 1Gi}}\n"
WITH_GPU = "display_name: 0.25 GPU\ngpu: {fraction: 0.25}\nresources: {cpu: {guarantee: 1}, memory: {guarantee: 1Gi}}\n"


async def in_optics(hub: RunningHub, templates: Path, *users: str) -> None:
    (templates / "quotas.yaml").write_text(CPU_QUOTAS)
    (templates / "cpu-only.yaml").write_text(CPU_ONLY)
    (templates / "quarter-gpu.yaml").write_text(f"name: quarter-gpu\n{WITH_GPU}")
    (templates / "big.yaml").write_text(
        f"name: big\n{WITH_GPU.replace('1Gi', '4Gi').replace('cpu: {guarantee: 1}, ', '')}"
    )
    await hub.api("POST", "groups/optics")
    for user in users:
        await hub.add_user(user)
        await hub.api("POST", "groups/optics/users", {"users": [user]})


def message(answer: Any) -> str:
    said: str = json.loads(answer.body)["message"]
    return said


async def test_servers_without_a_gpu_and_with_one_count_in_the_cpu_of_every_level(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    await in_optics(hub, templates, "ada", "bob", "eve")
    assert (await hub.start_server("ada", {"profile": "cpu-only"})).code in (201, 202)
    await hub.started("ada")
    refused = await hub.start_server("bob", {"profile": "cpu-only"})
    assert (refused.code, message(refused)) == (
        409,
        "This needs 2 CPU cores, and the quota of group science is limited to 3 CPU cores, of which 2 CPU cores are in "
        "use. Choose a template with at most 1 CPU core, or try again when a server of this quota has stopped.",
    )
    assert (await hub.start_server("bob", {"profile": "quarter-gpu"})).code in (201, 202)
    await hub.started("bob")
    refused = await hub.start_server("eve", {"profile": "quarter-gpu"})
    assert refused.code == 409
    assert "limited to 3 CPU cores, of which 3 CPU cores are in use" in message(refused)
    refused = await hub.start_server("eve", {"profile": "big"})
    assert "needs 4 GiB of memory, and the quota of group optics is limited to 4 GiB" in message(refused)
    browser = Browser(hub)
    await browser.log_in("eve")
    page = (await browser.open("/hub/spawn/eve")).body.decode().replace("\u00a0", " ")
    assert page.count("you cannot start now: science: 3 CPU cores of at most 3 CPU cores in use") == 2
    assert "you cannot start now: 2 GiB of memory of at most 4 GiB of memory in use" in page
    await hub.stop_server("ada")
    assert (await hub.start_server("eve", {"profile": "cpu-only"})).code in (201, 202)
    await hub.started("eve")


async def test_of_two_servers_without_a_gpu_at_once_only_one_gets_what_a_maximum_leaves(
    hub: RunningHub, templates: Path
) -> None:
    await in_optics(hub, templates)
    await hub.add_user("tom")
    assert (await hub.start_server("tom", {"profile": "cpu-only"})).code in (201, 202)
    assert (await hub.start_server("tom", {"profile": "cpu-only"}, "two")).code == 409
    await hub.started("tom")
    await hub.stop_server("tom")
    await until(lambda: not hub.reservations.without_gpu)
    assert (await hub.start_server("tom", {"profile": "cpu-only"}, "two")).code in (201, 202)
    await hub.started("tom", "two")


async def test_a_restarted_hub_counts_the_servers_without_a_gpu(make_hub: Any, templates: Path) -> None:
    first: RunningHub = await make_hub()
    await in_optics(first, templates, "ada", "bob")
    await first.start_server("ada", {"profile": "cpu-only"})
    process = (await first.started("ada")).proc
    (charged,) = first.reservations.without_gpu.values()
    assert charged.quota == "group:optics"
    await first.end(cleanup_servers=False)
    second: RunningHub = await make_hub()
    refused = await second.start_server("bob", {"profile": "cpu-only"})
    assert refused.code == 409
    assert second.reservations.without_gpu == {"ada": charged}
    await second.end(cleanup_servers=False)
    process.kill()
    process.wait()
    third: RunningHub = await make_hub()
    assert not third.spawner("ada").ready
    assert third.reservations.without_gpu == {}, "it ended meanwhile"


async def test_without_cpu_in_the_quotas_a_server_without_a_gpu_uses_none(hub: RunningHub, templates: Path) -> None:
    (templates / "quotas.yaml").write_text("default: {maximum: 0}\n")
    assert (await hub.start_server("ada", {"profile": "cpu-only"})).code in (201, 202)
    await hub.started("ada")
    (charged,) = hub.reservations.without_gpu.values()
    assert charged.quota == ""
