"""A demo's machine: its GPUs, free ports, processes, commands and folder.

`own_gpus` and `simulated_environment` choose the GPUs to share. `Processes` starts and watches processes and ends them
with all their descendants. `Stack` contains the commands and environments of a hub with shared GPUs on one machine; the
end-to-end tests use it too. `DemoFolder` contains all files that the demo writes, and the lock that excludes a second
demo. The command is in command.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import ipaddress
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpushare_spawner.agent.gpus.nvml import NoGpu, Nvml
from gpushare_spawner.agent.processes import named, parent
from gpushare_spawner.native import simulated_driver

PROGRAMS = "GPUSHARE_DEMO_PROGRAMS"
"""The hub's environment variable with `Stack.programs`, in the format of PATH."""
SIMULATED = {"SIMGPU_DEVICES": "2", "SIMGPU_MEMORY": "16GiB", "SIMGPU_MODEL": "Simulated GPU 16 GiB"}


def own_gpus() -> list[str]:
    """Return the models of this machine's NVIDIA GPUs that the agent can share; empty without a driver."""
    try:
        with contextlib.closing(Nvml()) as nvml:
            return [gpu.model for gpu in nvml.gpus()]
    except NoGpu:
        return []


def simulated_state(folder: Path) -> Path:
    """Return the shared-memory file with the simulated GPUs' state, for the demo in that folder."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    shared = Path("/dev/shm")
    return (shared if os.access(shared, os.W_OK) else folder) / f"simgpu-demo-{os.getuid()}-{name}"


def simulated_environment(folder: Path) -> dict[str, str]:
    """Return the agent's environment, with the simulated driver before any other driver, and the GPUs to simulate.

    Raises FileNotFoundError if the simulated driver is not built.
    """
    libraries = [str(simulated_driver()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**SIMULATED, "SIMGPU_STATE": str(simulated_state(folder)), "LD_LIBRARY_PATH": ":".join(libraries)}


def why_not(ip: str, port: int) -> str | None:
    """Return a sentence on why no program can listen there; None if the port is usable."""
    if not 1 <= port <= 65535:
        return f"{port} is not a valid port: ports are 1 to 65535"
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return f"{ip!r} is not an IP address; write one like 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {ip} is in use by another program"
            if error.errno == errno.EACCES:
                return f"only root can use port {port}"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                return f"{ip} is not an address of this machine"
            return f"port {port} of {ip} cannot be used: {error.strerror}"
    return None


def next_free(ip: str, port: int) -> int:
    """Return the first free port above `port`; any free port if the next hundred are in use."""
    nearby = (other for other in range(port + 1, min(port + 101, 65536)) if why_not(ip, other) is None)
    return next(nearby, 0) or free_ports(1)[0]


def is_loopback(ip: str) -> bool:
    """Return whether the address is reachable only from this machine."""
    return ipaddress.ip_address(ip).is_loopback


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""The signals of Ctrl-C, kill, and a closed terminal."""


class Processes:
    """A context manager for the main thread that ends all descendants of this process on exit.

    Signals are blocked and read with sigtimedwait, so that they do not interrupt other code.
    """

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        # orphaned descendants become children of this process, so they can be found and ended
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING | {signal.SIGCHLD})
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_everything()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str], log: Path) -> None:
        """Start a process in its own session, without the terminal's Ctrl-C. Its output goes to ``log``."""
        supervisor = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            # if this process is killed with SIGKILL, the child gets SIGTERM
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)

        with log.open("ab") as output:
            self._running[name] = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=prepare,
            )

    def ended(self) -> str | None:
        """Return the name of a process that has ended by itself, if any."""
        return next((name for name, process in self._running.items() if process.poll() is not None), None)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Wait for a stop signal and return it; return None when a child ends or the time is over."""
        got = signal.sigtimedwait(_STOPPING | {signal.SIGCHLD}, seconds)
        return signal.Signals(got.si_signo) if got and got.si_signo in _STOPPING else None

    def stop(self, name: str, patience: float) -> None:
        """Send SIGTERM, and SIGKILL after ``patience`` seconds or at the next Ctrl-C. The process may have ended."""
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        deadline = time.monotonic() + patience
        while process.poll() is None:
            if time.monotonic() > deadline or self.wait(0.2):
                process.kill()
                process.wait()

    def _end_everything(self) -> None:
        for name in list(self._running):
            self.stop(name, 5)
        # notebook servers and kernels that outlived the hub; each can leave other processes
        for sent in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            left = _descendants(os.getpid())
            for pid in left:
                # other users' programs are stopped by the hub, which has received the signal
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sent)
            deadline = time.monotonic() + 3
            while left and time.monotonic() < deadline:
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                left = _descendants(os.getpid())
                time.sleep(0.05 if left else 0)
            if not left:
                return


def _descendants(root: int) -> list[int]:
    """Return all descendants of ``root``, without zombies."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    parents = {pid: parent(pid) for pid in pids if named(pid) is not None}
    family = [root]
    for member in family:
        family += [pid for pid, its_parent in parents.items() if its_parent == member]
    return family[1:]


