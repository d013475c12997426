"""Wheel build: compile the C libraries first, and mark the wheel as one for their machine.

Their machine is this one, or the one that $GPUSHARE_MACHINE names (x86_64 or aarch64). The pyproject.toml of
gpushare-spawner and that of gpushare-simgpu name this file, and their folder with a libraries.toml.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs build.py, which lies beside this file."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the files. Raises BuildError."""
        # by path: the package itself is not importable in a build environment
        spec = importlib.util.spec_from_file_location("gpushare_native_build", HERE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        machine = os.environ.get("GPUSHARE_MACHINE") or platform.machine()
        folder = Path(self.root).resolve() / self.config["folder"]
        if version == "editable":
            module.build(folder, machine=machine)
        else:
            # a checkout keeps its own libraries, which have symbols; hatchling packs the files after this
            self._built = tempfile.TemporaryDirectory(prefix="gpushare-build-")
            for path in module.build(folder, Path(self._built.name), machine, stripped=True):
                build_data["force_include"][str(path)] = f"{self.config['folder']}/lib/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{module.GLIBC.replace('.', '_')}_{machine}"
