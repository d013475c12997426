"""The spawner's tests on the versions of JupyterHub and KubeSpawner that are supported.

``python -m tests.kubernetes.matrix [PYTEST ARGUMENTS]``. Each pair is laid over the environment that runs this: their
own packages only, the dependencies are those that are there. What was fetched is kept beside the tests' caches, so a
second run needs no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / ".pytest_cache" / "matrix"

MATRIX = (
    {"jupyterhub": "5.5.0", "jupyterhub-kubespawner": "7.0.0"},
    {"jupyterhub": "5.5.0", "jupyterhub-kubespawner": "7.1.0"},
    {"jupyterhub": "6.1.1", "jupyterhub-kubespawner": "7.0.0"},
    {"jupyterhub": "6.1.1", "jupyterhub-kubespawner": "7.1.0"},
)
TESTS = (
    "tests/kubernetes/test_spawner_is_kubespawner.py",
    "tests/kubernetes/test_spawner_start.py",
    "tests/kubernetes/test_service_fragments.py",
)


def overlay(versions: dict[str, str]) -> Path:
    """A folder with these versions. Raises subprocess.CalledProcessError where they cannot be had."""
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    folder = OVERLAYS / "-".join(wanted)
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        subprocess.run([*command, *wanted], check=True)
        (folder / "complete").touch()
    return folder


def run(versions: dict[str, str], arguments: list[str]) -> int:
    """The exit status of the tests on these versions."""
    path = os.pathsep.join([str(overlay(versions)), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def main() -> int:
    """Run all pairs; 0 if all of them pass."""
    failed = []
    for versions in MATRIX:
        name = ", ".join(f"{package} {version}" for package, version in versions.items())
        print(f"== {name}", flush=True)
        start = time.monotonic()
        if run(versions, sys.argv[1:]):
            failed.append(name)
        print(f"== {name}: {'failed' if name in failed else 'passed'} in {time.monotonic() - start:.0f} s", flush=True)
    for name in failed:
        print(f"FAILED on {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
