"""The budgets of host memory: the rules, the kernel's figures, and what a session is told."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.agent.cgroups import MachineMemory, MemoryCgroups, MemoryGroup, machine_memory
from gpushare_spawner.agent.session_limit import SessionLimit
from gpushare_spawner.agent.sessions.host_memory import (
    UNLIMITED,
    GpuMemoryBudget,
    HostMemorySettings,
    NodeMemory,
    SessionOnGpu,
    node_budget,
    node_left,
    node_needs,
    session_budget,
    session_left,
    session_needs,
)
from gpushare_spawner.model.control import ConfirmRequest, TierRequest
from gpushare_spawner.model.frames import Kind, ReserveKind
from gpushare_spawner.model.share import MemoryLimit, Tier
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, GIB, Peer

QUARTER = 4 * GIB


def session(has: int, guarantee: int = QUARTER, plain: int = 0, whole: bool = False) -> SessionOnGpu:
    return SessionOnGpu(has, has - plain, guarantee, whole)


def test_what_fits_on_the_gpu_needs_no_host_memory() -> None:
    gpu = GpuMemoryBudget(16 * GIB, {"a": session(4 * GIB), "b": session(12 * GIB)})
    assert node_needs([gpu]) == 0
    assert node_needs([replace(gpu, device_bytes=15 * GIB)]) == GIB


def test_an_unused_guarantee_counts_against_the_budget() -> None:
    gpu = GpuMemoryBudget(16 * GIB, {"a": session(0), "b": session(14 * GIB)})
    assert node_needs([gpu]) == 2 * GIB


def test_free_memory_is_what_the_gpu_and_the_budget_leave() -> None:
    gpus = {"g": GpuMemoryBudget(16 * GIB, {"a": session(8 * GIB), "b": session(6 * GIB)})}
    assert node_left(gpus, "g", "a", 0) == 2 * GIB
    assert node_left(gpus, "g", "a", 3 * GIB) == 5 * GIB
    assert node_left(gpus, "g", "a", None) == UNLIMITED


def test_no_neighbour_takes_the_room_within_a_guarantee() -> None:
    gpus = {"g": GpuMemoryBudget(16 * GIB, {"a": session(GIB), "b": session(500 * GIB)})}
    assert node_left(gpus, "g", "a", 8 * GIB) == 3 * GIB
    assert node_left(gpus, "g", "b", 8 * GIB) < 0


def test_gpus_of_a_node_share_its_budget() -> None:
    full = GpuMemoryBudget(16 * GIB, {"b": session(22 * GIB)})
    gpus = {"g": GpuMemoryBudget(16 * GIB, {"a": session(16 * GIB)}), "h": full}
    assert node_left(gpus, "g", "a", 8 * GIB) == 2 * GIB
    assert node_left(gpus, "g", "a", 2 * GIB) == 0, "what is used beyond the budget is not held against another GPU"


def test_all_movable_memory_of_a_session_counts_for_its_server() -> None:
    gpu = GpuMemoryBudget(16 * GIB, {"a": session(6 * GIB, plain=GIB), "b": session(GIB)})
    assert session_needs([(gpu, gpu.sessions["a"])]) == 5 * GIB
    assert session_left({"g": gpu}, "g", "a", 8 * GIB) == 3 * GIB
    assert session_left({"g": gpu}, "g", "a", None) == UNLIMITED


def test_a_whole_gpu_is_shared_with_nobody() -> None:
    gpu = GpuMemoryBudget(16 * GIB, {"a": session(10 * GIB, whole=True)})
    assert session_needs([(gpu, gpu.sessions["a"])]) == 0
    assert session_left({"g": gpu}, "g", "a", GIB) == 7 * GIB


def test_borrowers_of_a_whole_gpu_leave_what_its_owners_server_could_not_take() -> None:
    """12 GiB are on the lender's GPU, and its server's memory limit can take 5 of them."""
    lender = SessionOnGpu(12 * GIB, 12 * GIB, 16 * GIB, whole_gpu=True, must_stay=7 * GIB)
    gpus = {"g": GpuMemoryBudget(16 * GIB, {"lender": lender, "b": session(GIB, 0), "c": session(2 * GIB, 0)})}
    assert node_left(gpus, "g", "b", 100 * GIB) == 6 * GIB
    assert node_left(gpus, "g", "lender", 100 * GIB) == 101 * GIB, "its own allocations are as before"


def test_a_sessions_gpus_share_its_servers_memory() -> None:
    gpus = {name: GpuMemoryBudget(16 * GIB, {"a": session(3 * GIB)}) for name in "gh"}
    assert session_left(gpus, "g", "a", 8 * GIB) == 2 * GIB


def test_what_is_paged_out_is_not_counted_twice() -> None:
    assert session_budget(limit=16 * GIB, used=6 * GIB, paged_out=4 * GIB) == 14 * GIB
    assert session_budget(limit=16 * GIB, used=6 * GIB, paged_out=40 * GIB) == 16 * GIB
    assert session_budget(limit=4 * GIB, used=6 * GIB, paged_out=0) == 0


def test_the_nodes_budget_is_a_part_of_its_memory_and_never_more_than_there_is() -> None:
    assert node_budget(50 * GIB, total=100 * GIB, available=90 * GIB, paged_out=0) == 50 * GIB
    assert node_budget(50 * GIB, total=100 * GIB, available=10 * GIB, paged_out=0) == 8 * GIB
    assert node_budget(50 * GIB, total=100 * GIB, available=10 * GIB, paged_out=20 * GIB) == 28 * GIB
    assert node_budget(200 * GIB, total=100 * GIB, available=90 * GIB, paged_out=40 * GIB) == 100 * GIB


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True)
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # fmt: skip
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file 0\n{names[2]} {cache}\n" if version == 1
                                        else f"anon 1\n{names[2]} {cache}\n")  # fmt: skip


UID = "0a1b2c3d-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("version", "pod"),
    [
        (2, f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"),
        (2, f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"),
        (2, f"kubepods/besteffort/pod{UID}"),
        (1, f"kubepods/burstable/pod{UID}"),
    ],
)
def test_a_pods_cgroup_is_found_by_its_uid(tmp_path: Path, version: int, pod: str) -> None:
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("memory\n")
    base = tmp_path if version == 2 else tmp_path / "memory"
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    group(base / pod, unlimited, 9 * GIB, 0, version)
    assert MemoryCgroups(tmp_path).of_pod(UID) is None
    group(base / pod / "cri-containerd-1.scope", str(16 * GIB), 9 * GIB, 2 * GIB, version)
    assert MemoryCgroups(tmp_path).of_pod(UID) == MemoryGroup(16 * GIB, 7 * GIB)
    assert MemoryCgroups(tmp_path).of_pod(UID.replace("0a", "0b")) is None
    assert MemoryCgroups(tmp_path).of_pod("*") is None


def test_a_pods_cgroup_is_searched_once_while_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    pod = tmp_path / f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
    cgroups = MemoryCgroups(tmp_path)
    searches: list[str] = []
    search = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: searches.append(pattern) or search(self, pattern))  # type: ignore[func-returns-value]
    assert cgroups.of_pod(UID) is None
    group(pod, "max", 9 * GIB, 0)
    group(pod / "first.scope", str(16 * GIB), 9 * GIB, 2 * GIB)
    assert cgroups.of_pod(UID) == MemoryGroup(16 * GIB, 7 * GIB)
    searches.clear()
    group(pod / "restarted.scope", str(4 * GIB), GIB, 0)
    assert cgroups.of_pod(UID) == MemoryGroup(4 * GIB, GIB)
    assert searches == []
    shutil.rmtree(pod)
    assert cgroups.of_pod(UID) is None
    assert searches


def test_only_groups_of_the_session_alone_count(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    group(tmp_path / "system.slice", str(4 * GIB), 3 * GIB, 0)
    group(tmp_path / "system.slice/hub.service", str(5 * GIB), 4 * GIB, 0)
    group(tmp_path / "system.slice/ada.service", str(8 * GIB), 2 * GIB, GIB)
    cgroups = MemoryCgroups(tmp_path)
    ada = MemoryGroup(8 * GIB, GIB)
    assert cgroups.of_path("/system.slice/ada.service", below="/system.slice/agent.service") == ada
    assert cgroups.of_path("/system.slice/hub.service", below="/system.slice/hub.service") is None, "the hub's own"
    assert cgroups.of_path("/system.slice/ada.service/../hub.service", below="/") is None
    assert cgroups.of_path("/nowhere", below="/") is None


def test_memory_of_the_machine_is_read_from_meminfo(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\nHugePages: 0\n")
    assert machine_memory(tmp_path) == MachineMemory(1024 * 1024, 512 * 1024)
    assert machine_memory(tmp_path / "nowhere") is None


@pytest.mark.parametrize("total_kib", [24684092, 16 * 2**20, 65_700_001])
def test_a_budget_in_bytes_is_exact_on_every_machine(tmp_path: Path, total_kib: int) -> None:
    """As a rounded part of the memory it was one byte too small on some machines."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {total_kib} kB\nMemAvailable: {total_kib // 2} kB\n")
    settings = HostMemorySettings(node="32Mi", proc=tmp_path)
    memory = NodeMemory(settings, {}, {}, context_bytes=0, paged_out=lambda session: 0)
    assert memory.node_budget() == 32 * 2**20


