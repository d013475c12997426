"""What the compiled libraries are hardened with, as their ELF files say, for both machines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpushare_spawner.native import build
from tests.libraries import NATIVE, SIMGPU

pytestmark = [
    pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed"),
    pytest.mark.slow,
]
LIBRARIES = {"libgpushare.so": NATIVE, "libcuda.so.1": SIMGPU, "libnvidia-ml.so.1": SIMGPU}


@pytest.fixture(scope="module", params=build.MACHINES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All libraries for one machine."""
    folder = tmp_path_factory.mktemp(request.param)
    for sources in (NATIVE, SIMGPU):
        build.build(sources, folder, request.param)
    return folder


def said(library: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, library], check=True, capture_output=True, text=True).stdout


def wanted(library: Path) -> dict[str, tuple[int, ...]]:
    """The functions that a library takes from others, each with the version of glibc that it needs."""
    found = {}
    for line in said(library, "--dyn-syms").splitlines():
        words = line.split()
        if len(words) > 7 and words[6] == "UND" and "@GLIBC_" in words[7]:
            name, _, version = words[7].partition("@GLIBC_")
            found[name] = tuple(map(int, version.split(".")))
    return found


@pytest.mark.parametrize("name", LIBRARIES)
def test_stack_is_protected_and_no_newer_glibc_is_needed(built: Path, name: str) -> None:
    symbols = wanted(built / name)
    assert "__stack_chk_fail" in symbols
    newest = tuple(map(int, build.GLIBC.split(".")))
    assert {symbol: version for symbol, version in symbols.items() if version > newest} == {}


@pytest.mark.parametrize("name", LIBRARIES)
def test_pages_are_writable_or_executable_and_relocations_are_read_only(built: Path, name: str) -> None:
    segments = [line.split() for line in said(built / name, "-l").splitlines()]
    flags = {words[0]: "".join(words[6:-1]) for words in segments if words[:1] in (["GNU_STACK"], ["GNU_RELRO"])}
    assert flags == {"GNU_STACK": "RW", "GNU_RELRO": "R"}
    loaded = ["".join(words[6:-1]) for words in segments if words[:1] == ["LOAD"]]
    assert loaded
    assert not [one for one in loaded if "W" in one and "E" in one]
    assert "BIND_NOW" in said(built / name, "-d")


def test_simulated_driver_checks_sizes_and_the_library_keeps_to_what_musl_has(built: Path) -> None:
    """Fortified functions that every glibc since 2.17 has; a program of musl has none of them."""
    checked = {name: [one for one in wanted(built / name) if one.endswith("_chk")] for name in LIBRARIES}
    assert checked["libcuda.so.1"]
    assert checked["libnvidia-ml.so.1"]
    assert not checked["libgpushare.so"]


def test_every_reset_of_a_forked_child_is_in_the_section_that_the_child_walks(built: Path) -> None:
    """Neither the compiler's nor the linker's removal of unused code takes one out."""
    sources = (NATIVE / "preload").rglob("*.c")
    registered = sum("\nRESET_IN_CHILD(" in source.read_text() for source in sources)
    (size,) = re.findall(r" gpushare_fork +PROGBITS +\w+ +\w+ +(\w+)", said(built / "libgpushare.so", "-S"))
    assert int(size, 16) == 4 * registered > 0