LONGEST_SOCKET_FOLDER = 50
"""Maximum length of the sockets' folder: a Unix socket's path has at most 107 bytes, of which the agent needs the rest
for the session's id.
"""


class DemoFolder:
    """``.demo``: folder with the hub's database, users' homes, logs and sockets. Delete it to reset the demo."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.hub_log = self.root / "hub.log"
        self.agent_log = self.root / "agent.log"
        self.agent_state = short_folder(self.root / "agent")
        self.control_socket = self.agent_state / "control.sock"
        self.templates = self.root / "templates"
        self.users = self.root / "users"
        self.programs = self.root / "bin"
        self._lock: IO[str] | None = None

    def make(self) -> None:
        """Create the folders. Raises OSError."""
        for folder in (self.root, self.agent_state, self.users):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self.agent_state.lstat()
        if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode):
            # in /tmp another user could have created the folder
            raise PermissionError(0, "it belongs to another user", str(self.agent_state))

    def write_nvidia_smi(self) -> None:
        """Write a program nvidia-smi that runs `gpushare smi`; simulated GPUs have no driver. Raises OSError."""
        self.programs.mkdir(mode=0o700, exist_ok=True)
        program = self.programs / "nvidia-smi"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gpushare_spawner.cli smi "$@"\n')
        program.chmod(0o700)

    def lock(self) -> dict[str, Any] | None:
        """Lock the folder. Return None, or the pid and URL of the demo that holds the lock."""
        # "a+": opening the file must not delete the running demo's text
        lock = (self.root / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            try:
                running: dict[str, Any] = json.loads(lock.read())
            except ValueError:
                running = {}
            lock.close()
            return running
        self._lock = lock
        return None

    def write_address(self, url: str) -> None:
        """Write the pid and the URL into the lock file, for a second demo."""
        assert self._lock is not None
        self._lock.truncate(0)
        json.dump({"pid": os.getpid(), "url": url}, self._lock)
        self._lock.flush()


def short_folder(path: Path) -> Path:
    """Return the path itself, or a path in /tmp if the names of sockets below it would be too long."""
    if len(str(path)) <= LONGEST_SOCKET_FOLDER:
        return path
    name = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gpushare-demo-{os.getuid()}-{name}"


@dataclass(frozen=True)
class Stack:
    """Folders, ports and settings of the demo. The hub starts its proxy, its service and the notebook servers."""

    folder: DemoFolder
    config_files: Path
    """The folder jupyterhub_config.d."""
    ip: str
    port: int
    """The proxy's public port."""
    inner_ports: list[int]
    """The ports of hub, proxy and service, on 127.0.0.1 only."""
    simulated: bool
    password: str = ""
    """The password for all user names; empty: no password, so that every account on this machine can run programs as
    the demo's owner.
    """
    cull_every: float = 5.0
    """Seconds between two rounds of the idle culler."""
    settings: dict[str, str] = field(default_factory=dict)
    """Additional environment variables for the agent and the hub."""

    @property
    def url(self) -> str:
        """The address for users."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.ip, self.ip)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    @property
    def programs(self) -> tuple[Path, ...]:
        """The first folders in PATH: nvidia-smi for simulated GPUs, then the programs of this environment."""
        return (*((self.folder.programs,) if self.simulated else ()), Path(sys.executable).parent)

    def agent(self) -> tuple[list[str], dict[str, str]]:
        """Return the agent's command and environment.

        Raises FileNotFoundError if the simulated driver is not built.
        """
        command = [sys.executable, "-m", "gpushare_spawner.cli", "agent"]
        command += ["--state-dir", str(self.folder.agent_state), "--control-socket", str(self.folder.control_socket)]
        more = simulated_environment(self.folder.root) if self.simulated else {}
        return command, {**os.environ, **self.settings, **more}

    def hub(self) -> tuple[list[str], dict[str, str]]:
        """Return the hub's command and environment."""
        config = Path(__file__).with_name("jupyterhub_config.py")
        command = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
        programs = os.pathsep.join(map(str, self.programs))
        hub_port, proxy_port, service_port = self.inner_ports
        return command, {
            **os.environ,
            **self.settings,
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
            PROGRAMS: programs,
            "GPUSHARE_CONFIG_D": str(self.config_files),
            "GPUSHARE_CONTROL": str(self.folder.control_socket),
            "GPUSHARE_TEMPLATES": str(self.folder.templates),
            "GPUSHARE_SERVICE_URL": f"http://127.0.0.1:{service_port}",
            "GPUSHARE_HISTORY": f"sqlite:///{self.folder.root}/gpushare-history.sqlite",
            "GPUSHARE_SERVICE_OPTIONS": f"--cull-every {self.cull_every:g}",
            "GPUSHARE_DEMO_DIR": str(self.folder.root),
            "GPUSHARE_DEMO_IP": self.ip,
            "GPUSHARE_DEMO_PASSWORD": self.password,
            "GPUSHARE_DEMO_PORTS": f"{self.port},{hub_port},{proxy_port}",
        }
