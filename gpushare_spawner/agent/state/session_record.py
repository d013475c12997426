"""What the agent must know about a session after a restart: one JSON file each, written by session_records.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.model.controls import NO_CONTROLS, Controls, Message
from gpushare_spawner.model.delivered import NOTHING, Delivered
from gpushare_spawner.model.instant import LATEST, Instant
from gpushare_spawner.model.kubernetes import ShareChangeAnswer
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.memory_limits.hits import NO_HITS, MemoryLimitHits
from gpushare_spawner.model.protocol.control import OpenRequest
from gpushare_spawner.model.report import Notice, Units
from gpushare_spawner.model.tier import Tier, UseRule


class PodOwner(BaseModel):
    """The pod that a session ends with, on Kubernetes."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    namespace: str
    name: str
    uid: str = ""
    """Empty for a pod that holds devices of ours without being labelled as a session's."""
    devices: dict[str, tuple[str, ...]]
    """GPU's UUID -> ids of the devices that the kubelet gave to the pod."""
    given: tuple[tuple[str, ...], ...] = ()
    """The same ids as the kubelet gave them: together those of one GPU and one container."""
    folders: tuple[str, ...] = ()
    """Names of the folders that it has mounted; empty: one for each grant, named after its ids."""
    seen: tuple[str, ...] = ()
    """The decisions on the tier in the pod's annotations that have been dealt with, the latest last."""
    averted: Notice | None = None
    """The notice in the pod's annotations that the agent has withdrawn, as work averts its action; None: there is
    none."""
    placed_units: Units | None = None
    """What its devices stand for, on each of its GPUs; None: the session's share, which has not changed."""
    resized: ShareChangeAnswer | None = None
    """The last answer to a change of the share that its annotations asked for."""

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name)."""
        return self.namespace, self.name

    @property
    def grants(self) -> tuple[tuple[str, ...], ...]:
        """Ids that were given together; each such grant has a folder."""
        return self.given or tuple(self.devices.values())


class Suspension(BaseModel):
    """The processes of a session that are suspended, or on their way: written before the first of them is touched."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    processes: tuple[ProcessName, ...]
    sizes: tuple[Annotated[int, Field(ge=0)], ...]
    """Bytes on the GPU that each of them needs to come back."""
    complete: bool
    """All were suspended when this was written."""

    @model_validator(mode="after")
    def _has_a_size_for_each(self) -> Self:
        if len(self.sizes) != len(self.processes):
            raise ValueError(f"{len(self.sizes)} sizes for {len(self.processes)} processes")
        return self


class Clock(BaseModel):
    """The clock that people read, as it was when a record was written."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    boot: str
    """The kernel's boot id."""
    offset: Annotated[float, Field(allow_inf_nan=False)]
    """Seconds between it and the clock that starts with the machine."""


class SessionRecord(BaseModel):
    """What the agent must know again after a restart; one JSON file each."""

    # A newer agent may have written more than this one understands.
    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    version: Literal[1] = 1
    request: OpenRequest
    opened_at: Instant
    """As the clock was then: the session's name in other processes. `begun` is what durations count from."""
    clock_moved: float = 0.0
    """Seconds by which the clock was set since then."""
    clock: Clock | None = None
    """That of the instants below."""
    borrowed_units: Units
    effective_units: Units
    tier: Tier = Tier.ACTIVE
    tier_since: Instant
    process: ProcessName | None = None
    """The notebook server; None until it is confirmed."""
    pod: PodOwner | None = None
    """Where it is a pod, there is no process."""
    use: UseRule | None = None
    """How much GPU work restores the share. None: all work does, or the session is active."""
    notice: Notice | None = None
    yields_until: Instant | None = None
    """Until when the units that its tier took are kept for spawns in quota; None: they are not."""
    controls: Controls = NO_CONTROLS
    messages: tuple[Message, ...] = ()
    """Those that the session's user has, one of each cause, the earliest first."""
    gpu_busy: bool = False
    """There was work when this was written."""
    last_gpu_activity: Instant | None = None
    gpu_seconds: Annotated[float, Field(ge=0)] = 0.0
    delivered: Delivered = NOTHING
    memory_hits: MemoryLimitHits = NO_HITS
    suspension: Suspension | None = None
    """None: its processes run."""

    @model_validator(mode="before")
    @classmethod
    def _written_by_older_agents(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("message") is not None and "messages" not in data:
            return data | {"messages": [data["message"]]}
        return data

    @property
    def begun(self) -> float:
        """When the session was opened, by the clock of now."""
        return self.opened_at + self.clock_moved

    def clock_was_set(self, by: float) -> None:
        """Move all instants by a step of the clock, so that durations stay what they were.

        A keep and an exemption end when people were told.
        """
        self.clock_moved += by
        self.tier_since = _moved(self.tier_since, by)
        if self.last_gpu_activity is not None:
            self.last_gpu_activity = _moved(self.last_gpu_activity, by)
        if self.yields_until is not None:
            self.yields_until = _moved(self.yields_until, by)
        if self.notice is not None:
            self.notice = self.notice.model_copy(update={"at": _moved(self.notice.at, by)})
        # the notice period of a drain counts from its message
        self.messages = tuple(one.model_copy(update={"at": _moved(one.at, by)}) for one in self.messages)
        keeps = tuple(_moved(begun, by) for begun in self.controls.keeps)
        self.controls = self.controls.model_copy(update={"keeps": keeps})

    @property
    def owner(self) -> ProcessName | PodOwner | None:
        """The process or the pod that the session ends with; None until its server is confirmed."""
        return self.process if self.process is not None else self.pod

    @property
    def gpus_unknown(self) -> bool:
        """Whether another layer has given GPUs to the pod: its request names them, and only their number is known."""
        return self.pod is not None and self.request.layer is not LayerName.NATIVE

    @classmethod
    def opened(cls, request: OpenRequest, now: float) -> SessionRecord:
        """The record of a session that begins now (seconds since the epoch)."""
        return cls(
            request=request,
            opened_at=now,
            borrowed_units=request.borrowed_units,
            effective_units=request.share_units,
            tier_since=now,
        )


def _moved(instant: float, by: float) -> float:
    return min(max(0.0, instant + by), LATEST)
