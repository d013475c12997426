"""`gpushare agent` and `gpushare service` as copies of a process that has imported them: most of a start is imports.

`start_copy` is subprocess.Popen for them. A copy has its own environment, log and signals, but its libraries are
looked up as those of the process that it is a copy of. Tests of the start itself run the command.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.libraries import simulated_driver

_MOST_BYTES = 1 << 17
"""Of a message: the arguments and the environment of a copy."""


class Copy:
    """A process, like subprocess.Popen's."""

    def __init__(self, original: _Original, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._original = original

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._original.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """End it by SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start_copy(subcommand: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Copy:
    """Start `gpushare SUBCOMMAND ARGUMENTS` in this process's folder; its output is appended to the log."""
    return _original(subcommand).start(arguments, environment, log)


class _Original:
    """The process that copies itself; the tests' process talks to it over a socket, whose end is its end too."""

    def __init__(self, subcommand: str) -> None:
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        with its_end:
            subprocess.Popen(
                [sys.executable, "-m", "tests.copies", subcommand, str(its_end.fileno())],
                env=os.environ | {"LD_LIBRARY_PATH": str(simulated_driver())},
                cwd=Path(__file__).parents[1],
                pass_fds=[its_end.fileno()],
                start_new_session=True,
            )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Copy:
        umask = os.umask(0)
        os.umask(umask)
        with self._lock:
            request = [list(arguments), dict(environment), str(log), umask, os.getcwd()]
            self._socket.send(json.dumps(request).encode())
            while (answer := self._receive()) is None:
                pass
            return Copy(self, answer)

    def status(self, pid: int) -> int | None:
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                self._receive()
            return self._statuses.pop(pid, None)

    def _receive(self) -> int | None:
        """Return the pid of a copy that has started; None: one has ended."""
        message = self._socket.recv(_MOST_BYTES)
        assert message, "the process that copies itself has ended"
        pid, status = json.loads(message)
        if status is None:
            return int(pid)
        self._statuses[pid] = status
        return None


@functools.cache
def _original(subcommand: str) -> _Original:
    return _Original(subcommand)


def _copy_on_request(tests: socket.socket) -> list[str] | None:
    """Return the arguments in each copy; None in the original, when the tests have ended."""
    running: dict[int, int] = {}
    ready = select.poll()
    ready.register(tests, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            if descriptor in running:
                ready.unregister(descriptor)
                pid, status = os.waitpid(running.pop(descriptor), 0)
                os.close(descriptor)
                tests.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            request = tests.recv(_MOST_BYTES)
            if not request:
                for pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if pid == 0:
                tests.close()
                for other in running:
                    os.close(other)
                return _become(*json.loads(request))
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid
            ready.register(descriptor, select.POLLIN)
            tests.send(json.dumps([pid, None]).encode())


def _become(arguments: list[str], environment: dict[str, str], log: str, umask: int, folder: str) -> list[str]:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(log, "ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.umask(umask)
    if "kubernetes_asyncio.config.kube_config" in sys.modules:
        # it has read the variable when it was imported
        sys.modules["kubernetes_asyncio.config.kube_config"].__dict__.update(
            KUBE_CONFIG_DEFAULT_LOCATION=os.environ.get("KUBECONFIG", "~/.kube/config")
        )
    sys.argv[1:] = arguments
    return arguments


def _main() -> int:
    from gpushare_spawner import cli

    subcommand, descriptor = sys.argv.pop(1), int(sys.argv.pop(1))
    cli.COMMANDS[subcommand][1]()
    gc.freeze()
    arguments = _copy_on_request(socket.socket(fileno=descriptor))
    return 0 if arguments is None else cli.main([subcommand, *arguments])


if __name__ == "__main__":
    sys.exit(_main())
