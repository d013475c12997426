"""``gpushare service --namespace``, as a process: from the API server to the pod's annotations, and the dashboard."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tornado.testing import bind_unused_port

from gpushare_spawner.model.controls import Ask
from gpushare_spawner.model.protocol.frames import AskKind
from gpushare_spawner.model.tier import Tier
from tests.kubernetes.service_namespace import HUB_RULES, HubNamespace, make_namespace
from tests.kubernetes.standin.cluster import Cluster
from tests.present import present
from tests.service.conftest import hub_server  # noqa: F401
from tests.service.fake_hub import TOKEN, FakeHub

TEMPLATE = """
name: quarter
display_name: 0.25 GPU
gpu: {fraction: 0.25}
idle: {release_after: 4s, warn_before: 2s}
"""


@pytest.fixture
async def namespace(cluster: Cluster) -> HubNamespace:
    return await make_namespace(cluster, time.time)


def environment(folder: Path, **more: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
    return {**inherited, "HOME": str(folder), "JUPYTERHUB_API_TOKEN": TOKEN, **more}


async def start(*options: str, env: dict[str, str]) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "gpushare_spawner.cli", "service", "--cull-every=1s", *options)
    return await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE, cwd=env["HOME"])


async def test_an_idle_session_is_told_and_released(
    namespace: HubNamespace,
    hub_server: FakeHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "quarter.yaml").write_text(TEMPLATE)
    socket, port = bind_unused_port()
    socket.close()
    env = environment(
        tmp_path,
        KUBECONFIG=str(namespace.cluster.kubeconfig(namespace.token)),
        # the address of a Service: nothing can listen on it
        JUPYTERHUB_SERVICE_URL=f"http://192.0.2.1:{port}",
        JUPYTERHUB_SERVICE_PREFIX="/services/gpushare/",
    )
    await namespace.open("ann", last_gpu_activity=time.time())
    await namespace.publish()
    options = (f"--namespace={namespace.name}", "--ip=*", f"--url={hub_server.url}", f"--templates-dir={tmp_path}")
    service = await start(*options, env=env)
    try:
        told, end = False, time.monotonic() + 90
        while (said := await namespace.session("ann")).tier is Tier.ACTIVE:
            told = told or said.notice is not None
            assert time.monotonic() < end, "it was not released"
            assert service.returncode is None, (await present(service.stderr).read()).decode()
            await asyncio.sleep(0.1)
        assert told
        assert (said.tier, said.effective_units, said.notice) == (Tier.RELEASED, 0, None)
        with pytest.raises(HTTPError) as refused:
            await asyncio.to_thread(urlopen, f"http://127.0.0.1:{port}/services/gpushare/api/report", None, 10)
        assert refused.value.code == 403  # the dashboard listens, and knows nobody without a login
    finally:
        if service.returncode is None:
            service.terminate()
        said_at_the_end = (await present(service.stderr).read()).decode()
    assert await service.wait() == 0, said_at_the_end
    assert f"agents of the namespace {namespace.name}" in said_at_the_end


@pytest.mark.slow
async def test_a_node_that_forges_a_users_session_stops_only_its_own(
    namespace: HubNamespace,
    hub_server: FakeHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "quarter.yaml").write_text(TEMPLATE.replace("release_after: 4s", "stop_after: 1h"))
    env = environment(tmp_path, KUBECONFIG=str(namespace.cluster.kubeconfig(namespace.token)))
    stop = Ask(number=7, kind=AskKind.STOP, at=time.time())
    for user, node in (("victim", "node-a"), ("mallory", "node-b")):
        hub_server.add(user, started=time.time(), last_activity=time.time())
        await namespace.open(user, node=node, last_gpu_activity=time.time())
        await namespace.publish(node)
    forged = namespace.sessions["node-a"]["victim"].model_copy(
        update={"asks": (stop,), "opened_at": 1.0, "last_gpu_activity": 1.0, "last_kernel_activity": 1.0}
    )
    namespace.sessions["node-b"] |= {"victim": forged}
    options = (f"--namespace={namespace.name}", f"--url={hub_server.url}", f"--templates-dir={tmp_path}")
    service = await start(*options, env=env)
    try:
        end = time.monotonic() + 90
        while not hub_server.deleted:
            # again and again: the service drops asks of a report that it cannot read yet
            await namespace.publish("node-b", mallory={"user": "victim", "asks": (stop,)})
            assert time.monotonic() < end, "the session's own ask was not carried out"
            assert service.returncode is None, (await present(service.stderr).read()).decode()
            await asyncio.sleep(0.5)
        await asyncio.sleep(2.0)  # two rounds of the culler
    finally:
        if service.returncode is None:
            service.terminate()
        said = (await present(service.stderr).read()).decode()
    assert set(hub_server.deleted) == {"/users/mallory/server"}, said
    assert await service.wait() == 0, said


async def test_before_the_chart_it_listens_at_once_and_says_what_it_waits_for(
    namespace: HubNamespace,
    hub_server: FakeHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The hub first: zero-to-jupyterhub's Role alone, without ConfigMaps, until the chart gpushare-agent is there."""
    await namespace.rights([rule for rule in HUB_RULES if "configmaps" not in rule["resources"]])
    (tmp_path / "quarter.yaml").write_text(TEMPLATE)
    socket, port = bind_unused_port()
    socket.close()
    env = environment(
        tmp_path,
        KUBECONFIG=str(namespace.cluster.kubeconfig(namespace.token)),
        JUPYTERHUB_SERVICE_URL=f"http://127.0.0.1:{port}",
        JUPYTERHUB_SERVICE_PREFIX="/services/gpushare/",
    )
    await namespace.open("ann")
    options = (f"--namespace={namespace.name}", f"--url={hub_server.url}", f"--templates-dir={tmp_path}")
    log = tmp_path / "service.log"
    with log.open("wb") as output:
        command = (sys.executable, "-m", "gpushare_spawner.cli", "service", "--cull-every=1s", *options)
        service = await asyncio.create_subprocess_exec(*command, env=env, stderr=output, cwd=tmp_path)
    try:
        cpu = 0.0
        while not await listens(port):
            cpu = cpu_seconds(service.pid)
            assert service.returncode is None, log.read_text()
            # the start is imports alone: JupyterHub ends after 10 s without an answer
            assert cpu < 10, log.read_text()
            await asyncio.sleep(0.05)
        end = time.monotonic() + 30
        while "waiting for the chart gpushare-agent, which gives the hub this right" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            await asyncio.sleep(0.05)
        assert "has not been read yet" not in log.read_text(), "it did not wait for its lists in vain"

        await namespace.rights(HUB_RULES)
        await namespace.publish()
        end = time.monotonic() + 60
        while (await namespace.session("ann")).tier is Tier.ACTIVE:
            assert time.monotonic() < end, log.read_text()
            await asyncio.sleep(0.1)
    finally:
        service.terminate()
        await service.wait()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_without_a_cluster_it_says_what_it_looked_for(hub_server: FakeHub, tmp_path: Path) -> None:  # noqa: F811
    env = environment(tmp_path, KUBECONFIG=str(tmp_path / "nothing"))
    service = await start("--namespace=jhub", f"--url={hub_server.url}", env=env)
    said = (await present(service.stderr).read()).decode()
    assert await service.wait() == 1
    assert "cannot start: --namespace: there is neither a service account of a pod" in said


@pytest.mark.parametrize(
    ("options", "explained"),
    [
        (("--namespace=a", "--control-socket=b"), "not allowed with argument"),
        (("--all-namespaces",), "--all-namespaces is for a cluster"),
    ],
)
async def test_options_that_do_not_go_together(tmp_path: Path, options: tuple[str, ...], explained: str) -> None:
    service = await start("--url=http://127.0.0.1:1/hub/api", *options, env=environment(tmp_path))
    said = (await present(service.stderr).read()).decode()
    assert await service.wait() == 2
    assert explained in said
