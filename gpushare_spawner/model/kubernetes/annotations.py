"""A session in the annotations and labels of its pod. Pure data.

The annotations are the authoritative record of a session. The spawner writes them when it creates the pod, the service
lowers the tier, and the agent restores it. The service also writes the controls, and requests changes of a running
session's share; the agent decides and answers. The pod's device requests cannot change while it runs, so `PLACED_SHARE`
records the units that they represent. The agent's device plugin then offers more or fewer devices, so that free units
and free devices stay equal.

A session of another sharing layer has a different label, so that agents ignore it: that layer's scheduler has placed
it. The hub counts it in quotas, and the service shows and stops it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

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
    MessageCause,
)
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.part import MessagePart, faults
from gpushare_spawner.model.quantity import Instant, PercentOrBytes, parse_percent_or_bytes
from gpushare_spawner.model.report import BypassingProcess, Notice, shared_fields
from gpushare_spawner.model.share import NO_NEIGHBOUR_RULES, UNITS_PER_GPU, NeighbourRules, Share, Tier, UseRule

_Choice = TypeVar("_Choice", bound=StrEnum)

PREFIX = "gpushare-spawner.io/"
"""The prefix of all names of the project in a cluster: annotations, labels and resources."""


KEEP = PREFIX + "keep"
"""Annotation: JSON of `model.controls.Keep`; absent: the share is not kept."""
KEEPS = PREFIX + "keeps"
"""Annotation: JSON list of the start times of the keeps of the last 24 hours; absent: none."""
EXEMPTION = PREFIX + "exemption"
"""Annotation: JSON of `model.controls.Exemption`; absent: idle actions apply to the session."""
MESSAGES = PREFIX + "messages"
"""Annotation: JSON list of each current `model.controls.Message`, at most one per cause, earliest first; absent:
none."""
ANSWERS = PREFIX + "answers"
"""Annotation: JSON list of each recent `model.controls.AskAnswer`, latest last."""

RESIZE = PREFIX + "resize"
"""Annotation: JSON of `ShareChange`, the service's request; absent: none."""
RESIZED = PREFIX + "resized"
"""Annotation: JSON of `ShareChangeAnswer`, the agent's last answer; absent: the share was never changed."""
PLACED_SHARE = PREFIX + "placed-share"
"""Annotation: the units that the pod's devices represent, on each of its GPUs; absent: the units of its share."""


