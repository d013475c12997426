"""Who may have what, and how often: over named servers, running and starting ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from .fake_agent import FakeAgent
from .running_hub import RunningHub, until


async def test_the_limit_for_each_user_counts_running_named_servers(hub: RunningHub) -> None:
    assert (await hub.start_server("ada", {"profile": "whole-gpu"}, server="one")).code == 201
    refused = await hub.start_server("ada", {"profile": "whole-gpu"}, server="two")
    assert refused.code == 409
    assert "one server with 1 GPU at a time" in json.loads(refused.body)["message"]
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"}, server="two")).code == 201
    assert (await hub.start_server("bob", {"profile": "quarter-gpu"})).code == 201
    await hub.stop_server("ada", "one")
    assert (await hub.start_server("ada", {"profile": "whole-gpu"}, server="three")).code == 201


async def test_the_limit_for_each_user_counts_waiting_servers(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 10, 0)
    agent.occupy("there-1", 10, 1)
    assert (await hub.start_server("ada", {"profile": "whole-gpu"}, server="one")).code == 202
    await until(lambda: len(hub.reservations.queue) == 1)
    await hub.start_server("ada", {"profile": "whole-gpu"}, server="two")
    await until(lambda: not hub.spawner("ada", "two").active)
    assert "one server with 1 GPU" in hub.spawner("ada", "two")._spawn_future.exception().jupyterhub_message
    agent.sessions.clear()
    await hub.started("ada", "one")


async def test_the_limit_for_each_user_holds_for_two_starts_at_once(hub: RunningHub) -> None:
    await hub.add_user("ada")
    answers = await asyncio.gather(
        *(hub.api("POST", f"users/ada/servers/s{number}", {"profile": "whole-gpu"}) for number in range(4))
    )
    assert sorted(answer.code for answer in answers) == [201, 409, 409, 409]


async def test_a_template_is_offered_to_its_groups_and_users_only(hub: RunningHub) -> None:
    assert (await hub.start_server("ada", {"profile": "course"})).code == 403
    assert (await hub.start_server("tom", {"profile": "course"})).code == 201
    await hub.add_user("mia")
    await hub.api("POST", "groups/ml-course/users", {"users": ["mia"]})
    assert (await hub.start_server("mia", {"profile": "course"})).code == 201
    await hub.stop_server("mia")
    await hub.api("DELETE", "groups/ml-course/users", {"users": ["mia"]})
    assert (await hub.start_server("mia", {"profile": "course"})).code == 403


async def test_options_of_the_last_start_are_checked_again(hub: RunningHub, templates: Path) -> None:
    """The hub keeps options before anybody has looked at them, and starts with them when none are given."""
    await hub.start_server("ada", {"profile": "half-gpu"})
    await hub.started("ada")
    await hub.stop_server("ada")
    (templates / "half-gpu.yaml").unlink()
    refused = await hub.start_server("ada")
    assert refused.code == 400
    assert "There is no template 'half-gpu'" in json.loads(refused.body)["message"]


async def shown_options(hub: RunningHub, user: str) -> Any:
    """The options of the user's server as the hub's API shows them: all that the GPU service knows of its template."""
    return json.loads((await hub.api("GET", f"users/{user}")).body)["servers"][""]["user_options"]


async def test_a_start_without_options_waits_in_the_queue_with_the_name_of_its_template(
    make_hub: Any, agent: FakeAgent, templates: Path
) -> None:
    for template in templates.iterdir():
        if template.name != "quarter-gpu.yaml":
            template.unlink()
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 90, 0)
    agent.occupy("there-1", 90, 1)
    assert (await hub.start_server("ada")).code == 202
    await until(lambda: len(hub.reservations.queue) == 1)
    assert await shown_options(hub, "ada") == {"profile": "quarter-gpu"}
    agent.sessions.clear()
    await hub.started("ada")


async def test_after_a_restart_the_hub_names_the_template_of_a_start_without_options(
    make_hub: Any, templates: Path
) -> None:
    hub: RunningHub = await make_hub()
    await hub.start_server("ada")
    process = (await hub.started("ada")).proc
    await hub.end(cleanup_servers=False)
    hub = await make_hub()
    assert await shown_options(hub, "ada") == {"profile": "cpu-only"}
    process.kill()
    process.wait()
    await hub.stop_server("ada")
    await until(lambda: not hub.spawner("ada").active)
    default = templates / "cpu-only.yaml"
    default.write_text(default.read_text().replace("default: true", ""))
    (templates / "half-gpu.yaml").open("a").write("default: true\n")
    await hub.start_server("ada")
    assert (await hub.started("ada"))._attempt.template_name == "half-gpu", "the default of now, not that of then"


async def test_profiles_of_the_admin_are_offered_beside_templates(make_hub: Any, agent: FakeAgent) -> None:
    async def own(spawner: Any) -> list[dict[str, Any]]:
        return [
            {
                "display_name": f"Own of {spawner.user.name}",
                "slug": "own",
                "kubespawner_override": {"default_url": lambda spawner: f"/of/{spawner.user.name}"},
            }
        ]

    hub: RunningHub = await make_hub(lambda config: config.GPUShareMixin.update({"profile_list": own}))
    assert (await hub.start_server("ada", {"profile": "own"})).code == 201
    assert hub.spawner("ada").default_url == "/of/ada"
    assert not agent.asked("open")


async def test_a_bad_profile_list_hides_only_itself(make_hub: Any) -> None:
    hub: RunningHub = await make_hub(lambda config: config.GPUShareMixin.update({"profile_list": [{"slug": "x"}]}))
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201
