"""Check the layers of the preload library: ``python .ci/c_layers.py``. Needs the PyPI package ziglang, and nm.

A layer is a subfolder; sources in the folder itself are the top layer. Compiles each source with zig and reads the
symbols of the object files with nm. Reports every symbol that a source takes from a higher layer, every include of a
higher layer's header, every circle between sources, and every global symbol whose name does not begin with the name of
its file. Exit status 0: none of these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = ROOT / "gpushare_spawner" / "native" / "preload"
LAYERS = ("platform", "driver", "contexts", "memory", "gate", "lease", "wrappers")
"""Lowest first."""
COMPILE = ["-std=gnu11", "-O0", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", "-w"]
"""-O0 keeps every use of a symbol that an inline function of a header makes."""


@dataclass
class Source:
    """A source, and what its object file defines and wants."""

    path: Path
    name: str
    layer: int
    defines: set[str] = field(default_factory=set)
    wants: set[str] = field(default_factory=set)


def compiler() -> list[str]:
    """The command of zig's C compiler. Raises ImportError where the package ziglang is missing."""
    import ziglang

    return [str(Path(ziglang.__file__).parent / "zig"), "cc"]


def read_symbols(folder: Path, source: Source, compiled: Path) -> None:
    """Compile the source, and fill in its symbols. Raises CalledProcessError."""
    command = [*compiler(), *COMPILE, "-I", str(folder), "-c", str(source.path), "-o", str(compiled)]
    subprocess.run(command, check=True)
    listing = subprocess.run(["nm", "-g", compiled], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        *_, kind, symbol = line.split()
        (source.wants if kind in "Uw" else source.defines).add(symbol)


def read_sources(folder: Path, layers: tuple[str, ...]) -> list[Source]:
    """The sources below the folder, with their symbols. Raises CalledProcessError, ValueError for an unknown layer."""
    sources = []
    for path in sorted(folder.rglob("*.c")):
        name = path.relative_to(folder).as_posix()
        layer = name.split("/")[0] if "/" in name else ""
        if layer and layer not in layers:
            raise ValueError(f"{name}: {layer} is no layer; the layers are {', '.join(layers)}")
        sources.append(Source(path, name, layers.index(layer) if layer else len(layers)))
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


def problems(folder: Path, layers: tuple[str, ...], unprefixed: tuple[str, ...] = ()) -> list[str]:
    """One sentence for each violation. `unprefixed`: beginnings of symbols that need not name their file."""
    sources = read_sources(folder, layers)
    layer = {source.name: source.layer for source in sources}
    graph = dependencies(sources)
    found = [
        f"{user} uses {', '.join(symbols)} of {owner}, which is in a higher layer"
        for user, owners in graph.items()
        for owner, symbols in owners.items()
        if layer[owner] > layer[user]
    ]
    found += [f"these sources depend on each other in a circle: {', '.join(group)}" for group in circles(graph)]
    for path in sorted(folder.rglob("*.[ch]")):
        name = path.relative_to(folder).as_posix()
        own = layers.index(name.split("/")[0]) if "/" in name else len(layers)
        for included in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.MULTILINE):
            if (layers.index(included.split("/")[0]) if "/" in included else len(layers)) > own:
                found.append(f"{name} includes {included}, which is in a higher layer")
    for source in sources:
        named = prefixes(source.path.stem)
        for symbol in sorted(source.defines):
            if not symbol.startswith((*named, *unprefixed)):
                found.append(f"{source.name} defines {symbol}; its name must begin with {named[-1]}")
    return found


UNPREFIXED = ("wrapped_", "cu", "nvmlDevice", "real", "late")
"""Wrappers, the driver's names that they are exported under, and the two tables that read as `real.cuInit` and
`late.create`."""


def main() -> int:
    """Command line; 0 where the layers hold."""
    try:
        found = problems(PRELOAD, LAYERS, UNPREFIXED)
    except FileNotFoundError as error:
        found = [f"{error.filename} is missing: install binutils"]
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
