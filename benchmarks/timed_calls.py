"""What the benchmarks of single calls share: an agent that grants every lease, runs of a C program, fastest batches."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

from gpushare_spawner.model.frames import FRAME_BYTES, Frame, FrameError, Kind, gpu_bytes


class GrantingAgent:
    """Says WELCOME to every process and grants whatever is asked for, on one session socket."""

    def __init__(self, path: Path, gpu: bytes) -> None:
        self.gpu = gpu
        self.pace = 0
        self.grants = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(FRAME_BYTES):
                try:
                    frame = Frame.unpack(data)
                except FrameError:
                    return
                if frame.kind is Kind.HELLO:
                    connection.send(Frame(Kind.WELCOME, (25, 0, 25, 0, 1, 1)).pack())
                    connection.send(Frame(Kind.DEVICE, (8 << 30, 2 << 30), self.gpu).pack())
                elif frame.kind is Kind.REQUEST:
                    self.grants += 1
                    connection.send(Frame(Kind.GRANT, (self.grants, 0, 0, self.pace), frame.gpu).pack())


def run(program: Path, arguments: list[str], environment: dict[str, str]) -> list[float]:
    """The numbers that the program prints."""
    done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{program.name} failed: {done.stderr.strip()}")
    return [float(line) for line in done.stdout.split()]


def first_gpu(bare: dict[str, str]) -> bytes:
    """The UUID of the simulated GPU."""
    code = (
        "import pynvml as n; n.nvmlInit(); "
        "u = n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0)); print(u if isinstance(u, str) else u.decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
    return gpu_bytes(done.stdout.strip())


def fastest(runs: list[list[float]]) -> float:
    """The fastest batch of all runs."""
    return min(map(min, runs))
