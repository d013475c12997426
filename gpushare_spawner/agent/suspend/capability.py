"""Whether processes can be suspended here, in words: the driver, its functions, the right to use them."""

from __future__ import annotations

from gpushare_spawner.agent.suspend.driver_checkpoint import Answer, Code

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
}


def reason_of(answer: Answer, what: str) -> str:
    """Return a sentence: what cannot be done, and what the driver's answer means."""
    why = _WHY.get(answer.code)
    return f"{what}: {why}." if why is not None else f"{what}: the driver answers {answer}."
