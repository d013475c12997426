"""Quotas on one machine: from the file beside the templates to the session that the agent keeps."""

from __future__ import annotations

import json
from pathlib import Path

from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import Browser, RunningHub

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
