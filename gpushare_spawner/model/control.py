"""The control socket: requests of spawner and service to a machine's agent. Pure data.

Each line is one JSON object, in both directions, over a Unix stream socket. A connection can carry several requests;
the answers come in the same order. Only the agent's owner can use the socket (mode 0600, and the agent checks the
peer's uid). The client is `clients.agent`; the frames of the session socket are in `model.frames`.

`QueueProgress` is not part of the socket: it has the fields that the spawner adds to a waiting spawn's progress events
for the service.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from gpushare_spawner.model.controls import (
    AskAnswer,
    Controls,
    Cordon,
    Message,
    MessageCause,
    with_message,
    without_message,
)
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.quantity import Instant, PercentOrBytes
from gpushare_spawner.model.report import BypassingProcess, Notice
from gpushare_spawner.model.share import (
    MAX_LENGTH,
    NO_NEIGHBOUR_RULES,
    UNITS_PER_GPU,
    IdleCause,
    NeighbourRules,
    Share,
    Tier,
    UseRule,
    units_on,
)

CONTROL_VERSION: Literal[1] = 1
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line ends the connection; a report of 1,000 sessions is under 1 MiB."""

SessionId = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH, pattern=r"^[A-Za-z0-9@._:+=~-]+$")]


class _Request(BaseModel):
    """A request. Default values are not sent, because an agent refuses a request with an unknown field.

    `op` and `version` are always sent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = CONTROL_VERSION

    @model_serializer(mode="wrap")
    def _for_older_agents(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        return {name: value for name, value in handler(self).items() if name in {"op", "version", *given}}


class ReportRequest(_Request):
    """Request for the agent's `Report`."""

    op: Literal["report"] = "report"


class OpenRequest(_Request):
    """Request to open a session with a share on all of the given GPUs. The answer is an `Opened`.

    Refused (`no-capacity`) if the guaranteed units on one of the GPUs would exceed its capacity by the agent's own
    count. If the session is already open, the request succeeds for the same share and GPUs, and is refused (`exists`)
    for others.
    """

    op: Literal["open"] = "open"
    id: SessionId
    user: str
    server: str = ""
    uid: int
    """The user id that can connect to the session's socket."""
    template: str
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there are no quotas."""
    gpus: Annotated[tuple[str, ...], Field(min_length=1)]
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    last_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    """Units on the last GPU if these are fewer; 0: as many. Units of any kind are at most so many there."""
    borrowed_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    user_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)] | None = None
    """Maximum units of all sessions of this user and quota together on one GPU while others compete; None: no limit."""
    time_limit_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)] = UNITS_PER_GPU
    """Maximum part of each GPU's time, even when alone on the GPU. A larger share is the limit instead."""
    memory_limit: PercentOrBytes = "100%"
    oversubscribe: bool = True
    engine: MemoryEngine = MemoryEngine.MANAGED
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs. All sessions of a GPU have the same layer."""
    neighbours: NeighbourRules = NO_NEIGHBOUR_RULES
    """Labels and rules of the session for others on its GPUs. The agent reports them, and placement applies them."""
    confirm_within: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which the agent closes an unconfirmed session."""

    @property
    def share(self) -> Share:
        """The share. Raises ValueError for impossible numbers."""
        return Share(self.share_units, len(self.gpus), self.last_units)

    def on(self, gpu: str, units: int) -> int:
        """Return the session's units on one of its GPUs, by those on each, see `share.units_on`."""
        return units_on(gpu, self.gpus, units, self.last_units)


class Opened(BaseModel):
    """The environment variables for the notebook server."""

    environment: dict[str, str]


class ConfirmRequest(_Request):
    """Confirmation that the session's process runs. The session ends with process `pid`, even if the hub is down."""

    op: Literal["confirm"] = "confirm"
    id: SessionId
    pid: Annotated[int, Field(ge=1)]


class CloseRequest(_Request):
    """Request to close a session. It is not an error if the session is not open."""

    op: Literal["close"] = "close"
    id: SessionId