async def reserve(peer: Peer, wanted: int, size: int, kind: ReserveKind = ReserveKind.MANAGED) -> int:
    """Ask for it, and state what was granted as allocated; RESERVED's result."""
    peer.send(Kind.RESERVE, wanted, wanted - size, size, 1, kind, gpu=FIRST.uuid)
    answer = await peer.until(Kind.RESERVED)
    if answer.fields[1] == 0:
        peer.send(Kind.MEMORY, wanted, 0, gpu=FIRST.uuid)
    return answer.fields[1]


@pytest.fixture
async def small_host(agent: Agent, tmp_path: Path) -> Agent:
    """The node's budget for what leaves the GPUs is 8 GiB: half of the machine's memory."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {16 * 2**20} kB\n")
    await agent.stop()
    await agent.start(host_memory=HostMemorySettings(node="50%", proc=tmp_path, cgroups=tmp_path / "none"))
    return agent


async def test_a_report_counts_the_memory_of_each_session_once(
    small_host: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With n sessions it once took n times n."""
    for number in range(12):
        small_host.open(f"user-{number}", share_units=5)
    counts: list[str] = []
    counted = SessionLimit.counted
    monkeypatch.setattr(SessionLimit, "counted", lambda self, uuid: counts.append(uuid) or counted(self, uuid))  # type: ignore[func-returns-value]
    assert len(small_host.node.report().sessions) == 12
    assert len(counts) == 12


