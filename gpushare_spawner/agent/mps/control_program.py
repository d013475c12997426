"""The MPS control daemon of one GPU, by NVIDIA's program ``nvidia-cuda-mps-control``: start, ask, end.

The daemon outlives the agent. Whether it runs is asked of the daemon itself: a pid may be another process's by now.
Source: man nvidia-cuda-mps-control; NVIDIA, "Multi-Process Service", appendix "Tools and interface reference".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu

PROGRAM = "nvidia-cuda-mps-control"
ANSWER_WITHIN = 5.0
"""Seconds that the program has for a request."""
SERVERS_END_WITHIN = 2
"""Seconds that MPS servers have to end with their daemon. No session is left then, so nobody waits for their work."""


class MpsFailed(RuntimeError):
    """The daemon cannot be started; the message is a sentence without its full stop."""


@dataclass(frozen=True)
class ControlProgram:
    """The program, for the daemon of one GPU. ``folder`` has the daemon's pipes and logs."""

    gpu: Gpu
    folder: Path
    program: str = PROGRAM

    @property
    def pipes(self) -> Path:
        """The folder of the daemon's pipes and sockets, by which CUDA programs find it."""
        return self.folder / "pipe"

    @property
    def logs(self) -> Path:
        """The folder of the daemon's logs."""
        return self.folder / "log"

    async def start(self) -> None:
        """Start the daemon and wait until it answers. Raises MpsFailed."""
        # One server for the programs of all users, who are not isolated from each other then. Otherwise the programs
        # of one user wait until those of another have ended. It needs root and compute capability 7.0.
        options = ["-d", "-multiuser-server"] if os.geteuid() == 0 else ["-d"]
        try:
            self._make_folders()
            status, said = await self._run(options)
        except FileNotFoundError:
            raise MpsFailed(
                f"this machine has no program {self.program}: it comes with the NVIDIA driver, in the package of its "
                "compute utilities"
            ) from None
        except OSError as error:
            raise MpsFailed(f"{error.filename or self.program}: {error.strerror or error}") from None
        if status != 0:
            ended = "did not end in time" if status is None else f"ended with status {status}"
            raise MpsFailed(f"{self.program} {' '.join(options)} {ended}{f' ({said})' if said else ''}")
        until = asyncio.get_running_loop().time() + ANSWER_WITHIN
        while not await self.answers():
            if asyncio.get_running_loop().time() > until:
                raise MpsFailed(f"the MPS daemon was started and does not answer; its log is in {self.logs}")
            await asyncio.sleep(0.05)

    async def answers(self) -> bool | None:
        """Return whether the daemon runs; None: the program did not say so in time."""
        try:
            status, _ = await self._run([], "get_server_list\n")
        except OSError:
            return False
        return None if status is None else status == 0

    async def quit(self) -> None:
        """End the daemon and its servers. One that does not run is no error."""
        with contextlib.suppress(OSError):
            await self._run([], f"quit -t {SERVERS_END_WITHIN}\n")

    def _make_folders(self) -> None:
        """Make the folders: users pass through to the pipes, and only the agent's user reads the logs."""
        for folder, mode in (
            (self.folder.parent, 0o711),
            (self.folder, 0o711),
            (self.pipes, 0o755),
            (self.logs, 0o700),
        ):
            folder.mkdir(exist_ok=True)
            os.chmod(folder, mode)

    async def _run(self, options: list[str], asked: str = "") -> tuple[int | None, str]:
        """Run the program; its exit status (None: it hung) and the last line of what it said."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "LD_PRELOAD"))
        }
        environment |= {
            "CUDA_VISIBLE_DEVICES": self.gpu.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }
        # a file, since a daemon that keeps a pipe open would let its reader wait
        output = self.logs / ("start.txt" if options else "request.txt")
        with open(output, "w+b") as said:
            process = await asyncio.create_subprocess_exec(
                self.program,
                *options,
                stdin=asyncio.subprocess.PIPE,
                stdout=said,
                stderr=said,
                env=environment,
                # a signal to the agent's group is none to the daemon
                start_new_session=True,
                umask=0o022,
            )
            try:
                await asyncio.wait_for(process.communicate(asked.encode()), ANSWER_WITHIN)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                return None, ""
            said.seek(0)
            lines = said.read(4096).decode(errors="replace").strip().splitlines()
        return process.returncode, lines[-1] if lines else ""
