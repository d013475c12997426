"""Whether processes can be suspended here: what the driver answers, and what the kernel allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.suspend.checkpoints import CheckpointResult, Code, DriverCheckpoints, ProcessState
from gpushare_spawner.agent.suspend.progress import may_attach, why_not


class Driver(DriverCheckpoints):
    """Answers each call in the same way."""

    def __init__(self, code: Code) -> None:
        self.answer = CheckpointResult(code, code, ProcessState.RUNNING)

    async def lock(self, process: ProcessName, timeout: float) -> CheckpointResult:
        return self.answer

    async def checkpoint(self, process: ProcessName, size: int) -> CheckpointResult:
        return self.answer

    async def restore(self, process: ProcessName, size: int) -> CheckpointResult:
        return self.answer

    async def unlock(self, process: ProcessName) -> CheckpointResult:
        return self.answer

    async def state(self, process: ProcessName | None = None) -> CheckpointResult:
        return self.answer


@pytest.mark.parametrize("code", [Code.SUCCESS, Code.INVALID_VALUE, Code.NOT_INITIALIZED])
async def test_driver_that_knows_the_functions_can_suspend(code: Code) -> None:
    assert await why_not(Driver(code), True) is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (Code.NO_DRIVER, "NVIDIA_DRIVER_CAPABILITIES"),
        (Code.NO_FUNCTIONS, "driver 570 or later"),
        (Code.NOT_SUPPORTED, "does not support it on this machine"),
        (Code.HANGS, "did not answer"),
        (Code.UNKNOWN, "CUDA error 999"),
    ],
)
async def test_other_drivers_cannot_and_the_reason_is_a_sentence(code: Code, said: str) -> None:
    reason = await why_not(Driver(code), True)
    assert reason is not None
    assert said in reason
    assert reason.endswith(".")


async def test_agent_without_the_right_to_attach_cannot() -> None:
    reason = await why_not(Driver(Code.SUCCESS), False)
    assert reason is not None
    assert "CAP_SYS_PTRACE" in reason


@pytest.mark.parametrize(
    ("effective", "scope", "attaches"),
    [
        ("000001ffffffffff", "1", True),
        ("0000000000080000", None, True),
        ("0000000000000000", "0", True),
        ("00000000a80425fb", "1", False),
    ],
)
def test_rights_are_those_of_the_kernel(tmp_path: Path, effective: str, scope: str | None, attaches: bool) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tagent\nCapEff:\t{effective}\n")
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    assert may_attach(tmp_path) is attaches