async def test_beyond_the_nodes_budget_nothing_is_allocated_and_the_status_says_why(small_host: Agent) -> None:
    ada, bob = [await small_host.peer(small_host.open(name, memory_limit="200%")) for name in ("ada", "bob")]
    assert await reserve(ada, 18 * GIB, 18 * GIB) == 0
    assert await reserve(bob, 4 * GIB, 4 * GIB) == 0, "its guarantee"
    assert await reserve(ada, 21 * GIB, 3 * GIB) == MemoryLimit.NODE_HOST_MEMORY
    assert await reserve(ada, 20 * GIB, 2 * GIB) == 0
    assert await reserve(bob, 5 * GIB, GIB) == MemoryLimit.NODE_HOST_MEMORY
    report = small_host.node.report()
    assert report.host_memory is not None
    assert (report.host_memory.budget_bytes, report.host_memory.needed_bytes) == (8 * GIB, 8 * GIB)
    hit = report.session("bob").memory_limit_hits.last  # type: ignore[union-attr]
    assert hit is not None
    assert (hit.limit, hit.requested_bytes) == ("node_host_memory", GIB)
    ada.close()
    while small_host.node.report().host_memory.needed_bytes > 0:  # type: ignore[union-attr]
        await bob.quiet(0.02)
    assert await reserve(bob, 12 * GIB, 8 * GIB) == 0


