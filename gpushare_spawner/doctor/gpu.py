"""``--gpu``: runs programs on a GPU with libgpushare.so, against an agent in this process.

Each program fills memory and computes. Its lease is revoked and its memory is paged out. Then it gets another lease and
must find each byte unchanged. Next, the time of a launch with and without the library is measured. Finally, the program
runs once more, without the library, and the driver's checkpoint functions suspend and resume it, as for engine
`suspend`. The trial is needed because a driver's information on itself can be wrong, and NVIDIA does not document the
cost of these functions.

A program's managed memory stays below half of the GPU's free memory: more could hang a GPU that others use.
"""

from __future__ import annotations

import asyncio
import os
import queue
import tempfile
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpushare_spawner import native
from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.suspend.checkpoints import CheckpointResult, DriverCheckpoints
from gpushare_spawner.agent.suspend.progress import may_attach, reason_of, why_not
from gpushare_spawner.doctor.finding import Finding, note, ok, problem, skipped
from gpushare_spawner.doctor.gpu_programs import PROGRAMS, Program, ScriptedAgent, ScriptedPeer, free_memory, installed
from gpushare_spawner.model.frames import Frame, Kind, gpu_bytes
from gpushare_spawner.wording.amounts import memory, reason

DEFAULT_SIZE = 1 << 30
"""Bytes that each program fills."""
_COPIES = 2
"""Copies of the filled memory that a program can hold, including the original."""
_HEAR_WITHIN = 120.0
"""Seconds in which a framework must start, and memory must be paged out."""
_REPORT_IT = "Report the error with the versions of driver and framework."
_SIMULATED = " (simulated)"


@dataclass(frozen=True)
class ProgramResult:
    """The result of one program: bandwidths in bytes per second, launches in nanoseconds, `release` in seconds."""

    intact: bool
    page_out: float
    page_in: float
    release: float
    launch_ns: float
    bare_ns: float


def check(gpus: tuple[Gpu, ...], size: int, names: list[str]) -> list[Finding]:
    """Run the programs on the first GPU.

    `size`: in bytes. `names`: names in `PROGRAMS`; empty: all installed programs.
    """
    if not gpus:
        return [skipped("GPU checks", "there is no GPU")]
    gpu = gpus[0]
    free = free_memory(gpu)
    if (refused := too_much(size, free)) is not None:
        return [refused]
    environment = _environment(gpu)
    results = [skipped(name, "is not installed here") for name in names if name not in installed()]
    for name in [name for name in installed() if not names or name in names]:
        try:
            results.append(finding(name, run(PROGRAMS[name][1], size, gpu, environment), gpu.simulated))
        except (RuntimeError, AssertionError, OSError, queue.Empty) as error:
            results.append(failed(name, error))
        results.append(try_suspension(name, PROGRAMS[name][1], size, gpu, environment))
    return results


def too_much(size: int, free: int) -> Finding | None:
    """Return a finding if the programs would use half of the GPU's free memory or more."""
    if size * _COPIES < free // 2:
        return None
    what = f"not run: {memory(size)} is not less than a quarter of the GPU's free memory ({memory(free)})"
    return note("GPU checks", what, "Free memory on the GPU, or use a smaller --gpu-memory.")


def finding(name: str, outcome: ProgramResult, simulated: bool = False) -> Finding:
    """Return the finding for a program's result."""
    figures = (
        f"page out {outcome.page_out / 1e9:.1f} GB/s, page in {outcome.page_in / 1e9:.1f} GB/s, "
        f"lease returned in {outcome.release * 1000:.1f} ms, "
        f"a launch {outcome.launch_ns:.0f} ns, {outcome.bare_ns:.0f} ns without the library{_SIMULATED * simulated}"
    )
    if outcome.intact:
        return ok(name, f"memory unchanged after it was paged out and in; {figures}")
    return problem(name, f"memory was changed by paging out and in; {figures}", f"Do not share this GPU. {_REPORT_IT}")


def failed(name: str, error: Exception) -> Finding:
    """Return the finding for a program that failed."""
    remedy = "Try it with GPUSHARE_DISABLE=1. If it still fails, the driver or framework is the cause; else report it."
    return problem(name, f"the program fails with the library: {reason(error)}", remedy)


def run(code: str, size: int, gpu: Gpu, bare: Mapping[str, str]) -> ProgramResult:
    """Run one program with and without the library. Raises RuntimeError or AssertionError with the reason."""
    raw = gpu_bytes(gpu.uuid)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        agent = ScriptedAgent(path, [raw], total=gpu.memory_bytes)
        shared = {**bare, "LD_PRELOAD": str(native.preload_library()), "GPUSHARE_SOCKET": str(path)}
        try:
            with Program(code, size, shared) as program:
                leases = _Leases(agent.peer(_HEAR_WITHIN))
                assert leases.until(program) == "ready"
                out, released = leases.take_away(raw)
                leases.paged_in = (0, 0)
                program.go_on()
                intact = bool(leases.until(program))
                launch = float(leases.until(program))
        finally:
            agent.stop()
    with Program(code, size, bare) as plain:
        assert plain.hear() == "ready"
        plain.go_on()
        plain.hear()
        bare_ns = float(plain.hear())
    return ProgramResult(intact, _rate(*out.fields[:2]), _rate(*leases.paged_in), released, launch, bare_ns)


