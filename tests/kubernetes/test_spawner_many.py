"""500 users start at once on 20 nodes of 8 GPUs, while 5 % of the hub's calls to the API server fail."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import pod_session
from gpushare_spawner.spawner.kubernetes.cluster.pods import holds_share

from .sharing_hub import GpuNodes, SharingHub, kube_access
from .standin.cluster import Cluster
from .standin.faults import by_service_accounts

USERS, NODES, GPUS = 500, 20, 8
TEMPLATES = (
    ("quarter", "{fraction: 0.25}"),
    ("half", "{fraction: 0.5}"),
    ("third", "{fraction: 0.34}"),
    ("tenth", "{fraction: 0.1}"),
    ("two", "{count: 2}"),
)
PROFILES = ("quarter", "half", "tenth", "quarter", "third", "half", "quarter", "tenth", "two", "quarter")
"""More than there is: about 230 GPUs' worth on 160."""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_500_users_at_once_get_no_more_than_160_gpus_have(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "templates"
    folder.mkdir()
    for name, gpu in TEMPLATES:
        (folder / f"{name}.yaml").write_text(f"name: {name}\ndisplay_name: {name}\ngpu: {gpu}\n")
    nodes = GpuNodes(cluster)
    for _ in range(NODES):
        await nodes.add(gpus=GPUS)

    def configure(config: Any) -> None:
        config.GPUShareSpawner.queue_length = 30
        config.GPUShareSpawner.queue_timeout = 12
        config.KubeSpawner.events_enabled = False
        config.Spawner.start_timeout = 60
        config.JupyterHub.active_server_limit = 0
        # what is measured here is not the disk
        config.JupyterHub.db_url = "sqlite:///:memory:"
        config.JupyterHub.tornado_settings = {"slow_spawn_timeout": 120}

    async with kube_access(cluster), SharingHub(tmp_path, folder, cluster, configure) as hub:
        names = [f"user-{number}" for number in range(USERS)]
        for name in names:
            await hub.add_user(name)
        cluster.faults.applies_to = by_service_accounts
        cluster.faults.rate = 0.05
        profiles = [PROFILES[number % len(PROFILES)] for number in range(USERS)]
        asked = []
        for number, (name, profile) in enumerate(zip(names, profiles, strict=True)):
            asked.append(asyncio.ensure_future(hub.api("POST", f"users/{name}/server", {"profile": profile}, 120)))
            if number % 50 == 49:
                # the hub's socket keeps so many unaccepted connections, and no more
                await asyncio.sleep(0.02)
        answers = await asyncio.gather(*asked)
        cluster.faults.clear()
        # everybody was answered: with a server, or with a reason
        started = {name for name, answer in zip(names, answers, strict=True) if answer.code == 201}
        for answer in answers:
            assert answer.code in (201, 409, 502, 503), answer.body
            if answer.code != 201:
                assert len(json.loads(answer.body)["message"]) > 20
        assert len(started) > 250
        # nobody is left hanging, and nothing is left reserved
        assert not any(spawner.pending for name in names for spawner in hub.user(name).spawners.values())
        assert not len(hub.reservations.queue)
        assert not hub.reservations._in_flight
        # no GPU is given out twice, in what the pods say
        units: Counter[str] = Counter()
        owners = set()
        for pod in await cluster.pods():
            if holds_share(pod):
                session = pod_session(pod["metadata"]["annotations"])
                owners.add(session.session)
                for uuid in session.gpus:
                    units[uuid] += session.share_units
        assert max(units.values()) <= 100
        assert started <= owners
        assert cluster.faults.failed > 20
