"""How soon sessions are under arbitration again after the agent was killed under load, and what each receives then.

    .venv/bin/python -m benchmarks.restart [--json] [--restarts 3] [--sessions 50]

A real agent, libgpushare.so in each session's process, and one simulated GPU that all of them saturate with kernels of
20 ms: one session of 40 units, one of 12, and the others share the rest. The agent gets SIGKILL and is started again.
A session is under arbitration again when the agent's report says that it has a process with work. Time begins when a
session's socket takes connections. From a second later on, what each process receives in 20 s is read from the
simulated driver, which counts the time slices of its compute engine.

Printed: the 50th and 99th percentile of all sessions and restarts (bar 1 s), and the largest difference between
received and entitled, in units of 1 % of the GPU (bar 3).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import gpushare_simgpu

from benchmarks.shares import Driver, Job, gpus_of
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable, OpenRequest
from gpushare_spawner.sharing.native import merged

BIGGEST = (40, 12)
"""Units of the first two sessions."""
KERNEL = ("--kernel", "0.02", "--ahead", "4")
STEADY = 5.0
"""Seconds of work before each restart."""
WITHIN = 1.0
"""Seconds that a session may run without arbitration after the agent's return."""
MEASURED = 20.0
"""Seconds after that for which shares are measured."""
BARS = {"p99_seconds": WITHIN, "worst_error": 3.0}
POLL = 0.01
"""Seconds between two looks at the socket and at the report."""


class Sessions:
    """Sessions of one GPU with a process each."""

    def __init__(self, client: AgentClient, gpu: str, units: list[int]) -> None:
        self._client = client
        self._gpu = gpu
        self._driver = Driver()
        self.entitled = [one / sum(units) for one in units]
        """Each session's part of the GPU."""
        self._units = units
        self.jobs: list[Job] = []
        self.socket = ""

    async def start(self) -> None:
        """Open the sessions; their processes work from now on."""
        for number, units in enumerate(self._units):
            request = OpenRequest(
                id=f"s{number}", user=f"s{number}", uid=os.getuid(), template="benchmark", gpus=(self._gpu,),
                share_units=units, confirm_within=3600,
            )  # fmt: skip
            environment = dict(merged(os.environ, (await self._client.open(request)).environment))
            self.socket = environment["GPUSHARE_SOCKET"]
            self.jobs.append(await Job.start(environment, *KERNEL))
        for job in self.jobs:
            job.go()

    async def end(self) -> None:
        """Kill the processes."""
        for job in self.jobs:
            await job.end()

    async def working(self) -> set[str]:
        """The sessions with a process that the agent knows, and with work that it arbitrates."""
        report = await self._client.report()
        return {one.id for one in report.sessions if one.processes and (one.gpu_busy or one.waiting)}

    async def return_times(self, began: float) -> list[float]:
        """Seconds until each session is under arbitration. Raises TimeoutError after 30 s."""
        times: dict[str, float] = {}
        async with asyncio.timeout(30):
            while len(times) < len(self.jobs):
                with contextlib.suppress(AgentUnreachable):
                    found = await self.working()
                    times |= dict.fromkeys(found - times.keys(), time.monotonic() - began)
                await asyncio.sleep(POLL)
        return list(times.values())

    async def received(self, seconds: float) -> list[float]:
        """Part of the GPU that each session receives."""
        begun, before = time.monotonic(), [self._driver.seconds(0, job.pid) for job in self.jobs]
        await asyncio.sleep(seconds)
        ended, after = time.monotonic(), [self._driver.seconds(0, job.pid) for job in self.jobs]
        return [(late - early) / (ended - begun) for early, late in zip(before, after, strict=True)]

    def error(self, received: list[float]) -> float:
        """Largest difference from what a session is entitled to, in units of 1 % of the GPU."""
        return 100 * max(abs(got - due) for got, due in zip(received, self.entitled, strict=True))


async def takes_connections(path: str) -> float:
    """The instant at which the session's socket does."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, contextlib.suppress(OSError):
            probe.connect(path)
            return time.monotonic()
        await asyncio.sleep(POLL)


async def measure(sessions_wanted: int, restarts: int) -> tuple[list[float], list[float]]:
    """Seconds of each session and restart; the largest error after each restart."""
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    os.environ |= {
        "LD_LIBRARY_PATH": str(gpushare_simgpu.folder()),
        "SIMGPU_STATE": str(folder / "simgpu"),
        "SIMGPU_DEVICES": "1",
    }
    os.environ.pop("GPUSHARE_CONTROL", None)
    agent = start_agent(folder)
    sessions = None
    try:
        client = AgentClient(folder / "control.sock")
        rest = sessions_wanted - len(BIGGEST)
        units = [*BIGGEST, *[(100 - sum(BIGGEST)) // rest] * rest]
        sessions = Sessions(client, (await gpus_of(client, agent))[0], units)
        await sessions.start()
        times: list[float] = []
        errors: list[float] = []
        for _ in range(restarts):
            await asyncio.sleep(STEADY)
            agent.kill()
            agent.wait()
            agent = start_agent(folder)
            began = await takes_connections(sessions.socket)
            found = await sessions.return_times(began)
            await asyncio.sleep(max(0.0, began + WITHIN - time.monotonic()))
            received = await sessions.received(MEASURED)
            times += found
            errors.append(sessions.error(received))
            first = "  ".join(
                f"{100 * got:.1f} of {100 * due:.1f}"
                for got, due in list(zip(received, sessions.entitled, strict=True))[:3]
            )
            print(
                f"  last of {len(found)} sessions after {max(found):.3f} s, error {errors[-1]:.1f}: {first} ...",
                flush=True,
            )
        return times, errors
    finally:
        if sessions is not None:
            await sessions.end()
        agent.send_signal(signal.SIGTERM)
        agent.wait()
        shutil.rmtree(folder, ignore_errors=True)


def start_agent(folder: Path) -> subprocess.Popen[bytes]:
    """An agent with its state in the folder."""
    command = [sys.executable, "-m", "gpushare_spawner.cli", "agent", "--state-dir", str(folder)]
    return subprocess.Popen([*command, "--log-level", "warning"])


def result_of(times: list[float], errors: list[float]) -> Mapping[str, object]:
    """What --json prints."""
    ordered = sorted(times)
    return {
        "p50_seconds": round(ordered[len(ordered) // 2], 3),
        "p99_seconds": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        "worst_error": round(max(errors), 2),
        "bars": BARS,
        "simulated": True,
    }


def main() -> int:
    """Print the figures; 0 where both bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=50, help="at least 3 and at most 50")
    options = parser.parse_args()
    if not len(BIGGEST) < options.sessions <= 50:
        parser.error("--sessions: from 3 to 50, as a session has at least one unit")
    result = result_of(*asyncio.run(measure(options.sessions, options.restarts)))
    met = all(result[key] <= bar for key, bar in BARS.items())  # type: ignore[operator]
    print(f"under arbitration again after {result['p50_seconds']} s, 99th percentile {result['p99_seconds']} (bar 1)")
    print(f"largest error {result['worst_error']} units (bar 3)")
    print(f"bars {'met' if met else 'missed'}; simulated GPUs")
    if options.json:
        print(json.dumps(result))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
