"""Compiles the C libraries of a folder with zig's C compiler (PyPI package ziglang).

The folder's ``libraries.toml`` names them: libgpushare.so in this folder, the simulated driver in
packages/gpushare-simgpu. zig pins the required glibc version and cross-compiles, so neither gcc nor a sysroot is
needed. A wheel build runs this module through hatch_build.py. To run it manually: ``python -m
gpushare_spawner.native.build [--machine aarch64] [--into DIR] [FOLDER]``.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
GLIBC = "2.17"
"""Old enough for every distribution with a CUDA 12 driver (manylinux2014)."""
MACHINES = ("x86_64", "aarch64")

FLAGS = [
    "-std=gnu11", "-O2", "-fomit-frame-pointer", "-g", "-fPIC", "-shared", "-pthread",
    "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter",
    "-fvisibility=hidden", "-fno-sanitize=all", "-fstack-protector-strong",
]  # fmt: skip


class BuildError(RuntimeError):
    """The libraries cannot be built here; the message has the reason and a remedy."""


def compiler() -> list[str]:
    """Return the command of zig's C compiler. Raises BuildError if the package is missing."""
    try:
        import ziglang
    except ImportError:
        raise BuildError(
            "the C compiler is missing: install the PyPI package ziglang (pip install ziglang); "
            f"it exists for Linux on {' and '.join(MACHINES)}, this is {platform.system()} on {platform.machine()}"
        ) from None
    return [str(Path(ziglang.__file__).parent / "zig"), "cc"]


def build(
    folder: Path = HERE, into: Path | None = None, machine: str | None = None, stripped: bool = False
) -> list[Path]:
    """Compile the libraries in the folder's libraries.toml. Return their paths. Raises BuildError.

    `into`: the target folder; default: `lib` in the folder. `machine`: x86_64 or aarch64; default: this machine.
    `stripped`: whether to omit debug symbols, as in a wheel. The same sources give the same bytes in every folder.
    """
    machine = machine or platform.machine()
    into = into or folder / "lib"
    if machine not in MACHINES or platform.system() != "Linux":
        raise BuildError(
            f"the native libraries are built for Linux on {' or '.join(MACHINES)}, "
            f"not for {platform.system()} on {machine}"
        )
    if not into.is_dir():
        into.mkdir(parents=True)
        into.chmod(0o755)
    # the prefix map keeps this machine's paths out of the libraries
    command = [*compiler(), "-target", f"{machine}-linux-gnu.{GLIBC}", *FLAGS, f"-ffile-prefix-map={folder}=."]
    if stripped:
        command.append("-Wl,--strip-all")
    built = []
    for name, library in tomllib.loads((folder / "libraries.toml").read_text()).items():
        sources = sorted(path.relative_to(folder) for pattern in library["sources"] for path in folder.glob(pattern))
        if not sources:
            raise BuildError(f"there are no C sources {' '.join(library['sources'])} in {folder}: build in a checkout")
        target = into.resolve() / name
        # built under another name: a process can have the old library mapped
        fresh = target.with_name(f".{name}.{os.getpid()}.new")
        words = [*command, "-o", str(fresh), *map(str, sources), *library["flags"]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            fresh.unlink(missing_ok=True)
            raise BuildError(f"{name} does not compile:\n{done.stderr}")
        # processes of all users load it, so this process's umask must not apply
        fresh.chmod(0o755)
        os.replace(fresh, target)
        built.append(target)
    return built


def main() -> int:
    """Run the command line. Return 0 if everything was built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE, help="what to build; default: libgpushare.so")
    parser.add_argument("--machine", choices=MACHINES, help="default: this machine")
    parser.add_argument("--into", type=Path, help="default: lib in the folder")
    options = parser.parse_args()
    try:
        for path in build(options.folder.resolve(), options.into, options.machine):
            print(path)
    except BuildError as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
