"""Files that the package ships in addition to its code, and ``gpushare config-path``, which prints their paths.

The files are config files of the hub, compute templates, unit files, Helm values, alert rules and a Grafana dashboard.
A wheel contains them in the package's folder ``share``, a checkout in its top-level folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

FOLDERS = {
    "jupyterhub_config.d": "config files for the hub",
    "templates": "compute templates",
    "systemd": "unit files",
    "helm-values": "values for zero-to-jupyterhub, and the agent's chart",
    "monitoring": "alert rules for Prometheus, and a Grafana dashboard",
}
_PACKAGE = Path(__file__).resolve().parent
NOT_INSTALLED = frozenset({"jupyterhub_config.d/90-demo.py"})
"""Files of a checkout that a wheel does not contain: the demo runs from a checkout."""


class NotShipped(Exception):
    """Error for a file or folder that does not exist. The message names the command that lists all files."""


def shipped(name: str = "") -> Path:
    """Return the file or folder with this name; by default, the folder that contains all of them.

    `name` is a path below that folder, or the end of exactly one such path. Raises NotShipped.
    """
    root, requested = _root(), name.strip("/")
    if not requested or (requested.partition("/")[0] in FOLDERS and (root / requested).exists()):
        return root / requested
    matching = [path for path in _everything(root) if path.name == requested]
    if len(matching) == 1:
        return matching[0]
    if matching:
        several = ", ".join(str(path.relative_to(root)) for path in matching)
        raise NotShipped(f"several files have the name {requested!r}: write one of {several}")
    raise NotShipped(f"there is no file or folder {name!r}; `gpushare config-path` lists all files")


def files() -> list[Path]:
    """Return all files that a wheel contains, sorted. Raises NotShipped."""
    root = _root()
    candidates = (path for path in _everything(root) if path.is_file())
    return sorted(path for path in candidates if path.relative_to(root).as_posix() not in NOT_INSTALLED)


def _root() -> Path:
    for root in (_PACKAGE / "share", _PACKAGE.parent):
        if all((root / folder).is_dir() for folder in FOLDERS):
            return root
    raise NotShipped(f"{_PACKAGE / 'share'} is missing or incomplete: install gpushare-spawner again, from a wheel")


def _everything(root: Path) -> list[Path]:
    paths = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    # without Python's compiled files
    return [path for path in paths if "__pycache__" not in path.parts]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    names = "; ".join(f"{name}: {what}" for name, what in FOLDERS.items())
    parser.add_argument("--json", action="store_true", help="print a JSON array of paths")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help=f"print the path of this file or folder ({names}); default: the paths of all files",
    )


def run(options: argparse.Namespace) -> int:
    """Print the path. Returns 1, with a sentence on standard error, if there is no such file."""
    try:
        paths = list(map(str, files() if options.name is None else [shipped(options.name)]))
        print(json.dumps(paths) if options.json else "\n".join(paths))
    except NotShipped as error:
        print(f"gpushare config-path: {error}", file=sys.stderr)
        return 1
    return 0
