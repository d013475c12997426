"""The hub's requests to the agent: open, confirm and close sessions, change their tiers, report.

The socket itself is in sockets/control_socket.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.mps import MpsDaemons, MpsFailed
from gpushare_spawner.agent.report import GpuHealth
from gpushare_spawner.agent.sessions.environment import (
    Libraries,
    mig_environment,
    mps_environment,
    session_environment,
)
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sessions.tiers import Shares
from gpushare_spawner.agent.state.cordons import Cordons
from gpushare_spawner.agent.state.folder import StateFolder
from gpushare_spawner.agent.state.records import SessionRecord
from gpushare_spawner.model.control import (
    AnnounceRequest,
    AnswerRequest,
    AskedAnswer,
    AskedRequest,
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    ErrorCode,
    Failure,
    MessageRequest,
    Opened,
    OpenRequest,
    ReportRequest,
    Request,
    ResizeRequest,
    TierRequest,
)
from gpushare_spawner.model.layers import LAYERS, LayerName, Where
from gpushare_spawner.model.placement import engine_environment
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Share

log = logging.getLogger(__name__)

MAX_UID = 2**32 - 2
"""The kernel's uids have 32 bits, and the highest number means none."""


class ControlRequests:
    """Checks the requests of the control socket and carries them out. Its methods raise ControlRefused."""

    def __init__(
        self,
        registry: SessionRegistry,
        gpus: Mapping[str, Gpu],
        shares: Shares,
        health: GpuHealth,
        cordons: Cordons,
        mps: MpsDaemons,
        folder: StateFolder,
        libraries: Libraries,
        report: Callable[[], Report],
        clock: Callable[[], float],
    ) -> None:
        """Store the parts of the agent. `gpus` are by UUID; `clock` gives seconds since the epoch."""
        self._registry = registry
        self._gpus = gpus
        self._shares = shares
        self._health = health
        self._cordons = cordons
        self._mps = mps
        self._folder = folder
        self._libraries = libraries
        self._report = report
        self._clock = clock

    async def answer(self, request: Request) -> dict[str, Any]:
        """Carry out a request; its result is on the disk before the answer.

        After a failure of the disk no session is opened. Changes of open sessions hold in memory, and the
        report has the failure.
        """
        result: dict[str, Any] = {}
        match request:
            case ReportRequest():
                return self._report().model_dump(mode="json")
            case OpenRequest():
                result = (await self._open_when_ready(request)).model_dump()
                await self._check_kept(request.id)
            case ConfirmRequest():
                self.confirm(request)
            case CordonRequest():
                await self.cordon(request)
            case CloseRequest():
                self._registry.end(request.id, "closed")
            case TierRequest():
                self.tier(request)
            case ResizeRequest():
                self._registry.share_changes.resize(self._changeable(request.id), request)
            case AnnounceRequest():
                self.notify(request)
            case ControlsRequest():
                await self._set_controls(request)
            case MessageRequest():
                self._registry.controls.message(self._session(request.id), request)
            case AskedRequest():
                return AskedAnswer(asked=await self._registry.wait_for_ask(request.within)).model_dump()
            case AnswerRequest():
                self._registry.controls.answer(self._session(request.id), request.answer)
        await self._registry.store.flush()
        return result

    async def _open_when_ready(self, request: OpenRequest) -> Opened:
        """Open a session as soon as the layer's daemons of the GPUs run."""
        if request.layer is not LayerName.MPS:
            return self.open(request)
        self._checked(request)
        try:
            async with self._mps.running(request.gpus):
                return self.open(request)
        except MpsFailed as error:
            raise _refused("internal", f"the MPS daemon does not run: {error}") from None

    def open(self, request: OpenRequest) -> Opened:
        """Open a session, or open it again. A refused request has changed nothing."""
        gpus = self._checked(request)
        session = self._registry.sessions.get(request.id)
        is_new = session is None
        if session is not None:
            self._open_again(session, request)
        else:
            for gpu in gpus:
                self._shares.check_free_units(gpu, request.share_units, request.borrowed_units)
            session = self._registry.add(SessionRecord.opened(request, self._clock()))
            indices = ", ".join(str(gpu.index) for gpu in gpus)
            log.info("session %s opened: %d units on GPU %s", session.id, request.share_units, indices)
            if request.uid != os.geteuid() and (barrier := self._folder.barrier()) is not None:
                log.warning(
                    "uid %d cannot reach its socket: other users cannot enter %s (chmod o+x)", request.uid, barrier
                )
        reason = self._registry.listen(session) if session.socket is None else None
        if session.socket is None:
            if is_new:
                self._registry.end(session.id, "it has no socket")
            raise _refused("internal", f"cannot create the socket of session {request.id}: {reason}")
        return Opened(environment=self._environment(session, session.socket.path))

    def _environment(self, session: Session, socket: Path) -> dict[str, str]:
        request = session.record.request
        if request.layer is LayerName.NATIVE:
            return session_environment(session.gpus, socket, self._libraries) | engine_environment(request.engine)
        gpu = session.gpus[0]
        if request.layer is LayerName.MIG:
            return mig_environment(gpu, socket, self._libraries)
        pipes, memory = self._mps.pipes(gpu.uuid), session.memory_limit(gpu)
        return mps_environment(gpu, socket, pipes, request.share_units, memory, self._libraries)

    async def _check_kept(self, name: str) -> None:
        """Raise ControlRefused where a session that was just opened is not on the disk, and end it."""
        reason = await self._registry.store.missing(name)
        if reason is not None:
            self._registry.end(name, "its record cannot be written")
            raise _refused(
                "internal",
                f"cannot keep session {name} on the disk: {reason}. It would be lost if the agent stopped. Free space "
                "for the agent's state folder, then start the server again",
            )

    def confirm(self, request: ConfirmRequest) -> None:
        """Tie a session to the process of its server."""
        session = self._session(request.id)
        process = processes.named(request.pid)
        if process is None:
            raise _refused(
                "bad-request",
                f"there is no process {request.pid} on this machine: session {request.id} stays unconfirmed",
            )
        self._registry.confirm(session, process)

    def tier(self, request: TierRequest) -> None:
        """Change the tier of a session."""
        self._registry.tiers.decide(self._changeable(request.id), request)

    def notify(self, request: AnnounceRequest) -> None:
        """Send a notice to a session's user, or withdraw it."""
        self._registry.tiers.notify(self._session(request.id), request)

    async def _set_controls(self, request: ControlsRequest) -> None:
        """Set a session's controls. Its user gets the answer when they are on the disk, and so survive a crash.

        After a failure of the disk the report has the failure.
        """
        session = self._session(request.id)
        self._registry.controls.replace(session, request.controls)
        if request.answer is not None:
            await self._registry.store.flush()
            self._registry.controls.answer(session, request.answer)

    async def cordon(self, request: CordonRequest) -> None:
        """Cordon a GPU or the node, or end that."""
        if request.gpu and request.gpu not in self._gpus:
            raise _unknown_gpu(request.gpu, self._gpus)
        if request.cordon is not None and request.cordon.gpu != request.gpu:
            raise _refused("bad-request", f"the cordon is of {request.cordon.gpu or 'the node'}, not of {request.gpu}")
        try:
            await self._cordons.put(request.gpu, request.cordon)
        except OSError as error:
            raise _refused("internal", f"cannot keep the cordon on the disk: {error.strerror or error}") from None
        what = f"GPU {self._gpus[request.gpu].index}" if request.gpu else "the node"
        if request.cordon is None:
            log.info("new sessions may come to %s again", what)
        else:
            log.info("no new session comes to %s, by %s: %s", what, request.cordon.by, request.cordon.reason)

    def _checked(self, request: OpenRequest) -> tuple[Gpu, ...]:
        """Return the GPUs of a valid request."""
        try:
            Share(request.share_units, len(request.gpus))
            if request.borrowed_units > request.share_units:
                raise ValueError(
                    f"borrowed_units: {request.borrowed_units} is more than the share of {request.share_units}"
                )
            if len(set(request.gpus)) < len(request.gpus):
                raise ValueError("gpus: the same GPU is named twice")
            if not 0 <= request.uid <= MAX_UID:
                raise ValueError(f"uid: {request.uid} is no user; a uid is a number from 0 to {MAX_UID}")
            if os.geteuid() not in (0, request.uid):
                raise ValueError(
                    f"uid: this agent runs as uid {os.geteuid()} and cannot give a socket to uid {request.uid}; "
                    "run it as root"
                )
            if Where.ONE_MACHINE not in LAYERS[request.layer].where:
                raise ValueError(f"layer: {LAYERS[request.layer].title} does not work on one machine")
            if request.layer is LayerName.MPS and len(request.gpus) > 1:
                raise ValueError("gpus: each GPU has an MPS daemon of its own, and a session can use one of them")
            if request.layer is LayerName.MIG and len(request.gpus) > 1:
                raise ValueError("gpus: CUDA uses one MIG instance only")
            for uuid in request.gpus:
                if uuid in self._gpus and resolve_bytes(request.memory_limit, self._gpus[uuid].memory_bytes) <= 0:
                    raise ValueError(f"memory_limit: {request.memory_limit} leaves no memory")
        except ValueError as error:
            raise _refused("bad-request", str(error)) from None
        for uuid in request.gpus:
            if uuid not in self._gpus:
                raise _unknown_gpu(uuid, self._gpus)
            if (trouble := self._health.trouble(uuid)) is not None:
                raise _refused("unhealthy-gpu", trouble)
            self._check_layer(self._gpus[uuid], request)
        return tuple(self._gpus[uuid] for uuid in request.gpus)

    def _check_layer(self, gpu: Gpu, request: OpenRequest) -> None:
        if (request.layer is LayerName.MIG) is (gpu.mig is None):
            what = "is a whole GPU" if gpu.mig is None else "is a MIG instance"
            raise _refused("no-capacity", f"{gpu.label} ({gpu.uuid}) {what}: the layer {request.layer} cannot share it")
        for session in self._registry.sessions.values():
            layer = session.record.request.layer
            if session.id != request.id and gpu in session.gpus and layer is not request.layer:
                raise _refused(
                    "no-capacity",
                    f"GPU {gpu.index} ({gpu.uuid}) has sessions of the layer {layer}; a session of the layer "
                    f"{request.layer} needs a GPU without them",
                )

    def _open_again(self, session: Session, request: OpenRequest) -> None:
        before = session.record.request
        if any(
            getattr(before, name) != getattr(request, name)
            for name in ("share_units", "gpus", "uid", "engine", "layer")
        ):
            raise _refused(
                "exists",
                f"session {request.id} is open already, with {before.share_units} units on {', '.join(before.gpus)} "
                f"for uid {before.uid}, the layer {before.layer} and the memory engine {before.engine}; close it first",
            )
        self._registry.reopen(session, request)

    def _changeable(self, name: str) -> Session:
        session = self._session(name)
        layer = LAYERS[session.record.request.layer]
        if not layer.reach:
            raise _refused("bad-request", f"with {layer.title} the share of session {name} is fixed until it stops")
        return session

    def _session(self, name: str) -> Session:
        session = self._registry.sessions.get(name)
        if session is None:
            raise _refused("unknown-session", f"no session {name} is open on this machine")
        return session


def _unknown_gpu(uuid: str, current: Iterable[str]) -> ControlRefused:
    return _refused("unknown-gpu", f"this machine has no GPU {uuid}; it has {', '.join(current)}")


def _refused(code: ErrorCode, message: str) -> ControlRefused:
    return ControlRefused(Failure(code=code, message=message))
