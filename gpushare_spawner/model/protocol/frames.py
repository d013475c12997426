"""Frames of the session socket, as bytes. The same in words: docs/reference/protocol.md. In C:
native/preload/platform/frames.h.

A frame is 128 bytes, little-endian: magic, version, type, serial, flags, GPU (16 raw bytes), twelve unsigned 64-bit
fields. The socket is SOCK_SEQPACKET: one packet is one frame, so a packet of another length is detected.
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
    """Bytes that are no frame of this version; the connection ends."""


class Kind(IntEnum):
    """Frame types: below 64 from the notebook's side, from 64 on from the agent's."""

    HELLO = 1
    REQUEST = 2
    RELEASE = 3
    MEMORY = 4
    IDLE = 5
    BUSY = 6
    PAGED_IN = 7
    PAGED_OUT = 8
    KERNELS = 9
    QUERY = 10
    RESERVE = 11
    RETURN = 12
    ASK = 13
    SUSPEND_READY = 14

    WELCOME = 64
    DEVICE = 65
    GRANT = 66
    REVOKE = 67
    PAGE_OUT = 68
    TIER = 69
    ANNOUNCE = 70
    STATUS = 71
    RESERVED = 72
    RECALL = 73
    SESSION_MEMORY = 74
    DELIVERED = 76
    TEXT = 77
    CONTROLS = 78
    USE = 79
    SUSPEND = 80
    RESUMED = 81
    ERROR = 127


class Role(IntEnum):
    """The kind of process that sends HELLO."""

    CUDA = 1
    """A process with libgpushare.so that called cuInit."""
    OBSERVER = 2
    """The notebook server or ``gpushare status``: holds no lease, receives tiers and notices."""


class Feature(IntFlag):
    """What one side can do beyond the first form of version 1. Sent in HELLO and WELCOME.

    A side uses a feature only if the peer has its bit. A peer that is older than these bits sends 0.
    """

    PACE = 1
    """A lease can have a pace: an upper bound of queued GPU work, in GRANT."""
    RESERVE = 2
    """Device memory is reserved with the agent before it is allocated."""
    DELIVERED = 4
    """Observers receive DELIVERED frames."""
    CAUSE = 8
    """An answer to QUERY includes ANNOUNCE, with the cause, if there is a notice."""
    CONTROLS = 16
    """Observers ask for keeps and other things, and receive CONTROLS and TEXT frames."""
    USE = 32
    """An answer to QUERY includes USE frames."""
    SUSPEND = 64
    """The process can be suspended by the driver's checkpoint functions: its memory stays plain (engine `suspend`)."""
    OBSERVE = 128
    """The process reports its bursts and needs no lease: another sharing layer shares the GPU (engine `observe`)."""


class ReserveKind(IntEnum):
    """What RESERVE is for."""

    PLAIN = 0
    """Memory that cannot leave the GPU."""
    MANAGED = 1
    """Memory that the library made movable."""
    OWN_MANAGED = 2
    """Managed memory that the program itself allocates: the session's limit does not apply to it, as on a smaller GPU
    it would not."""


class SessionMemoryTopic(IntEnum):
    """What a SESSION_MEMORY frame is about."""

    OTHERS = 0
    """To a CUDA process: the memory that the session's other processes have allocated."""
    PROCESS = 1
    """To an observer: the memory that one process has allocated."""
    LIMIT_HIT = 2
    """To an observer: the last allocation that was refused."""


class AskKind(IntEnum):
    """What ASK asks for."""

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
        """Whether it only asks what the user can do. Such an ask changes nothing and is no action of the user."""
        return self in (AskKind.SHARES, AskKind.KEEPS)


class TextTopic(IntEnum):
    """What a TEXT frame is about."""

    ANSWER = 1
    """Of an ask; its number is the ask's."""
    MESSAGE = 2
    """Of an admin; its number is its instant in milliseconds since the epoch."""
    NOT_SUSPENDABLE = 3
    """Why a session of engine `suspend` cannot be suspended now; its number is 1."""
    LAYER = 4
    """Which sharing layer gives the session its GPU, where it is not ours: its name. Its number is that of the GPUs
    that the session has."""
    LAYER_TROUBLE = 5
    """What is wrong with that layer for the session, in sentences; its number is 1."""


TEXT_BYTES = 64
"""Bytes of a text in one TEXT frame."""
MAX_TEXT_PARTS = 32
"""TEXT frames of one text."""
MAX_TEXT_LETTERS = 500
"""Letters of a text. A letter takes at most 4 bytes of UTF-8, so that the text fits into its frames."""
NO_END = 2**64 - 1
"""CONTROLS says this of an exemption without end."""


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
    """One message. ``fields`` are padded with zeros to twelve; their meaning depends on ``kind``, see
    docs/reference/protocol.md."""

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
        """Return the frame. Raises FrameError, with the reason, for bytes that are no frame of this version."""
        if len(data) != FRAME_BYTES:
            raise FrameError(f"a frame has {FRAME_BYTES} bytes, not {len(data)}")
        magic, version, kind, serial, flags, gpu, *fields = _LAYOUT.unpack(data)
        if magic != MAGIC:
            raise FrameError(f"wrong magic {magic:#010x}, expected {MAGIC:#010x}")
        if version != VERSION:
            raise FrameError(f"protocol version {version}, this side speaks {VERSION}")
        try:
            known = Kind(kind)
        except ValueError:
            raise FrameError(f"unknown frame type {kind}") from None
        return cls(known, tuple(fields), gpu, serial, flags)


@dataclass(frozen=True)
class TextPart:
    """What one TEXT frame says. A text of several frames is complete when it has all parts, in order."""

    topic: int
    """See `TextTopic`; another number is of a newer version."""
    number: int
    """Tells texts of one topic apart."""
    part: int
    """From 0."""
    parts: int
    done: bool
    """Of an answer: what was asked has been done."""
    data: bytes

    @classmethod
    def of(cls, frame: Frame) -> TextPart:
        """Return what a TEXT frame says. Raises FrameError for figures that no text has."""
        topic, number, where, size, *words = frame.fields
        part, parts = where & 0xFFFF, where >> 16 & 0xFFFF
        if not part < parts <= MAX_TEXT_PARTS or size > TEXT_BYTES:
            raise FrameError(f"a TEXT frame with part {part} of {parts} and {size} bytes")
        data = _TEXT_LAYOUT.pack(*words)[:size]
        return cls(topic, number, part, parts, bool(where >> 32 & 1), data)

    def fields(self) -> tuple[int, ...]:
        """Return the fields of its frame; the inverse of `of`."""
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
