"""A hub is killed at every call to the API server, in turn, and the next one finds nothing amiss.

The scenario: ada starts with 60 % of the only GPU and bea with 40 %; cy, who wants 60 %, waits in the queue; ada stops,
cy gets her place; all stop. Beside its database the next hub has pods and their annotations to go by. Which calls there
are is found out: the first hub lives through the scenario. Every later one first has to find all in order, whatever
became of the one before it, and is then killed in the scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError

from gpushare_spawner.model.kubernetes.annotations import SESSION_SELECTOR, pod_session
from gpushare_spawner.spawner.kubernetes.cluster.pods import holds_share
from tests.ports import free_port

from .killable_hub import HUB_LOG, HubSettings, KillableHub
from .logs_of_failures import logs_of_failures
from .sharing_hub import SHARING_RULES, GpuNodes, gpu
from .standin.access import Ask
from .standin.client import path
from .standin.cluster import Cluster
from .standin.loopback import PodAddresses
from .standin.programs import Listeners

# some thirty hubs, one after the other: seconds each on a machine that has much else to do
pytestmark = pytest.mark.timeout(600)

TEMPLATES = {"sixty": "gpu: {fraction: 0.6}\n", "forty": "gpu: {fraction: 0.4}\n", "twenty": "gpu: {fraction: 0.2}\n"}
USERS = {"ada": "sixty", "bea": "forty", "cy": "sixty", "eve": "twenty"}
CAPACITY = 100


Call = tuple[str, str, int]
"""Verb, resource, and the how many-th of its kind it is."""


class Killer:
    """Kills the hub at one of its calls to the API server: before it arrives, or after it was carried out."""

    def __init__(self, hub: KillableHub, account: str, at: Call | None, after: bool) -> None:
        self.hub, self.account, self.at, self.after = hub, account, at, after
        self.calls: list[Call] = []
        """Of the hub, in their order."""
        self.struck = asyncio.Event()
        self._fatal: Ask | None = None

    def arrives(self, ask: Ask) -> bool:
        """A call arrives; whether it is to fail, undone."""
        if ask.user != self.account:
            return False
        before = sum(call[:2] == (ask.verb, ask.resource) for call in self.calls)
        self.calls.append((ask.verb, ask.resource, before + 1))
        if self.calls[-1] != self.at:
            return False
        self._fatal = ask
        if not self.after:
            self._strike()
        return not self.after

    def done(self, ask: Ask) -> None:
        """A call has been carried out."""
        if ask is self._fatal and self.after:
            self._strike()

    def _strike(self) -> None:
        self.hub.kill()
        self.struck.set()


class Scenario:
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

    async def run(self, hub: KillableHub) -> None:
        """Run the scenario on this hub."""
        await start(hub, "ada")
        await start(hub, "bea")
        waiting = asyncio.create_task(start(hub, "cy"))
        try:
            await waits_in_queue(hub, "cy")
            await stop(hub, "ada")
            await waiting
            await asyncio.gather(stop(hub, "cy"), stop(hub, "bea"))
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def killed_while_it_starts(self, at: Call | None) -> Killer:
        """A new hub that is killed at this call of its life; None: when the scenario is over."""

        async def whole(hub: KillableHub) -> None:
            await hub.start()
            await self.run(hub)

        hub = KillableHub(self.settings)
        return await self._killed(hub, Killer(hub, self._account, at, after=False), whole(hub))

    async def killed_at(self, at: Call, after: bool) -> Killer:
        """A new hub that finds everything in order, and is killed at this call of the scenario."""
        hub = await self.next_hub()
        return await self._killed(hub, Killer(hub, self._account, at, after), self.run(hub))

    async def _killed(self, hub: KillableHub, killer: Killer, scenario: Coroutine[Any, Any, None]) -> Killer:
        faults = self.cluster.faults
        faults.rate, faults.kinds, faults.applies_to, faults.on_done = 1.0, ("reset",), killer.arrives, killer.done
        running = asyncio.create_task(scenario)
        struck = asyncio.create_task(killer.struck.wait())
        try:
            await asyncio.wait({running, struck}, return_when=asyncio.FIRST_COMPLETED)
            if not killer.struck.is_set():
                running.result()
        finally:
            running.cancel()
            struck.cancel()
            await asyncio.gather(running, struck, return_exceptions=True)
            await end(hub)
            faults.clear()
            faults.on_done = lambda ask: None
        return killer

    @property
    def _account(self) -> str:
        return f"system:serviceaccount:{self.cluster.namespace}:hub"

    async def next_hub(self, still_running: list[str] | None = None) -> KillableHub:
        """A hub after one that was killed: what runs is its servers', and all can be given out again, to anybody.

        ``still_running``: users whose servers it must have found. It has none in the end.
        """
        hub = KillableHub(self.settings)
        try:
            await hub.start()
            found = await running(hub)
            assert still_running is None or found == still_running
            for user in found:
                pod = await self.cluster.pod(f"jupyter-{user}")
                assert pod is not None, f"{user}'s server runs, says the hub, and has no pod"
                assert pod["status"]["phase"] == "Running"
                await stop(hub, user)
            await asyncio.gather(start(hub, "ada"), start(hub, "bea"))
            await self._only("jupyter-ada", "jupyter-bea")
            assert units_held(await self.cluster.pods(SESSION_SELECTOR)) == CAPACITY
            await asyncio.gather(stop(hub, "ada"), stop(hub, "bea"))
            await self._only()
        except BaseException:
            await end(hub)
            raise
        return hub

    async def _only(self, *names: str) -> None:
        """Wait until there are these pods and no others."""
        async with asyncio.timeout(30):
            while {pod["metadata"]["name"] for pod in await self.cluster.pods(SESSION_SELECTOR)} != {*names}:
                await asyncio.sleep(0.05)


async def end(hub: KillableHub) -> None:
    hub.kill()
    await hub.gone()


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
    """Users whose server the hub has, once it knows of each whether it runs.

    JupyterHub begins to serve after 10 s, whether or not it has checked all servers (`init_spawners_timeout`). Until
    then it answers a request to stop such a server with 500. A server of which it knows no address yet, since the hub
    before was killed first, it stops after 60 s (`http_timeout`).
    """
    found = []
    async with asyncio.timeout(100):
        for user in USERS:
            with contextlib.suppress(HTTPClientError):  # nobody has made the user yet
                while (server := await hub.api.server(user)) is not None and server["pending"] is not None:
                    await asyncio.sleep(0.05)
                if server is not None:
                    found.append(user)
    return found


async def waits_in_queue(hub: KillableHub, user: str) -> None:
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
async def scenario(
    request: pytest.FixtureRequest, cluster: Cluster, nodes: GpuNodes, tmp_path: Path
) -> AsyncIterator[Scenario]:
    await nodes.add(gpus=1, capacity=CAPACITY)
    templates = tmp_path / "templates"
    templates.mkdir()
    for name, text in TEMPLATES.items():
        (templates / f"{name}.yaml").write_text(f"name: {name}\ndisplay_name: {name}\n{text}")
    addresses = PodAddresses()
    token = await cluster.service_account("hub", SHARING_RULES)
    settings = HubSettings(
        str(tmp_path), str(templates), cluster.namespace, str(cluster.kubeconfig(token)), addresses.next(), free_port()
    )
    scenario = Scenario(cluster, settings)
    beside = [asyncio.create_task(scenario.watch()), asyncio.create_task(stay_fresh(nodes))]
    with logs_of_failures(request.config, "hubs", lambda: (tmp_path / HUB_LOG).read_text()[-12000:]):
        yield scenario
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    addresses.close()


def changes(call: Call) -> bool:
    return call[0] in ("create", "delete", "patch", "update")


CHANGES = {(verb, "pods", number) for verb in ("create", "delete") for number in (1, 2, 3)}
"""What the scenario comes to, if no call has to be made twice."""


@pytest.mark.slow
async def test_at_every_call_in_turn(scenario: Scenario) -> None:
    calls = (await scenario.killed_while_it_starts(at=None)).calls
    reading = [call for call in calls if not changes(call)]
    assert {call[:2] for call in reading} >= {("list", "pods"), ("watch", "pods"), ("list", "configmaps")}
    assert {*calls} >= CHANGES
    for call in reading:
        await scenario.killed_while_it_starts(call)
        if await scenario.cluster.pods():
            await end(await scenario.next_hub())
        # else it was before the first pod: the next hub starts with the same server, and is killed a call later
    killed = {False: set[Call](), True: set[Call]()}
    for call in filter(changes, calls):
        for after in killed:
            if (await scenario.killed_at(call, after)).struck.is_set():
                killed[after].add(call)
    await end(await scenario.next_hub())
    assert killed[False] >= CHANGES
    assert killed[True] >= CHANGES
    assert scenario.most_held == CAPACITY, "never more than there is"


async def test_while_a_spawn_waits_in_the_queue(scenario: Scenario) -> None:
    hub = KillableHub(scenario.settings)
    try:
        await hub.start()
        await asyncio.gather(start(hub, "ada"), start(hub, "bea"))
        waiting = asyncio.create_task(start(hub, "cy"))
        await waits_in_queue(hub, "cy")
    finally:
        await end(hub)
    with pytest.raises((OSError, HTTPClientError)):
        await waiting
    assert await scenario.cluster.pod("jupyter-cy") is None
    await end(await scenario.next_hub(still_running=["ada", "bea"]))
    assert scenario.most_held == CAPACITY


async def test_a_spawn_whose_pod_runs_outlives_the_hub_and_one_in_the_queue_is_lost(scenario: Scenario) -> None:
    """docs/guides/kubernetes-upgrades.md says so."""
    (node,) = scenario.cluster.nodes.values()
    pods = scenario.cluster
    hub = KillableHub(scenario.settings)
    asked = []
    try:
        await hub.start()
        await start(hub, "ada")
        node.programs = Listeners(start_seconds=2.0)
        asked.append(asyncio.create_task(start(hub, "eve")))
        await pods.wait_for_phase("jupyter-eve", "Running")
        asked.append(asyncio.create_task(start(hub, "cy")))
        await waits_in_queue(hub, "cy")
    finally:
        await end(hub)
        results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(result, OSError | HTTPClientError) for result in results), results
    node.programs = Listeners()
    following = KillableHub(scenario.settings)
    try:
        await following.start()
        async with asyncio.timeout(30):
            while not all([await is_ready(following, user) for user in ("ada", "eve")]):
                await asyncio.sleep(0.1)
        assert await following.api.server("cy") is None
        assert await pods.pod("jupyter-cy") is None
        # nothing is reserved for the lost one: who stops makes room for it
        await stop(following, "ada")
        await start(following, "cy")
        assert scenario.most_held <= CAPACITY
    finally:
        await end(following)


async def is_ready(hub: KillableHub, user: str) -> bool:
    server = await hub.api.server(user)
    return server is not None and bool(server["ready"])
