"""GPUShareSpawner calls and answers as KubeSpawner does: on KubeSpawner, and on ours without and with templates."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from typing import Any

import pytest
from jupyterhub.objects import Hub
from kubespawner import KubeSpawner
from traitlets.config import Config

from .standin.client import path
from .standin.cluster import Cluster
from .test_spawner_is_kubespawner import PROFILES, Make, OutsideUser, config, kind, make, node

__all__ = ["config", "kind", "make", "node"]


async def test_options_are_loaded_once(make: Make, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    load = KubeSpawner.load_user_options

    async def counted(spawner: Any) -> None:
        calls["load_user_options"] += 1
        await load(spawner)

    def profiles(spawner: Any) -> list[dict[str, Any]]:
        calls["profile_list"] += 1
        return [{"display_name": "One", "kubespawner_override": {"cpu_limit": limit}}]

    def limit(spawner: Any) -> int:
        calls["override"] += 1
        return 1

    monkeypatch.setattr(KubeSpawner, "load_user_options", counted)
    spawner = make(profile_list=profiles)
    await spawner.start()
    assert calls == {"load_user_options": 1, "profile_list": 1, "override": 1}
    assert spawner.cpu_limit == 1
    await spawner.stop()
    # the same spawner again, with other options
    spawner.user_options = {"profile": "nothing"}
    with pytest.raises(ValueError, match="No such profile"):
        await spawner.start()


async def test_a_subclass_may_add_to_what_options_set(make: Make, node: Any, cluster: Cluster, config: Config) -> None:
    class Mine(type(make())):  # type: ignore[misc]
        async def load_user_options(self) -> None:
            await super().load_user_options()
            self.volumes = [*self.volumes, {"name": f"added-{len(self.volumes)}", "emptyDir": {}}]  # type: ignore[has-type]

    spawner = Mine(hub=Hub(), user=OutsideUser("start"), config=config, api_token="abc", oauth_client_id="unused")
    await spawner.start()
    pod = await cluster.pod(spawner.pod_name)
    assert pod is not None
    assert [volume["name"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume] == ["added-0"]


async def test_a_plain_hook_runs_when_it_is_called(make: Make, kind: str) -> None:
    seen: list[str] = []
    spawner = make(pre_spawn_hook=lambda spawner: seen.append("ran"), profile_list=PROFILES)
    result = spawner.run_pre_spawn_hook()
    if kind == "templates":
        # here the share is found too, which may take a while
        assert inspect.isawaitable(result)
        await result
    else:
        assert not inspect.isawaitable(result)
    assert seen == ["ran"]


async def test_what_an_admins_own_form_sends_is_kept(make: Make) -> None:
    sent = {
        "profile": ["choices"],
        "profile-option-choices--image": ["one"],
        "profile-option-choices--image--unlisted-choice": ["mine/x"],
    }
    spawner = make(profile_list=PROFILES, profile_form_template="<p>{{ profile_list|length }}</p>")
    await spawner.get_options_form()
    spawner.user_options = spawner.options_from_form(sent)
    assert spawner.user_options == {"profile": "choices", "image": "one", "image--unlisted-choice": "mine/x"}
    await spawner.load_user_options()
    assert spawner.image == "mine/x"


async def test_without_a_running_event_loop(make: Make) -> None:
    spawner = make(profile_list=PROFILES)
    options = await asyncio.to_thread(spawner.options_from_form, {"profile": ["small-b-one-b"]})
    assert options == {"profile": "small-b-one-b"}


async def test_a_watch_that_cannot_come_back_still_shows_what_it_saw(make: Make, node: Any, cluster: Cluster) -> None:
    spawner = make()
    await spawner.start()
    spawner.pod_reflector.watch_task.cancel()
    await asyncio.wait({spawner.pod_reflector.watch_task})
    cluster.faults.fail_next("list", "pods", "500", times=1000)
    try:
        assert await spawner.poll() is None
    finally:
        cluster.faults.clear()


async def test_a_label_on_the_pods_that_are_watched(make: Make, node: Any, cluster: Cluster) -> None:
    spawner = make(component_label="something", services_enabled=True, extra_labels={"mine": "{username}"})
    await spawner.start()
    pod = await cluster.pod(spawner.pod_name)
    assert pod is not None
    labels = {"component": "something", "app.kubernetes.io/component": "something", "mine": "start"}
    assert labels.items() <= pod["metadata"]["labels"].items()
    service = await cluster.admin.get(path("services", cluster.namespace, spawner.pod_name))
    assert labels.items() <= service["spec"]["selector"].items()
    assert spawner.pod_reflector.label_selector == "component=something"
    await spawner.stop()


async def test_a_pod_whose_program_has_ended(make: Make, node: Any, cluster: Cluster) -> None:
    spawner = make()
    await spawner.start()
    ended = {"name": "notebook", "ready": False, "restartCount": 0, "image": "x", "imageID": "", "lastState": {}}
    status = {"phase": "Failed", "containerStatuses": [{**ended, "state": {"terminated": {"exitCode": 3}}}]}
    await node.stop()
    await cluster.admin.patch(path("pods", cluster.namespace, spawner.pod_name, "status"), {"status": status})
    async with asyncio.timeout(20):
        while spawner.pod_reflector.pods[f"{spawner.namespace}/{spawner.pod_name}"]["status"]["phase"] != "Failed":
            await asyncio.sleep(0.05)
    assert await spawner.poll() == 3
    assert await cluster.pod(spawner.pod_name) is None
    await node.start()
