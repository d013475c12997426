"""A hub is killed at every call to the API server, in turn, and the next one finds nothing amiss.

The story that it is killed in: ada starts with 60 % of the only GPU and bea with 40 %; cy, who wants 60 %, waits in
line; ada stops, cy gets her place; all stop. Pods and annotations are all that the next hub has to go by, beside its
database.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError

from gpushare_spawner.model.kubernetes import SESSION_SELECTOR, pod_session
from gpushare_spawner.spawner.kube_manifest import holds_share

from .killable_hub import HubSettings, KillableHub
from .sharing_hub import SHARING_RULES, GpuNodes, gpu
from .standin.access import Ask
from .standin.client import path
from .standin.cluster import Cluster
from .standin.loopback import PodAddresses

pytestmark = pytest.mark.timeout(400)

TEMPLATES = {"sixty": "gpu: {fraction: 0.6}\n", "forty": "gpu: {fraction: 0.4}\n"}
USERS = {"ada": "sixty", "bea": "forty", "cy": "sixty"}
CAPACITY = 100
WRITING = ("create", "delete", "patch", "update")


class Killer:
    """Kills the hub at its n-th call to the API server: before it arrives, or after it was carried out."""

    def __init__(self, account: str, number: int, after: bool) -> None:
        self.account, self.number, self.after = account, number, after
        self.hub: KillableHub | None = None
        self.at: Ask | None = None
        """The call at which the hub was killed."""
        self.struck = asyncio.Event()
        self._calls = 0

    def call(self, ask: Ask) -> bool:
        """A call arrives; whether it is to fail, undone."""
        if ask.user != self.account or not ask.resource or self.at is not None:
            return False
        self._calls += 1
        if self._calls == self.number:
            self.at = ask
            if not self.after:
                self._strike()
        return self.at is not None and not self.after

    def done(self, ask: Ask) -> None:
        """A call has been carried out."""
        if ask is self.at and self.after:
            self._strike()

    def _strike(self) -> None:
        assert self.hub is not None
        self.hub.kill()
        self.struck.set()


class Story:
    """The cluster, and the hubs that come and go on it."""

    def __init__(self, cluster: Cluster, settings: HubSettings) -> None:
        self.cluster = cluster
        self.settings = settings
        self.most_held = 0
        """Units that pods have held at any one time."""
        self._pods: dict[str, Any] = {}

    async def watch(self) -> None:
        """Keep count of what is held, at each change of a pod."""

        async def listed(pods: list[dict[str, Any]]) -> None:
            self._pods = {pod["metadata"]["uid"]: pod for pod in pods}

        async def changed(what: str, pod: dict[str, Any]) -> None:
            self._pods[pod["metadata"]["uid"]] = pod
            if what == "DELETED":
                del self._pods[pod["metadata"]["uid"]]
            self.most_held = max(self.most_held, units_held(self._pods.values()))

        await self.cluster.admin.follow(path("pods", self.cluster.namespace), listed, changed)

    async def tell(self, hub: KillableHub) -> None:
        """The story; a hub that is killed ends it with an OSError or an HTTPClientError."""
        await start(hub, "ada")
        await start(hub, "bea")
        waiting = asyncio.create_task(start(hub, "cy"))
        try:
            await stands_in_line(hub, "cy")
            await stop(hub, "ada")
            await waiting
            await asyncio.gather(stop(hub, "cy"), stop(hub, "bea"))
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def killed(self, number: int, after: bool) -> Ask | None:
        """Tell the story to a hub that is killed at that call; None: it has made fewer."""
        killer = Killer(f"system:serviceaccount:{self.cluster.namespace}:hub", number, after)
        killer.hub = hub = KillableHub(self.settings)
        faults = self.cluster.faults
        faults.rate, faults.kinds, faults.applies_to, faults.on_done = 1.0, ("reset",), killer.call, killer.done
        try:
            await hub.start()
            telling = asyncio.create_task(self.tell(hub))
            struck = asyncio.create_task(killer.struck.wait())
            await asyncio.wait({telling, struck}, return_when=asyncio.FIRST_COMPLETED)
            if not killer.struck.is_set():
                telling.result()
            telling.cancel()
            struck.cancel()
            await asyncio.gather(telling, struck, return_exceptions=True)
        finally:
            hub.kill()
            await hub.gone()
            faults.clear()
            faults.on_done = lambda ask: None
        return killer.at

    async def recovers(self) -> None:
        """The next hub: what runs is its servers', all can be given out again, and everybody can start."""
        hub = KillableHub(self.settings)
        await hub.start()
        try:
            for user in await running(hub):
                pod = await self.cluster.pod(f"jupyter-{user}")
                assert pod is not None, f"{user}'s server runs, says the hub, and has no pod"
                assert pod["status"]["phase"] == "Running"
                await stop(hub, user)
            await asyncio.gather(start(hub, "ada"), start(hub, "bea"))
            await self._only("jupyter-ada", "jupyter-bea")
            assert units_held(await self.cluster.pods(SESSION_SELECTOR)) == CAPACITY
            await asyncio.gather(stop(hub, "ada"), stop(hub, "bea"))
            await self._only()
        finally:
            hub.kill()
            await hub.gone()

    async def _only(self, *names: str) -> None:
        """Wait until there are these pods and no others."""
        async with asyncio.timeout(30):
            while {pod["metadata"]["name"] for pod in await self.cluster.pods(SESSION_SELECTOR)} != {*names}:
                await asyncio.sleep(0.05)


