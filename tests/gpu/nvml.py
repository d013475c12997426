"""NVIDIA's nvidia-smi, and nvitop where it is installed, under the library on a real GPU: ``python -m tests.gpu.nvml``.

Starts an agent in a temporary folder, opens a session with half of the first GPU's memory as its limit, and compares
what nvidia-smi shows in the session with the limit. Needs root or a user of its own GPU. Exit status 0: the share is
shown; 1: not; 2: there is no nvidia-smi here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable, OpenRequest
from gpushare_spawner.sharing.native import merged

QUERY = [
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total,memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
]
APPS = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
MIB = 1 << 20


async def environment_of_session(client: AgentClient) -> tuple[dict[str, str], int]:
    """Open a session as soon as the agent answers; its environment, and its limit in MiB."""
    for _ in range(300):
        try:
            gpu = (await client.report()).gpus[0]
            break
        except AgentUnreachable:
            await asyncio.sleep(0.1)
    else:
        raise SystemExit("the agent did not start")
    limit = gpu.memory_bytes // 2 // MIB
    request = OpenRequest(
        id="trial", user="trial", uid=os.getuid(), template="trial", gpus=(gpu.uuid,), share_units=50,
        memory_limit=str(limit * MIB),
    )  # fmt: skip
    return (await client.open(request)).environment, limit


def main() -> int:
    """Command line."""
    if shutil.which("nvidia-smi") is None:
        print("there is no nvidia-smi here")
        return 2
    with tempfile.TemporaryDirectory(prefix="nvml") as folder:
        state = Path(folder) / "state"
        command = [sys.executable, "-m", "gpushare_spawner.cli", "agent", "--state-dir", str(state), "--node", "here"]
        agent = subprocess.Popen(command)
        try:
            opened, limit = asyncio.run(environment_of_session(AgentClient(state / "control.sock")))
            inside = merged(os.environ, opened)
            for title, environment in (("driver", inside | {"GPUSHARE_NVML": "driver"}), ("share", inside)):
                print(f"== {title}")
                shown = subprocess.check_output(QUERY, env=environment, text=True)
                print(shown, subprocess.check_output(APPS, env=environment, text=True))
                if shutil.which("nvitop"):
                    subprocess.run(["nvitop", "-1", "--no-unicode"], env=environment, check=False)
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(20)
    lines = [[field.strip() for field in line.split(",")] for line in shown.splitlines()]
    right = len(lines) == 1 and lines[0][2] == str(limit)
    print(f"nvidia-smi {'shows the share' if right else f'does not show the share of {limit} MiB'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
