"""Hatch hook for wheel and sdist that builds the C libraries and the JupyterLab extension.

Option `folder`, for a wheel: build the C libraries in that folder's libraries.toml. The wheel is tagged for their
machine: this one, or $GPUSHARE_MACHINE (x86_64 or aarch64). Option `labextension`: build the JupyterLab extension from
the sources in that folder. The sdist includes it too, so that building a wheel from the sdist needs no npm registry.

The pyproject.toml files of gpushare-spawner and gpushare-simgpu refer to this file.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent


class GpushareBuildHook(BuildHookInterface[Any]):
    """Runs the build scripts of the folders that the configuration names."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before hatchling collects the files. Raises BuildError."""
        root = Path(self.root).resolve()
        if "labextension" in self.config:
            folder = root / self.config["labextension"]
            _script(folder / "build.py").build(folder)
        if "folder" in self.config:
            self._compile(root / self.config["folder"], version, build_data)

    def _compile(self, folder: Path, version: str, build_data: dict[str, Any]) -> None:
        module = _script(HERE / "build.py")
        machine = os.environ.get("GPUSHARE_MACHINE") or platform.machine()
        if version == "editable":
            module.build(folder, machine=machine)
        else:
            # a checkout keeps its own libraries, which have symbols; hatchling packs these files afterward
            self._built = tempfile.TemporaryDirectory(prefix="gpushare-build-")
            for path in module.build(folder, Path(self._built.name), machine, stripped=True):
                build_data["force_include"][str(path)] = f"{self.config['folder']}/lib/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{module.GLIBC.replace('.', '_')}_{machine}"


def _script(path: Path) -> ModuleType:
    """Import a build script by its path: the package itself is not importable in a build environment."""
    spec = importlib.util.spec_from_file_location(f"gpushare_build_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
