"""Session records on disk: one JSON file each, replaced atomically: a crash leaves the old one or the new one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from gpushare_spawner.agent.state.session_record import SessionRecord
from gpushare_spawner.agent.state.state_file import regular_content, replace_file, sync_folder

log = logging.getLogger(__name__)


def short_name(session_id: str) -> str:
    """A session's file name: fixed length, and safe whatever the user is called."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]


def _file_name(record: SessionRecord) -> str:
    return f"{short_name(record.request.id)}.json"


def _left_name(record: SessionRecord) -> str:
    """A session can leave several processes behind, one after the other."""
    pids = record.suspension.processes if record.suspension is not None else ()
    return f"{short_name(record.request.id)}-{'-'.join(str(one.pid) for one in pids[:4])}.left"


class RecordFolder:
    """Reads and writes the files. Calls block on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def load(self) -> list[SessionRecord]:
        """All good records of sessions. One that cannot be read is set aside, with the reason beside it and in the
        log."""
        records = self._good("*.json")
        for unfinished in self.folder.glob("*.new"):
            with contextlib.suppress(OSError):
                unfinished.unlink()
        return records

    def left(self) -> list[SessionRecord]:
        """All good records of processes that were left suspended: their session has ended, or goes on without them."""
        return self._good("*.left")

    def unreadable(self) -> list[Path]:
        """Records that were set aside."""
        return sorted(self.folder.glob("*.bad"))

    def _good(self, pattern: str) -> list[SessionRecord]:
        records = []
        for path in sorted(self.folder.glob(pattern)):
            try:
                record = SessionRecord.model_validate_json(regular_content(path))
                if path.suffix == ".left" and record.suspension is None:
                    raise ValueError("it names no suspended process")
                if path.name not in (_file_name(record), _left_name(record)):
                    raise ValueError(f"the record of session {record.request.id} does not belong under this name")
                records.append(record)
            except (OSError, ValueError) as error:
                self._set_aside(path, error)
        return sorted(records, key=lambda record: record.opened_at)

    def write(self, name: str, record: bytes | None) -> None:
        """Replace a record, or remove it. Raises OSError; the old record is whole then."""
        path = self.folder / name
        if record is None:
            path.unlink(missing_ok=True)
            sync_folder(self.folder)
        else:
            replace_file(path, record)

    def replace(self, record: SessionRecord) -> None:
        """Write a session's record. Raises OSError."""
        self.write(_file_name(record), record.model_dump_json().encode())

    def forget_left(self, record: SessionRecord) -> None:
        """Remove the record of processes that were left suspended. Raises OSError."""
        self.write(_left_name(record), None)

    def _set_aside(self, path: Path, error: Exception) -> None:
        reason = str(error)
        if isinstance(error, ValidationError):
            parts = [f"{'.'.join(map(str, part['loc'])) or 'file'}: {part['msg']}" for part in error.errors()]
            reason = "; ".join(parts)
        aside = path.with_suffix(".bad")
        log.error("the record %s cannot be read and is set aside as %s: %s", path, aside.name, reason)
        with contextlib.suppress(OSError):
            os.replace(path, aside)
            beside = aside.with_suffix(".reason")
            beside.unlink(missing_ok=True)
            with open(beside, "x") as file:
                file.write(reason + "\n")


class Store:
    """Writes records behind the event loop's back, in order, the latest of each session only.

    A disk that refuses (full, read-only) stops nothing: the agent goes on from memory, the log says so once, and what
    is missing on the disk is tried again with each `retry`.
    """

    def __init__(self, folder: RecordFolder, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when `failure` has changed."""
        self._folder = folder
        self._changed = changed
        self._refused: set[str] = set()
        """Names of what the disk refused when it was last tried."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._unwritten: dict[str, bytes | None] = {}
        self._writing: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why records are in memory only; None while all is well."""

    def put(self, record: SessionRecord) -> None:
        """Write this record soon."""
        self._put(_file_name(record), record.model_dump_json().encode())

    def remove(self, session_id: str) -> None:
        """Forget this session's record soon."""
        self._put(f"{short_name(session_id)}.json", None)

    def put_left(self, record: SessionRecord) -> None:
        """Write the record of processes that are left suspended soon, and before what is asked for later."""
        self._put(_left_name(record), record.model_dump_json().encode())

    def remove_left(self, record: SessionRecord) -> None:
        """Forget it soon."""
        self._put(_left_name(record), None)

    def _put(self, name: str, content: bytes | None) -> None:
        self._unwritten[name] = content
        self._start()

    async def flush(self) -> None:
        """Wait until all that was asked for is on the disk, or the disk has refused it."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    async def missing(self, session_id: str) -> str | None:
        """Wait as `flush` does. Return why the session's record is not on the disk as it is now; None: it is."""
        await self.flush()
        return self.failure if f"{short_name(session_id)}.json" in self._refused else None

    def retry(self) -> None:
        """Try again what the disk refused."""
        if self._unwritten:
            self._start()

    async def close(self) -> None:
        """Write what is left and stop."""
        self.retry()
        await self.flush()
        if self._unwritten:
            log.error("%d records of sessions cannot be written: %s", len(self._unwritten), self.failure)
        self._thread.shutdown()

    def _start(self) -> None:
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        refused: dict[str, bytes | None] = {}
        failure = None
        try:
            while self._unwritten:
                name = next(iter(self._unwritten))
                content = self._unwritten.pop(name)
                try:
                    await loop.run_in_executor(self._thread, self._folder.write, name, content)
                except OSError as error:
                    refused[name] = content
                    failure = f"{error.strerror or error} ({self._folder.folder})"
        finally:
            self._writing = None
            for name, content in refused.items():
                self._unwritten.setdefault(name, content)
            self._refused = set(refused)
            if failure != self.failure:
                if failure:
                    log.error(
                        "sessions are kept in memory only, and would be lost if the agent stopped now: %s", failure
                    )
                else:
                    log.warning("records of sessions are written again")
                self.failure = failure
                self._changed()
