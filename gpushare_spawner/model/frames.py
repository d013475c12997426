"""Frames of the session socket, as bytes, and texts that consist of several TEXT frames. Pure data.

A frame is 128 bytes, little-endian: magic, version, type, serial, flags, GPU (16 raw bytes), twelve unsigned 64-bit
fields. The socket is SOCK_SEQPACKET: one packet is one frame, so a packet of another length is detected. The sequence
of frames is in docs/reference/protocol.md, the same layout in C in native/preload/platform/frames.h.
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
_TEXT_LAYOUT = struct.Struct("<8Q")
NO_GPU = bytes(16)
_MASK = 2**64 - 1


class FrameError(ValueError):
    """Error: the bytes are not a frame of this version. The connection ends."""


class Kind(IntEnum):
    """Frame types: below 64 from the notebook's side, from 64 on from the agent's.

    docs/reference/protocol.md shows the text of each. "Of a GPU": the frame names a GPU.
    """

    HELLO = 1
    """Fields: f0 role: 1 CUDA process, 2 observer; f1 pid as the process sees it; f2 library version (major*10000 +
    minor*100 + patch); f3 feature bits."""
    REQUEST = 2
    """Of a GPU. A launch waits, or work from before this WELCOME is still under way: f0 managed bytes allocated on this
    GPU, f1 plain bytes (they cannot leave), f2 burst number, f3 of f1, bytes that calls of a process of engine
    `suspend` wait for."""
    RELEASE = 3
    """Of a GPU. The gate is closed and the device is quiet: f0 lease id, f1 GPU-busy time in the lease, f2 reason: 0
    idle, 1 revoked. Memory that REVOKE requested to page out follows as PAGED_OUT."""
    MEMORY = 4
    """Of a GPU. Allocations changed (at most every 10 ms): f0 managed bytes, f1 plain bytes, f2 as f3 of REQUEST."""
    IDLE = 5
    """Of a GPU. The burst is over, the lease is kept: f0 lease id, f1 GPU-busy time in the lease so far, f2 time since
    the last work ended."""
    BUSY = 6
    """Of a GPU. Work again under a kept lease: f0 lease id."""
    PAGED_IN = 7
    """Of a GPU: f0 bytes prefetched to the device after GRANT, f1 time it took."""
    PAGED_OUT = 8
    """Of a GPU: f0 bytes moved to host memory, f1 time it took, f2 the lease id of the REVOKE, or 0 after PAGE_OUT."""
    KERNELS = 9
    """From an observer: f0 busy kernels, f1 kernels, f2 instant of the kernels' last activity (0 unknown). Counts while
    the observer is connected."""
    QUERY = 10
    """From an observer. The answer is DELIVERED (with that feature) and one STATUS for each GPU of the session."""
    RESERVE = 11
    """Of a GPU. Feature RESERVE. f0 bytes that the process needs in all on this GPU; f1 bytes that it has allocated
    now, of every kind; f2 size of the allocation that it is for (0: a statement right after WELCOME); f3 a number, not
    0, that RESERVED repeats (0 in the statement); f4 what for: 0 memory that stays on the GPU, 1 memory that the
    library made movable, 2 managed memory of the program's own."""
    RETURN = 12
    """Of a GPU. Answers RECALL: f0 bytes by which the allowance is reduced, f1 bytes allocated now, f2 the number of
    the RECALL."""
    ASK = 13
    """From an observer, feature CONTROLS: f0 a number that the answer repeats, 1 to 2^32-1; f1 what for: 1 keep the
    share, 2 end the keep, 3 release the share, 4 stop the server, 5 change the share, 6 list the shares that the user
    can change to, 7 say how many keeps are left; f2 seconds of the keep (1) or units of the share (5). Answered with
    TEXT."""
    SUSPEND_READY = 14
    """Answers SUSPEND: f0 the number of the SUSPEND; f1 bytes of managed memory of the program's own; f2 pieces of
    memory, events and semaphores of other processes or APIs that it has opened; f3 those of its own that it has
    exported; f4 CUDA contexts; f5 1: ready, 0: it cannot be suspended now, and runs on; f6 bytes of plain memory on all
    GPUs."""

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
    waiting; f4 = 1 then: the memory that calls wait for does not come."""
    REVOKE = 67
    """Of a GPU: f0 lease id, f1 bytes to page out after RELEASE (0: none), f2 reason: 0 idle, 1 time slice over, 2
    guarantee of another, 3 released by the culler."""
    PAGE_OUT = 68
    """Of a GPU. To a process without a lease: f0 bytes to page out."""
    TIER = 69
    """Fields: f0 tier, f1 effective units, f2 borrowed units, f3 guaranteed units, f4 share units."""
    ANNOUNCE = 70
    """To observers: f0 tier to come, f1 instant, f2 effective units then, f3 cause: 0 the session is idle, 1 the server
    has reached the greatest age that servers may have, 2 another cause, 3 a spawn in quota waits for units of this
    session, which is over quota, f4 the idle time or age at which it comes (0: not said); f1 = 0 withdraws the notice.
    With feature CAUSE it also precedes the STATUS frames that answer QUERY."""
    STATUS = 71
    """Of a GPU: f0 share units, f1 tier, f2 effective units, f3 borrowed units, f4 guaranteed units, f5 bytes
    allocated, f6 bytes on the GPU, f7 bytes shown as total, f8 lease: 0 none, 1 waiting, 2 held, f9 time since the last
    GPU work (2^64-1: none yet), f10 bits 0-31 sessions on this GPU, bits 32-63 of those with work, f11 instant of
    the notice's idle action (0 none). `flags`: bits 0-7 its tier, bits 8-15 the effective units after it; bit 16: the
    node has not granted CPU and memory again that the pod gave back while released; bit 17: the units that the tier
    took are kept for spawns in quota; bit 18: all processes of the session are suspended."""
    RESERVED = 72
    """Of a GPU. Answers RESERVE: f0 bytes that the allowance grows by, f1 result: 0 granted, 1 the session's limit, 2
    the session's host memory, 3 the node's host memory; f2 the number of the RESERVE, f3 bytes that the session's other
    processes have allocated."""
    RECALL = 73
    """Of a GPU: f0 bytes of the unused allowance that the agent recalls, f1 a number that RETURN repeats."""
    SESSION_MEMORY = 74
    """Of a GPU: f0 = 0, to a CUDA process: f1 bytes that the session's other processes have allocated. To an observer
    with feature RESERVE, before the STATUS frames of an answer: f0 = 1, for each of the 16 largest processes on the GPU
    and those of USE: f1 its pid as it numbers itself, f2 bytes that it has allocated; f0 = 2, of the session (no GPU):
    f1 the limit that refused an allocation last (as in RESERVED), f2 the time since then, f3 bytes requested, f4 the
    process's pid, f5 refused allocations since the session was opened, f6 bytes that the session had allocated on that
    GPU then."""
    DELIVERED = 76
    """To observers with the feature, before the STATUS frames of an answer; sums over the time in which others competed
    for the session's GPUs: f0 GPU time it was entitled to, f1 GPU time it received, f2 number of waits for a lease, f3
    wait that half of them did not exceed, f4 wait that 95 % did not exceed."""
    TEXT = 77
    """To observers with feature CONTROLS, one part of a text: f0 topic: 1 the answer to an ASK, 2 a message of an
    admin, 3 why the session cannot be suspended, 4 and 5 another layer; f1 the number of the ASK, or the instant of the
    message in milliseconds; f2 bits 0-15 which part, from 0, bits 16-31 the number of parts, 1 to 32, bit 32 of an
    answer: what was asked has been done; f3 bytes of the text in this frame, at most 64; f4 … f11 these bytes,
    UTF-8."""
    CONTROLS = 78
    """To observers with the feature, on each change and before the STATUS frames of an answer: f0 instant in
    milliseconds until which the user keeps the share (0: not kept), f1 instant in milliseconds until which an admin
    exempts the session from idle actions (0: none, 2^64-1: without end), f2 the largest share in units that the session
    can be changed to now (0: it cannot be changed), regardless of its user's templates."""
    USE = 79
    """Of a GPU. To observers with the feature, before the STATUS frames of an answer: f0 pid of a process in its own
    namespace, or 0: the session; f1 its GPU time within f2, the time before now. Once for the session on each GPU, and
    for the 16 busiest of its processes there."""
    SUSPEND = 80
    """Feature SUSPEND: prepare to be suspended. f0 a number, not 0, that SUSPEND_READY and RESUMED repeat. The process
    holds no lease then."""
    RESUMED = 81
    """Fields: f0 the number of the SUSPEND: the process runs again, or was not suspended after all. Driver calls are
    allowed; GPU work still needs a lease."""
    ERROR = 127
    """Fields: f0 code: 1 malformed, 2 version, 3 not allowed, 4 session closed. The connection ends."""


