"""Records of sessions on disk, from which the agent restores them after a restart.

Each record is a JSON file, read without waiting and replaced atomically: after a crash, either the old or the new file
exists. `RecordFolder` reads and writes the files and blocks on the disk; `Store` writes without delaying the event
loop. `Cordons` stores the cordons of the node and its GPUs. `SessionRegistry.restore` (sessions/registry.py) reads the
records after a restart and drops those of ended processes. sessions/session.py defines a session's state that is lost
in a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.controls import NO_CONTROLS, Controls, Cordon, Message
from gpushare_spawner.model.kubernetes.annotations import ShareChangeAnswer
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.part import faults
from gpushare_spawner.model.quantity import Instant, shifted
from gpushare_spawner.model.report import NO_HITS, NOTHING, Delivered, MemoryLimitHits, Notice, Units
from gpushare_spawner.model.share import Tier, UseRule
from gpushare_spawner.model.share_status import CellsStatus
from gpushare_spawner.wording.actions import UNREADABLE

log = logging.getLogger(__name__)


class PodOwner(BaseModel):
    """The pod with which a session ends, on Kubernetes."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    namespace: str
    name: str
    uid: str = ""
    """The pod's uid; empty for a pod that holds our devices without a session label."""
    devices: dict[str, tuple[str, ...]]
    """IDs of the devices that the kubelet assigned to the pod, keyed by GPU UUID."""
    given: tuple[tuple[str, ...], ...] = ()
    """The same IDs, grouped by the kubelet's grants: each grant is for one GPU and one container."""
    folders: tuple[str, ...] = ()
    """Names of its mounted folders; empty: one folder per grant, named after its IDs."""
    seen: tuple[str, ...] = ()
    """The handled tier decisions from the pod's annotations, latest last."""
    averted: Notice | None = None
    """The notice in the pod's annotations that the agent has withdrawn because work averts its action; None if there is
    none."""
    notice_before: Notice | None = None
    """The notice in the pod's annotations, if it was written before a step of the clock: its instants are never shifted
    there."""
    notice_shift: float = 0.0
    """Sum of the clock's steps since then, in seconds."""
    placed_units: Units | None = None
    """Units that its devices represent on each of its GPUs; None if they represent the session's share, which has not
    changed."""
    resized: ShareChangeAnswer | None = None
    """The last answer to a share change that its annotations requested."""

    @property
    def key(self) -> tuple[str, str]:
        """The pair (namespace, name)."""
        return self.namespace, self.name

    @property
    def grants(self) -> tuple[tuple[str, ...], ...]:
        """IDs that were granted together; each such grant has a folder."""
        return self.given or tuple(self.devices.values())

    def notice_of_now(self, notice: Notice | None) -> Notice | None:
        """Return the notice in the pod's annotations, shifted to the current clock."""
        if notice is None or notice != self.notice_before:
            return notice
        return notice.model_copy(update={"at": shifted(notice.at, self.notice_shift)})

    def clock_was_set(self, shown: Notice | None, by: float) -> Notice | None:
        """Record a step of the clock. Return the notice that the session's user sees, `shown`, shifted by the step."""
        notice = shown if shown is not None else self.averted
        if notice is None or notice != self.notice_of_now(self.notice_before):
            self.notice_before, self.notice_shift = notice, 0.0
        self.notice_shift += by
        now = self.notice_of_now(self.notice_before)
        if shown is None:
            self.averted = now
            return None
        self.averted = None  # another notice has been written since
        return now


class Suspension(BaseModel):
    """The suspended processes of a session, written before the first of them is suspended."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    processes: tuple[ProcessName, ...]
    sizes: tuple[Annotated[int, Field(ge=0)], ...]
    """Bytes on the GPU that each process needs for its restore."""
    complete: bool
    """Whether all processes were suspended when this was written."""

    @model_validator(mode="after")
    def _has_a_size_for_each(self) -> Self:
        if len(self.sizes) != len(self.processes):
            raise ValueError(f"{len(self.sizes)} sizes for {len(self.processes)} processes")
        return self


class Clock(BaseModel):
    """The wall clock at the time of a record."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    boot: str
    """The kernel's boot ID."""
    offset: Annotated[float, Field(allow_inf_nan=False)]
    """Seconds between the wall clock and the boot clock."""


