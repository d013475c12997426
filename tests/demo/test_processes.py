"""Whatever a demo started, and whatever that started, ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# starts a child that starts a grandchild in a session of its own, which ignores SIGTERM; the child leaves it behind
SUPERVISOR = """
import sys
from pathlib import Path
from gpushare_spawner.demo.machine import Processes

folder = Path(sys.argv[1])
child = (
    "import subprocess, sys; process = subprocess.Popen([sys.executable, '-c', "
    "\\"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(60)\\"], start_new_session=True, stdout=subprocess.PIPE); process.stdout.readline(); "
    "open(sys.argv[1], 'w').write(str(process.pid)); import time; time.sleep(float(sys.argv[2]))"
)
with Processes() as processes:
    processes.start("child", [sys.executable, "-c", child, folder / "grandchild", sys.argv[2]], {}, folder / "log")
    (folder / "child").write_text(str(processes._running["child"].pid))
    while True:
        if processes.wait(10):
            break
        if processes.ended():
            print("ended by itself:", processes.ended(), flush=True)
            break
"""


def start(folder: Path, life: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), str(life)], stdout=subprocess.PIPE, text=True
    )


def pid_in(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return int(path.read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone_soon(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_ctrl_c_ends_children_and_what_they_left_behind(tmp_path: Path) -> None:
    supervisor = start(tmp_path, 60)
    child, grandchild = pid_in(tmp_path / "child"), pid_in(tmp_path / "grandchild")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(20) == 0
    assert not alive(child)
    assert not alive(grandchild)


def test_a_closed_terminal_ends_everything_too(tmp_path: Path) -> None:
    supervisor = start(tmp_path, 60)
    grandchild = pid_in(tmp_path / "grandchild")
    supervisor.send_signal(signal.SIGHUP)
    assert supervisor.wait(20) == 0
    assert not alive(grandchild)


def test_a_child_that_ends_is_seen_and_its_orphan_is_ended(tmp_path: Path) -> None:
    supervisor = start(tmp_path, 0)
    grandchild = pid_in(tmp_path / "grandchild")
    output, _ = supervisor.communicate(timeout=20)
    assert output == "ended by itself: child\n"
    assert not alive(grandchild)


def test_children_end_when_the_demo_is_killed_outright(tmp_path: Path) -> None:
    supervisor = start(tmp_path, 60)
    child, grandchild = pid_in(tmp_path / "child"), pid_in(tmp_path / "grandchild")
    supervisor.kill()
    supervisor.wait()
    # the child, that is: what it left behind is the business of the hub, which ends its servers when it is told to end
    assert gone_soon(child)
    os.kill(grandchild, signal.SIGKILL)