class ShareChange(MessagePart):
    """A request to change the share, like `model.control.ResizeRequest`."""

    number: Annotated[int, Field(ge=1)]
    """Number that the answer repeats."""
    share_units: Annotated[int, Field(ge=1, le=UNITS_PER_GPU)]
    """Also "100,50", with `last_units`: an agent of an earlier version refuses such text."""
    last_units: Annotated[int, Field(ge=0, le=UNITS_PER_GPU)] = 0
    """See `OpenRequest.last_units`."""
    memory_limit: PercentOrBytes | None = None
    reason: str = ""

    @model_validator(mode="before")
    @classmethod
    def _read_share(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("share_units"), str):
            units, _, last = data["share_units"].partition(",")
            return {**data, "share_units": units, "last_units": last or 0}
        return data

    @model_serializer(mode="wrap")
    def _write_share(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        last = written.pop("last_units", 0)
        return {**written, "share_units": _share_text(self.share_units, last)} if last else written

    def request(self, session: str) -> ResizeRequest:
        """Return the request to a session's agent."""
        return ResizeRequest(id=session, **shared_fields(self, ResizeRequest))


class ShareChangeAnswer(MessagePart):
    """The result of a `ShareChange`."""

    number: Annotated[int, Field(ge=1)]
    refused: Failure | None = None
    """None if the share was changed."""


SESSION = PREFIX + "session"
"""Annotation: the session's id (`share.session_id`). Label of the same name: "true" on every pod with a share."""
TEMPLATE = PREFIX + "template"
"""Annotation: the compute template's name."""
QUOTA = PREFIX + "quota"
"""Annotation: the account that the share is charged to, see `quota.Account`; absent: there were no quotas at the
spawn."""
USER_UNITS = PREFIX + "user-units"
"""Annotation: maximum units of all sessions of this user and quota together on one GPU while others compete; absent: no
limit."""
SHARE = PREFIX + "share"
"""Annotation: the units that the session is entitled to, on each of its GPUs; "100,50": fewer on the last. An agent of
an earlier version refuses such text."""
GPU = PREFIX + "gpu"
"""Annotation: UUIDs of the session's GPUs, comma-separated, in NVML's format."""
GPU_INDEX = PREFIX + "gpu-index"
"""Annotation: the same GPUs' indices on the node, in the same order."""
BORROWED = PREFIX + "borrowed"
"""Annotation: the number of the share's units that idle sessions have lent."""
TIER = PREFIX + "tier"
"""Annotation: active, downgraded or released."""
TIER_SINCE = PREFIX + "tier-since"
"""Annotation: time of the last tier change, seconds since the epoch (UTC)."""
EFFECTIVE_SHARE = PREFIX + "effective-share"
"""Annotation: the units that the tier leaves to the session, on each of its GPUs."""
IDLE_SINCE = PREFIX + "idle-since"
"""Annotation: seconds since the epoch; absent when active. The service decided on the tier on the assumption that the
session has done no GPU work after this instant. If it has, the agent restores the share by patching the annotations
back."""
IF_GPU_SECONDS = PREFIX + "if-gpu-seconds"
"""Annotation: GPU seconds; absent when active. A session with more GPU seconds has worked since the service decided on
the tier. If present, it replaces `IDLE_SINCE`."""
USE = PREFIX + "use"
"""Annotation: JSON of `model.share.UseRule`, the GPU work that restores the share; absent: any work restores it
immediately."""
YIELDS_UNTIL = PREFIX + "yields-until"
"""Annotation: seconds since the epoch; absent: not reserved. Until then, the units that the tier took are reserved for
spawns in quota, and GPU work does not restore them."""
BACKGROUND = PREFIX + "background"
"""Annotation: "true" until then for a session whose budget is used up, see `TierRequest.background`; absent: false."""
NEIGHBOURS = PREFIX + "neighbours"
"""Annotation: JSON of `model.share.NeighbourRules`; absent: no labels and no rules."""
TIME_LIMIT = PREFIX + "time-limit"
"""Annotation: maximum part of each GPU's time in units of 1 %, even when alone on the GPU; absent: 100."""
MEMORY_LIMIT = PREFIX + "memory-limit"
"""Annotation: each GPU's total memory as CUDA reports it, as "80%" or "12Gi"; absent: the whole GPU."""
OVERSUBSCRIBE = PREFIX + "oversubscribe"
"""Annotation: "false" if allocations must stay on the GPU; absent or "true": they may move to host memory."""
ENGINE = PREFIX + "memory-engine"
"""Annotation: the memory engine, see `model.layers.MemoryEngine`; absent: "managed"."""
NOTICE = PREFIX + "notice"
"""Annotation: JSON of `model.report.Notice`; absent while the user has no notice."""
STOP_PROCESSES = PREFIX + "stop-processes"
"""Annotation: JSON of the processes that the agent stops, see `control.StopProcessesRequest`; absent: none."""
LAYER = PREFIX + "layer"
"""Label: the sharing layer that provides the GPU of the pod's server, unless it is our own."""
GPU_COUNT = PREFIX + "gpu-count"
"""Annotation: the number of whole GPUs of another layer's session; absent: its share is on one GPU."""
LAYER_SELECTOR = LAYER
"""Label selector: every pod with a share of another layer."""
HUB = PREFIX + "hub"
"""Annotation: the API address of the hub that created the pod. If several hubs share a namespace, each handles only its
own pods."""

SESSION_LABEL = SESSION
SESSION_LABEL_VALUE = "true"
SESSION_SELECTOR = f"{SESSION_LABEL}={SESSION_LABEL_VALUE}"
"""Label selector: every pod with a share."""

WHOLE_MEMORY = "100%"

OWN_FIELDS = ("borrowed_units", "user_units", "time_limit_units", "memory_limit", "engine", "neighbours")
"""Fields of a session that have an effect only where our own layer shares the GPU."""


class AnnotationProblem(ValueError):
    """Error: a pod's annotations do not describe a session. `problems` has a sentence for each invalid annotation."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True)
class SessionAnnotations:
    """A session as described by its pod's annotations."""

    session: str
    """The session's id, see `share.session_id`."""
    template: str
    share_units: int
    """Units of 1 % on each of its GPUs."""
    gpus: tuple[str, ...]
    """UUIDs. Under another layer, placeholder names, because only that layer knows its GPUs, see `gpu_names`."""
    gpu_indices: tuple[int, ...]
    """The same GPUs' indices on the node, in the same order."""
    tier_since: float
    """Seconds since the epoch."""
    effective_units: int
    """Units that the tier leaves to the session, on each of its GPUs: the full share when active."""
    last_units: int = 0
    """See `OpenRequest.last_units`."""
    borrowed_units: int = 0
    tier: Tier = Tier.ACTIVE
    notice: Notice | None = None
    idle_since: float | None = None
    """GPU work after this instant (seconds since the epoch) voids the idle action that led to `tier`; None: no
    condition."""
    if_gpu_seconds: float | None = None
    """See `IF_GPU_SECONDS`."""
    use: UseRule | None = None
    """The GPU work that restores the share. None: any work restores it."""
    yields_until: float | None = None
    """Time until which the units that the tier took are reserved for spawns in quota; None: they are not reserved."""
    background: bool = False
    """See `TierRequest.background`."""
    time_limit_units: int = UNITS_PER_GPU
    """Maximum part of each GPU's time in units of 1 %, even when the session is alone on the GPU."""
    memory_limit: str = WHOLE_MEMORY
    """Each GPU's total memory as CUDA reports it, in percent or bytes."""
    oversubscribe: bool = True
    """Whether allocations may move to host memory."""
    engine: MemoryEngine = MemoryEngine.MANAGED
    quota: str = ""
    """The account that the share is charged to; empty: none."""
    user_units: int | None = None
    """Maximum units of all sessions of this user and quota together on one GPU; None: no limit."""
    controls: Controls = NO_CONTROLS
    messages: tuple[Message, ...] = ()
    """The current messages, earliest first."""
    answers: tuple[AskAnswer, ...] = ()
    """The answers to the notebook server's last asks."""
    resize: ShareChange | None = None
    """The service's request to change the share, or None."""
    resized: ShareChangeAnswer | None = None
    """The agent's last answer to a request to change the share."""
    placed_units: int | None = None
    """The units that the pod's devices represent, on each of its GPUs. None: the units of its share."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer that provides the session's GPUs."""
    neighbours: NeighbourRules = NO_NEIGHBOUR_RULES
    stop_processes: tuple[BypassingProcess, ...] = ()
    """The processes that the agent stops if they still make the session exceed its memory limit."""

    @property
    def share(self) -> Share:
        """The session's share."""
        return Share(self.share_units, len(self.gpus), self.last_units)

    def annotations(self) -> dict[str, str]:
        """Return the annotations for the pod's metadata. With `labels`, this is the inverse of `pod_session`."""
        values = _patch(**vars(self), **dict(self.controls))
        written = {name: text for name, text in values.items() if text is not None}
        if self.layer is not LayerName.NATIVE:
            del written[GPU], written[GPU_INDEX]
            if len(self.gpus) > 1:
                written[GPU_COUNT] = str(len(self.gpus))
        return written

    def labels(self) -> dict[str, str]:
        """Return the labels for the pod's metadata."""
        return labels() if self.layer is LayerName.NATIVE else {LAYER: str(self.layer)}


def labels() -> dict[str, str]:
    """Return the labels of every pod with a share of our own layer."""
    return {SESSION_LABEL: SESSION_LABEL_VALUE}


def is_session(pod_labels: Mapping[str, str] | None) -> bool:
    """Return whether the labels are those of a pod with a share."""
    return (pod_labels or {}).get(SESSION_LABEL) == SESSION_LABEL_VALUE


def _text(text: str) -> str:
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


def _listed(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def _choice_parser(choices: Iterable[_Choice]) -> Callable[[str], _Choice]:
    by_text = {choice.value: choice for choice in choices}

    def parse(text: str) -> _Choice:
        if text not in by_text:
            raise ValueError(f"write one of {', '.join(by_text)}")
        return by_text[text]

    return parse


def _written_tier(tier: Tier) -> str:
    if tier is Tier.STOPPED:
        raise ValueError("a pod has no tier 'stopped': a stopped session's pod is gone")
    return tier.value


def _instant(text: str) -> float:
    if not re.fullmatch(r"\d{1,15}(\.\d*)?", text, re.ASCII):
        raise ValueError("write seconds since the epoch, like 1767225600")
    return float(text)


def _written_instant(instant: float) -> str:
    return f"{instant:.3f}"


def _written_guard(seconds: float) -> str:
    # rounded up, because otherwise work that the service has already counted would void the action
    return f"{math.ceil(seconds * 1000) / 1000:.3f}"


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError('write "true" or "false"')
    return text == "true"


def _written_truth(value: bool) -> str:
    return "true" if value else "false"


@dataclass(frozen=True)
class _Annotation:
    """The text of one field of a session. ``read`` raises ValueError."""

    field: str
    """Name of a field of `SessionAnnotations` or of its controls."""
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str
    always: bool = False
    """Whether the field's default value is also written."""

    @property
    def default(self) -> Any:
        """The value of an absent annotation; MISSING if the annotation is required."""
        return _DEFAULTS[self.field]

    def written(self, value: Any) -> str | None:
        """Return the annotation's text; None for a default value, which needs no annotation."""
        return self.write(value) if self.always or value != self.default else None


def _json(field: str, kind: Any) -> _Annotation:
    """Return an annotation with the JSON of a pydantic type as its text."""
    adapter = cache(lambda: TypeAdapter(kind))

    def read(text: str) -> Any:
        try:
            return adapter().validate_json(text)
        except ValidationError as error:
            raise ValueError(faults(error, "it")[0]) from None

    return _Annotation(field, read, lambda value: adapter().dump_json(value).decode())


_DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(SessionAnnotations)},
    **dict(NO_CONTROLS),
    "effective_units": None,  # the full share
}
_ANNOTATIONS = {
    SESSION: _Annotation("session", _text),
    TEMPLATE: _Annotation("template", _text),
    SHARE: _Annotation("share_units", _units_from(1)),
    GPU: _Annotation("gpus", _uuids, _listed),
    GPU_INDEX: _Annotation("gpu_indices", _indices, _listed),
    BORROWED: _Annotation("borrowed_units", _units_from(0), always=True),
    TIER: _Annotation(
        "tier", _choice_parser(tier for tier in Tier if tier is not Tier.STOPPED), _written_tier, always=True
    ),
    TIER_SINCE: _Annotation("tier_since", _instant, _written_instant),
    EFFECTIVE_SHARE: _Annotation("effective_units", _units_from(0)),
    IDLE_SINCE: _Annotation("idle_since", _instant, _written_guard),
    IF_GPU_SECONDS: _Annotation("if_gpu_seconds", _instant, _written_guard),
    USE: _json("use", UseRule),
    YIELDS_UNTIL: _Annotation("yields_until", _instant, _written_instant),
    BACKGROUND: _Annotation("background", _truth, _written_truth),
    TIME_LIMIT: _Annotation("time_limit_units", _units_from(1)),
    MEMORY_LIMIT: _Annotation("memory_limit", parse_percent_or_bytes),
    OVERSUBSCRIBE: _Annotation("oversubscribe", _truth, _written_truth),
    ENGINE: _Annotation("engine", _choice_parser(MemoryEngine), str),
    QUOTA: _Annotation("quota", str),
    USER_UNITS: _Annotation("user_units", _units_from(1)),
    NOTICE: _json("notice", Notice),
    KEEP: _json("keep", Keep),
    KEEPS: _json("keeps", Annotated[tuple[Instant, ...], Field(max_length=MOST_KEEPS)]),
    EXEMPTION: _json("exemption", Exemption),
    MESSAGES: _json("messages", tuple[Message, ...]),
    ANSWERS: _json("answers", tuple[AskAnswer, ...]),
    RESIZE: _json("resize", ShareChange),
    RESIZED: _json("resized", ShareChangeAnswer),
    PLACED_SHARE: _Annotation("placed_units", _units_from(1)),
    NEIGHBOURS: _json("neighbours", NeighbourRules),
    STOP_PROCESSES: _json("stop_processes", tuple[BypassingProcess, ...]),
}