async def test_borrowed_units_guarantee_no_memory_while_their_owner_has_them_guaranteed(small_host: Agent) -> None:
    """An owner of the whole GPU is idle, and two others start on what it lends: 16 GiB and 8 GiB of budget for all."""
    owner = await small_host.peer(small_host.open("owner", share_units=100))
    assert await reserve(owner, 15 * GIB, 15 * GIB) == 0
    small_host.node.requests.tier(TierRequest(id="owner", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    ada, bob = [
        await small_host.peer(small_host.open(name, share_units=share, borrowed_units=share))
        for name, share in (("ada", 60), ("bob", 40))
    ]
    report = small_host.node.report().host_memory
    assert report is not None
    assert report.needed_bytes == 0, "nothing is promised beside the owner's guarantee"
    assert await reserve(ada, 8 * GIB, 8 * GIB) == 0
    assert await reserve(bob, GIB, GIB) == MemoryLimit.NODE_HOST_MEMORY
    assert await reserve(owner, 16 * GIB, GIB) == 0, "its guarantee"


async def test_a_session_cannot_take_the_nodes_budget_by_what_it_claims(small_host: Agent) -> None:
    """Managed memory of its own is not bound by its limit, and a MEMORY frame can say anything."""
    ada, bob = [await small_host.peer(small_host.open(name)) for name in ("ada", "bob")]
    ada.send(Kind.MEMORY, 2**63, 0, gpu=FIRST.uuid)
    assert await reserve(ada, 2**62, 2**61, ReserveKind.OWN_MANAGED) == MemoryLimit.NODE_HOST_MEMORY
    assert await reserve(bob, 6 * GIB, 6 * GIB) == 0, "the limit of 16 GiB and a quarter of 8 are counted for ada"


async def test_a_server_with_a_memory_limit_has_a_budget_of_its_own(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    group(tmp_path / "ada.service", str(6 * GIB), 2 * GIB, GIB)
    monkeypatch.setattr(
        "gpushare_spawner.agent.processes.cgroup", lambda pid: "/agent.service" if pid == "self" else "/ada.service"
    )
    await agent.stop()
    await agent.start(host_memory=HostMemorySettings(cgroups=tmp_path))
    ada = await agent.peer(agent.open("ada"))
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    assert await reserve(ada, 5 * GIB, 5 * GIB) == 0
    assert await reserve(ada, 6 * GIB, GIB) == MemoryLimit.SESSION_HOST_MEMORY
    assert await reserve(ada, 6 * GIB, GIB, ReserveKind.PLAIN) == 0, "it stays on the GPU"
    report = agent.node.report().session("ada")
    assert report is not None
    assert report.host_memory_budget_bytes == 5 * GIB


@pytest.mark.parametrize("limit", [4, 5])
async def test_a_server_whose_memory_limit_breaks_its_guarantee_is_logged(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    """Of the limit 1 GiB is in use; a quarter of 16 GiB is guaranteed."""
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    group(tmp_path / "ada.service", str(limit * GIB), 2 * GIB, GIB)
    monkeypatch.setattr(
        "gpushare_spawner.agent.processes.cgroup", lambda pid: "/agent.service" if pid == "self" else "/ada.service"
    )
    await agent.stop()
    await agent.start(host_memory=HostMemorySettings(cgroups=tmp_path))
    ada = await agent.peer(agent.open("ada"))
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    agent.node.checks.check()
    agent.node.checks.check()
    said = [record.getMessage() for record in caplog.records if "leaves" in record.getMessage()]
    if limit == 4:
        (sentence,) = said
        assert "leaves 3 GiB for GPU memory that is paged out, and its share guarantees 4 GiB" in sentence
    else:
        assert said == []
    ada.close()


async def test_switched_off_there_is_no_budget(agent: Agent, tmp_path: Path) -> None:
    await agent.stop()
    await agent.start(host_memory=HostMemorySettings(node="off"))
    ada = await agent.peer(agent.open("ada", memory_limit="1000%"))
    assert await reserve(ada, 150 * GIB, 150 * GIB) == 0
    assert agent.node.report().host_memory is None


async def test_surplus_of_an_allowance_is_recalled_before_anybody_needs_it(agent: Agent) -> None:
    ada = await agent.peer(agent.open("ada"))
    assert await reserve(ada, 12 * GIB, 12 * GIB) == 0
    ada.send(Kind.MEMORY, 0, 0, gpu=FIRST.uuid)
    recall = await ada.until(Kind.RECALL)
    assert recall.fields[0] == 12 * GIB, "all but the piece in advance"
    ada.send(Kind.RETURN, recall.fields[0], 0, recall.fields[1], gpu=FIRST.uuid)
    await ada.quiet(0.2)
