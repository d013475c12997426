"""Frames of the session socket, as bytes. Pure data.

A frame is 128 bytes, little-endian: magic, version, type, serial, flags, GPU (16 raw bytes), and twelve unsigned 64-bit
fields. The socket is SOCK_SEQPACKET: one packet is one frame, so a packet of another length is detected. The sequence
of frames is in docs/reference/protocol.md, and the same layout in C is in native/preload/platform/frames.h. A notebook
server reads JSON records instead, see `model.share_status.AgentRecord`.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from enum import IntEnum, IntFlag

FRAME_BYTES = 128
MAGIC = 0x48535047  # "GPSH"
VERSION = 1
FIELDS = 12
_LAYOUT = struct.Struct("<IHHII16s12Q")
NO_GPU = bytes(16)
_MASK = 2**64 - 1


class FrameError(ValueError):
    """Error: the bytes are not a frame of this version. The connection ends."""


class Kind(IntEnum):
    """Frame types: below 64 from the notebook's side, 64 and above from the agent.

    docs/reference/protocol.md includes the docstring of each. "Of a GPU" means that the frame names a GPU.
    """

    HELLO = 1
    """Fields: f0 role: 1 CUDA process, 2 observer, 3 notebook server; f1 pid as the process sees it; f2 library version
    (major*10000 + minor*100 + patch); f3 feature bits."""
    REQUEST = 2
    """Of a GPU. A launch waits, or work from before this WELCOME still runs: f0 managed bytes allocated on this GPU, f1
    plain bytes (they cannot leave), f2 burst number, f3 the part of f1 that calls of a process with engine `suspend`
    wait for."""
    RELEASE = 3
    """Of a GPU. The gate is closed and the device is quiet: f0 lease id, f1 GPU-busy time in the lease, f2 reason: 0
    idle, 1 revoked. Memory that REVOKE requested to page out follows as PAGED_OUT."""
    MEMORY = 4
    """Of a GPU. Allocations changed (at most every 10 ms): f0 managed bytes, f1 plain bytes, f2 as f3 of REQUEST."""
    IDLE = 5
    """Of a GPU. The burst is over and the lease is kept: f0 lease id, f1 GPU-busy time in the lease so far, f2 time
    since the last work ended."""
    BUSY = 6
    """Of a GPU. Work resumes under a kept lease: f0 lease id."""
    PAGED_IN = 7
    """Of a GPU: f0 bytes prefetched to the device after GRANT or PAGE_IN, f1 time it took."""
    PAGED_OUT = 8
    """Of a GPU: f0 bytes moved to host memory, f1 time it took, f2 the lease id of the REVOKE, or 0 after PAGE_OUT."""
    KERNELS = 9
    """From a notebook server: f0 busy kernels, f1 kernels, f2 instant of the kernels' last activity (0 unknown). Counts
    while it is connected."""
    QUERY = 10
    """From an observer. The answer is one STATUS for each GPU of the session, or a record to a notebook server: its
    status, or with f0 = 1 (feature CELLS) its cells."""
    RESERVE = 11
    """Of a GPU. Feature RESERVE. f0 bytes that the process needs in all on this GPU; f1 bytes of every kind that it has
    allocated now; f2 size of the requested allocation (0: a statement right after WELCOME); f3 a number, not 0, that
    RESERVED repeats (0 in the statement); f4 kind of the allocation: 0 memory that stays on the GPU, 1 memory that the
    library made movable, 2 the program's own managed memory."""
    RETURN = 12
    """Of a GPU. Answers RECALL: f0 bytes by which the allowance is reduced, f1 bytes allocated now, f2 the number of
    the RECALL."""
    ASK = 13
    """From a notebook server: f0 a number that the answer repeats, 1 to 2^32-1; f1 request: 1 keep the share, 2 end the
    keep, 3 release the share, 4 stop the server, 5 change the share, 6 list the shares that the user can change to, 7
    say how many keeps are left, 8 give advice on the size of the share; f2 seconds of the keep (1) or units of the
    share (5). Answered with a record."""
    SUSPEND_READY = 14
    """Answers SUSPEND: f0 the number of the SUSPEND; f1 bytes of the program's own managed memory; f2 number of memory
    objects, events and semaphores of other processes or APIs that it has opened; f3 number of its own that it has
    exported; f4 CUDA contexts; f5 1: ready, 0: it cannot be suspended now, and continues; f6 bytes of plain memory on
    all GPUs."""
    CELL = 15
    """From a notebook server, feature CELLS: f0 event: 1 submitted, 2 started, 3 ended; f1 number of the execution, not
    0; f2 number of the kernel; f3 hash of the cell's text with a key that only the notebook server has; f4 the kernel's
    pid as the notebook server sees it, f5 the execution count, f6 the event's instant (0: unknown)."""

    WELCOME = 64
    """Answers HELLO: f0 share units, f1 tier (0 active, 1 downgraded, 2 released), f2 effective units, f3 borrowed
    units, f4 bit 0: turn allocations into managed ones (oversubscription), f5 number of DEVICE frames that follow; f6
    feature bits."""
    DEVICE = 65
    """Of a GPU: f0 bytes to show as the GPU's total memory, f1 bytes guaranteed. Sent again when the share changes. A
    CUDA process of a session with a MIG instance gets it twice, with the UUIDs of the GPU and of the instance."""
    GRANT = 66
    """Of a GPU. The lease: f0 lease id, f1 time slice (0: until revoked), f2 bytes to prefetch before the gate opens,
    f3 the lease's pace (0: none; feature PACE). With f0 = the lease that is held: its new pace. With f0 = 0: still
    waiting; f4 = 1 then: the memory that calls wait for will not become available."""
    REVOKE = 67
    """Of a GPU: f0 lease id, f1 bytes to page out after RELEASE (0: none), f2 reason: 0 idle, 1 time slice over, 2
    another session's guarantee, 3 released by the culler."""
    PAGE_OUT = 68
    """Of a GPU. To a process without a lease: f0 bytes to page out."""
    TIER = 69
    """Fields: f0 tier, f1 effective units, f2 borrowed units, f3 guaranteed units, f4 share units."""
    PAGE_IN = 70
    """Of a GPU. Feature PAGE_IN. A launch is expected. To a process without a lease: f0 bytes to prefetch. GRANT or
    PAGE_OUT can follow before they are in. Answered with PAGED_IN, together with the prefetch of such a GRANT."""
    STATUS = 71
    """Of a GPU. Answers QUERY of an observer: f5 bytes allocated, f7 bytes shown as total."""
    RESERVED = 72
    """Of a GPU. Answers RESERVE: f0 bytes by which the allowance grows, f1 result: 0 granted, 1 the session's limit, 2
    the session's host memory, 3 the node's host memory; f2 the number of the RESERVE, f3 bytes that the session's other
    processes have allocated."""
    RECALL = 73
    """Of a GPU: f0 bytes of the unused allowance that the agent recalls, f1 a number that RETURN repeats."""
    SESSION_MEMORY = 74
    """Of a GPU: f0 = 0, to a CUDA process: f1 bytes that the session's other processes have allocated. To an observer
    with feature RESERVE, before the STATUS frames of an answer: f0 = 1, for each of the 16 largest processes on the GPU
    and those of USE: f1 its pid as it numbers itself, f2 bytes that it has allocated."""
    USE = 79
    """Of a GPU. To observers with the feature, before the STATUS frames of an answer: f0 pid of a process in its own
    namespace, or 0: the session; f1 its GPU time within the last f2. One frame for the session on each GPU, and one for
    each of its 16 busiest processes there."""
    SUSPEND = 80
    """Feature SUSPEND: prepare to be suspended. f0 a number, not 0, that SUSPEND_READY and RESUMED repeat. The process
    holds no lease then."""
    RESUMED = 81
    """Fields: f0 the number of the SUSPEND: the process runs again, or was not suspended. Driver calls are allowed; GPU
    work still needs a lease."""
    ERROR = 127
    """Fields: f0 code: 1 malformed, 2 version, 3 not allowed, 4 session closed. The connection ends."""


