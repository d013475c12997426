"""Names of a session's processes for its user: of a kernel its notebook, of another program its file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gpushare_spawner.model.share_status import ShareStatus

Status = TypeVar("Status", bound=ShareStatus)

_KERNEL = re.compile(r"kernel-([0-9a-f]{8})[0-9a-f-]*\.json")
_LETTERS = 40


def named(status: Status, proc: Path = Path("/proc")) -> Status:
    """Return the status with the names of its processes, as far as they can be found."""
    return replace(status, processes=tuple(replace(one, name=process_name(one.pid, proc)) for one in status.processes))


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """Return "the kernel of train.ipynb", "the kernel 1a2b3c4d", "train.py" or "process 123". Raises nothing.

    Jupyter Server passes the path of the notebook to a kernel in JPY_SESSION_NAME.
    """
    arguments = _words(proc / str(pid) / "cmdline")
    kernel = next((found for word in arguments if (found := _KERNEL.search(word))), None)
    if kernel is not None:
        notebook = next(
            (
                word.partition("=")[2]
                for word in _words(proc / str(pid) / "environ")
                if word[:17] == "JPY_SESSION_NAME="
            ),
            "",
        )
        return f"the kernel of {_short(notebook)}" if notebook else f"the kernel {kernel[1]}"
    if not arguments:
        return f"process {pid}"
    program = Path(arguments[0]).name
    if program.startswith("python"):
        options = [word for word in arguments[1:] if word.startswith("-")]
        script = next((word for word in arguments[1:] if not word.startswith("-")), "")
        if script and not {"-c", "-m"} & set(options):
            return f"{_short(script)} (process {pid})"
    return f"{_short(program)} (process {pid})"


def _short(path: str) -> str:
    name = "".join(letter for letter in Path(path).name if letter.isprintable())
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def _words(path: Path) -> list[str]:
    try:
        return [word for word in path.read_bytes().decode(errors="replace").split("\0") if word]
    except OSError:
        return []
