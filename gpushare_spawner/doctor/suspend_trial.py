"""Suspends a program of ``--gpu`` by the driver's checkpoint functions and resumes it, as for engine `suspend`.

The trial is needed because a driver's report about itself can be wrong, and NVIDIA does not document the cost of these
functions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.suspend.driver import CheckpointResult, DriverCheckpoints
from gpushare_spawner.agent.suspend.progress import CheckpointRights, reason_of, why_not
from gpushare_spawner.doctor.finding import Finding, note, ok, problem, skipped
from gpushare_spawner.doctor.gpu_programs import Program, free_memory
from gpushare_spawner.wording.amounts import memory, reason

_LOCK_WITHIN = 10.0
"""Seconds for the program's GPU work."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial. `freed` in bytes, by NVML; times in seconds."""

    intact: bool
    freed: int
    suspended_in: float
    resumed_in: float


class SuspendUnavailable(Exception):
    """The driver, or the right to use it, is missing; the text has the reason."""


class StepRefused(Exception):
    """The driver has refused a step; the text has the step and the reason."""


def check(name: str, code: str, size: int, gpu: Gpu, environment: Mapping[str, str]) -> Finding:
    """Run one program, which fills `size` bytes, suspend it and resume it."""
    where = f"{name}, suspended"
    try:
        return finding(where, asyncio.run(try_out(code, size, gpu, environment)), gpu.simulated)
    except SuspendUnavailable as error:
        return skipped(where, str(error))
    except (StepRefused, RuntimeError, AssertionError, OSError) as error:
        remedy = "Use the engine managed on this machine. Report the error with the versions of driver and framework."
        return note(where, f"the program could not be suspended and resumed: {reason(error)}", remedy)


def finding(where: str, trial: Trial, simulated: bool = False) -> Finding:
    """Return the finding that follows from a trial."""
    figures = (
        f"{memory(trial.freed)} of GPU memory were free after {trial.suspended_in:.2f} s, "
        f"and the program was back after {trial.resumed_in:.2f} s"
    )
    if simulated:
        figures += " (simulated)"
    if trial.intact:
        return ok(where, f"memory unchanged after the program was suspended and resumed; {figures}")
    remedy = "Do not use the engine suspend here. Report the error with the versions of driver and framework."
    return problem(where, f"memory was changed while the program was suspended; {figures}", remedy)


async def try_out(code: str, size: int, gpu: Gpu, environment: Mapping[str, str]) -> Trial:
    """Suspend and resume one program.

    Raises SuspendUnavailable, StepRefused, and RuntimeError if the program ends.
    """
    checkpoints = DriverCheckpoints()
    try:
        if (cannot := await why_not(checkpoints, CheckpointRights.read())) is not None:
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
            # suspended once more before it is killed: with driver 595.71 the end of a restored process has hung a whole
            # machine, and this avoids it (NVIDIA/cuda-checkpoint, issue 53)
            if (await checkpoints.lock(process, _LOCK_WITHIN)).ok:
                await checkpoints.checkpoint(process, size)
            return Trial(intact, freed, suspended - began, resumed - resuming)
    finally:
        await checkpoints.close()


async def _step(call: Awaitable[CheckpointResult], done: str) -> None:
    answer = await call
    if not answer.ok:
        raise StepRefused(reason_of(answer, f"it cannot be {done}").rstrip("."))
