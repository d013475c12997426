"""A session in the annotations and labels of its pod. Pure data.

The annotations are the authoritative record of a session. The spawner writes them with the pod, the service lowers the
tier, and the agent restores it. The service also writes the controls, and asks for changes of a running session's
share: the agent decides and answers. The pod's device requests cannot change while it runs, so `PLACED_SHARE` records
the units that they stand for. The agent's device plugin then offers more or fewer devices, so that free units and free
devices stay equal.

A session of another sharing layer (`LayerSession`) has another label, so that agents ignore it: its layer's scheduler
has placed it. The hub counts it in quotas, and the service shows and stops it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gpushare_spawner.model.control import Failure, ResizeRequest
from gpushare_spawner.model.controls import (
    MOST_ASKS,
    MOST_KEEPS,
    NO_CONTROLS,
    AskAnswer,
    Controls,
    Exemption,
    Keep,
    Message,
)
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.quantity import Instant, PercentOrBytes, parse_percent_or_bytes
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, Tier, UseRule

_Value = TypeVar("_Value")


def read_json(annotations: Mapping[str, str], name: str, kind: TypeAdapter[_Value], otherwise: _Value) -> _Value:
    """Return an annotation's value; ``otherwise`` if it is absent. Raises ValueError, which names the annotation."""
    text = annotations.get(name)
    if text is None:
        return otherwise
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"the annotation {name} is {text!r}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Return the wrong field and the reason: "until: Input should be a finite number"."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


PREFIX = "gpushare-spawner.io/"
"""The prefix of all names of the project in a cluster: annotations, labels and resources."""


KEEP = PREFIX + "keep"
"""Annotation: JSON of `model.controls.Keep`; absent: the share is not kept."""
KEEPS = PREFIX + "keeps"
"""Annotation: JSON list of the instants at which keeps of the last 24 hours began; absent: none."""
EXEMPTION = PREFIX + "exemption"
"""Annotation: JSON of `model.controls.Exemption`; absent: the session can have idle actions."""
MESSAGE = PREFIX + "message"
"""Annotation: JSON of the last `model.controls.Message` to the session's user; absent: there is none. For readers that
do not know `MESSAGES`."""
MESSAGES = PREFIX + "messages"
"""Annotation: JSON list of the present `model.controls.Message`, one of each cause, the earliest first; absent: at most
that of `MESSAGE`."""
ANSWERS = PREFIX + "answers"
"""Annotation: JSON list of the last `model.controls.AskAnswer`, the latest last."""

_KEEP: TypeAdapter[Keep | None] = TypeAdapter(Keep)
_EXEMPTION: TypeAdapter[Exemption | None] = TypeAdapter(Exemption)
_MESSAGE: TypeAdapter[Message | None] = TypeAdapter(Message)
_MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(tuple[Message, ...])
_KEEPS: TypeAdapter[tuple[float, ...]] = TypeAdapter(Annotated[tuple[Instant, ...], Field(max_length=MOST_KEEPS)])
_ANSWERS: TypeAdapter[tuple[AskAnswer, ...]] = TypeAdapter(tuple[AskAnswer, ...])


def controls_patch(controls: Controls) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sets a session's controls."""
    keep, exemption = controls.keep, controls.exemption
    return {
        KEEP: None if keep is None else keep.model_dump_json(),
        KEEPS: _KEEPS.dump_json(controls.keeps).decode() if controls.keeps else None,
        EXEMPTION: None if exemption is None else exemption.model_dump_json(),
    }


def messages_patch(messages: Sequence[Message]) -> dict[str, str | None]:
    """Return the annotations of a merge patch that shows the user these messages, the earliest first, and no others."""
    if not messages:
        return {MESSAGE: None, MESSAGES: None}
    return {MESSAGE: messages[-1].model_dump_json(), MESSAGES: _MESSAGES.dump_json(tuple(messages)).decode()}


def answers_patch(before: Iterable[AskAnswer], answer: AskAnswer) -> dict[str, str | None]:
    """Return the annotations of a merge patch that answers an ask. ``before``: the earlier answers."""
    kept = [earlier for earlier in before if earlier.number != answer.number][-(MOST_ASKS - 1) :]
    return {ANSWERS: _ANSWERS.dump_json((*kept, answer)).decode()}


