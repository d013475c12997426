"""Programs that are built with sanitizers run under the library as without it: with it at work, switched off, and on
the simulated driver.

The runtimes ask for `dlsym` before their own functions can be called; those stand in for libc's everywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpushare_spawner.model.frames import Kind
from tests.libraries import preload_library
from tests.native.preload_agent import GenerousAgent

PROGRAM = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void *work(void *x) { return x; }
int main(int count, char **arguments) {
    char *text = malloc(8);
    pthread_t thread;
    pthread_create(&thread, NULL, work, NULL);
    pthread_join(thread, NULL);
    strcpy(text, "fine");
    int status = 0;
    if (count > 1) { /* the driver: a context, memory, and work */
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
        int (*retain)(void **, int) = (int (*)(void **, int))dlsym(library, "cuDevicePrimaryCtxRetain");
        int (*set)(void *) = (int (*)(void *))dlsym(library, "cuCtxSetCurrent");
        int (*alloc)(void **, size_t) = (int (*)(void **, size_t))dlsym(library, "cuMemAlloc_v2");
        int (*set_bytes)(void *, unsigned char, size_t) =
            (int (*)(void *, unsigned char, size_t))dlsym(library, "cuMemsetD8_v2");
        int (*release)(void *) = (int (*)(void *))dlsym(library, "cuMemFree_v2");
        void *context = NULL, *memory = NULL;
        status = init(0) || retain(&context, 0) || set(context) || alloc(&memory, 1 << 20) ||
                 set_bytes(memory, 1, 1 << 20) || release(memory);
    }
    ((int (*)(const char *))dlsym(NULL, "puts"))(text);
    free(text);
    return status;
}
"""
pytest_plugins = ["tests.native.preload_clients"]
SANITIZERS = ("address", "thread", "undefined", "leak", "memory")
STATIC = {"address": "asan", "thread": "tsan", "undefined": "ubsan", "leak": "lsan"}
"""gcc's names of the runtimes."""


@dataclass(frozen=True)
class Sanitized:
    """A program with a sanitizer's runtime."""

    path: Path
    environment: dict[str, str]

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.path, *arguments], env=self.environment | changes, capture_output=True, text=True, timeout=60
        )


def flags_of(compiler: str, sanitizer: str, link: str) -> list[str]:
    """What links the runtime into the program, or leaves it a library."""
    if compiler == "clang":
        return [f"-fsanitize={sanitizer}", "-shared-libsan" if link == "dynamic" else "-static-libsan"]
    static = [f"-static-lib{STATIC[sanitizer]}"] if link == "static" and sanitizer in STATIC else []
    return [f"-fsanitize={sanitizer}", *static]


def built(compiler: str, sanitizer: str, link: str, folder: Path) -> Sanitized:
    """The program, which runs without the library. Skips the test where it cannot be built or does not run."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (folder / "program.c").write_text(PROGRAM)
    command = [compiler, "-g", *flags_of(compiler, sanitizer, link), "-pthread", "program.c", "-o", "program", "-ldl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{compiler} cannot build it: {done.stderr.strip().splitlines()[-1]}")
    runtimes = subprocess.run([compiler, "-print-resource-dir"], capture_output=True, text=True).stdout.strip()
    program = Sanitized(
        folder / "program", os.environ | ({"LD_LIBRARY_PATH": f"{runtimes}/lib/linux"} if runtimes else {})
    )
    bare = program.run()
    if bare.returncode:
        pytest.skip(f"it does not run without the library: status {bare.returncode}, {bare.stderr[:200]!r}")
    return program


@pytest.mark.parametrize("link", ["dynamic", "static"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_program_with_a_sanitizer_starts_and_ends_as_without_the_library(
    compiler: str, sanitizer: str, link: str, tmp_path: Path
) -> None:
    program = built(compiler, sanitizer, link, tmp_path)
    for changes in ({}, {"GPUSHARE_DISABLE": "1"}, {"GPUSHARE_SOCKET": str(tmp_path / "no-agent")}):
        done = program.run(LD_PRELOAD=str(preload_library()), **changes)
        assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0), changes


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[GenerousAgent]:
    agent = GenerousAgent(socket_path, gpus, total=1 << 28)
    yield agent
    agent.stop()


@pytest.mark.parametrize(
    ("compiler", "sanitizer", "link"),
    [
        ("gcc", "address", "dynamic"),
        ("gcc", "thread", "dynamic"),
        ("clang", "address", "static"),
        ("clang", "thread", "static"),
    ],
)
def test_program_with_a_sanitizer_uses_the_gpu_under_the_library(
    compiler: str, sanitizer: str, link: str, tmp_path: Path, agent: GenerousAgent, environment: dict[str, str]
) -> None:
    program = built(compiler, sanitizer, link, tmp_path)
    # what the driver keeps until the end is no leak of the program's
    own = environment | {"ASAN_OPTIONS": "detect_leaks=0"}
    without = {name: value for name, value in own.items() if name not in ("LD_PRELOAD", "GPUSHARE_SOCKET")}
    bare = replace(program, environment=without).run("driver")
    if bare.returncode:
        pytest.skip(f"it does not use the simulated driver without the library: {bare.stderr[:200]!r}")
    done = replace(program, environment=own).run("driver")
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr
    assert any(frame.kind is Kind.REQUEST for _, frame in agent.frames)
