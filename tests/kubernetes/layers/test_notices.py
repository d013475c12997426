"""A notice of the service reaches a server without an agent: through the pod's annotations and the kubelet's files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpushare_spawner.model.control import MessageRequest, NoticeRequest
from gpushare_spawner.model.controls import Message
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.notebook.pod_annotations import PodAnnotations
from gpushare_spawner.service.kubernetes.cluster import Cluster as ServiceCluster
from gpushare_spawner.wording import notices
from tests.present import present
from tests.spawner.running_hub import until

from ..service_namespace import HUB_RULES, has, seen
from ..standin.cluster import Cluster
from ..standin.layers.nvidia import shared_node
from ..standin.programs import Launch, Listeners, Running


class Servers(Listeners):
    """Servers that only listen; keeps the environment that each was started with."""

    async def start(self, launch: Launch) -> Running:
        self.environment = launch.environment
        return await super().start(launch)


async def test_a_notice_and_a_message_come_and_the_notice_goes(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path
) -> None:
    (templates / "layers.yaml").write_text("rules: [{models: ['*L4*'], layer: time-slicing}]")
    token = await cluster.service_account("service", HUB_RULES)
    async with shared_node(cluster, replicas=2) as node, cluster.api_client(token) as client:
        node.programs = servers = Servers()
        hub = await make_hub()
        assert (await hub.start_server("ada", {"profile": "half-gpu"})).code in (201, 202)
        await hub.started("ada")
        annotations = present(PodAnnotations.of(servers.environment))
        before = annotations.status()
        assert (before.layer, before.share_units, before.notice) == ("time-slicing", 50, None)

        nodes = ServiceCluster(client, cluster.namespace)
        await nodes.start(60)
        try:
            agent = await seen(nodes, node.name, has("ada", confirmed=True))
            stop = Notice(tier=Tier.STOPPED, at=time.time() + 600, reason="idle", cause=IdleCause.IDLE)
            await agent.send(NoticeRequest.of("ada", stop))
            await until(lambda: annotations.status().notice is not None)
            now = annotations.status()
            action = present(now.notice)
            assert notices.notice(now, action).startswith("Your server will stop at {time}: idle. Save your work")
            assert action.at == stop.at
            agent = await seen(nodes, node.name, has("ada", notice=stop))
            await agent.send(MessageRequest(id="ada", message=Message(text="Grüße", by="root", at=1.0)))
            await until(lambda: present(annotations.status().controls).messages)
            agent = await seen(nodes, node.name, has("ada", messages=(Message(text="Grüße", by="root", at=1.0),)))
            await agent.send(NoticeRequest.of("ada", None))
            await until(lambda: annotations.status().notice is None)
            assert [one.text for one in present(annotations.status().controls).messages] == ["Grüße"]
        finally:
            await nodes.close()