class Role(IntEnum):
    """The kind of the process that sends HELLO."""

    CUDA = 1
    """A process with libgpushare.so that called cuInit."""
    OBSERVER = 2
    """The notebook server or ``gpushare status``: holds no lease, receives tiers and notices."""


class Feature(IntFlag):
    """Abilities of one side beyond the first form of version 1. Sent in HELLO and WELCOME.

    A side uses a feature only if the peer has its bit. A peer that is older than these bits sends 0.
    """

    PACE = 1
    """The library obeys f3 of GRANT. The agent sends f3 of GRANT."""
    RESERVE = 2
    """The library reserves memory before it allocates. The agent answers reservations."""
    DELIVERED = 4
    """An observer understands DELIVERED. The agent sends DELIVERED."""
    CAUSE = 8
    """An observer accepts ANNOUNCE as a part of the answer to QUERY. The agent sends it, with the cause."""
    CONTROLS = 16
    """An observer understands TEXT and CONTROLS. The agent accepts ASK, and sends TEXT and CONTROLS."""
    USE = 32
    """An observer understands USE. The agent sends USE."""
    SUSPEND = 64
    """The library runs with engine `suspend`: memory stays plain, and it answers SUSPEND. The agent suspends such
    processes."""
    OBSERVE = 128
    """The library runs with engine `observe`: it sends no REQUEST, and reports its bursts without a lease. The agent
    accepts BUSY and IDLE with lease id 0, in sessions on GPUs that another layer shares."""