def _patch(**values: Any) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sets these fields."""
    patch = {
        name: annotation.written(values[annotation.field])
        for name, annotation in _ANNOTATIONS.items()
        if annotation.field in values
    }
    if values.get("last_units"):
        patch[SHARE] = _share_text(values["share_units"], values["last_units"])
    return patch


def _share_text(units: int, last: int) -> str:
    """Return the text of a share with fewer units on the last GPU, like "100,50"."""
    return f"{units},{last}"


def pod_session(annotations: Mapping[str, str] | None, labels: Mapping[str, str] | None = None) -> SessionAnnotations:
    """Return a session from its pod's annotations, and from the labels if it can be another layer's.

    Another layer's session has the defaults of `OWN_FIELDS`: the spawner writes no annotations for them, and forged
    ones must have no effect.
    Raises AnnotationProblem, which names every missing or invalid annotation, with advice.
    """
    if not is_layer_session(labels):
        return _read_session(annotations or {})
    given, layer = annotations or {}, (labels or {})[LAYER]
    written = given.get(GPU_COUNT, "1")
    others = [name for name in LayerName if name is not LayerName.NATIVE]
    if layer not in others:
        raise AnnotationProblem([f"the label {LAYER} is {layer!r}: write one of {', '.join(others)}"])
    # int() raises a different error for thousands of digits
    if not written.isdecimal() or len(written) > 2 or not 1 <= int(written) <= 64:
        raise AnnotationProblem([f"the annotation {GPU_COUNT} is {written!r}: write a whole number from 1 to 64"])
    indices = _listed(range(int(written)))
    session = _read_session({**given, GPU: indices, GPU_INDEX: indices})
    names = gpu_names(LayerName(layer), session.session, int(written))
    own = {name: _DEFAULTS[name] for name in OWN_FIELDS}
    return dataclasses.replace(session, layer=LayerName(layer), gpus=names, **own)


def _read_session(given: Mapping[str, str]) -> SessionAnnotations:
    problems: list[str] = []
    values: dict[str, Any] = {}
    each, comma, last = given.get(SHARE, "").partition(",")
    for name, annotation in _ANNOTATIONS.items():
        text = given.get(name) if name != SHARE or not comma else each
        try:
            values[annotation.field] = annotation.default if text is None else annotation.read(text)
        except ValueError as error:
            problems.append(f"the annotation {name} is {text!r}: {error}")
            continue
        if values[annotation.field] is dataclasses.MISSING:
            problems.append(f"the annotation {name} is missing")
    if not problems:
        gpus, indices, share = values["gpus"], values["gpu_indices"], values["share_units"]
        if values["effective_units"] is None:
            values["effective_units"] = share
        if comma:
            try:
                values["last_units"] = Share(share, len(gpus), _units_from(1)(last)).last_units
            except ValueError as error:
                problems.append(f"the annotation {SHARE} is {given[SHARE]!r}: {error}")
        if len(gpus) != len(indices):
            problems.append(f"{GPU} names {len(gpus)} GPUs and {GPU_INDEX} {len(indices)}: both list the same GPUs")
        for name in (BORROWED, EFFECTIVE_SHARE):
            units = values[_ANNOTATIONS[name].field]
            if units > share:
                problems.append(f"the annotation {name} is {units}, which is more than the share of {share}")
    if problems:
        raise AnnotationProblem(problems)
    controls = Controls(**{name: values.pop(name) for name in Controls.model_fields})
    return SessionAnnotations(controls=controls, **values)


def tier_patch(
    tier: Tier,
    since: float,
    effective_units: int,
    idle_since: float | None = None,
    yields_until: float | None = None,
    if_gpu_seconds: float | None = None,
    use: UseRule | None = None,
    background: bool = False,
) -> dict[str, str | None]:
    """Return the annotations of a merge patch that changes a session's tier and withdraws the notice.

    The other arguments are the values of `IDLE_SINCE`, `YIELDS_UNTIL`, `IF_GPU_SECONDS`, `USE` and `BACKGROUND`.
    """
    return _patch(
        tier=tier,
        tier_since=since,
        effective_units=effective_units,
        idle_since=idle_since,
        yields_until=yields_until,
        if_gpu_seconds=if_gpu_seconds,
        use=use,
        background=background,
        notice=None,
    )


def notice_patch(notice: Notice | None) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sends the user a notice, or withdraws it (None)."""
    return _patch(notice=notice)


