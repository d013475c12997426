"""A CUDA program: it holds memory of known content, and does what it reads, a JSON list on each line."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import gpushare_simgpu

from tests.agent.cuda_program import checked
from tests.native.simgpu_program import cu as cuda

MIB = 2**20


class Machine:
    """Blocks of device memory, each filled with words of its own."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Any, int]] = {}
        self.add: Any = None

    def context(self) -> None:
        """Make a CUDA context."""
        checked(cuda.cuInit(0))
        checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))))
        module = checked(cuda.cuModuleLoadData(gpushare_simgpu.KERNELS.read_bytes() + b"\0"))
        self.add = checked(cuda.cuModuleGetFunction(module, b"add_u32"))

    def allocate(self, word: int, mib: int) -> None:
        """Plain memory full of a word."""
        block = checked(cuda.cuMemAlloc(mib * MIB))
        checked(cuda.cuMemsetD32(block, word, mib * MIB // 4))
        self.blocks[word] = block, mib

    def reserve(self, mib: int) -> float:
        """Plain memory without content. Returns how many seconds that took."""
        began = time.monotonic()
        checked(cuda.cuMemAlloc(mib * MIB))
        return time.monotonic() - began

    def managed(self, mib: int) -> None:
        """Managed memory of the program's own."""
        checked(cuda.cuMemAllocManaged(mib * MIB, 1))

    def work(self, seconds: float) -> int:
        """Add 1 to a word in the middle of each block, over and over. Returns how often."""
        end, rounds = time.monotonic() + seconds, 0
        while rounds == 0 or time.monotonic() < end:
            rounds += 1
            for block, mib in self.blocks.values():
                arguments = ((int(block) + mib * MIB // 2, 1, 1), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32))
                checked(cuda.cuLaunchKernel(self.add, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
            checked(cuda.cuCtxSynchronize())
        return rounds

    def words(self) -> list[list[int]]:
        """Of each block the first word, the one in the middle, less its filling, and the last."""
        found = []
        for word, (block, mib) in self.blocks.items():
            read = ctypes.c_uint32()
            row = []
            for place in (0, mib * MIB // 2, mib * MIB - 4):
                checked(cuda.cuMemcpyDtoH(ctypes.addressof(read), int(block) + place, 4))
                row.append(read.value - word)
            found.append(row)
        return found

    def fork(self, word: int, mib: int) -> int:
        """A child with a context and a block of its own, which lives until it is killed. Returns its pid."""
        if child := os.fork():
            return child
        try:
            machine = Machine()
            machine.context()
            machine.allocate(word, mib)
            while True:
                machine.work(0.05)
                time.sleep(0.2)
        finally:
            os._exit(1)

    def fork_without_cuda(self) -> int:
        """A child that ends at once, as subprocesses of notebooks do. Returns its exit status."""
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(7)


def main() -> None:
    """Do what standard input says, and answer each line with one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where it was when this was started
    machine = Machine()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(machine, name)(*arguments)
        except RuntimeError as error:
            answer = str(error)
        except KeyboardInterrupt:
            answer = "interrupted"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
