"""Databases to test the history with: SQLite in a file, and Debian's PostgreSQL with a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


def find(program: str) -> str | None:
    """Return the path of one of PostgreSQL's programs, which Debian does not put on the PATH."""
    found = sorted(str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return shutil.which(program) or (found[-1] if found else None)


@contextmanager
def postgresql() -> Iterator[str]:
    """Run a server in a folder of its own, on a Unix socket only, and yield its URL."""
    initdb, server = find("initdb"), find("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    # PostgreSQL refuses to run as root, and pytest's folders are closed to others
    as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
    with TemporaryDirectory(prefix="gspg") as made:
        folder = Path(made)
        if as_user:
            shutil.chown(folder, "nobody", "nogroup")
        subprocess.run(
            [*as_user, initdb, "-D", folder / "data", "-U", "gpushare", "-A", "trust", "--no-sync", "-E", "UTF8"],
            check=True, capture_output=True, cwd=folder,
        )  # fmt: skip
        process = subprocess.Popen(
            [*as_user, server, "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait(process, folder, as_user)
            yield f"postgresql+psycopg://gpushare@/postgres?host={folder}"
        finally:
            # a fast shutdown: SIGTERM waits for connections
            process.send_signal(signal.SIGINT)
            process.wait(20)


def _wait(process: subprocess.Popen[bytes], folder: Path, as_user: list[str]) -> None:
    ready = find("pg_isready")
    assert ready is not None
    for _ in range(200):
        assert process.poll() is None, "PostgreSQL has ended"
        if subprocess.run([*as_user, ready, "-q", "-t", "1", "-h", folder], cwd=folder).returncode == 0:
            return
        subprocess.run(["sleep", "0.05"])
    raise TimeoutError("PostgreSQL does not answer")