class Role(IntEnum):
    """The kind of the process that sends HELLO."""

    CUDA = 1
    """A process with libgpushare.so that called cuInit."""
    OBSERVER = 2
    """A process that uses NVML. It holds no lease and reads the session's figures."""
    NOTEBOOK = 3
    """The notebook server or ``gpushare status``. It reports its kernels, sends asks, and reads JSON records."""


class Feature(IntFlag):
    """Capabilities of one side beyond the original version 1. Sent in HELLO and WELCOME.

    A side uses a feature only if the peer has set its bit. A peer that is older than these bits sends 0.
    """

    PACE = 1
    """The library obeys f3 of GRANT. The agent sends f3 of GRANT."""
    RESERVE = 2
    """The library reserves memory before it allocates. The agent answers reservations."""
    USE = 32
    """An observer understands USE. The agent sends USE."""
    SUSPEND = 64
    """The library runs with engine `suspend`: memory stays plain, and it answers SUSPEND. The agent suspends such
    processes."""
    OBSERVE = 128
    """The library runs with engine `observe`: it sends no REQUEST, and reports its bursts without a lease. The agent
    accepts BUSY and IDLE with lease id 0, in sessions on GPUs that another layer shares."""
    CELLS = 256
    """The agent accepts CELL from notebook servers."""
    PAGE_IN = 512
    """The library obeys PAGE_IN."""


