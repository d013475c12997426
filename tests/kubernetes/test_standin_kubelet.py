"""The stand-in kubelet does with pods what a kubelet does."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spawner.running_hub import until

from .standin.client import ApiStatus, path
from .standin.cluster import Cluster, a_pod, restarts
from .standin.programs import Listeners


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
    messages = [message for reason, message in await cluster.events("late") if reason == "FailedScheduling"]
    assert "Insufficient example.org/gpu" in messages[0]
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


async def test_files_of_annotations_follow_the_pod(cluster: Cluster) -> None:
    node = await cluster.make_node(programs=Listeners())
    said = "example.org/said"
    items = [
        {"path": "said", "fieldRef": {"fieldPath": f"metadata.annotations['{said}']"}},
        {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
    ]
    container = {"name": "main", "image": "x", "volumeMounts": [{"name": "me", "mountPath": "/me"}]}
    spec = {"containers": [container], "volumes": [{"name": "me", "downwardAPI": {"items": items}}]}
    where = path("pods", cluster.namespace)
    await cluster.admin.create(where, {"metadata": {"name": "one"}, "spec": spec})
    pod = await cluster.wait_for_phase("one", "Running")
    folder = node.folder / "pods" / pod["metadata"]["uid"] / "volumes" / "me"
    assert [(folder / name).read_text() for name in ("said", "name")] == ["", "one"]
    before = (folder / "..data").readlink()
    for text in ("one\nmore", None):
        await cluster.admin.patch(path("pods", cluster.namespace, "one"), {"metadata": {"annotations": {said: text}}})
        wanted = "more\none" if text else ""
        await until(lambda wanted=wanted: (folder / "said").read_text() == wanted)  # type: ignore[misc]
    assert (folder / "..data").readlink() != before
    assert len([one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()]) == 1, "the old ones are gone"


@pytest.mark.parametrize("field", ["spec.nodeName", "metadata.annotations['']", "status.podIP"])
async def test_a_volume_of_another_field_is_refused(cluster: Cluster, field: str) -> None:
    volume = {"name": "me", "downwardAPI": {"items": [{"path": "x", "fieldRef": {"fieldPath": field}}]}}
    spec = {"containers": [{"name": "main", "image": "x"}], "volumes": [volume]}
    with pytest.raises(ApiStatus, match="fieldPath"):
        await cluster.admin.create(path("pods", cluster.namespace), {"metadata": {"name": "one"}, "spec": spec})


async def test_a_claims_files_outlive_the_pod(cluster: Cluster) -> None:
    await cluster.make_node()
    await cluster.make_claim("home")
    for name, command in (("writer", "echo kept > $PLACE"), ("reader", "grep kept $PLACE")):
        manifest = a_pod(name, ["sh", "-c", command], env={"PLACE": "/home/ada/notes"}, restartPolicy="Never")
        manifest["spec"]["containers"][0]["volumeMounts"] = [{"name": "home", "mountPath": "/home/ada"}]
        manifest["spec"]["volumes"] = [{"name": "home", "persistentVolumeClaim": {"claimName": "home"}}]
        await cluster.admin.create(path("pods", cluster.namespace), manifest)
        await cluster.wait_for_phase(name, "Succeeded")


async def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(cluster: Cluster) -> None:
    node = await cluster.make_node()
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    await cluster.create_pod("deaf", command=[sys.executable, "-c", deaf], terminationGracePeriodSeconds=1)
    pod = await cluster.wait_for_phase("deaf", "Running")
    log = node.folder / "pods" / pod["metadata"]["uid"] / "notebook.log"
    while "deaf" not in log.read_text():
        await asyncio.sleep(0.05)
    await cluster.admin.delete(path("pods", cluster.namespace, "deaf"))
    await asyncio.sleep(0.3)
    going = await cluster.pod("deaf")
    assert going is not None
    assert going["metadata"]["deletionTimestamp"]
    await cluster.wait_until_gone("deaf")


async def test_what_a_pod_leaves_behind_ends_with_it(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.make_node()
    note = tmp_path / "pid"
    script = f"setsid sleep 300 & echo $! > {note}; wait"
    await cluster.create_pod("parent", command=["sh", "-c", script])
    await cluster.wait_for_phase("parent", "Running")
    while not note.exists() or not note.read_text():
        await asyncio.sleep(0.05)
    await cluster.admin.delete(path("pods", cluster.namespace, "parent"))
    await cluster.wait_until_gone("parent")
    assert not is_running(int(note.read_text()))


def is_running(pid: int) -> bool:
    """A process that has ended, and waits for its parent to notice, is not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


async def test_hundreds_of_pods_need_no_processes(cluster: Cluster) -> None:
    node = await cluster.make_node(programs=(listeners := Listeners()))
    for number in range(30):
        await cluster.create_pod(f"many-{number}")
    for number in range(30):
        pod = await cluster.wait_for_phase(f"many-{number}", "Running")
    reader, writer = await asyncio.open_connection(pod["status"]["podIP"], listeners.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert len(node.active_pods()) == 30


_PRINT = "import os, sys; print(*(os.environ[n] for n in ('BOTH', 'NAME', 'COLOR', 'DATA')), sys.argv[1], sep='\\n')"
