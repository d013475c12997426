"""libgpushare.so on a real GPU, for people who have one: ``python -m tests.gpu.check_preload [--size 1GiB]
[FRAMEWORK ...]``.

For each framework that is installed (cuda-bindings, PyTorch, CuPy, Numba, JAX) a program runs under the library,
against an agent in this script: it fills memory and computes; its lease is revoked and its memory paged out; it
gets the lease back and must find every byte as it was. Then the cost of a launch with and without the library, and
the bandwidth of both directions of the hand-off.

The managed memory asked for is at most ``--size``, and never more than half of what is free on the card: more could
hang a card that others use. Exit status 0: everything that is installed passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpushare_spawner.model.frames import Frame, Kind
from gpushare_spawner.model.quantity import format_bytes, parse_bytes
from gpushare_spawner.native import preload_library
from tests.native.preload_agent import Peer, ScriptedAgent

ROOT = Path(__file__).parent.parent.parent
CALM = (Kind.MEMORY, Kind.IDLE, Kind.BUSY)

COMMON = """
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
def story(checksum, launch, wait):
    before = checksum()
    say("ready")
    hear()
    say(checksum() == before)
    say(timed(launch, wait))
"""

FRAMEWORKS = {
    "cuda-bindings": (
        "cuda.bindings",
        """
        from pathlib import Path
        import ctypes, numpy
        from cuda.bindings import driver as d
        import gpushare_spawner.native
        def ok(answer):
            code, *rest = answer
            assert code == d.CUresult.CUDA_SUCCESS, code
            return rest[0] if len(rest) == 1 else rest
        ok(d.cuInit(0))
        ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(0))))))
        ptx = (Path(gpushare_spawner.native.__file__).parent / "simgpu" / "kernels.ptx").read_bytes() + bytes(1)
        module = ok(d.cuModuleLoadData(ptx))
        at, out = ok(d.cuMemAlloc(size)), ok(d.cuMemAlloc(8))
        chunk = numpy.random.default_rng(1).integers(0, 2**32, 1 << 20, dtype=numpy.uint32)
        for offset in range(0, size - chunk.nbytes + 1, chunk.nbytes):
            ok(d.cuMemcpyHtoD(int(at) + offset, chunk.ctypes.data, chunk.nbytes))
        def run(name, *arguments):
            values, types = zip(*arguments)
            function = ok(d.cuModuleGetFunction(module, name))
            ok(d.cuLaunchKernel(function, 256, 1, 1, 256, 1, 1, 0, 0, (values, types), 0))
        def checksum():
            ok(d.cuMemsetD8(out, 0, 8))
            run(b"checksum_u32", (int(at), ctypes.c_uint64), (size // 4, ctypes.c_uint64), (int(out), ctypes.c_uint64))
            result = numpy.zeros(1, dtype=numpy.uint64)
            ok(d.cuMemcpyDtoH(result.ctypes.data, out, 8))
            return int(result[0])
        fill = ok(d.cuModuleGetFunction(module, b"fill_u32"))
        small = ((int(out), 1, 0), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32))
        def launch(): d.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, 0, small, 0)
        story(checksum, launch, lambda: ok(d.cuCtxSynchronize()))
        """,
    ),
    "torch": (
        "torch",
        """
        import torch
        torch.manual_seed(1)
        x = torch.randint(-2**31, 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        y = torch.zeros(1, device="cuda")
        story(lambda: int(x.sum(dtype=torch.int64).item()), lambda: y.add_(1), torch.cuda.synchronize)
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
        story(checksum, lambda: y.add_(1), torch.cuda.synchronize)
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
        story(lambda: int(x.sum(dtype=torch.int64).item()), graph.replay, torch.cuda.synchronize)
        """,
    ),
    "cupy": (
        "cupy",
        """
        import cupy
        x = cupy.random.default_rng(1).integers(0, 2**31, size // 4, dtype=cupy.int32)
        y = cupy.zeros(1)
        def add(): y.__iadd__(1)
        story(lambda: int(x.sum(dtype=cupy.int64)), add, cupy.cuda.Device().synchronize)
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
        story(checksum, lambda: add[1, 1](y), cuda.synchronize)
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
        story(lambda: int(total(x)), lambda: add(y), lambda: add(y).block_until_ready())
        """,
    ),
}


@dataclass
class Outcome:
    """What one program showed. Bandwidths in bytes per second, launches in nanoseconds."""

    intact: bool
    page_out: float
    page_in: float
    release_ms: float
    launch_ns: float
    bare_ns: float


class Program:
    """A framework's program, under the library or without it."""

    def __init__(self, code: str, size: int, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMON + textwrap.dedent(code), str(size)],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def hear(self) -> Any:
        line = self.output.readline()
        if not line:
            _, errors = self.process.communicate()
            raise RuntimeError(f"the program ended with status {self.process.returncode}:\n{errors[-3000:]}")
        return json.loads(line)

    def said_something(self) -> bool:
        return bool(select.select([self.output], [], [], 0)[0])

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


class Leases:
    """Grants each request of one process, with as much to page in as there is."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.lease, self.paged_in = peer, 0, [0, 0]

    def until(self, program: Program) -> Any:
        """Serve until the program says something; returns that."""
        while not program.said_something():
            try:
                frame = self.peer.hear(0.05)
            except TimeoutError:
                if program.process.poll() is not None:
                    break
                continue
            if frame is None:
                break
            self.serve(frame)
        return program.hear()

    def serve(self, frame: Frame) -> None:
        if frame.kind is Kind.REQUEST:
            self.lease += 1
            self.peer.grant(frame.gpu, self.lease, prefetch=frame.fields[0])
        elif frame.kind is Kind.PAGED_IN and frame.fields[0] > self.paged_in[0]:
            self.paged_in = list(frame.fields[:2])

    def take_away(self, gpu: bytes) -> tuple[Frame, float]:
        """Revoke and page everything out; the PAGED_OUT frame, and the seconds until RELEASE (0: none was held)."""
        began = time.monotonic()
        self.peer.revoke(gpu, self.lease, page_out=1 << 62)
        released = 0.0
        while True:
            frame = self.peer.hear(120)
            assert frame is not None, "the connection ended"
            if frame.kind is Kind.RELEASE and not released:
                released = time.monotonic() - began
            if frame.kind is Kind.PAGED_OUT:
                return frame, released
            if frame.kind is not Kind.REQUEST:
                self.serve(frame)


def check(code: str, size: int, gpu: bytes, total: int, bare: dict[str, str]) -> Outcome:
    """One program's story. Raises RuntimeError or AssertionError, saying what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.sock"
        agent = ScriptedAgent(path, [gpu], total=total)
        program = Program(code, size, bare | {"LD_PRELOAD": str(preload_library()), "GPUSHARE_SOCKET": str(path)})
        try:
            leases = Leases(agent.peer(120))
            assert leases.until(program) == "ready"
            out, released = leases.take_away(gpu)
            leases.paged_in = [0, 0]
            program.go_on()
            intact = bool(leases.until(program))
            launch = float(leases.until(program))
        finally:
            program.process.kill()
            program.process.communicate()
            agent.stop()
        plain = Program(code, size, bare)
        assert plain.hear() == "ready"
        plain.go_on()
        plain.hear()
        bare_ns = float(plain.hear())
        plain.process.communicate()
        return Outcome(
            intact,
            out.fields[0] / max(out.fields[1], 1) * 1e9,
            leases.paged_in[0] / max(leases.paged_in[1], 1) * 1e9,
            released * 1000,
            launch,
            bare_ns,
        )


def card(environment: dict[str, str]) -> tuple[bytes, int, int]:
    """UUID, free and total bytes of the first GPU, asked in a program of its own."""
    code = (
        "from tests.native.preload_driver import Driver; import json\n"
        "d = Driver(); print(json.dumps([d.uuid().hex(), *d.memory()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no usable GPU here:\n{done.stderr.strip().splitlines()[-1]}")
    uuid, available, total = json.loads(done.stdout)
    return bytes.fromhex(uuid), available, total


def main() -> int:
    """Command line; 0 when all that is installed passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=1 << 30, help="bytes of GPU memory to fill (default 1Gi)")
    parser.add_argument("frameworks", nargs="*", help=f"default: those installed of {', '.join(FRAMEWORKS)}")
    options = parser.parse_args()
    unknown = set(options.frameworks) - set(FRAMEWORKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FRAMEWORKS)}")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE_", "LD_PRELOAD"))}
    gpu, available, total = card(bare)
    # a program may hold a copy of what it fills; both together stay under half of what is free
    if options.size * 2 > available // 2:
        print(
            f"{format_bytes(options.size)} twice is more than half of the {format_bytes(available)} free here: not run"
        )
        return 2
    failed = False
    for name, (module, code) in FRAMEWORKS.items():
        if options.frameworks and name not in options.frameworks:
            continue
        if importlib.util.find_spec(module.split(".")[0]) is None:
            print(f"{name}: not installed")
            continue
        try:
            outcome = check(code, options.size, gpu, total, bare)
        except (RuntimeError, AssertionError, TimeoutError) as error:
            print(f"{name}: FAILED: {error}")
            failed = True
            continue
        failed |= not outcome.intact
        print(
            f"{name}: contents {'intact' if outcome.intact else 'LOST'}; out {outcome.page_out / 1e9:.1f} GB/s, "
            f"in {outcome.page_in / 1e9:.1f} GB/s; gave way in {outcome.release_ms:.1f} ms; "
            f"a launch {outcome.launch_ns:.0f} ns, without the library {outcome.bare_ns:.0f} ns"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
