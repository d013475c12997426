"""The parts of JupyterLab's extension that need no browser: node runs their own tests on what tsc has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.jupyter import ROOT

LAB = ROOT / "gpushare_spawner" / "notebook" / "lab"


@pytest.mark.skipif(not (LAB / "lib").is_dir(), reason="needs JupyterLab's extension built in this checkout: make venv")
def test_units_of_the_extension() -> None:
    node = Path(sys.executable).with_name("node")
    tests = sorted(str(path) for path in (LAB / "test").glob("*.test.mjs"))
    assert tests
    # a zone with summer time
    environment = {**os.environ, "TZ": "Europe/Berlin"}
    done = subprocess.run([str(node), "--test", *tests], cwd=LAB, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "fail 0" in done.stdout