class _Leases:
    """The agent's side for one process: grants each lease request and pages in all its memory."""

    def __init__(self, peer: ScriptedPeer) -> None:
        self.peer, self.lease = peer, 0
        self.paged_in = (0, 0)
        """Bytes and nanoseconds."""

    def until(self, program: Program) -> Any:
        """Grant requests until the program sends a message; return the message."""
        while not program.has_message():
            try:
                frame = self.peer.hear(0.05)
            except TimeoutError:
                if program.process.poll() is not None:
                    break
                continue
            if frame is None:
                break
            self._serve(frame)
        return program.hear()

    def _serve(self, frame: Frame) -> None:
        if frame.kind is Kind.REQUEST:
            self.lease += 1
            self.peer.send(Kind.GRANT, self.lease, 0, frame.fields[0], 0, gpu=frame.gpu)
        elif frame.kind is Kind.PAGED_IN and frame.fields[0] > self.paged_in[0]:
            self.paged_in = (frame.fields[0], frame.fields[1])

    def take_away(self, gpu: bytes) -> tuple[Frame, float]:
        """Revoke the lease and page everything out.

        Returns the PAGED_OUT frame and the seconds until RELEASE (0: no lease).
        """
        began = time.monotonic()
        self.peer.send(Kind.REVOKE, self.lease, 1 << 62, 1, gpu=gpu)
        released = 0.0
        while True:
            frame = self.peer.hear(_HEAR_WITHIN)
            assert frame is not None, "the program closed its connection"
            if frame.kind is Kind.RELEASE and not released:
                released = time.monotonic() - began
            if frame.kind is Kind.PAGED_OUT:
                return frame, released
            if frame.kind is not Kind.REQUEST:
                self._serve(frame)


def _rate(size: int, nanoseconds: int) -> float:
    return size / max(nanoseconds, 1) * 1e9


def _environment(gpu: Gpu) -> dict[str, str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE_", "LD_PRELOAD"))}
    return {**bare, "CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


_LOCK_WITHIN = 10.0
"""Seconds for the program's GPU work."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial: `freed` in bytes according to NVML, times in seconds."""

    intact: bool
    freed: int
    suspended_in: float
    resumed_in: float


class SuspendUnavailable(Exception):
    """The driver, or the permission to use it, is missing; the text is the reason."""


def try_suspension(name: str, code: str, size: int, gpu: Gpu, environment: Mapping[str, str]) -> Finding:
    """Run one program that fills `size` bytes, suspend it and resume it."""
    where = f"{name}, suspended"
    try:
        return trial_finding(where, asyncio.run(try_out(code, size, gpu, environment)), gpu.simulated)
    except SuspendUnavailable as error:
        return skipped(where, str(error))
    except (RuntimeError, AssertionError, OSError) as error:
        what = f"the program could not be suspended and resumed: {reason(error)}"
        return note(where, what, f"Use the engine managed on this machine. {_REPORT_IT}")


def trial_finding(where: str, trial: Trial, simulated: bool = False) -> Finding:
    """Return the finding for a trial."""
    figures = (
        f"{memory(trial.freed)} of GPU memory were free after {trial.suspended_in:.2f} s, "
        f"and the program ran again after {trial.resumed_in:.2f} s{_SIMULATED * simulated}"
    )
    if trial.intact:
        return ok(where, f"memory unchanged after the program was suspended and resumed; {figures}")
    what = f"memory was changed while the program was suspended; {figures}"
    return problem(where, what, f"Do not use the engine suspend here. {_REPORT_IT}")


async def try_out(code: str, size: int, gpu: Gpu, environment: Mapping[str, str]) -> Trial:
    """Suspend and resume one program.

    Raises SuspendUnavailable, and RuntimeError if the driver refuses a step or the program ends.
    """
    checkpoints = DriverCheckpoints()
    try:
        if (cannot := await why_not(checkpoints, may_attach())) is not None:
            raise SuspendUnavailable(cannot)
        with Program(code, size, environment) as program:
            assert program.hear() == "ready"
            process = processes.named(program.process.pid)
            if process is None:
                raise RuntimeError("the program has ended")
            before, began = free_memory(gpu), time.monotonic()
            await _step(checkpoints.lock(process, _LOCK_WITHIN), "locked")
            await _step(checkpoints.checkpoint(process, size), "checkpointed")
            suspended, freed = time.monotonic(), free_memory(gpu) - before
            resuming = time.monotonic()
            await _step(checkpoints.restore(process, size), "restored")
            await _step(checkpoints.unlock(process), "unlocked")
            resumed = time.monotonic()
            program.go_on()
            intact = bool(program.hear())
            # Suspend the process again before it is killed: with driver 595.71 the end of a restored process hung a
            # whole machine, and this avoids the hang (NVIDIA/cuda-checkpoint, issue 53).
            if (await checkpoints.lock(process, _LOCK_WITHIN)).ok:
                await checkpoints.checkpoint(process, size)
            return Trial(intact, freed, suspended - began, resumed - resuming)
    finally:
        await checkpoints.close()


async def _step(call: Awaitable[CheckpointResult], done: str) -> None:
    answer = await call
    if not answer.ok:
        raise RuntimeError(reason_of(answer, f"it cannot be {done}").rstrip("."))
