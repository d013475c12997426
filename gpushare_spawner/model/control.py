"""The control socket: requests of spawner and service to a machine's agent.

One JSON object on each line, both ways, over a Unix stream socket. A connection can carry several requests; the answers
come in the same order. Only the owner of the agent can use the socket (mode 0600, and the peer's uid is checked).

What the progress events of a queued spawn say for programs. The spawner writes it, the service reads it.

What agents, notebook servers, hub and service say to each other over sockets: frames, texts, requests.
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
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.placement import MemoryEngine
from gpushare_spawner.model.quantity import Instant, PercentOrBytes
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import MAX_LENGTH, UNITS_PER_GPU, IdleCause, Tier, UseRule

CONTROL_VERSION: Literal[1] = 1
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line ends the connection; a report of 1,000 sessions is under 1 MiB."""

SessionId = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH, pattern=r"^[A-Za-z0-9@._:+=~-]+$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = CONTROL_VERSION


def _without(written: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Leave out these fields where they are None: an agent that does not know a field refuses the request."""
    return {name: value for name, value in written.items() if value is not None or name not in fields}


class ReportRequest(_Request):
    """Answered with a `Report`."""

    op: Literal["report"] = "report"


class OpenRequest(_Request):
    """Reserve a share on all of the given GPUs. Answered with an `Opened`.

    Refused (`no-capacity`) if the guaranteed units on one of the GPUs would exceed its capacity: the agent counts by
    itself. A request for a session that is open with the same share and GPUs succeeds; with others it is refused
    (`exists`).
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
    borrowed_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    user_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)] | None = None
    """What the sessions of this user and quota on one GPU have at most together while others compete; None: no
    bound."""
    memory_limit: PercentOrBytes = "100%"
    oversubscribe: bool = True
    engine: MemoryEngine = MemoryEngine.MANAGED
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs. All sessions of a GPU have the same."""
    confirm_within: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a session that was not confirmed is closed."""

    @model_serializer(mode="wrap")
    def _for_older_agents(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = _without(handler(self), "user_units")
        if self.engine is MemoryEngine.MANAGED:
            del written["engine"]
        if self.layer is LayerName.NATIVE:
            del written["layer"]
        return written


class Opened(BaseModel):
    """The environment that the notebook server must be started with."""

    environment: dict[str, str]


class ConfirmRequest(_Request):
    """The session's process runs. The session ends with the process `pid`, even if the hub is down."""

    op: Literal["confirm"] = "confirm"
    id: SessionId
    pid: Annotated[int, Field(ge=1)]


class CloseRequest(_Request):
    """The session has ended. Closing a session that is not open is no error."""

    op: Literal["close"] = "close"
    id: SessionId


class TierRequest(_Request):
    """Change a session's tier, by the service's decision. Answered with whether it was applied.

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
    """How much GPU work restores the share after a downgrade or release. None: all work does, at once."""
    yields_until: Instant | None = None
    """The session gives up the units that the tier takes: another session can come to own them, and until then, at most
    until this instant, GPU work does not restore them. None: the session keeps owning its units."""

    @model_serializer(mode="wrap")
    def _for_older_agents(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(handler(self), "if_gpu_seconds", "use", "yields_until")


class ResizeRequest(_Request):
    """Change the share of a session that runs, on each of its GPUs.

    Refused (`no-capacity`) if the units are not free: the agent counts by itself. The share that the session has
    already is no error.
    """

    op: Literal["resize"] = "resize"
    id: SessionId
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    memory_limit: PercentOrBytes | None = None
    """What CUDA shows as the GPU's total from now on; None: as before."""
    reason: str = ""


class AnnounceRequest(_Request):
    """Send the session's user a notice of an idle action; `tier` None withdraws the notice."""

    op: Literal["announce"] = "announce"
    id: SessionId
    tier: Tier | None
    at: Instant = 0
    effective_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    """What the session will hold after the action, on each of its GPUs."""
    reason: str = ""
    cause: IdleCause | None = None
    after_seconds: Annotated[float, Field(ge=0)] = 0.0
    use: UseRule | None = None

    @model_serializer(mode="wrap")
    def _for_older_agents(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(handler(self), "use")

    @classmethod
    def of(cls, session: str, notice: Notice | None) -> AnnounceRequest:
        """Return the request to send a session this notice; None withdraws the one that stands."""
        return cls(id=session, tier=None) if notice is None else cls(id=session, **notice.model_dump())

    @property
    def notice(self) -> Notice | None:
        """The notice for the session's user; None: a notice is withdrawn."""
        if self.tier is None:
            return None
        return Notice.model_validate(self.model_dump(exclude={"op", "id"}))


class ControlsRequest(_Request, Controls):
    """Set a session's keep and exemption; both are replaced.

    `answer` is taken together with them: an ask for a keep counts as answered exactly when the keep is there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    op: Literal["controls"] = "controls"
    id: SessionId
    answer: AskAnswer | None = None

    @classmethod
    def of(cls, session: str, controls: Controls, answer: AskAnswer | None = None) -> ControlsRequest:
        """Return the request to set these, and to answer the ask that they come from."""
        return cls(id=session, answer=answer, **dict(controls))

    @property
    def controls(self) -> Controls:
        """What stands for the session from now on."""
        return Controls(keep=self.keep, keeps=self.keeps, exemption=self.exemption)


class MessageRequest(_Request):
    """Show the session's user a message instead of the one of its cause, or withdraw that."""

    op: Literal["message"] = "message"
    id: SessionId
    message: Message | None
    """None: the message of `cause` is withdrawn."""
    cause: MessageCause | None = None

    @classmethod
    def withdraw(cls, session: str, cause: MessageCause) -> MessageRequest:
        """Return the request to withdraw a session's message of this cause."""
        return cls(id=session, message=None, cause=cause)

    def messages(self, standing: Iterable[Message]) -> tuple[Message, ...]:
        """Return the messages after the request, the earliest first. ``standing``: those before."""
        if self.message is not None:
            return with_message(standing, self.message)
        return without_message(standing, self.cause or MessageCause.ADMIN)

    @model_serializer(mode="wrap")
    def _for_older_agents(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(handler(self), "cause")


class AnswerRequest(_Request):
    """Answer what the session's notebook server asked. An answer to an ask that was dropped is no error."""

    op: Literal["answer"] = "answer"
    id: SessionId
    answer: AskAnswer


class AskedRequest(_Request):
    """Answered with an `AskedAnswer` as soon as notebook servers ask something that waits for the service, at the
    latest after `within` seconds."""

    op: Literal["asked"] = "asked"
    within: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 30.0


class AskedAnswer(BaseModel):
    """Whether something waits. The report says what."""

    asked: bool


class CordonRequest(_Request):
    """Set the cordon of a GPU or of the node, instead of what was there. Kept over restarts of the agent. Refused
    (`unknown-gpu`) for a GPU that the node does not have."""

    op: Literal["cordon"] = "cordon"
    gpu: str = ""
    """The GPU's UUID; empty: the node."""
    cordon: Cordon | None
    """None: new sessions may come again."""


Request = Annotated[
    ReportRequest
    | OpenRequest
    | ConfirmRequest
    | CloseRequest
    | TierRequest
    | ResizeRequest
    | AnnounceRequest
    | ControlsRequest
    | MessageRequest
    | AnswerRequest
    | AskedRequest
    | CordonRequest,
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
"""`busy`: the session works; `overloaded`: the agent has too many requests, send the same one again later."""


class Failure(BaseModel):
    """Why a request was refused: a code for programs, a sentence for people."""

    code: ErrorCode
    message: str


class Answer(BaseModel):
    """One line back.

    Either `error` is set, or `result` has the answer ({} where there is none).
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


LONGEST_TEXT = 1000
"""Letters of a sentence that the service takes at most."""


class QueueProgress(BaseModel):
    """Fields beside JupyterHub's own in an event of ``Spawner.progress``. Only spawns that wait have them."""

    # The event has JupyterHub's fields too, and a newer hub can say more.
    model_config = ConfigDict(extra="ignore", frozen=True)

    queue_position: Annotated[int, Field(ge=1)]
    """First = 1; only spawns that could use the same GPUs count."""
    estimated_minutes: Annotated[int, Field(ge=1)] | None = None
    """How long the spawn will still wait, about; None: nothing is known."""
    waits_for: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""
    """What it waits for, as a sentence for its user."""
    cancelled_at: Instant | None = None
    """When the spawn is cancelled if it still waits then."""
