"""The control socket: what the spawner and the service ask of a machine's agent.

One JSON object a line each way over a Unix stream socket; a connection may carry several requests, answered in order.
The socket is the agent owner's alone (mode 0600, and the peer's uid is checked).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.quantity import PercentOrBytes
from gpushare_spawner.model.report import Announcement, Instant
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.tier import Tier

CONTROL_VERSION: Literal[1] = 1
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line ends the connection; a report of 1,000 sessions is under 1 MiB."""

SessionId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9@._:+=~-]+$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = CONTROL_VERSION


class ReportRequest(_Request):
    """Answered with a `Report`."""

    op: Literal["report"] = "report"


class OpenRequest(_Request):
    """Reserve a share on the given GPUs, or on none of them. Answered with an `Opened`.

    Refused (`no-room`) if the guarantees on one of the GPUs would exceed its capacity: the agent counts again,
    whatever the hub believed.
    Opening a session that is open with the same share and GPUs is answered as if it were new; with others it is
    refused (`exists`).
    """

    op: Literal["open"] = "open"
    id: SessionId
    user: str
    server: str = ""
    uid: int
    """Who may connect to the session's socket."""
    template: str
    gpus: Annotated[tuple[str, ...], Field(min_length=1)]
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    borrowed_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    memory_limit: PercentOrBytes = "100%"
    oversubscribe: bool = True
    confirm_within: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a session that nobody confirmed is dropped."""


class Opened(BaseModel):
    """The environment that the notebook server must be started with."""

    environment: dict[str, str]


class ConfirmRequest(_Request):
    """The session's process runs. `pid` is watched: when it is gone the session ends, even if the hub is down."""

    op: Literal["confirm"] = "confirm"
    id: SessionId
    pid: Annotated[int, Field(ge=1)]


class CloseRequest(_Request):
    """The session is over. Closing one that is not open is no error."""

    op: Literal["close"] = "close"
    id: SessionId


class TierRequest(_Request):
    """The service's decision: a step down (or back up). Answered with whether it was applied.

    `if_idle_since` guards the gap between decision and deed: the step is refused (`busy`) if there was a burst after
    that instant.
    """

    op: Literal["tier"] = "tier"
    id: SessionId
    tier: Literal[Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED]
    effective_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)]
    reason: str
    if_idle_since: Instant | None = None


class AnnounceRequest(_Request):
    """Tell the session's user about a step down before it comes; `tier` None takes the announcement back."""

    op: Literal["announce"] = "announce"
    id: SessionId
    tier: Tier | None
    at: Instant = 0
    effective_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    """What the session will hold after the step, on each of its GPUs."""
    reason: str = ""
    cause: IdleCause | None = None
    after_seconds: Annotated[float, Field(ge=0)] = 0.0

    @classmethod
    def of(cls, session: str, step: Announcement | None) -> AnnounceRequest:
        """Ask for this announcement to a session; None takes back the one that stands."""
        return cls(id=session, tier=None) if step is None else cls(id=session, **step.model_dump())

    @property
    def announcement(self) -> Announcement | None:
        """What the session's user is to be told; None: nothing comes."""
        if self.tier is None:
            return None
        return Announcement.model_validate(self.model_dump(exclude={"op", "id"}))


Request = Annotated[
    ReportRequest | OpenRequest | ConfirmRequest | CloseRequest | TierRequest | AnnounceRequest,
    Field(discriminator="op"),
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
"""Validates one line: `REQUEST.validate_json(line)`."""

ErrorCode = Literal[
    "bad-request",
    "no-room",
    "exists",
    "unknown-session",
    "unknown-gpu",
    "unhealthy-gpu",
    "busy",
    "overloaded",
    "internal",
]
"""`busy`: the session works; `overloaded`: the agent has too many requests, the same one may be sent again."""


class Failure(BaseModel):
    """Why a request was refused: a code for programs, a sentence for people."""

    code: ErrorCode
    message: str


class Answer(BaseModel):
    """One line back.

    Either `error` is set, or `result` holds what the request is answered with ({} where nothing is).
    """

    version: Literal[1] = CONTROL_VERSION
    error: Failure | None = None
    result: dict[str, Any] = {}


class ControlRefused(Exception):
    """The agent refused a request."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.code = failure.code
        self.message = failure.message


class AgentUnreachable(Exception):
    """No agent answers on the control socket."""
