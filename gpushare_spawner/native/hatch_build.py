"""Wheel build: compile the C libraries first, and mark the wheel as one for this machine."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent


class NativeBuildHook(BuildHookInterface):
    """Runs build.py, which lies beside this file."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the files."""
        # by path: the package itself is not importable in a build environment
        spec = importlib.util.spec_from_file_location("gpushare_native_build", HERE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.build(HERE / "lib")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{module.GLIBC.replace('.', '_')}_{platform.machine()}"
