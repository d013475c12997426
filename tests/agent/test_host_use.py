"""What pods use of their node's CPU and memory, from made-up cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.agent.cgroups import MemoryCgroups
from gpushare_spawner.agent.sessions.host_memory import FORGET_AFTER, OVER, HostUse
from gpushare_spawner.model.report import HostUseReport

UID = "0a1b2c3d-0000-1111-2222-333344445555"
MIB = 2**20


class Pod:
    """A pod's cgroups, of either version."""

    def __init__(self, root: Path, version: int) -> None:
        self.version = version
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu memory\n")
        group = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
        self.memory = root / group if version == 2 else root / "memory" / group
        self.cpu = root / group if version == 2 else root / "cpuacct" / group
        for folder in {self.memory, self.cpu}:
            folder.mkdir(parents=True)

    def uses(self, cpu_seconds: float, memory: int, cache: int = 0) -> None:
        if self.version == 2:
            (self.cpu / "cpu.stat").write_text(f"usage_usec {round(cpu_seconds * 1e6)}\nuser_usec 1\n")
            (self.memory / "memory.current").write_text(f"{memory + cache}\n")
            (self.memory / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
        else:
            (self.cpu / "cpuacct.usage").write_text(f"{round(cpu_seconds * 1e9)}\n")
            (self.memory / "memory.usage_in_bytes").write_text(f"{memory + cache}\n")
            (self.memory / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {cache}\n")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("version", [1, 2])
def test_use_is_known_after_an_interval_and_rounded_up(tmp_path: Path, version: int) -> None:
    pod, clock = Pod(tmp_path, version), Clock()
    use = HostUse(MemoryCgroups(tmp_path), clock)
    pod.uses(100.0, 100 * MIB, cache=500 * MIB)
    assert use.of_pod(UID) is None
    clock.now += OVER / 2
    assert use.of_pod(UID) is None
    clock.now += OVER / 2
    pod.uses(100.0 + 0.26 * OVER, 100 * MIB)
    assert use.of_pod(UID) == HostUseReport(cpu_millicores=300, memory_bytes=128 * MIB)
    pod.uses(200.0, 129 * MIB)
    clock.now += 1.0
    assert use.of_pod(UID) == HostUseReport(cpu_millicores=300, memory_bytes=192 * MIB)
    clock.now += OVER - 1.0
    pod.uses(100.0 + 0.26 * OVER, 129 * MIB)
    assert use.of_pod(UID) == HostUseReport(cpu_millicores=0, memory_bytes=192 * MIB)


def test_a_pod_that_was_not_asked_for_is_measured_anew(tmp_path: Path) -> None:
    pod, clock = Pod(tmp_path, 2), Clock()
    use = HostUse(MemoryCgroups(tmp_path), clock)
    pod.uses(0.0, MIB)
    use.of_pod(UID)
    clock.now += FORGET_AFTER
    pod.uses(9.0, MIB)
    assert use.of_pod(UID) is None


@pytest.mark.parametrize("uid", ["*", "../x", UID.replace("0a", "0b")])
def test_a_pod_without_cgroups_is_not_known(tmp_path: Path, uid: str) -> None:
    pod, clock = Pod(tmp_path, 2), Clock()
    pod.uses(1.0, MIB)
    use = HostUse(MemoryCgroups(tmp_path), clock)
    assert use.of_pod(uid) is None
    clock.now += OVER
    assert use.of_pod(uid) is None


def test_groups_that_cannot_be_read_are_not_known(tmp_path: Path) -> None:
    pod, clock = Pod(tmp_path, 2), Clock()
    use = HostUse(MemoryCgroups(tmp_path), clock)
    for text in ("", "nr_periods 1\n", "usage_usec many\n"):
        (pod.cpu / "cpu.stat").write_text(text)
        assert use.of_pod(UID) is None
        clock.now += OVER