async def start(hub: KillableHub, user: str) -> None:
    await hub.api.add_user(user)
    await hub.api.request_start(user, USERS[user], timeout=100)
    server = await hub.api.server(user)
    assert server is not None, f"{user}'s server did not start"
    assert server["ready"], server


async def stop(hub: KillableHub, user: str) -> None:
    await hub.api.call("DELETE", f"/hub/api/users/{user}/server", timeout=100)
    assert await hub.api.server(user) is None


async def running(hub: KillableHub) -> list[str]:
    """Users whose server the hub has."""
    found = []
    for user in USERS:
        with contextlib.suppress(HTTPClientError):  # nobody has made the user yet
            if await hub.api.server(user) is not None:
                found.append(user)
    return found


async def stands_in_line(hub: KillableHub, user: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(HTTPClientError):
                server = await hub.api.server(user)
                if server is not None and server["pending"] == "spawn":
                    return
            await asyncio.sleep(0.05)


async def stay_fresh(nodes: GpuNodes) -> None:
    """What the agent does: a report that is two minutes old counts for nothing."""
    while True:
        await asyncio.sleep(30)
        for node in nodes.names:
            await nodes.report(node, [gpu(node, 0, capacity=CAPACITY)])


def units_held(pods: Any) -> int:
    return sum(pod_session(pod["metadata"]["annotations"]).share_units for pod in pods if holds_share(pod))


@pytest.fixture
async def story(cluster: Cluster, nodes: GpuNodes, tmp_path: Path) -> AsyncIterator[Story]:
    await nodes.add(gpus=1, capacity=CAPACITY)
    templates = tmp_path / "templates"
    templates.mkdir()
    for name, text in TEMPLATES.items():
        (templates / f"{name}.yaml").write_text(f"name: {name}\ndisplay_name: {name}\n{text}")
    addresses = PodAddresses()
    token = await cluster.service_account("hub", SHARING_RULES)
    settings = HubSettings(
        str(tmp_path), str(templates), cluster.namespace, str(cluster.kubeconfig(token)), addresses.next()
    )
    story = Story(cluster, settings)
    beside = [asyncio.create_task(story.watch()), asyncio.create_task(stay_fresh(nodes))]
    yield story
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    addresses.close()


async def test_at_every_call_in_turn(story: Story) -> None:
    struck: list[str] = []
    number = 0
    while (ask := await story.killed(number := number + 1, after=False)) is not None:
        struck.append(f"before {ask.verb} {ask.resource}")
        await story.recovers()
        if ask.verb in WRITING:  # a call that changes nothing is as good as one that never came
            again = await story.killed(number, after=True)
            struck.append(f"after {again.verb} {again.resource}" if again else "")
            await story.recovers()
    print(number, struck)
    assert story.most_held == CAPACITY
    # of each kind: the three pods are made and removed
    assert struck.count("before create pods") >= 3
    assert struck.count("after delete pods") >= 3
