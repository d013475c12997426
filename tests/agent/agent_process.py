"""A real `gpushare agent`, on simulated GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable
from tests.copies import Copy, start_copy
from tests.libraries import preload_library, simulated_driver


class AgentProcess:
    """Started on a folder, ended by any signal, started again."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.preload = preload_library()
        self.folder = folder
        self.log = folder / "agent.log"
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": str(simulated_driver()),
            "SIMGPU_STATE": str(folder / "simgpu"),
            "SIMGPU_DEVICES": str(gpus),
        }
        self.client = AgentClient(folder / "state" / "control.sock")
        self.process: subprocess.Popen[bytes] | Copy | None = None

    def command(self, *options: str) -> list[str]:
        return [
            sys.executable, "-m", "gpushare_spawner.cli", "agent",
            "--state-dir", str(self.folder / "state"), "--node", "here", *options,
        ]  # fmt: skip

    async def start(self, *options: str) -> None:
        """Start it and wait until it answers."""
        self.process = self._start(self.command(*options))
        end = time.monotonic() + 90
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                await self.client.report()
                return
            except AgentUnreachable:
                await asyncio.sleep(0.05)
        raise AssertionError(f"the agent did not come up:\n{self.log.read_text()}")

    def _start(self, command: list[str]) -> subprocess.Popen[bytes] | Copy:
        own_driver = self.environment.get("LD_LIBRARY_PATH") != str(simulated_driver())
        if command[2] == "gpushare_spawner.cli" and "--kubernetes" not in command and not own_driver:
            return start_copy("agent", command[4:], self.environment, self.log)
        # what is imported for a cluster is not in the process that copies itself
        with open(self.log, "ab") as log:
            return subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def cpu_seconds(self) -> float:
        """CPU time that the process has used."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> dict[str, int]:
        """What /proc/PID/smaps_rollup says: `Rss` is resident, of `Pss` pages that processes share count in parts."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()[1:]
        parts = (line.partition(":") for line in lines)
        return {name: int(rest.split()[0]) * 1024 for name, _, rest in parts}

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it with a signal; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
