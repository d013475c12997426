"""A CUDA program that sets one byte of GPU memory for each line that it reads."""

from __future__ import annotations

import sys

from tests.agent.cuda_program import checked
from tests.native.simgpu_program import cu as cuda


def main() -> None:
    """Ends with its input."""
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))))
    buffer = checked(cuda.cuMemAlloc(4096))
    print("ready", flush=True)
    for _ in sys.stdin:
        checked(cuda.cuMemsetD8(buffer, 0, 1))
        checked(cuda.cuCtxSynchronize())
        print("done", flush=True)


if __name__ == "__main__":
    main()