class SessionRecord(BaseModel):
    """The part of a session that survives a restart; one JSON file each."""

    # A newer agent may have written fields that this version does not have.
    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    version: Literal[1] = 1
    request: OpenRequest
    opened_at: Instant
    """Opening time, by the clock at that time; it identifies the session in other processes.

    Durations count from `begun`.
    """
    clock_moved: float = 0.0
    """Sum of the clock's steps since then, in seconds."""
    clock: Clock | None = None
    """The clock of the instants below."""
    borrowed_units: Units
    borrowed_each: tuple[Units, ...] = ()
    """The borrowed units on each GPU, if `borrowed_units` does not say them, see `share.borrowed_as`."""
    effective_units: Units
    tier: Tier = Tier.ACTIVE
    tier_since: Instant
    process: ProcessName | None = None
    """The notebook server; None until it is confirmed."""
    pod: PodOwner | None = None
    """The pod; if it is set, there is no process."""
    use: UseRule | None = None
    """GPU work that restores the share. None: all work does so, or the session is active."""
    notice: Notice | None = None
    yields_until: Instant | None = None
    """End of the time for which the units taken by its tier are reserved for spawns in quota; None if they are not
    reserved."""
    background: bool = False
    """Whether it works only in GPU time and memory that no other session uses until then, see `TierRequest`."""
    controls: Controls = NO_CONTROLS
    messages: tuple[Message, ...] = ()
    """Messages to the session's user, one per cause, earliest first."""
    gpu_busy: bool = False
    """Whether there was GPU work when this was written."""
    last_gpu_activity: Instant | None = None
    gpu_seconds: Annotated[float, Field(ge=0)] = 0.0
    energy_joules: Annotated[float, Field(ge=0)] = 0.0
    """Energy of its GPUs, see `SessionReport.energy_joules`."""
    delivered: Delivered = NOTHING
    cells: CellsStatus = CellsStatus()
    memory_hits: MemoryLimitHits = NO_HITS
    suspension: Suspension | None = None
    """The suspended processes; None if all processes run."""

    @property
    def begun(self) -> float:
        """Time at which the session was opened, by the current clock."""
        return self.opened_at + self.clock_moved

    def clock_was_set(self, by: float) -> None:
        """Shift all instants by a step of the clock, so that durations stay the same.

        Keeps and exemptions still end at the time that the user was shown.
        """
        self.clock_moved += by
        self.tier_since = shifted(self.tier_since, by)
        if self.last_gpu_activity is not None:
            self.last_gpu_activity = shifted(self.last_gpu_activity, by)
        if self.yields_until is not None:
            self.yields_until = shifted(self.yields_until, by)
        if self.pod is not None:
            self.notice = self.pod.clock_was_set(self.notice, by)
        elif self.notice is not None:
            self.notice = self.notice.model_copy(update={"at": shifted(self.notice.at, by)})
        # the notice period of a drain counts from its message
        self.messages = tuple(message.model_copy(update={"at": shifted(message.at, by)}) for message in self.messages)
        keeps = tuple(shifted(begun, by) for begun in self.controls.keeps)
        self.controls = self.controls.model_copy(update={"keeps": keeps})

    @property
    def owner(self) -> ProcessName | PodOwner | None:
        """The process or pod with which the session ends; None until its server is confirmed."""
        return self.process if self.process is not None else self.pod

    @property
    def gpus_unknown(self) -> bool:
        """Whether another layer has assigned GPUs to the pod: then only their number is known, from its request."""
        return self.pod is not None and self.request.layer is not LayerName.NATIVE

    @classmethod
    def opened(cls, request: OpenRequest, now: float) -> SessionRecord:
        """Return the record of a session that begins now (seconds since the epoch)."""
        return cls(
            request=request,
            opened_at=now,
            borrowed_units=request.borrowed_units,
            effective_units=request.share_units,
            tier_since=now,
        )


MAX_RECORD_BYTES = 1024 * 1024
"""Maximum size of a record. A record is about 1 KiB; a bigger file is not a record."""


def regular_content(path: Path) -> bytes:
    """Return a file's content, waiting only for the disk. Raises OSError or ValueError."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > MAX_RECORD_BYTES:
            raise ValueError(f"the file has {status.st_size} bytes, more than any record")
        return opened.read(MAX_RECORD_BYTES)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically, even in a crash. Raises OSError, leaving the old file intact.

    The file gets the mode regardless of the umask. By default only this user can read it: others can traverse the state
    folder, but must not read its records.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.unlink(missing_ok=True)
        with open(fresh, "xb", opener=_private) as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
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
    """Flush the folder's list of files to disk. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def short_name(session_id: str) -> str:
    """Return a session's file name: fixed length, and safe for any user name."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]


def _file_name(record: SessionRecord) -> str:
    return f"{short_name(record.request.id)}.json"


def _left_name(record: SessionRecord) -> str:
    """Return a file name for a record of leftover processes; a session can have several in succession."""
    pids = record.suspension.processes if record.suspension is not None else ()
    return f"{short_name(record.request.id)}-{'-'.join(str(pid.pid) for pid in pids[:4])}.left"


class RecordFolder:
    """Reader and writer of the files. Calls block on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def load(self) -> list[SessionRecord]:
        """Return all readable session records.

        An unreadable record is set aside, with the reason in a file next to it and in the log.
        """
        records = self._good("*.json")
        for unfinished in self.folder.glob("*.new"):
            with contextlib.suppress(OSError):
                unfinished.unlink()
        return records

    def left(self) -> list[SessionRecord]:
        """Return all readable records of processes that were left suspended.

        Their session has ended, or continues without them.
        """
        return self._good("*.left")

    def unreadable(self) -> list[Path]:
        """Return the records that were set aside."""
        return sorted(self.folder.glob("*.bad"))

    def _good(self, pattern: str) -> list[SessionRecord]:
        records = []
        for path in sorted(self.folder.glob(pattern)):
            try:
                record = SessionRecord.model_validate_json(regular_content(path))
                if path.suffix == ".left" and record.suspension is None:
                    raise ValueError("it contains no suspended process")
                if path.name not in (_file_name(record), _left_name(record)):
                    raise ValueError(f"the record of session {record.request.id} has the wrong file name")
                records.append(record)
            except (OSError, ValueError) as error:
                self._set_aside(path, error)
        return sorted(records, key=lambda record: record.opened_at)

    def write(self, name: str, record: bytes | None) -> None:
        """Replace or remove a record. Raises OSError, leaving the old record intact."""
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
        reason = "; ".join(faults(error, "file")) if isinstance(error, ValidationError) else str(error)
        aside = path.with_suffix(".bad")
        log.error("the record %s cannot be read and is set aside as %s: %s", path, aside.name, reason)
        with contextlib.suppress(OSError):
            os.replace(path, aside)
            beside = aside.with_suffix(".reason")
            beside.unlink(missing_ok=True)
            with open(beside, "x") as file:
                file.write(reason + "\n")


