"""downwardAPI volumes of fields of the pod, as a kubelet writes them (its AtomicWriter) and writes them again.

The files lie in a folder that the link `..data` names; after a change the kubelet makes another folder and replaces
the link, so that all files change together. Fields of resources, and whole maps of labels or annotations, are not
written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .container_environment import field

_DATA = "..data"


def write_downward_volumes(pod: dict[str, Any], folder: Path) -> None:
    """Write the pod's volumes below ``folder``, each in a folder of its name; nothing where nothing has changed."""
    for volume in pod["spec"].get("volumes") or []:
        if "downwardAPI" in volume:
            items = volume["downwardAPI"]["items"]
            wanted = {one["path"]: _sorted(field(pod, one["fieldRef"]["fieldPath"])) for one in items}
            _write(folder / volume["name"], wanted)


def _sorted(text: str) -> str:
    # kubernetes pkg/volume/downwardapi sorts the lines of every value
    return "\n".join(sorted(text.split("\n")))


def _write(target: Path, wanted: dict[str, str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    data = target / _DATA
    if data.exists() and {file.name: file.read_text() for file in data.iterdir()} == wanted:
        return
    before = data.resolve() if data.exists() else None
    new = Path(tempfile.mkdtemp(prefix="..", dir=target))
    for name, text in wanted.items():
        (new / name).write_text(text)
    link = target / "..data_tmp"
    link.symlink_to(new.name)
    os.replace(link, data)
    for name in wanted:
        if not (target / name).is_symlink():
            (target / name).symlink_to(f"{_DATA}/{name}")
    if before is not None:
        shutil.rmtree(before)
