"""The stand-in kubelet does with pods what a kubelet does."""

from __future__ import annotations

import sys
from typing import Any

from .standin.client import path
from .standin.cluster import Cluster, a_pod, restarts


async def test_a_pod_runs_and_goes(cluster: Cluster) -> None:
    node = await cluster.make_node()
    await cluster.create_pod("one")
    pod = await cluster.wait_for_phase("one", "Running")
    assert pod["spec"]["nodeName"] == node.name
    assert pod["status"]["podIP"].startswith("127.")
    assert pod["status"]["containerStatuses"][0]["ready"]
    assert "Scheduled" in [reason for reason, _ in await cluster.events("one")]
    await cluster.admin.delete(path("pods", cluster.namespace, "one"))
    await cluster.wait_until_gone("one")
    assert not node.active_pods()


async def test_a_pod_that_fits_nowhere_waits(cluster: Cluster) -> None:
    await cluster.make_node(static_resources={"example.org/gpu": 2})
    await cluster.create_pod("big", limits={"example.org/gpu": 2})
    await cluster.wait_for_phase("big", "Running")
    await cluster.create_pod("late", limits={"example.org/gpu": 1})

    def unschedulable(pod: dict[str, Any]) -> bool:
        conditions = pod["status"].get("conditions") or []
        return any(each.get("reason") == "Unschedulable" for each in conditions)

    await cluster.wait_for_pod("late", unschedulable)
    assert ("FailedScheduling", "0/1 nodes are available: 1 Insufficient example.org/gpu.") in await cluster.events(
        "late"
    )
    await cluster.admin.delete(path("pods", cluster.namespace, "big"), grace=1)
    await cluster.wait_for_phase("late", "Running")


async def test_exit_codes_and_restarts(cluster: Cluster) -> None:
    await cluster.make_node(restart_backoff=0.1)
    await cluster.create_pod("good", command=["true"])
    await cluster.create_pod("bad", command=["false"], restartPolicy="Never")
    await cluster.create_pod("again", command=["false"])
    await cluster.wait_for_phase("good", "Succeeded")
    bad = await cluster.wait_for_phase("bad", "Failed")
    assert bad["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 1
    await cluster.wait_for_pod("again", lambda pod: restarts(pod) >= 2)


async def test_what_a_process_sees(cluster: Cluster) -> None:
    node = await cluster.make_node()
    await cluster.admin.create(
        path("configmaps", cluster.namespace), {"metadata": {"name": "settings"}, "data": {"color": "green"}}
    )
    manifest = a_pod(
        "seer", command=[sys.executable, "-c", _PRINT, "at 0.0.0.0:80"], env={"BOTH": "$(GREETING) 0.0.0.0"}
    )
    container = manifest["spec"]["containers"][0]
    container["env"][:0] = [
        {"name": "GREETING", "value": "hello"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
        {"name": "DATA", "value": "/data/file"},
    ]
    container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    manifest["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    await cluster.admin.create(path("pods", cluster.namespace), manifest)
    pod = await cluster.wait_for_phase("seer", "Succeeded", "Failed")
    address = pod["status"]["podIP"]
    uid = pod["metadata"]["uid"]
    log = (node.folder / "pods" / uid / "notebook.log").read_text()
    assert log.splitlines() == [
        f"hello {address}",
        "seer",
        "green",
        f"{node.folder}/pods/{uid}/volumes/data/file",
        f"at {address}:80",
    ]


_PRINT = "import os, sys; print(*(os.environ[n] for n in ('BOTH', 'NAME', 'COLOR', 'DATA')), sys.argv[1], sep='\\n')"
