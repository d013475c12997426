"""Memory of cgroups (both versions) and of the machine, as the kernel reports them: limits, use, and available memory.

As in the kubelet's figures, use excludes the page cache that the kernel can drop (inactive_file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

NO_LIMIT = 2**60
"""Bytes from which a limit counts as none: version 1 shows a number near 2^63 if there is no limit."""


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup with a limit. Amounts are in bytes."""

    limit: int
    used: int


@dataclass(frozen=True)
class MachineMemory:
    """Figures from /proc/meminfo, in bytes."""

    total: int
    available: int


def machine_memory(proc: Path = Path("/proc")) -> MachineMemory | None:
    """Return the machine's memory; None if it cannot be read."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        amounts = {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest
        }
        return MachineMemory(amounts["MemTotal"], amounts["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        return None


class MemoryCgroups:
    """Reader of the hierarchy under a mount point, usually /sys/fs/cgroup."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self.root = root
        unified = (root / "cgroup.controllers").exists()
        self._memory = root if unified else root / "memory"
        self._names = (
            ("memory.max", "memory.current", "inactive_file")
            if unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        self._pods = PodFolders(self._memory)

    def of_path(self, path: str, below: str = "/") -> MemoryGroup | None:
        """Return the group with the least memory left between `below` (exclusive) and `path`.

        None if no group has a limit. Groups at or above `below` are shared with others.
        """
        if ".." in path.split("/"):
            return None
        parts = [part for part in path.split("/") if part]
        pairs = zip(parts, [part for part in below.split("/") if part], strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return self._tightest(self._memory.joinpath(*parts[:depth]) for depth in range(shared + 1, len(parts) + 1))

    def of_pod(self, uid: str) -> MemoryGroup | None:
        """Return the group with the least memory left of a pod and its containers; None if none has a limit."""
        return self._tightest(
            group
            for folder in self._pods.of(uid)
            for group in (folder, *(path for path in folder.iterdir() if path.is_dir()))
        )

    def used_by_pod(self, uid: str) -> int | None:
        """Return the bytes that a pod uses, with or without a limit; None if they cannot be read."""
        try:
            return max((self._used(folder) for folder in self._pods.of(uid)), default=None)
        except (OSError, ValueError, IndexError):
            return None

    def _tightest(self, folders: Iterable[Path]) -> MemoryGroup | None:
        groups = filter(None, map(self._read, folders))
        return min(groups, key=lambda group: group.limit - group.used, default=None)

    def _read(self, folder: Path) -> MemoryGroup | None:
        try:
            text = (folder / self._names[0]).read_text().strip()
            if text == "max" or int(text) >= NO_LIMIT:
                return None
            return MemoryGroup(int(text), self._used(folder))
        except (OSError, ValueError, IndexError):
            return None

    def _used(self, folder: Path) -> int:
        _, used_name, cache_name = self._names
        used = int((folder / used_name).read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
        cache = next((int(line.split()[1]) for line in statistics if line.split()[:1] == [cache_name]), 0)
        return max(0, used - cache)


class CpuCgroups:
    """Reader of CPU time from the hierarchy under a mount point."""

    def __init__(self, root: Path) -> None:
        self._unified = (root / "cgroup.controllers").exists()
        self._pods = PodFolders(root if self._unified else root / "cpuacct")

    def seconds_of_pod(self, uid: str) -> float | None:
        """Return the CPU time that a pod has used; None if it cannot be read."""
        try:
            for folder in self._pods.of(uid):
                if not self._unified:
                    return int((folder / "cpuacct.usage").read_text()) / 1e9
                words = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
                return int(words["usage_usec"]) / 1e6
        except (OSError, ValueError, KeyError):
            pass
        return None


class PodFolders:
    """The groups of pods, named as by the kubelet's two cgroup drivers."""

    def __init__(self, hierarchy: Path) -> None:
        self._hierarchy = hierarchy
        self._cache: dict[str, tuple[Path, ...]] = {}
        """Folders by pod uid, cached because a search reads the folders of all the node's pods."""

    def of(self, uid: str) -> tuple[Path, ...]:
        """Return a pod's folders; empty if there are none."""
        if not re.fullmatch(r"[0-9a-f-]{36}", uid):
            return ()
        folders = self._cache.get(uid, ())
        if not folders or not all(folder.is_dir() for folder in folders):
            folders = self._search(uid)
        return folders

    def _search(self, uid: str) -> tuple[Path, ...]:
        """Search for a pod's folders, and drop the folders of pods that no longer exist."""
        names = (f"pod{uid}", f"kubepods*-pod{uid.replace('-', '_')}.slice")
        levels = ("kubepods*", "kubepods*/*")
        folders = tuple(
            folder for name in names for level in levels for folder in self._hierarchy.glob(f"{level}/{name}")
        )
        self._cache = {
            pod: folders_of_pod
            for pod, folders_of_pod in self._cache.items()
            if pod != uid and folders_of_pod[0].is_dir()
        }
        if folders:
            self._cache[uid] = folders
        return folders
