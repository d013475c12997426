"""`gpushare demo` as its user runs it: one command, watched through its terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from gpushare_spawner.demo.machine import free_ports, simulated_state


class RunningDemo:
    """A demo in a folder of its own, on a free port, in a terminal of its own."""

    def __init__(self, *options: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=f"gpushare-demo-{secrets.token_hex(4)}-"))
        self.folder = self.home / "state"
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.options = options
        self.said = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._terminal = -1
        self._closing = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def command(self, *more: str) -> list[str]:
        """The command line; more options win."""
        given = ["--dir", str(self.folder), "--port", str(self.port), "--simulate", *self.options, *more]
        return [sys.executable, "-m", "gpushare_spawner.cli", "demo", *given]

    def start(self) -> None:
        """Start it and wait until it says that it is ready."""
        self._terminal, inside = pty.openpty()
        # the terminal is its controlling one, so that Ctrl-C and closing it do what they do
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *self.command()], stdin=inside, stdout=inside, stderr=inside, close_fds=True
        )
        os.close(inside)
        self._listener.start()
        self.until_said("Press Ctrl-C to stop the demo", 90)

    @property
    def password(self) -> str:
        """What it printed."""
        return self.said.partition("Password:")[2].split()[0]

    def until_said(self, text: str, within: float) -> None:
        """Wait until the text stands in the terminal."""
        deadline = time.monotonic() + within
        while text not in self.said:
            assert self.process is not None
            assert self.process.poll() is None, f"it ended:\n{self.said}"
            assert time.monotonic() < deadline, f"not said within {within:.0f} s: {text!r}; said:\n{self.said}"
            time.sleep(0.05)

    def type(self, keys: bytes) -> None:
        """Type into its terminal."""
        os.write(self._terminal, keys)

    def close_terminal(self) -> None:
        """As if the window were closed: everybody in it gets SIGHUP."""
        self._closing.set()
        self._listener.join()

    def wait(self, within: float) -> int:
        """Its exit status."""
        assert self.process is not None
        return self.process.wait(within)

    def processes(self) -> dict[int, str]:
        """Every living process that names the demo's folder: its own, the hub's, the users'."""
        found = {}
        mark = str(self.home).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes()
                    if line and (mark in line or mark in (entry / "environ").read_bytes()):
                        found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def close(self) -> None:
        """End whatever is left, and remove its files."""
        if self.process is not None and self.process.poll() is None:
            for pid, line in self.processes().items():
                if "gpushare_spawner.cli demo" in line:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._listener.is_alive():
            self.close_terminal()
        simulated_state(self.folder).unlink(missing_ok=True)
        shutil.rmtree(self.home, ignore_errors=True)

    def _listen(self) -> None:
        # closed here, where it is read: a read that waits would keep it open
        with open(self._terminal, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
            while not self._closing.is_set():
                if select.select([terminal], [], [], 0.1)[0]:
                    data = terminal.read(4096)
                    if not data:
                        return
                    self.said += data.decode(errors="replace").replace("\r\n", "\n")
