"""Checks of libgpushare.so: whether users' programs can load it, and whether it belongs to this package."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner import __version__, native
from gpushare_spawner.doctor.finding import Finding, closed_part, note, ok, problem, skipped
from gpushare_spawner.doctor.gpu_programs import ScriptedAgent

_PROGRAM = "import ctypes; raise SystemExit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
_TIMEOUT = 30.0
"""Timeout in seconds for a program that calls cuInit."""
_AGAIN = "Install gpushare-spawner again, from a wheel for this machine."


@dataclass(frozen=True)
class LibraryFacts:
    """Facts that the probe has read."""

    path: Path
    missing: bool = False
    refused: str = ""
    """The dynamic linker's message if it does not load the library."""
    closed: str = ""
    """The first file or folder on the library's path that other users cannot read; empty: none."""
    root: bool = False
    reported: int | None = None
    """The version that the library reports to an agent; None if no CUDA program ran here or the program did not
    connect.
    """
    silent: str = ""
    """Why `reported` is None; empty if there is no driver."""


def check() -> list[Finding]:
    """Return the findings."""
    return findings(probe(native.LIBRARIES / "libgpushare.so"))


def probe(path: Path) -> LibraryFacts:
    """Read the facts. Runs two short programs with the library; one of them calls cuInit."""
    if not path.is_file():
        return LibraryFacts(path, missing=True)
    # use a system program, because Python can be linked statically
    tried = subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(path)}, capture_output=True, text=True)
    reported, silent = (None, "") if tried.stderr else _reported(path)
    return LibraryFacts(
        path,
        refused=tried.stderr.strip(),
        closed=closed_part(path.resolve()),
        root=os.geteuid() == 0,
        reported=reported,
        silent=silent,
    )


def findings(facts: LibraryFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    where = str(facts.path)
    if facts.missing:
        return [problem(where, "the library is missing", _AGAIN)]
    if facts.refused:
        remedy = f"{_AGAIN} The file system of the library must not be mounted with noexec."
        return [problem(where, f"the dynamic linker does not load it: {facts.refused}", remedy)]
    results = [ok(where, "loads")]
    if facts.closed:
        what = f"other users cannot read {facts.closed}, so their programs cannot load the library"
        remedy = f"Install the package where all users can read it, or run `chmod o+rX {facts.closed}`."
        results.append(problem(where, what, remedy) if facts.root else note(where, what, remedy))
    if facts.reported is None:
        what = facts.silent or "version not checked: there is no CUDA driver"
        results.append(problem(where, what, _AGAIN) if facts.silent else skipped(where, what))
    elif facts.reported != version_number(__version__):
        what = f"has version {version_text(facts.reported)}, but the package has {__version__}"
        results.append(problem(where, what, _AGAIN))
    else:
        results.append(ok(where, f"version {version_text(facts.reported)}, like the package"))
    return results


def version_number(text: str) -> int:
    """Return "1.2.3" as 10203, as the library reports it; text after the third number is ignored."""
    major, minor, patch = (int("".join(filter(str.isdigit, part)) or 0) for part in (*text.split("."), "0", "0")[:3])
    return major * 10000 + minor * 100 + patch


def version_text(number: int) -> str:
    """Return 10203 as "1.2.3"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _reported(path: Path) -> tuple[int | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "socket"
        agent = ScriptedAgent(socket, [])
        environment = {**os.environ, "LD_PRELOAD": str(path), "GPUSHARE_SOCKET": str(socket)}
        environment.pop("GPUSHARE_DISABLE", None)
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=_TIMEOUT
            )
            if done.returncode:
                # the driver is missing or fails, which the driver's check reports
                return None, ""
            hello = agent.peer(timeout=2).hello
        except subprocess.TimeoutExpired:
            return None, f"a program that calls cuInit with the library did not end within {_TIMEOUT:g} s"
        except queue.Empty:
            return None, "a program that calls cuInit with the library did not connect to its session's socket"
        finally:
            agent.stop()
    return (hello.fields[2], "") if hello is not None else (None, "a program with the library sent no HELLO")