def read_controls(annotations: Mapping[str, str]) -> Controls:
    """Return the controls in annotations. Raises ValueError, which names the wrong annotation."""
    return Controls(
        keep=read_json(annotations, KEEP, _KEEP, None),
        keeps=read_json(annotations, KEEPS, _KEEPS, ()),
        exemption=read_json(annotations, EXEMPTION, _EXEMPTION, None),
    )


def read_messages(annotations: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the present messages, the earliest first. Raises ValueError as `read_controls` does."""
    last = read_json(annotations, MESSAGE, _MESSAGE, None)
    messages = read_json(annotations, MESSAGES, _MESSAGES, ())
    if last is None or last in messages:
        return messages if last is not None else ()
    return (last,)  # from an older service


def read_answers(annotations: Mapping[str, str]) -> tuple[AskAnswer, ...]:
    """Return the last answers. Raises ValueError as `read_controls` does."""
    return read_json(annotations, ANSWERS, _ANSWERS, ())


RESIZE = PREFIX + "resize"
"""Annotation: JSON of `ShareChange`, the service's request; absent: there is none."""
RESIZED = PREFIX + "resized"
"""Annotation: JSON of `ShareChangeAnswer`, the agent's last answer; absent: the share was never changed."""
PLACED_SHARE = PREFIX + "placed-share"
"""Annotation: the units that the pod's devices stand for, on each of its GPUs; absent: the units of its share."""


class _Part(BaseModel):
    # a newer service or agent can write more than this version understands
    model_config = ConfigDict(extra="ignore", frozen=True)


class ShareChange(_Part):
    """A request for another share, as `model.control.ResizeRequest`."""

    number: Annotated[int, Field(ge=1)]
    """The answer repeats it."""
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    memory_limit: PercentOrBytes | None = None
    reason: str = ""

    def request(self, session: str) -> ResizeRequest:
        """Return the request for the agent of a session."""
        return ResizeRequest(
            id=session, share_units=self.share_units, memory_limit=self.memory_limit, reason=self.reason
        )


class ShareChangeAnswer(_Part):
    """The result of a `ShareChange`."""

    number: Annotated[int, Field(ge=1)]
    refused: Failure | None = None
    """None if the share was changed."""


_CHANGE: TypeAdapter[ShareChange | None] = TypeAdapter(ShareChange)
_ANSWER: TypeAdapter[ShareChangeAnswer | None] = TypeAdapter(ShareChangeAnswer)


def resize_patch(change: ShareChange | None) -> dict[str, str | None]:
    """Return the annotations of a merge patch that requests another share; None withdraws the request."""
    return {RESIZE: None if change is None else change.model_dump_json()}


def resized_patch(answer: ShareChangeAnswer) -> dict[str, str | None]:
    """Return the annotations of a merge patch that answers a request for another share."""
    return {RESIZED: answer.model_dump_json(), RESIZE: None}


def read_resize(annotations: Mapping[str, str]) -> ShareChange | None:
    """Return the service's request for another share. Raises ValueError, which names the wrong annotation."""
    return read_json(annotations, RESIZE, _CHANGE, None)


def read_resized(annotations: Mapping[str, str]) -> ShareChangeAnswer | None:
    """Return the agent's last answer. Raises ValueError, which names the wrong annotation."""
    return read_json(annotations, RESIZED, _ANSWER, None)


SESSION = PREFIX + "session"
"""Annotation: the session's id (`share.session_id`). Label of the same name: "true" on every pod with a share."""
TEMPLATE = PREFIX + "template"
"""Annotation: the compute template's name."""
QUOTA = PREFIX + "quota"
"""Annotation: the account that the share is charged to, see `quota.Account`; absent: there were no quotas."""
USER_UNITS = PREFIX + "user-units"
"""Annotation: the most units of 1 % of a GPU that the sessions of this user and quota have together on one GPU while
others compete; absent: no bound."""
SHARE = PREFIX + "share"
"""Annotation: the units of 1 % that the session is entitled to, on each of its GPUs."""
GPU = PREFIX + "gpu"
"""Annotation: UUIDs of the session's GPUs, comma-separated, in NVML's form."""
GPU_INDEX = PREFIX + "gpu-index"
"""Annotation: the same GPUs' indices on the node, in the same order."""
BORROWED = PREFIX + "borrowed"
"""Annotation: the part of the share's units that idle sessions have lent."""
TIER = PREFIX + "tier"
"""Annotation: active, downgraded or released."""
TIER_SINCE = PREFIX + "tier-since"
"""Annotation: seconds since the epoch (UTC)."""
EFFECTIVE_SHARE = PREFIX + "effective-share"
"""Annotation: the units that the tier leaves the session, on each of its GPUs."""
IDLE_SINCE = PREFIX + "idle-since"
"""Annotation: seconds since the epoch; absent when active. The service decided on the tier on the assumption that the
session did no GPU work after this instant. If the session did, the agent restores the share: it patches the annotations
back."""
IF_GPU_SECONDS = PREFIX + "if-gpu-seconds"
"""Annotation: GPU seconds; absent when active. A session with more has worked since the service decided on the tier. If
present, it counts instead of `IDLE_SINCE`."""
USE = PREFIX + "use"
"""Annotation: JSON of `model.share.UseRule`, how much GPU work restores the share; absent: any work, at once."""
YIELDS_UNTIL = PREFIX + "yields-until"
"""Annotation: seconds since the epoch; absent: never. Until then the units that the tier took are kept for spawns in
quota, and GPU work does not restore them."""
MEMORY_LIMIT = PREFIX + "memory-limit"
"""Annotation: each GPU's total memory as CUDA reports it, as "80%" or "12Gi"; absent: the whole GPU."""
OVERSUBSCRIBE = PREFIX + "oversubscribe"
"""Annotation: "false" if allocations must stay on the GPU; absent or "true": they may move to host memory."""
ENGINE = PREFIX + "memory-engine"
"""Annotation: how memory leaves the GPU, see `model.layers.MemoryEngine`; absent: "managed"."""
NOTICE = PREFIX + "notice"
"""Annotation: JSON of `model.report.Notice`; absent while the user has no notice."""
HUB = PREFIX + "hub"
"""Annotation: the address of the API of the hub that made the pod. Each of several hubs in one namespace handles its
own pods only."""

SESSION_LABEL = SESSION
SESSION_LABEL_VALUE = "true"
SESSION_SELECTOR = f"{SESSION_LABEL}={SESSION_LABEL_VALUE}"
"""Label selector: every pod with a share."""

WHOLE_MEMORY = "100%"


_USE_RULE = TypeAdapter(UseRule)


class AnnotationProblem(ValueError):
    """Error: a pod's annotations do not describe a session. `problems` has a sentence for each wrong annotation."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True)
class PodSession:
    """A session in a pod's annotations."""

    session: str
    """The session's id, see `share.session_id`."""
    template: str
    share_units: int
    """Units of 1 % on each of its GPUs."""
    gpus: tuple[str, ...]
    """UUIDs."""
    gpu_indices: tuple[int, ...]
    """The same GPUs' indices on the node, in the same order."""
    tier_since: float
    """Seconds since the epoch."""
    effective_units: int
    """Units that the tier leaves it, on each of its GPUs: the full share when active."""
    borrowed_units: int = 0
    tier: Tier = Tier.ACTIVE
    notice: Notice | None = None
    idle_since: float | None = None
    """GPU work after this instant (seconds since the epoch) makes the idle action to `tier` void; None if there is no
    guard."""
    if_gpu_seconds: float | None = None
    """See `IF_GPU_SECONDS`."""
    use: UseRule | None = None
    """How much GPU work restores the share. None if any work does."""
    yields_until: float | None = None
    """Until this instant the units that the tier took are kept for spawns in quota; None if they are not."""
    memory_limit: str = WHOLE_MEMORY
    """Each GPU's total memory as CUDA reports it: a part of it, or bytes."""
    oversubscribe: bool = True
    """Whether allocations may move to host memory."""
    engine: MemoryEngine = MemoryEngine.MANAGED
    quota: str = ""
    """The account that the share is charged to; empty: none was chosen."""
    user_units: int | None = None
    """Most units of the sessions of this user and quota on one GPU together; None if there is no bound."""
    controls: Controls = NO_CONTROLS
    messages: tuple[Message, ...] = ()
    """The present messages, the earliest first."""
    answers: tuple[AskAnswer, ...] = ()
    """The answers to the last asks of the notebook server."""
    resize: ShareChange | None = None
    """The service's request for another share; None if there is none."""
    resized: ShareChangeAnswer | None = None
    """The agent's last answer to such a request."""
    placed_units: int | None = None
    """The units that the pod's devices stand for, on each of its GPUs. None if they stand for its share."""

    def annotations(self) -> dict[str, str]:
        """Return the annotations for the pod's metadata. The inverse of `pod_session`."""
        written = {
            SESSION: self.session,
            TEMPLATE: self.template,
            SHARE: str(self.share_units),
            GPU: ",".join(self.gpus),
            GPU_INDEX: ",".join(map(str, self.gpu_indices)),
            BORROWED: str(self.borrowed_units),
            **_written_tier(self.tier, self.tier_since, self.effective_units),
        }
        if self.idle_since is not None:
            written[IDLE_SINCE] = _written_guard(self.idle_since)
        if self.if_gpu_seconds is not None:
            written[IF_GPU_SECONDS] = _written_guard(self.if_gpu_seconds)
        if self.use is not None:
            written[USE] = _USE_RULE.dump_json(self.use).decode()
        if self.yields_until is not None:
            written[YIELDS_UNTIL] = _written_instant(self.yields_until)
        if self.memory_limit != WHOLE_MEMORY:
            written[MEMORY_LIMIT] = self.memory_limit
        if self.quota:
            written[QUOTA] = self.quota
        if self.user_units is not None:
            written[USER_UNITS] = str(self.user_units)
        if not self.oversubscribe:
            written[OVERSUBSCRIBE] = "false"
        if self.engine is not MemoryEngine.MANAGED:
            written[ENGINE] = self.engine.value
        if self.notice is not None:
            written[NOTICE] = self.notice.model_dump_json()
        controls = dict(controls_patch(self.controls))
        controls |= messages_patch(self.messages)
        for number, answer in enumerate(self.answers):
            controls |= answers_patch(self.answers[:number], answer)
        if self.resized is not None:
            controls |= resized_patch(self.resized)
        if self.resize is not None:
            controls |= resize_patch(self.resize)
        if self.placed_units is not None:
            written[PLACED_SHARE] = str(self.placed_units)
        return written | {name: text for name, text in controls.items() if text is not None}


def labels() -> dict[str, str]:
    """Return the labels of every pod with a share."""
    return {SESSION_LABEL: SESSION_LABEL_VALUE}


def is_session(pod_labels: Mapping[str, str] | None) -> bool:
    """Return whether the labels are those of a pod with a share."""
    return (pod_labels or {}).get(SESSION_LABEL) == SESSION_LABEL_VALUE


def pod_session(annotations: Mapping[str, str] | None) -> PodSession:
    """Return a session from its pod's annotations.

    Raises AnnotationProblem, which names every missing or wrong annotation, with advice.
    """
    given = annotations or {}
    problems: list[str] = []

    def read(name: str, parse: Callable[[str], _Value], instead: _Value, default: _Value | None = None) -> _Value:
        text = given.get(name)
        if text is None:
            if default is not None:
                return default
            problems.append(f"the annotation {name} is missing")
            return instead
        try:
            return parse(text)
        except ValueError as error:
            problems.append(f"the annotation {name} is {text!r}: {error}")
            return instead

    session = read(SESSION, _some_text, "")
    template = read(TEMPLATE, _some_text, "")
    share = read(SHARE, _units_from(1), 0)
    no_gpus: tuple[str, ...] = ()
    no_indices: tuple[int, ...] = ()
    gpus = read(GPU, _uuids, no_gpus)
    indices = read(GPU_INDEX, _indices, no_indices)
    borrowed = read(BORROWED, _units_from(0), 0, default=0)
    tier = read(TIER, _tier, Tier.ACTIVE, default=Tier.ACTIVE)
    since = read(TIER_SINCE, _instant, 0.0)
    effective = read(EFFECTIVE_SHARE, _units_from(0), 0, default=share)
    notice = read(NOTICE, _notice, None) if NOTICE in given else None
    idle_since = read(IDLE_SINCE, _instant, 0.0) if IDLE_SINCE in given else None
    if_gpu_seconds = read(IF_GPU_SECONDS, _instant, 0.0) if IF_GPU_SECONDS in given else None
    use = read(USE, _USE_RULE.validate_json, None) if USE in given else None
    yields_until = read(YIELDS_UNTIL, _instant, 0.0) if YIELDS_UNTIL in given else None
    user_units = read(USER_UNITS, _units_from(1), 0) if USER_UNITS in given else None
    memory_limit = read(MEMORY_LIMIT, _amount, WHOLE_MEMORY, default=WHOLE_MEMORY)
    oversubscribe = read(OVERSUBSCRIBE, _truth, True, default=True)
    engine = read(ENGINE, _engine, MemoryEngine.MANAGED, default=MemoryEngine.MANAGED)
    controls: Controls = NO_CONTROLS
    messages: tuple[Message, ...] = ()
    answers: tuple[AskAnswer, ...] = ()
    resize: ShareChange | None = None
    resized: ShareChangeAnswer | None = None
    placed = read(PLACED_SHARE, _units_from(1), 0) if PLACED_SHARE in given else None
    try:
        controls, messages, answers = read_controls(given), read_messages(given), read_answers(given)
        resize, resized = read_resize(given), read_resized(given)
    except ValueError as error:
        problems.append(str(error))
    if not problems:
        if len(gpus) != len(indices):
            problems.append(f"{GPU} names {len(gpus)} GPUs and {GPU_INDEX} {len(indices)}: both list the same GPUs")
        for name, units in ((BORROWED, borrowed), (EFFECTIVE_SHARE, effective)):
            if units > share:
                problems.append(f"the annotation {name} is {units}, which is more than the share of {share}")
    if problems:
        raise AnnotationProblem(problems)
    return PodSession(
        session=session,
        template=template,
        share_units=share,
        gpus=gpus,
        gpu_indices=indices,
        tier_since=since,
        borrowed_units=borrowed,
        tier=tier,
        effective_units=effective,
        notice=notice,
        idle_since=idle_since,
        if_gpu_seconds=if_gpu_seconds,
        use=use,
        yields_until=yields_until,
        memory_limit=memory_limit,
        oversubscribe=oversubscribe,
        engine=engine,
        quota=given.get(QUOTA, ""),
        user_units=user_units,
        controls=controls,
        messages=messages,
        answers=answers,
        resize=resize,
        resized=resized,
        placed_units=placed,
    )


def tier_patch(
    tier: Tier,
    since: float,
    effective_units: int,
    idle_since: float | None = None,
    yields_until: float | None = None,
    if_gpu_seconds: float | None = None,
    use: UseRule | None = None,
) -> dict[str, str | None]:
    """Return the annotations of a merge patch that changes a session's tier and withdraws the notice.

    The other arguments are the values of `IDLE_SINCE`, `YIELDS_UNTIL`, `IF_GPU_SECONDS` and `USE`.
    """
    return {
        **_written_tier(tier, since, effective_units),
        IDLE_SINCE: None if idle_since is None else _written_guard(idle_since),
        IF_GPU_SECONDS: None if if_gpu_seconds is None else _written_guard(if_gpu_seconds),
        USE: None if use is None else _USE_RULE.dump_json(use).decode(),
        YIELDS_UNTIL: None if yields_until is None else _written_instant(yields_until),
        NOTICE: None,
    }


def notice_patch(notice: Notice | None) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sends the user a notice, or (None) withdraws it."""
    return {NOTICE: None if notice is None else notice.model_dump_json()}


def borrowed_patch(borrowed_units: int) -> dict[str, str | None]:
    """Return the annotations of a merge patch with the units of the share that are borrowed now."""
    return {BORROWED: str(borrowed_units)}


def share_patch(share_units: int, placed_units: int, memory_limit: str) -> dict[str, str | None]:
    """Return the annotations of a merge patch after a change of the share. The caller adds those of the tier."""
    return {
        SHARE: str(share_units),
        PLACED_SHARE: str(placed_units),
        MEMORY_LIMIT: None if memory_limit == WHOLE_MEMORY else memory_limit,
    }


def _written_tier(tier: Tier, since: float, effective_units: int) -> dict[str, str]:
    if tier is Tier.STOPPED:
        raise ValueError("a pod has no tier 'stopped': a stopped session's pod is gone")
    return {TIER: str(tier), TIER_SINCE: f"{since:.3f}", EFFECTIVE_SHARE: str(effective_units)}


def _written_instant(instant: float) -> str:
    return f"{instant:.3f}"


def _written_guard(seconds: float) -> str:
    # rounded up: if rounded down, the work that the service has already counted would void the action
    return f"{math.ceil(seconds * 1000) / 1000:.3f}"


def _some_text(text: str) -> str:
    if not text:
        raise ValueError("it must not be empty")
    return text


def _units_from(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or not least <= int(text) <= UNITS_PER_GPU:
            raise ValueError(f"write units of 1 %, a whole number from {least} to {UNITS_PER_GPU}")
        return int(text)

    return parse


def _uuids(text: str) -> tuple[str, ...]:
    uuids = tuple(part.strip() for part in text.split(","))
    if not all(uuids) or len(set(uuids)) != len(uuids):
        raise ValueError("list different UUIDs, with a comma between two")
    return uuids


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+", part, re.ASCII) for part in parts) or len(set(map(int, parts))) != len(parts):
        raise ValueError("list different indices from 0, with a comma between two")
    return tuple(map(int, parts))


def _tier(text: str) -> Tier:
    tiers = [tier for tier in Tier if tier is not Tier.STOPPED]
    if text not in tiers:
        raise ValueError(f"write one of {', '.join(tiers)}")
    return Tier(text)


def _instant(text: str) -> float:
    if not re.fullmatch(r"\d{1,15}(\.\d*)?", text, re.ASCII):
        raise ValueError("write seconds since the epoch, like 1767225600")
    return float(text)


def _amount(text: str) -> str:
    return str(parse_percent_or_bytes(text))


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError('write "true" or "false"')
    return text == "true"


def _engine(text: str) -> MemoryEngine:
    try:
        return MemoryEngine(text)
    except ValueError:
        raise ValueError(f"write one of {', '.join(MemoryEngine)}") from None


def _notice(text: str) -> Notice:
    try:
        return Notice.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"write the JSON of a notice ({first_problem(error)})") from None


LAYER = PREFIX + "layer"
"""Label: the sharing layer that gives the pod's server its GPU, unless it is our own."""
GPU_COUNT = PREFIX + "gpu-count"
"""Annotation: the number of whole GPUs of the session; absent: its share is of one GPU."""
LAYER_SELECTOR = LAYER
"""Label selector: every pod with a share of another layer."""


@dataclass(frozen=True)
class LayerSession:
    """A session of another layer in its pod's metadata."""

    layer: LayerName
    session: PodSession
    """Its GPUs have no UUIDs here, because only the layer knows them: see `gpu_names`."""

    @property
    def share(self) -> Share:
        """The share of the session."""
        return Share(self.session.share_units, len(self.session.gpus))

    def annotations(self) -> dict[str, str]:
        """Return the annotations for the pod's metadata, beside `labels`."""
        written = {name: text for name, text in self.session.annotations().items() if name not in (GPU, GPU_INDEX)}
        return {**written, GPU_COUNT: str(len(self.session.gpus))} if len(self.session.gpus) > 1 else written

    def labels(self) -> dict[str, str]:
        """Return the labels for the pod's metadata."""
        return {LAYER: str(self.layer)}


def gpu_names(layer: LayerName, session: str, count: int) -> tuple[str, ...]:
    """Return names for the GPUs of a session of another layer. No report has them; only their number is known."""
    return tuple(f"{layer}/{session}/{index}" for index in range(count))


def is_layer_session(labels: Mapping[str, str] | None) -> bool:
    """Return whether the labels are those of a pod with a share of another layer."""
    return LAYER in (labels or {})


def layer_session(labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None) -> LayerSession:
    """Return a session from its pod's labels and annotations. Raises AnnotationProblem."""
    given, layer = annotations or {}, (labels or {}).get(LAYER, "")
    written = given.get(GPU_COUNT, "1")
    others = [name for name in LayerName if name is not LayerName.NATIVE]
    if layer not in others:
        raise AnnotationProblem([f"the label {LAYER} is {layer!r}: write one of {', '.join(others)}"])
    # Python refuses to read thousands of digits with an error of its own
    if not written.isdecimal() or len(written) > 2 or not 1 <= int(written) <= 64:
        raise AnnotationProblem([f"the annotation {GPU_COUNT} is {written!r}: write a whole number from 1 to 64"])
    indices = range(int(written))
    gpus = {GPU: ",".join(str(index) for index in indices), GPU_INDEX: ",".join(str(index) for index in indices)}
    session = pod_session({**given, **gpus})
    named = gpu_names(LayerName(layer), session.session, int(written))
    return LayerSession(LayerName(layer), dataclasses.replace(session, gpus=named))
