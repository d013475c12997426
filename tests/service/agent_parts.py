"""An agent made of the product's parts, in virtual time: on one machine, or behind the annotations of a pod.

No socket, no API server: a request of the service is carried out at once, and what the agent then writes to the pod is
written before the next request.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpushare_spawner.agent.kubernetes.pods.annotations import follow_tier, needed_patch, remember, tier_decision_key
from gpushare_spawner.agent.node import report_of_session
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord
from gpushare_spawner.agent.sessions.registry import SessionControls
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.agent.sessions.tiers import Tiers
from gpushare_spawner.model.control import (
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    NoticeRequest,
    OpenRequest,
    ServiceRequest,
    TierRequest,
)
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels, pod_session
from gpushare_spawner.model.report import NOTHING, GpuReport, Report, SessionReport
from gpushare_spawner.service.kubernetes.cluster import NodeAgent
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod, joined_report
from gpushare_spawner.service.reports import KnownReport
from tests.service.conftest import Clock

NODE = "fake"
GPU = GpuReport(index=0, uuid="GPU-0", model="Test", memory_bytes=1 << 34)


class _Shares:
    """Nobody else is on the GPU."""

    def change(self, session: Session) -> list[Session]:
        return []

    def work_on_lent_units(self, session: Session, works: bool) -> None:
        session.works_on_lent_units = works


class AgentParts:
    """The agent of one machine with the session "ann", whose work is told by hand."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.cordons: tuple[Cordon, ...] = ()
        self.busy, self.gpu_seconds = False, 0.0
        self.last: float | None = None
        request = OpenRequest(id="ann", user="ann", uid=0, template="quarter", gpus=(GPU.uuid,), share_units=25)
        record = SessionRecord.opened(request, clock())
        record.pod = self.owner()
        self._begin(record)

    def owner(self) -> PodOwner:
        """Of the session; here a pod without annotations, as it is one machine."""
        return PodOwner(namespace="jupyter", name="ann", uid="1", devices={})

    def _begin(self, record: SessionRecord) -> None:
        self.session = Session(record, ())
        self.tiers = Tiers(_Shares(), self.activity, self.save, self.clock)  # type: ignore[arg-type]
        self.controls_part = SessionControls(self.save, lambda: None)

    def save(self, session: Session) -> None:
        self.saved = session.record.model_dump_json()

    def restart(self) -> None:
        """Another agent takes over what this one has written."""
        self.save(self.session)
        self._begin(SessionRecord.model_validate_json(self.saved))
        self.look()

    def activity(self, session: Session) -> Activity:
        return Activity(self.busy, False, self.last, self.gpu_seconds, 0, 0, NOTHING)

    def work_begins(self) -> None:
        self.busy = True
        self.tiers.work_begins(self.session)
        self.look()

    def work_ends(self, seconds: float) -> None:
        """It has had the GPU for so many seconds."""
        self.busy, self.last, self.gpu_seconds = False, self.clock(), self.gpu_seconds + seconds
        self.look()

    def look(self) -> None:
        """What the agent does now and then."""
        self.tiers.check_use(self.session)

    def own_report(self) -> Report:
        session = report_of_session(self.session, self.activity(self.session), (0, None), None, None)
        report = Report(node=NODE, published_at=self.clock(), gpus=(GPU,), sessions=(session,))
        return report.with_cordons(self.cordons)

    # -- what the service asks for --

    async def report(self) -> KnownReport:
        report = self.own_report()
        return KnownReport.of(report, report.sessions)

    def report_age(self) -> float:
        return 0.0

    async def send(self, request: ServiceRequest) -> None:
        match request:
            case TierRequest():
                self.tiers.apply_request(self.session, request)
            case NoticeRequest():
                self.tiers.notify(self.session, request)
            case ControlsRequest():
                self.controls_part.replace(self.session, request.controls)
            case MessageRequest():
                self.controls_part.message(self.session, request)
            case CordonRequest():
                self.cordons = () if request.cordon is None else (request.cordon,)
            case _:
                raise NotImplementedError

    async def carried_out(self, request: TierRequest) -> bool:
        return True


class PodAgent(AgentParts):
    """The same behind the annotations of a pod. ``patches``: all that were written, by the service and the agent."""

    def __init__(self, clock: Clock) -> None:
        said = SessionAnnotations(
            session="ann", template="quarter", share_units=25, gpus=(GPU.uuid,), gpu_indices=(0,), tier_since=clock(),
            effective_units=25,
        )  # fmt: skip
        self.annotations: dict[str, str] = said.annotations()
        self.version = 1
        self.created = clock()
        self.patches: list[Mapping[str, str | None]] = []
        super().__init__(clock)
        self._service = _ServiceSide(self)

    def owner(self) -> PodOwner:
        return PodOwner(
            namespace="jupyter", name="ann", uid="1", devices={}, seen=(tier_decision_key(self.annotations),)
        )  # fmt: skip

    def patch(self, patch: Mapping[str, str | None]) -> None:
        self.patches.append(patch)
        self.version += 1
        merged_ones = {**self.annotations, **patch}
        self.annotations = {name: text for name, text in merged_ones.items() if text is not None}

    def look(self) -> None:
        super().look()
        said = pod_session(self.annotations)
        follow_tier(self.session, said, self.annotations, self)  # type: ignore[arg-type]
        self.controls_part.follow(self.session, said.controls, said.messages, said.answers)
        for _ in range(3):
            patch = needed_patch(pod_session(self.annotations), self.session.record, self.clock())
            if not patch:
                return
            self.patch(patch)
            assert self.session.record.pod is not None
            remember(self.session.record.pod, tier_decision_key(self.annotations))
            follow_tier(self.session, pod_session(self.annotations), self.annotations, self)  # type: ignore[arg-type]
        raise AssertionError(f"the agent patches without end: {self.patches[-3:]}")

    def pod(self) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.created, UTC).isoformat()
        return {
            "metadata": {
                "namespace": "jupyter", "name": "ann", "uid": "1", "resourceVersion": str(self.version),
                "creationTimestamp": created, "labels": labels(), "annotations": dict(self.annotations),
            },
            "spec": {"nodeName": NODE, "containers": []},
            "status": {"phase": "Running"},
        }  # fmt: skip

    async def report(self) -> KnownReport:
        return await self._service.report()

    async def send(self, request: ServiceRequest) -> None:
        await self._service.send(request)

    async def carried_out(self, request: TierRequest) -> bool:
        return await self._service.carried_out(request)


class _KnownCluster:
    """What the service knows of the cluster: one node with the pod of the session "ann"."""

    namespace = "jupyter"

    def __init__(self, here: PodAgent) -> None:
        self._here = here

    def report(self, node: str) -> tuple[KnownReport, float]:
        return joined_report(self._here.own_report(), self.pods(node).values()), 0.0

    def pods(self, node: str) -> Mapping[str, SessionPod]:
        return {"ann": SessionPod.of(self._here.pod())}

    def report_version(self, node: str) -> str:
        return str(self._here.version)

    def reported(self, node: str, session: str) -> SessionReport | None:
        return self._here.own_report().session(session)


class _ServiceSide(NodeAgent):
    """The service's view of the pod."""

    def __init__(self, here: PodAgent) -> None:
        self._here = here
        super().__init__(NODE, _KnownCluster(here), here.clock)  # type: ignore[arg-type]

    async def _patch(self, session: str, pod: SessionPod, annotations: Mapping[str, str | None]) -> None:
        self._here.patch(annotations)
        self._here.look()


__all__ = ["GPU", "AgentParts", "ControlRefused", "PodAgent"]
