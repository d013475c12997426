"""Scripted peers of a session's socket, and GPUs that exist only as numbers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState, Utilisation
from gpushare_spawner.model.frames import NO_GPU, Frame, Kind, Role, gpu_bytes
from gpushare_spawner.model.share_status import AgentRecord, ServiceAnswer, ShareStatus

GIB = 2**30
FIRST = Gpu(0, "GPU-00000000-0000-0000-0000-000000000001", "Simulated GPU 16 GiB", 16 * GIB, simulated=True)
SECOND = Gpu(1, "GPU-00000000-0000-0000-0000-000000000002", "Simulated GPU 16 GiB", 16 * GIB, simulated=True)


class GpusOnPaper:
    """Stands in for NVML: healthy unless told otherwise."""

    def __init__(self) -> None:
        self.states: dict[str, GpuState] = {}
        self.utilised: dict[str, tuple[Utilisation, ...]] = {}
        """By UUID; without an entry the GPU does not tell."""

    def state(self, gpu: Gpu) -> GpuState:
        return self.states.get(gpu.uuid, GpuState(healthy=True))

    def memory(self, gpu: Gpu) -> GpuState | None:
        return self.state(gpu)

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        return self.utilised.get(gpu.uuid)


class Peer:
    """A process on a session's socket, as the protocol page describes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.serial = 0

    async def connect(self, role: Role | None = Role.CUDA, features: int = 0) -> list[Frame]:
        """Connect, and say HELLO where a role is given; returns WELCOME and the DEVICE frames."""
        self.socket.connect(self.path)
        self.socket.setblocking(False)
        if role is None:
            return []
        self.send(Kind.HELLO, role, os.getpid(), 100, features)
        welcome = await self.expect(Kind.WELCOME)
        return [welcome, *[await self.expect(Kind.DEVICE) for _ in range(welcome.fields[5])]]

    def send(self, kind: Kind, *fields: int, gpu: str | None = None) -> None:
        self.serial += 1
        self.send_raw(Frame(kind, fields, gpu_bytes(gpu) if gpu else NO_GPU, self.serial).pack())

    def send_raw(self, data: bytes) -> None:
        self.socket.send(data)

    async def packet(self, timeout: float = 5.0) -> Frame | AgentRecord | None:
        """The next packet, or None where the agent has ended the connection."""
        async with asyncio.timeout(timeout):
            try:
                data = await asyncio.get_running_loop().sock_recv(self.socket, 2**18)
            except ConnectionResetError:
                # we had sent more than was read; what the agent said is still there
                with contextlib.suppress(ConnectionResetError):
                    data = await asyncio.get_running_loop().sock_recv(self.socket, 2**18)
        if not data:
            return None
        return AgentRecord.parse(data) if data.startswith(b"{") else Frame.unpack(data)

    async def receive(self, timeout: float = 5.0) -> Frame | None:
        """The next frame, or None where the agent has ended the connection; records are skipped."""
        while isinstance(packet := await self.packet(timeout), AgentRecord):
            pass
        return packet

    async def record(self, timeout: float = 5.0) -> AgentRecord:
        """The next record of a notebook server; frames are skipped."""
        while not isinstance(packet := await self.packet(timeout), AgentRecord):
            assert packet is not None, "the connection ended, expected a record"
        return packet

    async def status(self) -> ShareStatus:
        """Ask for the status; earlier records are skipped."""
        self.send(Kind.QUERY)
        while (status := (await self.record()).status) is None:
            pass
        return status

    async def changed(self) -> ShareStatus:
        """Wait for the record of a change, and ask for the status."""
        assert await self.record() == AgentRecord()
        return await self.status()

    async def answer(self, timeout: float = 5.0) -> ServiceAnswer:
        """The next answer to an ask; other records are skipped."""
        while (answer := (await self.record(timeout)).answer) is None:
            pass
        return answer

    async def expect(self, *kinds: Kind, timeout: float = 5.0) -> Frame:
        """The next frame, which must be one of these."""
        frame = await self.receive(timeout)
        assert frame is not None, f"the connection ended, expected {kinds}"
        assert frame.kind in kinds, f"{frame} instead of {kinds}"
        return frame

    async def until(self, kind: Kind, timeout: float = 5.0) -> Frame:
        """The next frame of this kind; others are skipped."""
        async with asyncio.timeout(timeout):
            while True:
                frame = await self.receive(timeout)
                assert frame is not None, f"the connection ended, expected {kind}"
                if frame.kind is kind:
                    return frame

    async def ended(self, timeout: float = 5.0) -> int | None:
        """Wait for the end; the code of the ERROR that came before it, or None."""
        code = None
        while (frame := await self.receive(timeout)) is not None:
            if frame.kind is Kind.ERROR:
                code = frame.fields[0]
        return code

    async def quiet(self, seconds: float = 0.1) -> None:
        """Nothing comes for so long."""
        with contextlib.suppress(TimeoutError):
            packet = await self.packet(seconds)
            raise AssertionError(f"unexpected {packet}")

    def close(self) -> None:
        self.socket.close()


async def session_processes(path: str | Path, gpu: str, working_set: int = GIB // 4) -> tuple[Peer, Peer]:
    """The processes of an idle session: a CUDA process that has worked once, and a notebook server."""
    cuda, observer = Peer(path), Peer(path)
    await cuda.connect(Role.CUDA)
    await observer.connect(Role.NOTEBOOK)
    cuda.send(Kind.REQUEST, working_set, 0, gpu=gpu)
    grant = await cuda.until(Kind.GRANT)
    cuda.send(Kind.IDLE, grant.fields[0], 1_000_000, 1_000_000, gpu=gpu)
    return cuda, observer