class Store:
    """Writer of records in a thread, in order, only the latest of each session.

    A failing disk (full, read-only) does not stop the agent: it continues from memory, logs the failure once, and
    writes the missing records at each `retry`.
    """

    def __init__(self, folder: RecordFolder, changed: Callable[[], None] = lambda: None) -> None:
        """Start without records to write. `changed` is called after `failure` changes."""
        self._folder = folder
        self._changed = changed
        self._refused: set[str] = set()
        """Names of the records that could not be written last time."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._unwritten: dict[str, bytes | None] = {}
        self._writing: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Reason why records are only in memory; None: all are on disk."""

    def put(self, record: SessionRecord) -> None:
        """Write this record soon."""
        self._put(_file_name(record), record.model_dump_json().encode())

    def remove(self, session_id: str) -> None:
        """Remove this session's record soon."""
        self._put(f"{short_name(session_id)}.json", None)

    def put_left(self, record: SessionRecord) -> None:
        """Write the record of processes that are left suspended, soon and before later requests."""
        self._put(_left_name(record), record.model_dump_json().encode())

    def remove_left(self, record: SessionRecord) -> None:
        """Remove the record of such processes soon."""
        self._put(_left_name(record), None)

    def _put(self, name: str, content: bytes | None) -> None:
        self._unwritten[name] = content
        self._start()

    async def flush(self) -> None:
        """Wait until all requested records are on disk or have failed to be written."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    async def missing(self, session_id: str) -> str | None:
        """Wait, like `flush`. Return why the session's current record is not on disk; None if it is."""
        await self.flush()
        return self.failure if f"{short_name(session_id)}.json" in self._refused else None

    def retry(self) -> None:
        """Retry the failed writes."""
        if self._unwritten:
            self._start()

    async def close(self) -> None:
        """Write the remaining records and stop."""
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
                    log.error("sessions are only in memory, and would be lost if the agent stopped now: %s", failure)
                else:
                    log.warning("records of sessions are written again")
                self.failure = failure
                self._changed()


CORDON_AUTHOR = "gpushare-agent"
"""Author of the cordon set on a node with unknown cordons."""
_CORDONS = TypeAdapter(tuple[Cordon, ...])


class Cordons:
    """``cordons.json``, replaced atomically: after a crash, either the old or the new file exists."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Read the file. A missing file means no cordons.

        An unreadable file cordons the node until an admin ends the cordon: a GPU that an admin has cordoned must not
        get sessions now. `clock`: seconds since the epoch.
        """
        self.path = path
        self._writing = asyncio.Lock()
        self.now: tuple[Cordon, ...] = ()
        try:
            self.now = _CORDONS.validate_json(regular_content(path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ValidationError) as error:
            self.now = (Cordon(by=CORDON_AUTHOR, reason=UNREADABLE, since=clock()),)
            log.error("cannot read the cordons of this node, %s; its GPUs get no new sessions: %s", path, error)

    async def put(self, gpu: str, cordon: Cordon | None) -> None:
        """Set the cordon of a GPU (UUID) or of the node (empty). Raises OSError without making a change."""
        async with self._writing:
            others = [other for other in self.now if other.gpu != gpu]
            await self._write([*others, *([cordon] if cordon is not None else [])])

    async def replace(self, cordons: Iterable[Cordon]) -> None:
        """Set all cordons; nothing is written if they are the same. Raises OSError."""
        cordons = sorted(cordons, key=lambda cordon: cordon.gpu)
        async with self._writing:
            if cordons != sorted(self.now, key=lambda entry: entry.gpu):
                await self._write(cordons)

    async def _write(self, cordons: list[Cordon]) -> None:
        # Write them to disk first, so that an answered request survives a crash.
        await asyncio.to_thread(replace_file, self.path, _CORDONS.dump_json(tuple(cordons)))
        self.now = tuple(cordons)
