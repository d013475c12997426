"""Check the layers of the C libraries: ``python .ci/c_layers.py``. Needs the PyPI package ziglang, and nm.

A layer is a subfolder; sources in the folder itself are the top layer. Compiles each source with zig and reads the
symbols of the object files with nm. Reports for the preload library every symbol that a source takes from a higher
layer, every include of a higher layer's header, every circle between sources, every global symbol whose name does
not begin with the name of its file, every variable that a forked child neither resets nor may keep, and each function
of libc that the sources behind `dlsym` call. The simulated driver has listed exceptions: see SIMGPU. Exit status 0:
none of these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = ROOT / "gpushare_spawner" / "native" / "preload"
LAYERS = ("platform", "driver", "contexts", "memory", "gate", "lease", "wrappers", "nvml")
"""Lowest first."""
SIMGPU = ROOT / "packages" / "gpushare-simgpu" / "gpushare_simgpu"
SIMGPU_LAYERS = (
    "common", "cuda/streams", "cuda/memory", "cuda/paging", "cuda/kernels", "cuda/checkpoint", "cuda/driver", "nvml",
)  # fmt: skip
"""Lowest first. Only symbols and circles are checked here: headers of the driver's folders include each other."""
SIMGPU_UPWARD = {
    "driver": "the state of the process stands in driver/driver.c, and init.c fills it; all layers read it",
    "memory_accessible": "the address of an operation on a value in memory is checked when it is put on a stream",
    "copy_rectangle": "graphs copy as copies on streams do",
    "launch_prepare": "graphs launch as launches on streams do",
    "execute_copy": "the thread of a stream carries its operations out, by kind",
    "execute_prefetch": "the same",
    "kernel_run": "the same",
    "compute_run": "the same; a copy on the device takes compute time too",
    "memory_free_context": "the end of a context frees its memory",
    "pool_free": "a free from a pool happens in a stream's order",
    "residency_fault_range": "a copy by the host faults as the host's own access does",
}
"""Symbols that lower layers of the simulated driver take from higher ones, each with the reason. None may be added."""
SIMGPU_CIRCLES = (
    ("common/processes.c", "common/state.c", "common/turns.c"),
    ("cuda/driver/functions.c", "cuda/driver/procaddress.c"),
    (
        "cuda/kernels/compute.c",
        "cuda/kernels/kernels.c",
        "cuda/kernels/launch.c",
        "cuda/memory/copy.c",
        "cuda/memory/copy_api.c",
        "cuda/memory/pool.c",
        "cuda/streams/capture.c",
        "cuda/streams/context.c",
        "cuda/streams/event.c",
        "cuda/streams/execute.c",
        "cuda/streams/graph.c",
        "cuda/streams/graph_exec.c",
        "cuda/streams/stream.c",
        "cuda/streams/stream_api.c",
    ),
)
"""Groups of the simulated driver's sources that use each other. They may only become smaller.

Shared state: a process that joins sets the state up, and one that died gives its turn back. cuGetProcAddress is itself
in the table of functions that it reads. In the large group the thread of a stream carries out what copies, launches and
graphs have put on it, and a capture turns such a call into a node of a graph.
"""
COMPILE = ["-std=gnu11", "-O0", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", "-w"]
"""-O0 keeps every use of a symbol that an inline function of a header makes."""


@dataclass
class Source:
    """A source, and the symbols of its object file."""

    path: Path
    name: str
    layer: int
    defines: set[str] = field(default_factory=set)
    wants: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    """Variables that are not constant, local ones among them."""
    registered: bool = False
    """Whether it registers a function that resets its variables in a forked child."""


def compiler() -> list[str]:
    """The command of zig's C compiler. Raises ImportError where the package ziglang is missing."""
    import ziglang

    return [str(Path(ziglang.__file__).parent / "zig"), "cc"]


def read_symbols(folder: Path, source: Source, compiled: Path) -> None:
    """Compile the source, and fill in its symbols. Raises CalledProcessError."""
    command = [*compiler(), *COMPILE, "-I", str(folder), "-c", str(source.path), "-o", str(compiled)]
    subprocess.run(command, check=True)
    listing = subprocess.run(["nm", compiled], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        *_, kind, symbol = line.split()
        if kind in "Uw":
            source.wants.add(symbol)
        elif kind.isupper():
            source.defines.add(symbol)
        if kind in "bBdDC":
            source.variables.add(symbol)
        source.registered |= symbol.startswith(REGISTRATION)


def layer_of(name: str, layers: tuple[str, ...]) -> int:
    """The number of the layer of a file, by its path below the folder. Raises ValueError for an unknown layer."""
    folder = name.rpartition("/")[0]
    if not folder:
        return len(layers)
    if folder not in layers:
        raise ValueError(f"{name}: {folder} is no layer; the layers are {', '.join(layers)}")
    return layers.index(folder)


@cache
def read_sources(folder: Path, layers: tuple[str, ...]) -> list[Source]:
    """The sources below the folder, with their symbols. Raises CalledProcessError, ValueError for an unknown layer."""
    sources = []
    for path in sorted(folder.rglob("*.c")):
        name = path.relative_to(folder).as_posix()
        sources.append(Source(path, name, layer_of(name, layers)))
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = [Path(objects) / f"{number}.o" for number in range(len(sources))]
        list(pool.map(lambda source, into: read_symbols(folder, source, into), sources, compiled))
    return sources


def dependencies(sources: list[Source]) -> dict[str, dict[str, list[str]]]:
    """For each source the sources that it takes symbols from, and those symbols."""
    owner = {symbol: source.name for source in sources for symbol in source.defines}
    graph: dict[str, dict[str, list[str]]] = {source.name: {} for source in sources}
    for source in sources:
        for symbol in sorted(source.wants & owner.keys()):
            if owner[symbol] != source.name:
                graph[source.name].setdefault(owner[symbol], []).append(symbol)
    return graph


def circles(graph: dict[str, dict[str, list[str]]]) -> list[list[str]]:
    """Groups of sources that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for other in graph[left.pop()]:
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted(o for o in graph if o in reach[n] and n in reach[o])) for n in graph if n in reach[n]}
    return [list(group) for group in sorted(groups)]


def prefixes(stem: str) -> tuple[str, ...]:
    """What a symbol of a file may begin with: the file's name, or its singular."""
    return (stem, stem.removesuffix("s"))


def upward(graph: dict[str, dict[str, list[str]]], layers: tuple[str, ...], allowed: Collection[str] = ()) -> list[str]:
    """One sentence for each pair of sources of which the lower one uses the higher one. `allowed`: symbols."""
    found = []
    for user, owners in graph.items():
        for owner, symbols in owners.items():
            wrong = [symbol for symbol in symbols if symbol not in allowed]
            if wrong and layer_of(owner, layers) > layer_of(user, layers):
                found.append(f"{user} uses {', '.join(wrong)} of {owner}, which is in a higher layer")
    return found


def problems(folder: Path, layers: tuple[str, ...], unprefixed: tuple[str, ...] = ()) -> list[str]:
    """One sentence for each violation. `unprefixed`: beginnings of symbols that need not name their file."""
    sources = read_sources(folder, layers)
    graph = dependencies(sources)
    found = upward(graph, layers)
    found += [f"these sources depend on each other in a circle: {', '.join(group)}" for group in circles(graph)]
    for path in sorted(folder.rglob("*.[ch]")):
        name = path.relative_to(folder).as_posix()
        for included in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.MULTILINE):
            if layer_of(included, layers) > layer_of(name, layers):
                found.append(f"{name} includes {included}, which is in a higher layer")
    for source in sources:
        named = prefixes(source.path.stem)
        for symbol in sorted(source.defines):
            if not symbol.startswith((*named, *unprefixed)):
                found.append(f"{source.name} defines {symbol}; its name must begin with {named[-1]}")
    return found


def new_problems(
    folder: Path, layers: tuple[str, ...], allowed: Collection[str], known: Collection[tuple[str, ...]]
) -> list[str]:
    """One sentence for each violation beside the listed ones, and for each listed one that is gone.

    `allowed`: symbols that lower layers may take from higher ones. `known`: circles, each sorted.
    """
    graph = dependencies(read_sources(folder, layers))
    found = upward(graph, layers, allowed)
    used = {
        symbol
        for user, owners in graph.items()
        for owner, symbols in owners.items()
        if layer_of(owner, layers) > layer_of(user, layers)
        for symbol in symbols
    }
    found += [
        f"{symbol} is not used by a lower layer: remove it from the list" for symbol in allowed if symbol not in used
    ]
    present = [tuple(group) for group in circles(graph)]
    found += [
        f"these sources depend on each other in a circle: {', '.join(group)}" for group in present if group not in known
    ]
    found += [f"this circle is gone: remove it from the list: {', '.join(one)}" for one in known if one not in present]
    return found


UNPREFIXED = (
    "wrapped_", "suspendable_", "cu", "nvmlDevice", "dlsym@", "real", "late", "__asan_default_options",
)  # fmt: skip
"""Wrappers, the names of the driver and of the C library that they are exported under, the two tables that read as
`real.cuInit` and `late.create`, and the function by which AddressSanitizer asks a program for options."""
BEFORE_SANITIZERS = ("resolve.c", "platform/libc.c")
"""Sources of the preload library that run before a sanitizer's runtime is ready: its functions stand in for libc's
then, and end the program."""
NOT_CALLED = {
    "__stack_chk_fail",
    "__dso_handle",
    "__start_gpushare_fork",
    "__stop_gpushare_fork",
    "_r_debug",
    "_dl_debug_addr",
    "_DYNAMIC",
    "__ehdr_start",
    "_end",
    "_GLOBAL_OFFSET_TABLE_",
}
"""Symbols that they may take from outside the library: data of the dynamic linker, marks of the linker, and the
function that ends a process whose stack was overwritten."""


REGISTRATION = "reset_in_child_"
"""The beginning of the symbol of an entry that RESET_IN_CHILD (platform/libc.h) adds."""
KEPT_IN_CHILD = {
    "contexts/captures.c": {"captures_version": "only its changes matter", "on_change": "set once for all processes"},
    "driver/driver.c": {"loaded": "the driver's functions stay", "places": "the driver's functions stay"},
    "driver/gpus.c": {"gpus": "valid up to gpu_count, which is reset"},
    "gate/gate.c": {"gate_fences": "a property of the kernel"},
    "gate/launch.c": {
        "keyed": "the key stays", "thread_end": "the key stays", "no_lane": "constant", "nowhere": "constant",
    },
    "gate/pace.c": {"generations": "a counter"},
    "lease/pager.c": {"walks": "a counter"},
    "lease/worker.c": {
        "exit_watched": "a child inherits what runs at its exit", "session": "set by worker_start",
        "socket_path": "read once",
    },
    "memory/allocations.c": {
        "allocation_conversion": "holds until the next WELCOME", "newest": "a counter", "switched_off": "read once",
    },
    "memory/block_cache.c": {"logged": "logged once", "number": "of the thread", "threads": "a counter"},
    "nvml/figures.c": {
        "incoming": "valid after answered_at, which is reset", "last": "valid after answered_at, which is reset",
        "path": "read once", "read": "read once",
    },
    "nvml/nvml.c": {"loaded": "NVML's functions stay", "numbering": "the numbers of the GPUs stay"},
    "platform/frames.c": {"logged": "logged once"},
    "platform/libc.c": {
        "late": "the C library's functions stay", "loaded": "the C library's functions stay",
        "next_dlsym": "the C library's functions stay", "watched": "a child inherits the fork handler",
    },
    "platform/log.c": {"chosen": "read once", "log_path": "read once", "prepared": "read once", "words": "constant"},
    "platform/settings.c": {"read": "read once", "settings_engine_read": "read once"},
    "wrappers/handle_calls.c": {"logged": "logged once"},
}  # fmt: skip
"""Variables of the preload library's sources that a forked child keeps, each with the reason. All other variables that
are not constant are reset: the function that the source registers by RESET_IN_CHILD names them."""


def variable_names(source: Source) -> set[str]:
    """The variables of a source by their names in C: compilers write `function.name`, `name.1` or `name` as symbol."""
    return {[part for part in symbol.split(".") if not part.isdigit()][-1] for symbol in source.variables}


def state_problems(folder: Path, layers: tuple[str, ...], kept: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One sentence for each variable that a forked child does not reset, and for each listed one that is not kept.

    `kept`: the variables that a child keeps, for each source that has some.
    """
    found = []
    for source in read_sources(folder, layers):
        _, _, reset = source.path.read_text().partition("\nRESET_IN_CHILD(")
        names = variable_names(source)
        not_reset = {name for name in names if not source.registered or not re.search(rf"\b{name}\b", reset)}
        listed = set(kept.get(source.name, ()))
        found += [
            f"{source.name}: a forked child keeps {name}: name it in the function that RESET_IN_CHILD registers, "
            "or list it in KEPT_IN_CHILD"
            for name in sorted(not_reset - listed)
        ]
        found += [
            f"{source.name}: {name} is listed in KEPT_IN_CHILD, and is reset or no variable: remove it from the list"
            for name in sorted(listed - not_reset)
        ]
    present = {source.name for source in read_sources(folder, layers)}
    return found + [f"{name} is listed in KEPT_IN_CHILD, and is no source" for name in sorted(set(kept) - present)]


def foreign_symbols(
    folder: Path, layers: tuple[str, ...], names: Collection[str], allowed: Collection[str]
) -> list[str]:
    """One sentence for each of these sources that takes a symbol from outside the folder that is not allowed."""
    sources = read_sources(folder, layers)
    own = {symbol for source in sources for symbol in source.defines}
    found = [f"{name} is missing: it is listed as one that calls nothing of libc" for name in names]
    for source in sources:
        if source.name in names:
            found.remove(f"{source.name} is missing: it is listed as one that calls nothing of libc")
            foreign = sorted(source.wants - own - set(allowed))
            if foreign:
                found.append(
                    f"{source.name} calls {', '.join(foreign)}, which sanitizers replace before they are ready"
                )
    return found


def main() -> int:
    """Command line; 0 where the layers hold."""
    try:
        found = problems(PRELOAD, LAYERS, UNPREFIXED)
        found += state_problems(PRELOAD, LAYERS, KEPT_IN_CHILD)
        found += foreign_symbols(PRELOAD, LAYERS, BEFORE_SANITIZERS, NOT_CALLED)
        found += new_problems(SIMGPU, SIMGPU_LAYERS, SIMGPU_UPWARD, SIMGPU_CIRCLES)
    except FileNotFoundError as error:
        found = [f"{error.filename} is missing: install binutils"]
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
