"""No variable, mask, locale or time zone of the machine reaches a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner.native import build
from tests.conftest import ROOT
from tests.machine import REMOVED, RENAMED, TOLD, removed

SOURCES = ("gpushare_spawner", "packages/gpushare-simgpu/gpushare_simgpu", "jupyterhub_config.d")
READ = re.compile(r'(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\(|VARIABLE = )\s*f?"(\w+)')
STAYS = {
    "PATH": "programs are where the machine has them; tests put their own before these",
    "SOURCE_DATE_EPOCH": "the date of a build that can be repeated",
}
POISON = "/nowhere/of-the-machine"

SAY = """
import json, os, sys, time
import tests.conftest
mask = os.umask(0)
opened = open(os.devnull).encoding
print(json.dumps({"environment": dict(os.environ), "mask": mask, "zone": time.tzname[0], "encoding": opened}))
"""


def read_by_the_product() -> dict[str, set[str]]:
    """Return the variables that the sources read -> the files."""
    found: dict[str, set[str]] = {}
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".c", ".h") and "node_modules" not in path.parts:
                for name in READ.findall(path.read_text(encoding="utf-8")):
                    found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_tests_run_without_each_variable_that_the_product_reads() -> None:
    found = read_by_the_product()
    assert {"GPUSHARE_SOCKET", "SIMGPU_STATE", "POD_NAMESPACE", "XDG_RUNTIME_DIR", "JUPYTERHUB_API_URL"} <= found.keys()
    left = {name: files for name, files in found.items() if not removed(name) and name not in STAYS}
    assert left == {}, "add these to tests.machine.REMOVED"


def test_nothing_of_the_machine_is_left_when_a_test_begins(tmp_path: Path) -> None:
    """A process with each of the variables, a mask that closes files to others, and another locale and time zone."""
    names = [name if name[-1] not in "_E" else f"{name}OF_THE_MACHINE" for name in REMOVED]
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    without_poison = {
        "LD_PRELOAD": "",
        "LD_AUDIT": "",
        "LC_ALL": "POSIX",
        "PYTHONIOENCODING": "latin-1",
        "PYTHONUTF8": "0",
    }
    machine = {
        **dict.fromkeys((*names, *proxies, "KUBERNETES_SERVICE_HOST", "JUPYTERHUB_API_TOKEN", "KUBECONFIG"), POISON),
        **{name: POISON for name in read_by_the_product() if name not in STAYS},
        **without_poison,
        "LOGNAME": "ann o'hara", "TZ": "Pacific/Apia", "TMPDIR": str(deep), "HOME": POISON, "PATH": os.environ["PATH"],
    }  # fmt: skip
    command = [sys.executable, "-c", SAY]
    done = subprocess.run(command, env=machine, cwd=ROOT, umask=0o077, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    environment = said.pop("environment")
    assert said == {"mask": 0o022, "zone": "UTC", "encoding": "UTF-8"}
    assert {name for name, value in environment.items() if POISON in value} == set(RENAMED.values())
    assert [environment[name] for name in ("TMPDIR", "LANG", "LOGNAME")] == ["/tmp", "C.UTF-8", f"tests-{os.getuid()}"]
    assert Path(environment["HOME"]).parent == Path("/tmp")
    assert not without_poison.keys() & environment.keys()


def test_a_library_that_is_built_with_a_closed_umask_can_be_loaded_by_all_users(tmp_path: Path) -> None:
    (tmp_path / "libraries.toml").write_text('["lib.so"]\nsources = ["*.c"]\nflags = []\n')
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    before = os.umask(0o077)
    try:
        (library,) = build.build(tmp_path)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (library, library.parent)] == [0o755, 0o755]


@pytest.mark.parametrize("name", sorted(TOLD))
def test_what_tests_are_told_reaches_them(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY], env={**os.environ, name: POISON}, cwd=ROOT, capture_output=True, check=True
    )
    assert json.loads(done.stdout)["environment"][name] == POISON
