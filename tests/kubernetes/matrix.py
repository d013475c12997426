"""The spawner's tests on every pair of supported versions of JupyterHub and KubeSpawner, one line for each pair.

``python -m tests.kubernetes.matrix [PYTEST ARGUMENTS]``. The pair that is installed is left to `make test`. Each
package's versions are laid over the environment that runs this, without their dependencies, which are those that are
there. What was fetched is kept beside the tests' caches: a second run needs no network.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / ".pytest_cache" / "matrix"

HUBS = ("5.5.0", "6.1.1")
KUBESPAWNERS = ("7.0.0", "7.1.0")
TESTS = tuple(
    f"tests/kubernetes/test_{name}.py"
    for name in ("spawner_is_kubespawner", "spawner_same_calls", "spawner_start", "service_config_files")
)
OURS = "not theirs"
"""Leaves out what runs on KubeSpawner itself, to compare with."""

_AT_ONCE = 2
_SAY = "import jupyterhub, kubespawner; print(jupyterhub.__version__, kubespawner.__version__)"


class NotInstalled(Exception):
    """A version could not be had; ``str()`` is what pip said."""


def overlay(package: str, version: str) -> Path:
    """A folder with this version of a package and nothing else. Raises NotInstalled."""
    folder = OVERLAYS / f"{package}-{version}"
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        command += ["--no-deps", "--upgrade", "--target", str(folder), f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalled(f"{package} {version} cannot be installed:\n{done.stderr.strip()}")
        (folder / "complete").touch()
    return folder


def run(hub: str, kubespawner: str, arguments: list[str]) -> tuple[bool, str]:
    """Whether the tests pass on this pair, and what pytest said."""
    folders = [overlay("jupyterhub", hub), overlay("jupyterhub-kubespawner", kubespawner), ROOT]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    used = subprocess.run([sys.executable, "-c", _SAY], env=environment, capture_output=True, text=True, check=False)
    if used.stdout.split() != [hub, kubespawner]:
        return False, f"the tests would run on other versions: {used.stdout.strip() or used.stderr.strip()}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or [*TESTS, "-k", OURS])]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode == 0, done.stdout


def main() -> int:
    """Run all pairs but the installed one; 0 if all of them pass."""
    try:
        for hub, kubespawner in zip(HUBS, KUBESPAWNERS, strict=True):
            overlay("jupyterhub", hub)
            overlay("jupyterhub-kubespawner", kubespawner)
    except NotInstalled as error:
        print(error)
        return 1
    installed = tuple(map(importlib.metadata.version, ("jupyterhub", "jupyterhub-kubespawner")))
    pairs = [pair for pair in product(HUBS, KUBESPAWNERS) if pair != installed]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return 0 if all(list(pool.map(tell, pairs))) else 1


def tell(pair: tuple[str, str]) -> bool:
    """Run one pair and print how it went: one line, and all of pytest's if it failed."""
    start = time.monotonic()
    passed, said = run(*pair, sys.argv[1:])
    last = said.strip().splitlines()[-1] if said.strip() else "pytest said nothing"
    name = f"JupyterHub {pair[0]}, KubeSpawner {pair[1]}"
    line = f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s: {last}"
    print(line if passed else f"{said}\n{line}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
