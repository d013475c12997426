"""Builds libgpushare.so and the simulated driver with zig's C compiler (PyPI package ziglang).

zig pins the glibc that the result needs and cross-compiles, so neither gcc nor a sysroot is wanted. A wheel build runs
this through hatch_build.py; by hand: ``python -m gpushare_spawner.native.build [--machine aarch64] [--into DIR]``.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
GLIBC = "2.17"
"""Old enough for every distribution that still runs a CUDA 12 driver (manylinux2014)."""
MACHINES = ("x86_64", "aarch64")

FLAGS = [
    "-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread",
    "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter",
    "-fvisibility=hidden", "-fno-sanitize=all",
]  # fmt: skip

TARGETS: dict[str, tuple[str, list[str]]] = {
    # library: (sources, flags of its own)
    "libgpushare.so": (
        "preload/**/*.c",
        ["-Ipreload", "-Wl,-soname,libgpushare.so", "-Wl,--version-script=preload/exports.map", "-ldl"],
    ),
    "simgpu/libcuda.so.1": (
        "simgpu/cuda/*.c simgpu/common/*.c",
        ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-ldl", "-lrt"],
    ),
    "simgpu/libnvidia-ml.so.1": (
        "simgpu/nvml/*.c simgpu/common/*.c",
        ["-Wl,-soname,libnvidia-ml.so.1", "-Wl,-Bsymbolic", "-lrt"],
    ),
}


class BuildError(RuntimeError):
    """The libraries cannot be built here; the message says why and what would help."""


def compiler() -> list[str]:
    """The command of zig's C compiler. Raises BuildError where the package is missing."""
    try:
        import ziglang
    except ImportError:
        raise BuildError(
            "the C compiler is missing: install the PyPI package ziglang (pip install ziglang); "
            f"it exists for Linux on {' and '.join(MACHINES)}, this is {platform.system()} on {platform.machine()}"
        ) from None
    return [str(Path(ziglang.__file__).parent / "zig"), "cc"]


def build(into: Path, machine: str | None = None, stripped: bool = False) -> list[Path]:
    """Compile every library for `machine` (default: this one) into the folder. Raises BuildError.

    The same sources give the same bytes in whatever folder they lie. `stripped`: without symbols for a debugger, as in
    a wheel.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES or platform.system() != "Linux":
        raise BuildError(
            f"the native library is built for Linux on {' or '.join(MACHINES)}, "
            f"not for {platform.system()} on {machine}"
        )
    built = []
    for name, (patterns, link) in TARGETS.items():
        sources = sorted(path for pattern in patterns.split() for path in HERE.glob(pattern))
        if not sources:
            raise BuildError(f"no C sources at {HERE / patterns}: the installation is incomplete")
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # under another name first: a process may have the old library mapped
        fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
        command = [
            *compiler(),
            "-target",
            f"{machine}-linux-gnu.{GLIBC}",
            *FLAGS,
            # no path of the building machine in debug information and __FILE__
            f"-ffile-prefix-map={HERE}=native",
            *(["-Wl,--strip-all"] if stripped else []),
            "-o",
            str(fresh),
            *map(str, sources),
            *link,
        ]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{name} does not compile:\n{done.stderr}")
        os.replace(fresh, target)
        built.append(target)
    cuda = into / "simgpu" / "libcuda.so"
    cuda.unlink(missing_ok=True)
    cuda.symlink_to("libcuda.so.1")
    return built


def main() -> int:
    """Command line; 0 when everything was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", choices=MACHINES, help="default: this machine")
    parser.add_argument("--into", type=Path, default=HERE / "lib", help="default: beside the sources")
    parser.add_argument("--clean", action="store_true", help="empty the folder first")
    options = parser.parse_args()
    if options.clean:
        shutil.rmtree(options.into, ignore_errors=True)
    try:
        for path in build(options.into, options.machine):
            print(path)
    except BuildError as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
