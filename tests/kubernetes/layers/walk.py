"""The walk that a server takes with every sharing layer: the form, a spawn, one that waits, and its turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gpushare_spawner.spawner.queue.availability import Availability, AvailabilityNow
from gpushare_spawner.wording.spawn_form import NOT_READ_YET
from tests.spawner.running_hub import until

from ..standin.cluster import Cluster


async def shows(hub: Any, template: str, text: str, user: str = "eve") -> Availability:
    """Wait until the template's card says this to a user."""
    found: Availability | None = None
    for _ in range(100):
        spawner = hub.spawner(user)
        now = await spawner._availability_if_watched()
        (offered,) = [one for one in spawner._templates() if one.name == template]
        found = now.availability(offered) if isinstance(now, AvailabilityNow) else None
        if found is not None and found.text == text and found.detail != NOT_READ_YET:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"the card never says {text!r}: {found}")


async def walk(hub: Any, cluster: Cluster, template: str, fits: int = 1) -> list[dict[str, Any]]:
    """``fits`` servers start, the next one waits until the first has stopped; the pods of the first servers."""
    await hub.add_user("eve")
    await shows(hub, template, "Starts now")
    users = [f"user{number}" for number in range(fits)]
    for response in await asyncio.gather(*(hub.start_server(user, {"profile": template}) for user in users)):
        assert response.code in (201, 202), response.body
    await asyncio.gather(*(hub.started(user) for user in users))
    pods = [await cluster.pod(f"jupyter-{user}") for user in users]
    assert (await shows(hub, template, "First in queue")).detail.startswith("Not enough free capacity")
    assert (await hub.start_server("waiting", {"profile": template})).code == 202
    await until(lambda: "First in queue" in json.dumps(hub.spawner("waiting")._attempt.progress._events))
    assert await cluster.pod("jupyter-waiting") is None
    await shows(hub, template, "Position 2 in queue")
    assert (await hub.stop_server(users[0])).code in (202, 204)
    await hub.started("waiting")
    assert await cluster.pod("jupyter-waiting") is not None
    return [pod for pod in pods if pod is not None]


def limits(pod: dict[str, Any]) -> dict[str, str]:
    """What the notebook's container asks for."""
    found: dict[str, str] = pod["spec"]["containers"][0]["resources"]["limits"]
    return found
