"""Prometheus' programs: from the folder $GPUSHARE_PROMETHEUS, or from the PATH (Debian's package ``prometheus``)."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("GPUSHARE_PROMETHEUS") or None)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus, or its folder in $GPUSHARE_PROMETHEUS)")
    return found


@pytest.fixture
def promtool() -> str:
    return program("promtool")


@pytest.fixture
def prometheus() -> str:
    return program("prometheus")
