"""Files of the state folder: read without waiting, and replaced atomically."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

MAX_RECORD_BYTES = 1024 * 1024
"""A record is about 1 KiB; a bigger file is none of ours."""


def regular_content(path: Path) -> bytes:
    """A file's content, without waiting for anything else than the disk. Raises OSError or ValueError."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > MAX_RECORD_BYTES:
            raise ValueError(f"the file has {found.st_size} bytes, more than any record")
        return opened.read(MAX_RECORD_BYTES)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file; a crash leaves the old one or the new one. Raises OSError; the old file is whole then.

    It is this user's alone, whatever the umask: others can pass the state folder, and nobody else reads its records.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.unlink(missing_ok=True)
        with open(fresh, "xb", opener=_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Have the disk keep which files a folder has. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
