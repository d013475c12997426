"""``gpushare service --namespace``, as a process: from the API server to the pod's annotations, and the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from gpushare_spawner.cli import main
from gpushare_spawner.model.controls import Ask
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.share import Tier
from tests.copies import Copy, start_copy
from tests.kubernetes.service_namespace import HUB_RULES, HubNamespace, make_namespace
from tests.kubernetes.standin.cluster import Cluster
from tests.ports import free_port
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


@dataclass
class Service:
    """The processes of the command, with their log."""

    folder: Path
    url: str
    """The hub's API."""
    log: Path
    port: int
    """Of the dashboard."""
    processes: list[Copy] = field(default_factory=list)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def start(self, *options: str, **environment: str) -> Copy:
        inherited = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
        inherited |= {"HOME": str(self.folder), "JUPYTERHUB_API_TOKEN": TOKEN, "GPUSHARE_HISTORY": "false"}
        arguments = ["--cull-every=1s", f"--url={self.url}", *options]
        process = start_copy("service", arguments, inherited | environment, self.log)
        self.processes.append(process)
        return process

    def start_in(self, namespace: HubNamespace, *options: str, listens_on: str = "127.0.0.1") -> Copy:
        """Start it for a namespace, with the templates of the folder and a dashboard."""
        return self.start(
            f"--namespace={namespace.name}",
            f"--templates-dir={self.folder}",
            *options,
            KUBECONFIG=str(namespace.cluster.kubeconfig(namespace.token)),
            JUPYTERHUB_SERVICE_URL=f"http://{listens_on}:{self.port}",
            JUPYTERHUB_SERVICE_PREFIX="/services/gpushare/",
        )

    async def until(self, holds: Callable[[], Awaitable[bool]], seconds: float = 90, every: float = 0.1) -> None:
        """Wait for something that the processes do."""
        end = time.monotonic() + seconds
        while not await holds():
            assert time.monotonic() < end, self.said
            assert all(process.poll() is None for process in self.processes), self.said
            await asyncio.sleep(every)

    async def end(self) -> None:
        """End the processes; each must end well."""
        for process in self.processes:
            process.terminate()
            assert await asyncio.to_thread(process.wait, 30) == 0, self.said


@pytest.fixture
async def service(hub_server: FakeHub, tmp_path: Path) -> AsyncIterator[Service]:  # noqa: F811
    (tmp_path / "quarter.yaml").write_text(TEMPLATE)
    (log := tmp_path / "service.log").touch()
    found = Service(tmp_path, hub_server.url, log, free_port())
    try:
        yield found
    finally:
        for process in found.processes:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)


async def test_an_idle_session_is_told_and_released(namespace: HubNamespace, service: Service) -> None:
    await namespace.open("ann", last_gpu_activity=time.time())
    await namespace.publish()
    # the address of a Service: nothing can listen on it
    service.start_in(namespace, "--ip=*", listens_on="192.0.2.1")
    told = False

    async def released() -> bool:
        nonlocal told
        session = await namespace.session("ann")
        told = told or session.notice is not None
        return session.tier is not Tier.ACTIVE

    await service.until(released)
    assert told
    session = await namespace.session("ann")
    assert (session.tier, session.effective_units, session.notice) == (Tier.RELEASED, 0, None)
    with pytest.raises(HTTPError) as refused:
        await asyncio.to_thread(urlopen, f"http://127.0.0.1:{service.port}/services/gpushare/api/v1/sessions", None, 10)
    assert refused.value.code == 403  # the dashboard listens, and knows nobody without a login
    await service.end()
    assert f"agents of the namespace {namespace.name}" in service.said


@pytest.mark.slow
async def test_a_node_that_forges_a_users_session_stops_only_its_own(
    namespace: HubNamespace,
    hub_server: FakeHub,  # noqa: F811
    service: Service,
) -> None:
    (service.folder / "quarter.yaml").write_text(TEMPLATE.replace("release_after: 4s", "stop_after: 1h"))
    stop = Ask(number=7, kind=AskKind.STOP, at=time.time())
    for user, node in (("victim", "node-a"), ("mallory", "node-b")):
        hub_server.add(user, started=time.time(), last_activity=time.time())
        await namespace.open(user, node=node, last_gpu_activity=time.time())
        await namespace.publish(node)
    forged = namespace.sessions["node-a"]["victim"].model_copy(
        update={"asks": (stop,), "opened_at": 1.0, "last_gpu_activity": 1.0, "last_kernel_activity": 1.0}
    )
    namespace.sessions["node-b"] |= {"victim": forged}
    service.start_in(namespace)

    async def own_is_stopped() -> bool:
        # again and again: the service drops asks of a report that it cannot read yet
        await namespace.publish("node-b", mallory={"user": "victim", "asks": (stop,)})
        return bool(hub_server.deleted)

    await service.until(own_is_stopped, every=0.5)
    await asyncio.sleep(2.0)  # two rounds of the culler
    await service.end()
    assert set(hub_server.deleted) == {"/users/mallory/server"}, service.said


async def test_before_the_chart_it_listens_at_once_and_says_what_it_waits_for(
    namespace: HubNamespace, service: Service
) -> None:
    """The hub first: zero-to-jupyterhub's Role alone, without ConfigMaps, until the chart gpushare-agent is there."""
    await namespace.rights([rule for rule in HUB_RULES if "configmaps" not in rule["resources"]])
    await namespace.open("ann")
    process = service.start_in(namespace)
    cpu = 0.0
    while not await listens(service.port):
        cpu = cpu_seconds(process.pid)
        assert process.poll() is None, service.said
        # the start is imports alone: JupyterHub ends after 10 s without an answer
        assert cpu < 10, service.said
        await asyncio.sleep(0.05)

    async def says_what_it_waits_for() -> bool:
        return "waiting for the chart gpushare-agent, which gives the hub this right" in service.said

    await service.until(says_what_it_waits_for, seconds=30, every=0.05)
    assert "has not been read yet" not in service.said, "it did not wait for its lists in vain"

    await namespace.rights(HUB_RULES)
    await namespace.publish()

    async def released() -> bool:
        return (await namespace.session("ann")).tier is not Tier.ACTIVE

    await service.until(released, seconds=60)


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


async def test_without_a_cluster_it_says_what_it_looked_for(service: Service) -> None:
    process = service.start("--namespace=jhub", KUBECONFIG=str(service.folder / "nothing"))
    assert await asyncio.to_thread(process.wait, 30) == 1
    assert "cannot start: --namespace: there is neither a service account of a pod" in service.said


@pytest.mark.parametrize(
    ("options", "explained"),
    [
        (("--namespace=a", "--control-socket=b"), "not allowed with argument"),
        (("--all-namespaces",), "--all-namespaces is for a cluster"),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...],
    explained: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", TOKEN)
    with contextlib.suppress(SystemExit):
        assert main(["service", "--url=http://127.0.0.1:1", *options]) == 2
    assert explained in capsys.readouterr().err + caplog.text
