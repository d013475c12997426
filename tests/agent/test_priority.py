"""The agent's CPU priority, and the unit that is shipped for systemd."""

from __future__ import annotations

import configparser
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner.agent.command import NICE, SLICE_NS

UNIT = Path(__file__).parents[2] / "systemd" / "gpushare-agent.service"

SAY = """
import ctypes, os, struct
from gpushare_spawner.agent.command import prefer_this_thread
if {nobody}:
    os.setgid(65534); os.setuid(65534)
prefer_this_thread()
buffer = ctypes.create_string_buffer(48)
ctypes.CDLL(None).syscall(ctypes.c_long({number}), 0, buffer, 48, 0)
size, policy, flags, nice, priority, runtime, deadline, period = struct.unpack("=IIQiIQQQ", buffer.raw)
print(policy, nice, runtime)
"""


def said(nobody: bool) -> list[int]:
    """Policy, nice and slice in nanoseconds of a process that has asked for priority."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    code = SAY.format(nobody=nobody, number=number)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can raise its priority")
def test_agent_of_root_has_a_higher_cpu_priority() -> None:
    assert said(nobody=False)[:2] == [os.SCHED_OTHER, NICE]


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 12), reason="kernels before 6.12 have no slices"
)
def test_slice_is_short_with_and_without_rights() -> None:
    nobody = os.getuid() == 0
    policy, nice, runtime = said(nobody)
    assert (policy, runtime) == (os.SCHED_OTHER, SLICE_NS)
    assert nice == os.getpriority(os.PRIO_PROCESS, 0) or not nobody


def test_unit_has_what_the_documentation_promises() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert int(service["CPUWeight"]) >= 1000
    assert int(service["Nice"]) == NICE
    assert {"CAP_CHOWN", "CAP_SYS_NICE"} <= set(service["CapabilityBoundingSet"].split())
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["RuntimeDirectoryMode"] == "0711"
    # these hide the GPUs
    assert not {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"} & set(service)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/tljh/hub/bin/gpushare", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert "Unknown" not in done.stderr, done.stderr