class ReserveKind(IntEnum):
    """The kind of memory that RESERVE is for."""

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
    LIMIT_HIT = 2
    """To an observer: the last refused allocation."""


class AskKind(IntEnum):
    """The request of an ASK frame."""

    KEEP = 1
    """The value is in seconds."""
    END_KEEP = 2
    RELEASE = 3
    STOP = 4
    SHARE = 5
    """The value is in units."""
    SHARES = 6
    """The shares that the user may change to: the answer's text is a JSON list of units, the smallest first."""
    KEEPS = 7
    """How many keeps the user has left, and for how long: the answer's text is a sentence."""

    @property
    def reads(self) -> bool:
        """Whether the ask only reads. It then changes nothing and is no action of the user."""
        return self in (AskKind.SHARES, AskKind.KEEPS)


class TextTopic(IntEnum):
    """The subject of a TEXT frame."""

    ANSWER = 1
    """The answer to an ask; its number is the ask's."""
    MESSAGE = 2
    """A message of an admin; its number is its instant in milliseconds since the epoch."""
    NOT_SUSPENDABLE = 3
    """Why a session of engine `suspend` cannot be suspended now; its number is 1."""
    LAYER = 4
    """The name of the sharing layer that gives the session its GPU, unless it is our own. Its number is the number of
    the session's GPUs."""
    LAYER_TROUBLE = 5
    """Problems of that layer for the session, in sentences; its number is 1."""


TEXT_BYTES = 64
"""Bytes of a text in one TEXT frame."""
MAX_TEXT_PARTS = 32
"""TEXT frames of one text."""
MAX_TEXT_LETTERS = 500
"""Characters of a text. A character takes at most 4 bytes of UTF-8, so that the text fits into its frames."""
NO_END = 2**64 - 1
"""Field of CONTROLS for an exemption without end."""


class LeaseState(IntEnum):
    """A session's lease on a GPU, in STATUS."""

    NONE = 0
    WAITING = 1
    HELD = 2