class TierRequest(_Request):
    """Request to change a session's tier, as the service decided. The answer states whether the change was applied.

    The agent refuses (`busy`) if the session has worked since the decision, see `voids_idle_action`.
    """

    op: Literal["tier"] = "tier"
    id: SessionId
    tier: Literal[Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED]
    effective_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)]
    reason: str
    if_idle_since: Instant | None = None
    if_gpu_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    use: UseRule | None = None
    """The GPU work that restores the share after a downgrade or release. None: any work restores it immediately."""
    yields_until: Instant | None = None
    """The session gives up the units that the tier takes, so that another session can own them. Until it does, but at
    most until this instant, GPU work does not restore them. None: the session keeps its units."""
    background: bool = False
    """Until that instant the session works only in GPU time and memory that no other session uses, because its budget
    is used up."""


class ResizeRequest(_Request):
    """Request to change the share of a running session, on each of its GPUs.

    Refused (`no-capacity`) if the units are not free by the agent's own count. It is not an error to request the
    session's current share.
    """

    op: Literal["resize"] = "resize"
    id: SessionId
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    last_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    """See `OpenRequest.last_units`."""
    memory_limit: PercentOrBytes | None = None
    """The GPU's total memory as CUDA will report it; None: unchanged."""
    reason: str = ""


class NoticeRequest(_Request):
    """Request to send the session's user a notice of an idle action; `tier` None withdraws the notice."""

    op: Literal["notice"] = "notice"
    id: SessionId
    tier: Tier | None
    at: Instant = 0
    effective_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    """The session's units after the action, on each of its GPUs."""
    reason: str = ""
    cause: IdleCause | None = None
    after_seconds: Annotated[float, Field(ge=0)] = 0.0
    use: UseRule | None = None

    @classmethod
    def of(cls, session: str, notice: Notice | None) -> NoticeRequest:
        """Return the request to send this notice to a session; None withdraws the current notice."""
        return cls(id=session, tier=None) if notice is None else cls(id=session, **notice.model_dump())

    @property
    def notice(self) -> Notice | None:
        """The notice for the session's user; None: the current notice is withdrawn."""
        if self.tier is None:
            return None
        return Notice.model_validate(self, from_attributes=True)


class ControlsRequest(_Request, Controls):
    """Request to replace a session's keep and exemption.

    The agent records `answer` together with the controls, so a request for a keep is answered if and only if the keep
    is set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    op: Literal["controls"] = "controls"
    id: SessionId
    answer: AskAnswer | None = None

    @classmethod
    def of(cls, session: str, controls: Controls, answer: AskAnswer | None = None) -> ControlsRequest:
        """Return the request to set these controls, and to answer the ask that led to them."""
        return cls(id=session, answer=answer, **dict(controls))

    @property
    def controls(self) -> Controls:
        """The session's new controls."""
        return Controls(keep=self.keep, keeps=self.keeps, exemption=self.exemption)


class MessageRequest(_Request):
    """Request to show or withdraw a message to the session's user. It replaces the message of the same cause."""

    op: Literal["message"] = "message"
    id: SessionId
    message: Message | None
    """None if the message of `cause` is withdrawn."""
    cause: MessageCause | None = None

    @classmethod
    def withdraw(cls, session: str, cause: MessageCause) -> MessageRequest:
        """Return the request to withdraw a session's message of this cause."""
        return cls(id=session, message=None, cause=cause)

    @property
    def changed_cause(self) -> MessageCause:
        """The cause of the message that is shown, replaced or withdrawn."""
        return self.message.cause if self.message is not None else self.cause or MessageCause.ADMIN

    def messages(self, standing: Iterable[Message]) -> tuple[Message, ...]:
        """Return the messages after the request, earliest first. ``standing``: the messages before it."""
        if self.message is not None:
            return with_message(standing, self.message)
        return without_message(standing, self.changed_cause)


