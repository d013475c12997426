"""Benchmarks are no tests, and nobody runs them daily: what they import must still be there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__
