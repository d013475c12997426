"""Whether processes can be suspended here, in words: the driver, its functions, the right to use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.suspend.driver_checkpoint import Answer, Checkpoints, Code

_CAP_SYS_PTRACE = 19
"""Bit of include/uapi/linux/capability.h."""

_WHY = {
    Code.NO_DRIVER: "there is no CUDA driver (libcuda.so.1) beside NVML; containers need NVIDIA_DRIVER_CAPABILITIES="
    "compute,utility",
    Code.NO_FUNCTIONS: "the driver has no checkpoint functions; install driver 570 or later",
    Code.NOT_SUPPORTED: "this driver does not support it on this machine",
    Code.NOT_PERMITTED: "the agent lacks the right to attach to it; run the agent as root with CAP_SYS_PTRACE",
    # too few rights can show as this too (NVIDIA/cuda-checkpoint, issue 6)
    Code.OPERATING_SYSTEM: "the operating system refused it, perhaps because the agent lacks CAP_SYS_PTRACE",
    Code.NO_DEVICE: "the driver shows no GPU",
    Code.NOT_INITIALIZED: "it has not initialised CUDA",
    Code.OUT_OF_MEMORY: "there is too little memory",
    Code.HANGS: "the driver did not answer",
    Code.STOPPED: "it is stopped, by Ctrl-Z, SIGSTOP or a debugger",
    Code.NO_WORKER: "the agent could not start the process that asks the driver",
}


def reason_of(answer: Answer, what: str) -> str:
    """Return a sentence: what cannot be done, and what the driver's answer means."""
    why = _WHY.get(answer.code)
    return f"{what}: {why}." if why is not None else f"{what}: the driver answers {answer}."


@dataclass(frozen=True)
class Rights:
    """What the kernel lets this process do to others of its user and of other users."""

    traces_all: bool
    """It has CAP_SYS_PTRACE."""
    traces_own: bool
    """It may attach to processes of its own user that are not its children (Yama's ptrace_scope is 0, or there is no
    Yama)."""

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> Rights:
        """Those of this process. What cannot be read counts as allowed: the driver says no where it is not."""
        try:
            status = (proc / "self/status").read_text()
            effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
        except (OSError, StopIteration, ValueError):
            return cls(True, True)
        try:
            scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
        except (OSError, ValueError):
            scope = 0
        return cls(bool(effective >> _CAP_SYS_PTRACE & 1), scope == 0)


async def why_not(checkpoints: Checkpoints, rights: Rights) -> str | None:
    """Return in a sentence why this machine's driver cannot suspend processes, or this process may not; None: it
    can."""
    answer = await checkpoints.state()
    # the worker that asks has no context, which drivers may answer in these ways
    if not answer.ok and answer.code not in (Code.INVALID_VALUE, Code.NOT_INITIALIZED):
        return reason_of(answer, "Processes cannot be suspended")
    if not rights.traces_all and not rights.traces_own:
        return "Processes cannot be suspended: the agent lacks CAP_SYS_PTRACE; run it as root, or with that capability."
    return None