def borrowed_patch(borrowed_units: int) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sets the number of borrowed units."""
    return _patch(borrowed_units=borrowed_units)


def share_patch(share_units: int, placed_units: int, memory_limit: str, last_units: int = 0) -> dict[str, str | None]:
    """Return the annotations of a merge patch for a changed share. The caller adds those of the tier."""
    share = {"share_units": share_units, "last_units": last_units}
    return _patch(**share, placed_units=placed_units, memory_limit=memory_limit)


def controls_patch(controls: Controls) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sets a session's controls."""
    return _patch(**dict(controls))


def messages_patch(messages: Sequence[Message], changed: MessageCause) -> dict[str, str | None]:
    """Return the annotations of a merge patch that shows the user only these messages, earliest first.

    If the message of cause BYPASS has changed, no process is stopped until the next request.
    """
    if changed is MessageCause.BYPASS:
        return _patch(messages=tuple(messages), stop_processes=())
    return _patch(messages=tuple(messages))


def stop_processes_patch(processes: Sequence[BypassingProcess]) -> dict[str, str | None]:
    """Return the annotations of a merge patch that requests to stop processes."""
    return _patch(stop_processes=tuple(processes))


def answers_patch(before: Iterable[AskAnswer], answer: AskAnswer) -> dict[str, str | None]:
    """Return the annotations of a merge patch that answers an ask. ``before``: the earlier answers."""
    kept = [earlier for earlier in before if earlier.number != answer.number][-(MOST_ASKS - 1) :]
    return _patch(answers=(*kept, answer))


def resize_patch(change: ShareChange | None) -> dict[str, str | None]:
    """Return the annotations of a merge patch that requests a change of the share; None withdraws the request."""
    return _patch(resize=change)


def resized_patch(answer: ShareChangeAnswer) -> dict[str, str | None]:
    """Return the annotations of a merge patch that answers a request to change the share."""
    return _patch(resized=answer, resize=None)


def gpu_names(layer: LayerName, session: str, count: int) -> tuple[str, ...]:
    """Return placeholder names for the GPUs of another layer's session. Reports do not have them."""
    return tuple(f"{layer}/{session}/{index}" for index in range(count))


def is_layer_session(labels: Mapping[str, str] | None) -> bool:
    """Return whether the labels are those of a pod with a share of another layer."""
    return LAYER in (labels or {})
