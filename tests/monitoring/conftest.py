"""Prometheus' programs; tests that need one are skipped where it is not installed."""

from __future__ import annotations

import pytest

from tests.monitoring.running import found_program


def program(name: str) -> str:
    found = found_program(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus, or its folder in $GPUSHARE_PROMETHEUS)")
    return found


@pytest.fixture
def promtool() -> str:
    return program("promtool")