class StopProcessesRequest(_Request):
    """Request to stop processes that bypass the library, of which the session's user has a message of cause BYPASS.

    The agent checks by its own facts that each process belongs to the session and makes it exceed its memory limit. The
    others are ignored. A later message of this cause ends the request.
    """

    op: Literal["stop-processes"] = "stop-processes"
    id: SessionId
    processes: tuple[BypassingProcess, ...]


class AnswerRequest(_Request):
    """Answer to an ask of the session's notebook server. It is not an error if the ask was dropped."""

    op: Literal["answer"] = "answer"
    id: SessionId
    answer: AskAnswer


class AskedRequest(_Request):
    """Request for an `AskedAnswer` as soon as a notebook server's ask waits, or after `within` seconds."""

    op: Literal["asked"] = "asked"
    within: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 30.0


class AskedAnswer(BaseModel):
    """Whether asks wait for the service. The asks themselves are in the report."""

    asked: bool


class CordonRequest(_Request):
    """Request to replace the cordon of a GPU or of the node.

    The cordon persists over restarts of the agent. Refused (`unknown-gpu`) for a GPU that the node does not have.
    """

    op: Literal["cordon"] = "cordon"
    gpu: str = ""
    """The GPU's UUID; empty: the node."""
    cordon: Cordon | None
    """None allows new sessions again."""


ServiceRequest = (
    TierRequest
    | ResizeRequest
    | NoticeRequest
    | ControlsRequest
    | MessageRequest
    | StopProcessesRequest
    | AnswerRequest
    | CordonRequest
)
"""Requests of the service, without an answer of their own."""
Request = Annotated[
    ReportRequest | OpenRequest | ConfirmRequest | CloseRequest | AskedRequest | ServiceRequest,
    Field(discriminator="op"),
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
"""Validates one line: `REQUEST.validate_json(line)`."""

ErrorCode = Literal[
    "bad-request",
    "no-capacity",
    "exists",
    "unknown-session",
    "unknown-gpu",
    "unhealthy-gpu",
    "busy",
    "overloaded",
    "internal",
]
"""`busy`: the session works; `overloaded`: the agent has too many requests, so send the request again later."""


class Failure(BaseModel):
    """The reason for a refusal: a code for programs and a sentence for people."""

    code: ErrorCode
    message: str


class Answer(BaseModel):
    """One line from the agent.

    Either `error` is set, or `result` has the answer ({} if there is nothing to answer).
    """

    version: Literal[1] = CONTROL_VERSION
    error: Failure | None = None
    result: dict[str, Any] = {}


class ControlRefused(Exception):
    """The agent refused a request."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class AgentUnreachable(Exception):
    """No agent answers on the control socket."""


LONGEST_TEXT = 1000
"""Maximum characters of a sentence that the service accepts."""


class QueueProgress(BaseModel):
    """Fields of an event of ``Spawner.progress`` in addition to JupyterHub's own. Only waiting spawns have them."""

    # The event also has JupyterHub's fields, and a newer hub can send more.
    model_config = ConfigDict(extra="ignore", frozen=True)

    queue_position: Annotated[int, Field(ge=1)]
    """Position in the queue, first = 1. Only spawns that could use the same GPUs count."""
    estimated_minutes: Annotated[int, Field(ge=1)] | None = None
    """Estimate of the remaining wait: half of such spawns have started by then. None: no estimate."""
    earliest_minutes: Annotated[int, Field(ge=0)] | None = None
    """Four of five spawns start between this and `latest_minutes`. None: no estimate, or the hub is older."""
    latest_minutes: Annotated[int, Field(ge=1)] | None = None
    waits_for: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""
    """Why the spawn waits, as a sentence for its user."""
    cancelled_at: Instant | None = None
    """The instant at which the hub cancels the spawn if it still waits."""
    nodes: tuple[str, ...] | None = None
    """Nodes with CPU and memory for the spawn: it fits if sessions give up GPU units. None: unknown, or too many."""