class ReserveKind(IntEnum):
    """The kind of memory for which RESERVE is sent."""

    PLAIN = 0
    """Memory that cannot leave the GPU."""
    MANAGED = 1
    """Memory that the library made movable."""
    OWN_MANAGED = 2
    """Managed memory that the program itself allocates. The session's limit does not apply to it, just as the size of a
    smaller GPU would not."""


class SessionMemoryTopic(IntEnum):
    """The subject of a SESSION_MEMORY frame."""

    OTHERS = 0
    """To a CUDA process: the memory that the session's other processes have allocated."""
    PROCESS = 1
    """To an observer: the memory that one process has allocated."""


class QueryTopic(IntEnum):
    """The subject of a notebook server's QUERY frame."""

    STATUS = 0
    CELLS = 1


class CellEvent(IntEnum):
    """The event of a CELL frame."""

    SUBMITTED = 1
    """The notebook server has received the request to execute the cell; the kernel has not."""
    STARTED = 2
    ENDED = 3


class AskKind(IntEnum):
    """The request of an ASK frame."""

    KEEP = 1
    """The value is the keep's length in seconds."""
    END_KEEP = 2
    RELEASE = 3
    STOP = 4
    SHARE = 5
    """The value is the share in units."""
    SHARES = 6
    """The shares that the user may change to. The answer's text is a JSON list of units, smallest first."""
    KEEPS = 7
    """The user's remaining keeps and their maximum length. The answer's text is a sentence."""
    ADVICE = 8
    """Advice on the size of the share. The answer's text is JSON: the advised units and a sentence, or null."""

    @property
    def reads(self) -> bool:
        """Whether the ask only reads. Such an ask changes nothing and is not a user action."""
        return self in (AskKind.SHARES, AskKind.KEEPS, AskKind.ADVICE)


MAX_TEXT_LETTERS = 500
"""Maximum characters of a text for a notebook server."""


@dataclass(frozen=True)
class Frame:
    """One message. ``fields`` are padded with zeros to twelve.

    Their meaning depends on ``kind``, see docs/reference/protocol.md.
    """

    kind: Kind
    fields: tuple[int, ...] = ()
    gpu: bytes = NO_GPU
    serial: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        """Return the frame's 128 bytes. Fields are truncated to 64 bits."""
        if len(self.fields) > FIELDS:
            raise FrameError(f"a frame has {FIELDS} fields, not {len(self.fields)}")
        padded = [field & _MASK for field in self.fields] + [0] * (FIELDS - len(self.fields))
        return _LAYOUT.pack(
            MAGIC, VERSION, self.kind, self.serial & 0xFFFFFFFF, self.flags & 0xFFFFFFFF, self.gpu, *padded
        )

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Return the frame. Raises FrameError, with the reason, if the bytes are not a frame of this version."""
        if len(data) != FRAME_BYTES:
            raise FrameError(f"a frame has {FRAME_BYTES} bytes, not {len(data)}")
        magic, version, kind, serial, flags, gpu, *fields = _LAYOUT.unpack(data)
        if magic != MAGIC:
            raise FrameError(f"wrong magic {magic:#010x}, expected {MAGIC:#010x}")
        if version != VERSION:
            raise FrameError(f"protocol version {version}, this side speaks {VERSION}")
        try:
            frame_kind = Kind(kind)
        except ValueError:
            raise FrameError(f"unknown frame type {kind}") from None
        return cls(frame_kind, tuple(fields), gpu, serial, flags)


def gpu_bytes(gpu_uuid: str) -> bytes:
    """Return NVML's "GPU-9f3c…", or "MIG-9f3c…", as the 16 bytes of CUDA's CUuuid. Raises ValueError for other text."""
    try:
        return uuid.UUID(gpu_uuid.removeprefix("GPU-").removeprefix("MIG-")).bytes
    except ValueError:
        raise ValueError(
            f"{gpu_uuid!r} is not the UUID of a GPU; NVML writes GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
        ) from None
