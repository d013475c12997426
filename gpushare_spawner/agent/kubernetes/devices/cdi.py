"""Names of GPUs in the node's CDI specifications.

CDI is the Container Device Interface (cncf-tags/container-device-interface). With a CDI name, a container gets its GPU
without a runtime hook.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpushare_spawner.agent.gpus.nvml import Gpu

log = logging.getLogger(__name__)

FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""The folders that container runtimes read; the second folder has precedence."""


AUTO, OFF = "auto", "off"


_CLASS = "gpu"


_DEVICE_NODE = re.compile(r"/dev/nvidia(\d+)")


_MAX_BYTES = 16 * 1024 * 1024


class CdiNames:
    """Names of the node's GPUs. Specifications can appear or change after the agent has started."""

    def __init__(self, gpus: Iterable[Gpu], choice: str = AUTO, folders: Iterable[Path] = FOLDERS) -> None:
        """Store the arguments, see `cdi_names`."""
        self._gpus = tuple(gpus)
        self._choice = choice
        self._folders = tuple(folders)
        self._read_files: list[tuple[str, int, int]] = []
        self._names: Mapping[str, str] = {}

    async def read(self) -> None:
        """Read the specifications if they have changed since the last read."""
        there = _there(self._folders) if self._choice != OFF else []
        if there != self._read_files:
            # a specification can have thousands of lines
            self._names = await asyncio.to_thread(cdi_names, self._gpus, self._choice, self._folders)
            self._read_files = there

    async def name(self, uuid: str) -> str | None:
        """Return the current qualified name of a GPU; None if it has none."""
        await self.read()
        return self._names.get(uuid)


def cdi_names(gpus: Iterable[Gpu], choice: str = AUTO, folders: Iterable[Path] = FOLDERS) -> Mapping[str, str]:
    """Return the qualified device names, like ``nvidia.com/gpu=GPU-…``, of the GPUs that have one, by UUID.

    `choice`: "auto", "off", or a kind (vendor/class) to use. A device matches a GPU by its name if the name is the
    UUID, otherwise by its only device node.
    """
    if choice == OFF:
        return {}
    names: dict[str, str] = {}
    chosen = list(gpus)
    for folder in folders:
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            spec = _read(path)
            kind = str(spec.get("kind", ""))
            if kind == choice or (choice == AUTO and kind.partition("/")[2] == _CLASS):
                names |= _in_spec(spec, kind, chosen)
    return names


def _in_spec(spec: Mapping[str, Any], kind: str, gpus: list[Gpu]) -> dict[str, str]:
    by_name: dict[str, str] = {}
    by_minor: dict[int, str] = {}
    for device in spec.get("devices") or []:
        name = str(device.get("name", ""))
        by_name[name] = name
        nodes = (device.get("containerEdits") or {}).get("deviceNodes") or []
        matches = [_DEVICE_NODE.fullmatch(str(node.get("path", ""))) for node in nodes]
        minors = {int(match[1]) for match in matches if match is not None}
        if len(minors) == 1:
            by_minor.setdefault(minors.pop(), name)
    names = {gpu.uuid: by_name.get(gpu.uuid) or by_minor.get(-1 if gpu.minor is None else gpu.minor) for gpu in gpus}
    return {uuid: f"{kind}={name}" for uuid, name in names.items() if name}


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".json", ".yaml", ".yml"):
        return {}
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        text = path.read_text()
        spec = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if not isinstance(spec, dict) or not isinstance(spec.get("devices") or [], list):
            raise ValueError("it is not a CDI specification")
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.warning("%s is left out: %s", path, error)
        return {}
    return spec


def _there(folders: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the specifications' paths, times and sizes, which differ after each change."""
    files = []
    with contextlib.suppress(OSError):
        for path in [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]:
            about = path.stat()
            files.append((str(path), about.st_mtime_ns, about.st_size))
    return files