LACKS_REQUESTS = 1 << 16
"""Flag of STATUS: the pod gave back requested CPU and memory, and its node has not granted them again."""
YIELDS = 1 << 17
"""Flag of STATUS: the units that the tier took are kept for spawns in quota, and GPU work does not restore them yet."""
SUSPENDED = 1 << 18
"""Flag of STATUS: all processes of the session are suspended (engine `suspend`)."""


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
        """Return the frame's 128 bytes. Fields are cut to 64 bits."""
        if len(self.fields) > FIELDS:
            raise FrameError(f"a frame has {FIELDS} fields, not {len(self.fields)}")
        padded = [field & _MASK for field in self.fields] + [0] * (FIELDS - len(self.fields))
        return _LAYOUT.pack(
            MAGIC, VERSION, self.kind, self.serial & 0xFFFFFFFF, self.flags & 0xFFFFFFFF, self.gpu, *padded
        )

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Return the frame. Raises FrameError, with the reason, for bytes that are not a frame of this version."""
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


@dataclass(frozen=True)
class TextPart:
    """The content of one TEXT frame. A text of several frames is complete when it has all parts, in order."""

    topic: int
    """See `TextTopic`; other numbers come from a newer version."""
    number: int
    """Distinguishes texts of one topic."""
    part: int
    """From 0."""
    parts: int
    done: bool
    """Of an answer: whether the request was carried out."""
    data: bytes

    @classmethod
    def of(cls, frame: Frame) -> TextPart:
        """Return the content of a TEXT frame. Raises FrameError for fields that are not valid in a TEXT frame."""
        topic, number, where, size, *words = frame.fields
        part, parts = where & 0xFFFF, where >> 16 & 0xFFFF
        if not part < parts <= MAX_TEXT_PARTS or size > TEXT_BYTES:
            raise FrameError(f"a TEXT frame with part {part} of {parts} and {size} bytes")
        data = _TEXT_LAYOUT.pack(*words)[:size]
        return cls(topic, number, part, parts, bool(where >> 32 & 1), data)

    def fields(self) -> tuple[int, ...]:
        """Return the fields of the frame; the inverse of `of`."""
        where = self.part | self.parts << 16 | self.done << 32
        words = _TEXT_LAYOUT.unpack(self.data.ljust(TEXT_BYTES, b"\0"))
        return self.topic, self.number, where, len(self.data), *words


def text_parts(topic: TextTopic, number: int, text: str, done: bool = False) -> list[TextPart]:
    """Return a text in parts, at least one. Raises FrameError for a text that is too long."""
    data = text.encode()
    pieces = [data[at : at + TEXT_BYTES] for at in range(0, len(data), TEXT_BYTES)] or [b""]
    if len(pieces) > MAX_TEXT_PARTS:
        raise FrameError(f"a text has at most {MAX_TEXT_PARTS * TEXT_BYTES} bytes, not {len(data)}")
    return [TextPart(topic, number, part, len(pieces), done, piece) for part, piece in enumerate(pieces)]


def gpu_bytes(gpu_uuid: str) -> bytes:
    """Return NVML's "GPU-9f3c…", or "MIG-9f3c…", as the 16 bytes of CUDA's CUuuid. Raises ValueError for other text."""
    try:
        return uuid.UUID(gpu_uuid.removeprefix("GPU-").removeprefix("MIG-")).bytes
    except ValueError:
        raise ValueError(
            f"{gpu_uuid!r} is not the UUID of a GPU; NVML writes GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
        ) from None


def gpu_name(raw: bytes) -> str:
    """Return the 16 bytes of a CUuuid as NVML's "GPU-9f3c…"."""
    return f"GPU-{uuid.UUID(bytes=raw)}"


@dataclass(frozen=True)
class ReceivedText:
    """A complete text."""

    topic: int
    """See `TextTopic`; other numbers come from a newer agent."""
    number: int
    done: bool
    text: str
    """At most MAX_TEXT_LETTERS long; bytes that are not UTF-8 are replaced."""


class TextReader:
    """Assembles the TEXT frames of one connection. Keeps one unfinished text for each topic, of at most 2 KiB."""

    MOST_TOPICS = 8
    """Most topics with an unfinished text; beyond that the oldest is dropped."""

    def __init__(self) -> None:
        self._unfinished: dict[int, list[TextPart]] = {}

    def take(self, frame: Frame) -> ReceivedText | None:
        """Return the text that this frame completes; None if it completes none.

        A part that does not continue its text drops the text. Raises FrameError for a frame that is not valid.
        """
        part = TextPart.of(frame)
        parts = self._unfinished.pop(part.topic, [])
        if part.part == 0:
            parts = []
        if part.part != len(parts) or any(
            (earlier.number, earlier.parts) != (part.number, part.parts) for earlier in parts
        ):
            return None
        parts.append(part)
        if len(parts) < part.parts:
            while len(self._unfinished) >= self.MOST_TOPICS:
                del self._unfinished[next(iter(self._unfinished))]
            self._unfinished[part.topic] = parts
            return None
        text = b"".join(piece.data for piece in parts).decode(errors="replace")[:MAX_TEXT_LETTERS]
        return ReceivedText(part.topic, part.number, part.done, text)
