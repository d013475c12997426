"""NVIDIA MPS on one machine: a control daemon for each GPU that sessions share by MPS.

`ControlDaemon` starts, queries and ends the control daemon of one GPU with NVIDIA's program
``nvidia-cuda-mps-control``. Source: man nvidia-cuda-mps-control; NVIDIA, "Multi-Process Service", appendix "Tools and
interface reference".

`MpsDaemons` runs a daemon from its GPU's first such session to the last, and restarts it if it ends. The daemon
outlives the agent. The next agent queries the daemon itself, because the daemon's pid may belong to another process by
then. If a daemon ends, its GPU programs are lost; the sessions' reports state this. On Kubernetes, NVIDIA's device
plugin runs the daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.session_records import short_name
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.clocks import BackOff
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.wording.layers import daemon_down, daemon_restarted

log = logging.getLogger(__name__)


PROGRAM = "nvidia-cuda-mps-control"
CHECK_EVERY = 5.0
"""Seconds between two checks of whether a daemon is running."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds from a failed or short-lived start to the next one; doubled after each further failure."""
ANSWER_WITHIN = 5.0
"""Seconds within which the program must answer a request."""
SERVERS_END_WITHIN = 2
"""Seconds within which MPS servers must end with their daemon. No session is left then, so no work is lost."""


class MpsFailed(RuntimeError):
    """Error for a daemon that cannot be started. The message is a sentence without a period."""


