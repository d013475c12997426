"""The processes of a demo: starts them, watches them, and ends them with all their descendants."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Ctrl-C, kill, and a terminal that is closed."""


class Processes:
    """A context manager for the main thread: its end ends each process that was started below this one.

    Signals are blocked and read with sigtimedwait, so that none interrupts other code.
    """

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        # processes that a child leaves behind become children of this process, so they can be found and ended
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING | {signal.SIGCHLD})
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_everything()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start(self, name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> None:
        """Start a process in its own session, without the terminal's Ctrl-C. Its output goes to the file."""
        parent = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            # if this process is killed with -9, the child gets SIGTERM
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
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

    def pid(self, name: str) -> int:
        """Return the id of a process that was started."""
        return self._running[name].pid

    def has(self, name: str) -> bool:
        """Return whether the process was started and not stopped."""
        return name in self._running

    def ended(self) -> str | None:
        """Return the name of a process that has ended by itself, if there is one."""
        return next((name for name, process in self._running.items() if process.poll() is not None), None)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Wait for a signal to stop (returned), or the end of a child or of the time (None)."""
        got = signal.sigtimedwait(_STOPPING | {signal.SIGCHLD}, seconds)
        return signal.Signals(got.si_signo) if got and got.si_signo in _STOPPING else None

    def stop(self, name: str, patience: float) -> None:
        """Send SIGTERM, and SIGKILL after ``patience`` seconds or with the next Ctrl-C."""
        process = self._running.pop(name)
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + patience
        while process.poll() is None:
            if time.monotonic() > deadline or self.wait(0.2):
                process.kill()
                process.wait()

    def _end_everything(self) -> None:
        for name in list(self._running):
            self.stop(name, 5)
        # notebook servers and kernels that outlived the hub; each can leave other processes behind
        for sent in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            left = _descendants(os.getpid())
            for pid in left:
                _signal(pid, sent)
            deadline = time.monotonic() + 3
            while left and time.monotonic() < deadline:
                _reap()
                left = _descendants(os.getpid())
                time.sleep(0.05 if left else 0)
            if not left:
                return


def _descendants(root: int) -> list[int]:
    """Return all processes below this one, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state parent ...; the name can contain any character, so count from its last parenthesis
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        # a program of another user; the hub has been asked to stop it
        pass


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
