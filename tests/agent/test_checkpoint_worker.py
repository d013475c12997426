"""The worker that makes the driver's checkpoint calls: a pid that was given away is not locked."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.suspend.checkpoint_worker import ENDED, SUCCESS, answer
from gpushare_spawner.agent.suspend.checkpoints import Code


class Driver:
    """Notes the calls that reach it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, name: str, pid: int, timeout_ms: int = 0) -> int:
        self.calls.append(name)
        return SUCCESS

    def state(self, pid: int) -> tuple[int, int]:
        self.calls.append("state")
        return SUCCESS, 0


def own_name() -> ProcessName:
    name = processes.named(os.getpid())
    assert name is not None
    return name


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock", "state"])
def test_no_call_reaches_a_later_process_of_the_same_pid(call: str) -> None:
    driver: Any = Driver()
    ended = replace(own_name(), started=own_name().started - 1)
    assert answer(driver, {"call": call, "process": asdict(ended), "timeout_ms": 10})["code"] == ENDED == Code.ENDED
    assert not driver.calls
    assert answer(driver, {"call": call, "process": asdict(own_name()), "timeout_ms": 10})["code"] == SUCCESS
    assert driver.calls == [call]


def test_lock_that_met_a_later_process_of_the_pid_is_undone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = Driver()
    lives = iter([True, False])
    monkeypatch.setattr(processes, "alive", lambda process: next(lives))
    assert answer(driver, {"call": "lock", "process": asdict(own_name()), "timeout_ms": 10})["code"] == ENDED
    assert driver.calls == ["lock", "unlock"]