@dataclass
class ControlDaemon:
    """The daemon of one GPU, run by NVIDIA's program. ``folder`` contains the daemon's pipes and logs."""

    gpu: Gpu
    folder: Path
    ran: bool = False
    """Whether it was running at the last check."""
    pauses: BackOff = field(default_factory=lambda: BackOff(FIRST_PAUSE, LONGEST_PAUSE))
    """Pauses after its starts, on the event loop's clock."""
    trouble: str = ""
    """Reason why it is not running; empty: it is running, or no session needs it."""
    lost_at: float | None = None
    """Time at which its unexpected end was last detected, seconds since the epoch."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pipes(self) -> Path:
        """The folder of the daemon's pipes and sockets, for CUDA programs."""
        return self.folder / "pipe"

    @property
    def logs(self) -> Path:
        """The folder of the daemon's logs."""
        return self.folder / "log"

    async def start(self) -> None:
        """Start the daemon and wait until it answers. Raises MpsFailed."""
        # One server for all users' programs, which are not isolated from each other. Otherwise one user's programs wait
        # until another user's programs have ended. The option needs root and compute capability 7.0.
        options = ["-d", "-multiuser-server"] if os.geteuid() == 0 else ["-d"]
        try:
            self._make_folders()
            status, output = await self._run(options)
        except FileNotFoundError:
            raise MpsFailed(
                f"{PROGRAM} is not installed: it is part of the NVIDIA driver, in the package of its compute utilities"
            ) from None
        except OSError as error:
            raise MpsFailed(f"{error.filename or PROGRAM}: {error.strerror or error}") from None
        if status != 0:
            ended = "did not end in time" if status is None else f"ended with status {status}"
            raise MpsFailed(f"{PROGRAM} {' '.join(options)} {ended}{f' ({output})' if output else ''}")
        until = asyncio.get_running_loop().time() + ANSWER_WITHIN
        while not await self.answers():
            if asyncio.get_running_loop().time() > until:
                raise MpsFailed(f"the MPS daemon was started but does not answer; its log is in {self.logs}")
            await asyncio.sleep(0.05)

    async def answers(self) -> bool | None:
        """Return whether the daemon is running; None if there is no answer in time."""
        try:
            status, _ = await self._run([], "get_server_list\n")
        except OSError:
            return False
        return None if status is None else status == 0

    async def quit(self) -> None:
        """End the daemon and its servers. A missing daemon is not an error."""
        with contextlib.suppress(OSError):
            await self._run([], f"quit -t {SERVERS_END_WITHIN}\n")

    def _make_folders(self) -> None:
        """Create the folders. Users can reach the pipes, and only the agent's user can read the logs."""
        for folder, mode in (
            (self.folder.parent, 0o711),
            (self.folder, 0o711),
            (self.pipes, 0o755),
            (self.logs, 0o700),
        ):
            folder.mkdir(exist_ok=True)
            os.chmod(folder, mode)

    async def _run(self, options: list[str], command: str = "") -> tuple[int | None, str]:
        """Run the program. Return its exit status (None if it hung) and the last line of its output."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "LD_PRELOAD"))
        }
        environment |= {
            "CUDA_VISIBLE_DEVICES": self.gpu.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }
        # a file, because a daemon that keeps a pipe open would block the pipe's reader
        output = self.logs / ("start.txt" if options else "request.txt")
        with open(output, "w+b") as log_file:
            process = await asyncio.create_subprocess_exec(
                PROGRAM,
                *options,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                # signals to the agent's group do not reach the daemon
                start_new_session=True,
                umask=0o022,
            )
            try:
                await asyncio.wait_for(process.communicate(command.encode()), ANSWER_WITHIN)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                return None, ""
            log_file.seek(0)
            lines = log_file.read(4096).decode(errors="replace").strip().splitlines()
        return process.returncode, lines[-1] if lines else ""


class MpsDaemons:
    """The daemons of a machine, at most one for each GPU."""

    def __init__(
        self,
        gpus: Mapping[str, Gpu],
        folder: Path,
        sessions: Mapping[str, Session],
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """Store the parts of the agent. `gpus` is keyed by UUID; `sessions` may change.

        `clock` returns seconds since the epoch; `changed` is called when a daemon is lost or runs again.
        """
        self._sessions = sessions
        self._clock = clock
        self._changed = changed
        self._opening: Counter[str] = Counter()
        self._daemons = {uuid: ControlDaemon(gpu, folder / short_name(uuid)) for uuid, gpu in gpus.items()}
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()
        self._closing = False

    async def start(self) -> None:
        """Query which daemons are running, and start the periodic checks. The sessions have been restored."""
        for uuid, daemon in self._daemons.items():
            # These sessions are from an earlier agent. Their daemon was running.
            daemon.ran = self._needed(uuid) or daemon.pipes.exists()
        await self.check()
        self._task = asyncio.create_task(self._check_now_and_then())

    async def close(self) -> None:
        """Stop checking. The daemons keep running."""
        self._closing = True
        self._soon.set()
        if self._task is not None:
            # do not interrupt a start in progress
            await self._task

    @contextlib.asynccontextmanager
    async def running(self, gpus: Iterable[str]) -> AsyncIterator[None]:
        """Keep these GPUs' daemons running until the session that needs them is open. Raises MpsFailed."""
        uuids = tuple(gpus)
        self._opening.update(uuids)
        try:
            for uuid in uuids:
                daemon = self._daemons[uuid]
                async with daemon.busy:
                    if await daemon.answers() is False:
                        self._record_end(uuid, daemon)
                        await self._start(daemon)
                    daemon.ran, daemon.trouble = True, ""
            yield
        finally:
            self._opening.subtract(uuids)
            self.check_soon()

    def check_soon(self) -> None:
        """Check the daemons after a session was opened or ended."""
        self._soon.set()

    def pipes(self, gpu: str) -> Path:
        """Return the folder for programs that use a GPU's daemon. `gpu` is a UUID."""
        return self._daemons[gpu].pipes

    def trouble(self, session: Session) -> str | None:
        """Return sentences about the effect of the daemon's end on a session; None if there is no effect."""
        if not _has_our_daemon(session):
            return None
        for gpu in session.gpus:
            daemon = self._daemons[gpu.uuid]
            if daemon.trouble:
                return daemon_down(gpu.index, daemon.trouble)
            if daemon.lost_at is not None and session.record.opened_at <= daemon.lost_at:
                return daemon_restarted(gpu.index, daemon.lost_at)
        return None

    async def check(self) -> None:
        """Start needed daemons that are not running, and end daemons that no session needs."""
        await asyncio.gather(*(self._check_daemon(uuid, daemon) for uuid, daemon in self._daemons.items()))

    async def _check_now_and_then(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), CHECK_EVERY)
            self._soon.clear()
            if self._closing:
                return
            try:
                await self.check()
            except Exception:
                log.exception("cannot check the MPS daemons; retrying")

    async def _check_daemon(self, uuid: str, daemon: ControlDaemon) -> None:
        async with daemon.busy:
            needed = self._needed(uuid)
            if not (needed or daemon.ran):
                return
            answers = await daemon.answers()
            if answers is None:
                log.warning("the MPS daemon of GPU %d did not answer", daemon.gpu.index)
                return
            if not needed:
                if answers:
                    await daemon.quit()
                    log.info("the MPS daemon of GPU %d was ended: no session needs it", daemon.gpu.index)
                daemon.ran, daemon.trouble, daemon.lost_at = False, "", None
                daemon.pauses.succeeded()
            elif answers:
                if daemon.trouble:
                    daemon.trouble = ""
                    self._changed()
                daemon.ran = True
            else:
                self._record_end(uuid, daemon)
                if asyncio.get_running_loop().time() >= daemon.pauses.until:
                    with contextlib.suppress(MpsFailed):
                        await self._start(daemon)

    def _record_end(self, uuid: str, daemon: ControlDaemon) -> None:
        if not (daemon.ran and self._has_sessions(uuid)):
            return
        daemon.ran, daemon.lost_at = False, self._clock()
        daemon.trouble = "it ended unexpectedly and is being restarted"
        log.error(
            "the MPS daemon of GPU %d has ended; GPU programs of its sessions have failed. Its log is in %s",
            daemon.gpu.index,
            daemon.logs,
        )
        self._changed()

    async def _start(self, daemon: ControlDaemon) -> None:
        again = daemon.lost_at is not None
        daemon.pauses.next(asyncio.get_running_loop().time())
        try:
            await daemon.start()
        except MpsFailed as error:
            if str(error) != daemon.trouble:
                log.error("the MPS daemon of GPU %d cannot be started: %s", daemon.gpu.index, error)
            daemon.trouble = str(error)
            self._changed()
            raise
        daemon.ran, daemon.trouble = True, ""
        log.info("the MPS daemon of GPU %d runs%s", daemon.gpu.index, " again" if again else "")
        self._changed()

    def _needed(self, uuid: str) -> bool:
        return self._opening[uuid] > 0 or self._has_sessions(uuid)

    def _has_sessions(self, uuid: str) -> bool:
        sessions = filter(_has_our_daemon, self._sessions.values())
        return any(gpu.uuid == uuid for session in sessions for gpu in session.gpus)


def _has_our_daemon(session: Session) -> bool:
    """Return whether a session needs one of the agent's daemons. On Kubernetes, NVIDIA's device plugin runs them."""
    return session.record.request.layer is LayerName.MPS and not session.record.gpus_unknown
