"""Names of GPUs in the node's CDI specifications (Container Device Interface, cncf-tags/container-device-interface).

Where a node has them, a container gets its GPU by such a name, and no runtime hook is needed.
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
"""Where the runtimes look; the later has precedence."""


AUTO, OFF = "auto", "off"


_CLASS = "gpu"


_DEVICE_NODE = re.compile(r"/dev/nvidia(\d+)")


_MAX_BYTES = 16 * 1024 * 1024


class CdiNames:
    """Names of the node's GPUs. Its specifications may be written after the agent has started, or anew."""

    def __init__(self, gpus: Iterable[Gpu], choice: str = AUTO, folders: Iterable[Path] = FOLDERS) -> None:
        """See `cdi_names`."""
        self._gpus = tuple(gpus)
        self._choice = choice
        self._folders = tuple(folders)
        self._known: list[tuple[str, int, int]] = []
        self._names: Mapping[str, str] = {}

    async def read(self) -> None:
        """Read the specifications, if they are others than those that were read."""
        there = _there(self._folders) if self._choice != OFF else []
        if there != self._known:
            # thousands of lines
            self._names = await asyncio.to_thread(cdi_names, self._gpus, self._choice, self._folders)
            self._known = there

    async def name(self, uuid: str) -> str | None:
        """The qualified name of a GPU, where it has one now."""
        await self.read()
        return self._names.get(uuid)


def cdi_names(gpus: Iterable[Gpu], choice: str = AUTO, folders: Iterable[Path] = FOLDERS) -> Mapping[str, str]:
    """GPU's UUID -> qualified device name, like ``nvidia.com/gpu=GPU-…``, for the GPUs that have one.

    `choice`: "auto", "off", or a kind (vendor/class) that is to be used. A device is recognised by its name, if that is
    the UUID, else by the one device node that it brings.
    """
    if choice == OFF:
        return {}
    found: dict[str, str] = {}
    chosen = list(gpus)
    for folder in folders:
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            spec = _read(path)
            kind = str(spec.get("kind", ""))
            if kind == choice or (choice == AUTO and kind.partition("/")[2] == _CLASS):
                found |= _in_spec(spec, kind, chosen)
    return found


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
            raise ValueError("it is no CDI specification")
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.warning("%s is left out: %s", path, error)
        return {}
    return spec


def _there(folders: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What tells one state of the specifications from another: their paths, times and sizes."""
    found = []
    with contextlib.suppress(OSError):
        for path in [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]:
            about = path.stat()
            found.append((str(path), about.st_mtime_ns, about.st_size))
    return found
