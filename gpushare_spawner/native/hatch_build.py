"""Wheel build: compile the C libraries first, and mark the wheel as one for their machine.

That is this machine, or the one that $GPUSHARE_MACHINE names (x86_64 or aarch64): the compiler can do both anywhere.
"""

from __future__ import annotations

import importlib.util
import os
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
        machine = os.environ.get("GPUSHARE_MACHINE") or platform.machine()
        module.build(HERE / "lib", machine, stripped=version != "editable")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{module.GLIBC.replace('.', '_')}_{machine}"
