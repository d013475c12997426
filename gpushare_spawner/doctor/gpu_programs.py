"""Programs for gpu.py that compute on a real GPU, and a scripted agent that serves them.

`PROGRAMS` contains one program that uses only the driver, and one program for each framework. Each fills GPU memory,
prints "ready", waits for a line, prints whether every byte is unchanged, and prints the nanoseconds of a launch.
`Program` runs one of them. `ScriptedAgent` is the agent's end of the session socket, for checks of the library without
the real agent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import select
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.model.frames import FRAME_BYTES, NO_GPU, Frame, Kind, Role

PREAMBLE = """
import json, sys, time
size = int(sys.argv[1])
def say(value): print(json.dumps(value), flush=True)
def hear(): return sys.stdin.readline()
def timed(launch, wait, count=20000):
    best = None
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(count): launch()
        took = (time.perf_counter() - start) / count * 1e9
        wait()
        best = took if best is None else min(best, took)
    return best
def run_checks(checksum, launch, wait):
    before = checksum()
    say("ready")
    hear()
    say(checksum() == before)
    say(timed(launch, wait))
"""

DRIVER = "driver"
PROGRAMS: dict[str, tuple[str | None, str]] = {
    DRIVER: (
        None,
        '''
        import ctypes as c, random, zlib
        cuda = c.CDLL("libcuda.so.1")
        PTX = b"""
        .version 6.3
        .target sm_70
        .address_size 64
        .visible .entry fill_u32(.param .u64 p, .param .u64 n, .param .u32 value)
        {
            .reg .pred %none;
            .reg .b32 %v;
            .reg .b64 %at, %count;
            ld.param.u64 %count, [n];
            ld.param.u64 %at, [p];
            ld.param.u32 %v, [value];
            cvta.to.global.u64 %at, %at;
            setp.eq.u64 %none, %count, 0;
            @%none bra done;
            st.global.u32 [%at], %v;
        done:
            ret;
        }
        """
        def ok(name, *arguments):
            code = getattr(cuda, name)(*arguments)
            if code: sys.exit(f"{name} fails with CUDA error {code}")
        context, module, fill = c.c_void_p(), c.c_void_p(), c.c_void_p()
        ok("cuInit", 0)
        ok("cuDevicePrimaryCtxRetain", c.byref(context), 0)
        ok("cuCtxSetCurrent", context)
        ok("cuModuleLoadData", c.byref(module), PTX)
        ok("cuModuleGetFunction", c.byref(fill), module, b"fill_u32")
        at, out = c.c_uint64(), c.c_uint64()
        ok("cuMemAlloc_v2", c.byref(at), c.c_size_t(size))
        ok("cuMemAlloc_v2", c.byref(out), c.c_size_t(4))
        piece = min(size, 1 << 22)
        chunk = random.Random(1).randbytes(piece)
        for offset in range(0, size - piece + 1, piece):
            ok("cuMemcpyHtoD_v2", c.c_uint64(at.value + offset), chunk, c.c_size_t(piece))
        def checksum():
            back, total = c.create_string_buffer(piece), 0
            for offset in range(0, size - piece + 1, piece):
                ok("cuMemcpyDtoH_v2", back, c.c_uint64(at.value + offset), c.c_size_t(piece))
                total = zlib.crc32(back.raw, total)
            return total
        count, value = c.c_uint64(1), c.c_uint32(7)
        values = (c.c_void_p * 3)(*(c.addressof(one) for one in (out, count, value)))
        launching = cuda.cuLaunchKernel
        launching.argtypes = [c.c_void_p] + [c.c_uint] * 7 + [c.c_void_p] * 3
        launch = lambda: launching(fill, 1, 1, 1, 1, 1, 1, 0, None, values, None)
        run_checks(checksum, launch, lambda: ok("cuCtxSynchronize"))
        ''',
    ),
    "torch": (
        "torch",
        """
        import torch
        torch.manual_seed(1)
        x = torch.randint(-2**31, 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        y = torch.zeros(1, device="cuda")
        run_checks(lambda: int(x.sum(dtype=torch.int64).item()), lambda: y.add_(1), torch.cuda.synchronize)
        """,
    ),
    "torch, cudaMallocAsync": (
        "torch",
        """
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
        import torch
        x = torch.randint(-2**31, 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        y = torch.zeros(1, device="cuda")
        def checksum():
            pieces = [part.to(torch.int64).sum() for part in x.chunk(16)]   # memory that comes and goes
            return int(torch.stack(pieces).sum().item())
        run_checks(checksum, lambda: y.add_(1), torch.cuda.synchronize)
        """,
    ),
    "torch, CUDA graph": (
        "torch",
        """
        import torch
        x = torch.randint(-2**31, 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        y = torch.zeros(1024, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3): y.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.add_(1)
        run_checks(lambda: int(x.sum(dtype=torch.int64).item()), graph.replay, torch.cuda.synchronize)
        """,
    ),
    "cupy": (
        "cupy",
        """
        import cupy
        x = cupy.random.default_rng(1).integers(0, 2**31, size // 4, dtype=cupy.int32)
        y = cupy.zeros(1)
        def add(): y.__iadd__(1)
        run_checks(lambda: int(x.sum(dtype=cupy.int64)), add, cupy.cuda.Device().synchronize)
        """,
    ),
    "numba": (
        "numba_cuda" if importlib.util.find_spec("numba_cuda") else "numba",
        """
        import numpy
        from numba import cuda
        chunk = numpy.random.default_rng(1).integers(0, 2**31, 1 << 20, dtype=numpy.int32)
        x = cuda.device_array(size // 4, dtype=numpy.int32)
        for at in range(0, len(x) - len(chunk) + 1, len(chunk)):
            x[at : at + len(chunk)].copy_to_device(chunk)
        y = cuda.to_device(numpy.zeros(1))
        @cuda.jit
        def add(y): y[0] += 1
        def checksum():
            parts = (x[at : at + (1 << 24)].copy_to_host() for at in range(0, len(x), 1 << 24))
            return sum(int(part.sum(dtype=numpy.int64)) for part in parts)
        run_checks(checksum, lambda: add[1, 1](y), cuda.synchronize)
        """,
    ),
    "jax": (
        "jax",
        """
        import os
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax, jax.numpy as jnp
        x = jax.random.randint(jax.random.key(1), (size // 4,), -2**31, 2**31 - 1, dtype=jnp.int32)
        y = jnp.zeros(1)
        add = jax.jit(lambda y: y + 1)
        total = jax.jit(lambda x: jnp.bitwise_xor.reduce(x))
        run_checks(lambda: int(total(x)), lambda: add(y), lambda: add(y).block_until_ready())
        """,
    ),
}
"""By name: the required module (None: only the driver), and the code."""


def installed() -> list[str]:
    """Return the programs that can run in this environment."""
    return [
        name
        for name, (module, _) in PROGRAMS.items()
        if module is None or importlib.util.find_spec(module.partition(".")[0]) is not None
    ]


class Program:
    """A running program, with or without the library. The context manager ends it."""

    def __init__(self, code: str, size: int, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(size)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> Any:
        """Return the program's next message. Raises RuntimeError if the program has ended."""
        line = self.output.readline()
        if not line:
            _, errors = self.process.communicate()
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"it ended with status {self.process.returncode}: {last}")
        return json.loads(line)

    def has_message(self) -> bool:
        return bool(select.select([self.output], [], [], 0)[0])

    def go_on(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()


def free_memory(gpu: Gpu) -> int:
    """Return the GPU's free memory in bytes according to NVML."""
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).free)
    finally:
        pynvml.nvmlShutdown()


GIB = 1 << 30
HELLO_WITHIN = 10.0
"""Seconds in which a process must send HELLO."""


class ScriptedPeer:
    """One connection of a process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: Frame | None = None

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU) -> None:
        """Send a frame."""
        self.connection.send(Frame(kind, fields, gpu).pack())

    def hear(self, timeout: float = HELLO_WITHIN) -> Frame | None:
        """Return the next frame; None if the process has closed the connection. Raises TimeoutError."""
        ready, _, _ = select.select([self.connection], [], [], timeout)
        if not ready:
            raise TimeoutError(f"no frame in {timeout} s")
        try:
            data = self.connection.recv(2 * FRAME_BYTES)
        except ConnectionResetError:
            return None
        return Frame.unpack(data) if data else None

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


class ScriptedAgent:
    """An agent that listens on a session socket and sends WELCOME to each process; a script does the rest."""

    peer_class: type[ScriptedPeer] = ScriptedPeer

    def __init__(self, path: Path, gpus: Sequence[bytes], total: int = 8 * GIB) -> None:
        """Start listening. `total`: bytes of memory of each GPU."""
        self.path, self.gpus, self.total = path, gpus, total
        self._peers: queue.Queue[ScriptedPeer] = queue.Queue()
        self._all: list[ScriptedPeer] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            peer = self.peer_class(connection)
            self._all.append(peer)
            self.welcome(peer)
            if peer.hello is None or peer.hello.fields[0] == Role.CUDA:
                self._peers.put(peer)

    def welcome(self, peer: ScriptedPeer) -> None:
        """Receive HELLO and answer it."""
        peer.hello = peer.hear()
        if peer.hello is not None:
            (self.greet if peer.hello.fields[0] == Role.CUDA else self.observed)(peer)

    def greet(self, peer: ScriptedPeer) -> None:
        """Send WELCOME and the DEVICE frames."""
        peer.send(Kind.WELCOME, 25, 0, 25, 0, 1, len(self.gpus), 0)
        for gpu in self.gpus:
            peer.send(Kind.DEVICE, self.total, self.total // 4, gpu=gpu)

    def observed(self, peer: ScriptedPeer) -> None:
        """Handle an observer's HELLO: end its connection, so that NVML shows the driver's own figures."""
        peer.close()

    def peer(self, timeout: float = 10.0) -> ScriptedPeer:
        """Return the next process that connects. Raises queue.Empty."""
        return self._peers.get(timeout=timeout)

    def stop(self) -> None:
        """Close the listener and all connections, as if the agent were killed."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._all:
            peer.close()
        self.path.unlink(missing_ok=True)
