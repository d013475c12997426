"""Which function a program gets when it asks for one of the driver's: the wrapper of exactly that ABI, or the
driver's own.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Kind
from gpushare_spawner.native import build, preload_library
from tests.libraries import NATIVE
from tests.native.preload_agent import GenerousAgent, ScriptedAgent
from tests.native.preload_stub import compile_library

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

HERE = Path(__file__).parent
pytest_plugins = ["tests.native.preload_clients", "tests.native.preload_stub"]

ASKING = """
library = c.CDLL("libcuda.so.1")
mine = [line.split()[0].split("-") for line in open("/proc/self/maps") if "libgpushare.so" in line]

def ours(pointer):
    return any(int(low, 16) <= pointer < int(high, 16) for low, high in mine)

def by_name(name):
    return c.cast(getattr(library, name), c.c_void_p).value

def ask(symbol, version, flags=0, form="cuGetProcAddress_v2", status=None):
    pointer = c.c_void_p()
    arguments = [c.c_char_p(symbol.encode()), c.byref(pointer), c.c_int(version), c.c_uint64(flags)]
    code = getattr(library, form)(*arguments, *([status] if form.endswith("2") else []))
    return code, pointer.value

def called(pointer):
    return c.CFUNCTYPE(c.c_int)(pointer)()
"""


def test_each_abi_gets_its_own_wrapper(start: Start, stub_folder: Path) -> None:
    client = start(
        ASKING
        + """
answers = {}
for version in (8000, 12020):
    for flags in (0, 2):
        code, pointer = ask("cuMemPrefetchAsync", version, flags)
        answers[f"{version}/{flags}"] = [code, ours(pointer), called(pointer)]
say(answers)
""",
        LD_LIBRARY_PATH=str(stub_folder),
    )
    assert client.hear() == {
        "8000/0": [0, True, 8000],
        "8000/2": [0, True, 8001],
        "12020/0": [0, True, 12020],
        "12020/2": [0, True, 12021],
    }
    client.end()


def test_both_forms_of_get_proc_address_and_null_status(start: Start, stub_folder: Path) -> None:
    client = start(
        ASKING
        + """
status = c.c_int(-1)
say([ask("cuMemsetD8", 12000, 2, "cuGetProcAddress_v2", c.byref(status))[0], status.value])
for form in ("cuGetProcAddress", "cuGetProcAddress_v2"):
    say([ours(by_name(form)), *(called(ask("cuMemsetD8", 12000, flags, form)[1]) for flags in (0, 2))])
say([library.cuGetProcAddress_v2(c.c_char_p(b"cuInit"), None, 12000, c.c_uint64(0), None),
     library.cuGetProcAddress_v2(None, None, 12000, c.c_uint64(0), None)])
say(ours(ask("cuGetProcAddress", 12000)[1]))
say(ask("cuNoSuchThing", 12000)[0])
""",
        LD_LIBRARY_PATH=str(stub_folder),
    )
    assert client.hear() == [0, 0]
    assert client.hear() == [True, 3020, 7000]
    assert client.hear() == [True, 3020, 7000]
    assert client.hear() == [1, 1], "the driver's own answer to NULL pointers"
    assert client.hear() is True
    assert client.hear() == 500
    client.end()


def test_unknown_functions_are_left_alone_and_unexported_ones_found(start: Start, stub_folder: Path) -> None:
    client = start(
        ASKING
        + """
say([ours(ask("cuStreamQuery", 12000)[1]), ours(by_name("cuStreamQuery"))])
say([[ours(p), called(p)] for p in (ask("cuGraphLaunch", 12000)[1], ask("cuGraphLaunch", 99000)[1])])
say([[ours(p), called(p)] for p in (ask("cuGraphUpload", 12000)[1],)])
""",
        LD_LIBRARY_PATH=str(stub_folder),
    )
    assert client.hear() == [False, False]
    assert client.hear() == [[True, 10000], [False, 99000]], "a form of unknown ABI is passed through"
    assert client.hear() == [[True, 11010]]
    client.end()


def test_functions_of_cuda_13_2_and_later_are_gated_or_watched(
    start: Start, stub_folder: Path, socket_path: Path
) -> None:
    """Copies wait for the lease, but not in a stream that is being captured; a memory node is seen."""
    agent = ScriptedAgent(socket_path, [bytes([7]) * 16], total=1 << 40)
    client = start(
        ASKING
        + """
library.cuInit(0)
one, two = c.c_void_p(64), c.c_void_p(128)
none = (c.c_uint64(0), c.c_uint64(0), c.c_size_t(0), None)
copy = library.cuMemcpyWithAttributesAsync
other = ask("cuMemcpyWithAttributesAsync", 13020, 2)[1]
say([ours(by_name("cuMemcpyWithAttributesAsync")), ours(other), ours(ask("cuGraphAddNode", 13040)[1])])
library.cuStreamBeginRecaptureToGraph(one, c.c_int(0), None, None, None)
say(copy(*none, one))
library.cuStreamEndCapture(one, None)
library.cuStreamBeginCaptureToCig(two, None)
say(library.cuMemcpy3DWithAttributesAsync(None, c.c_uint64(0), two))
library.cuStreamEndCaptureToCig(two)
hear()
say(copy(*none, two))
hear()
say(c.CFUNCTYPE(c.c_int, c.c_uint64, c.c_uint64, c.c_size_t, c.c_void_p, c.c_void_p)(other)(0, 0, 0, None, one))
library.cuGraphAddNode_v3(None, None, None, None, c.c_size_t(0), c.byref(c.c_int(10)))
available, total = c.c_size_t(), c.c_size_t()
library.cuMemGetInfo_v2(c.byref(available), c.byref(total))
say(total.value - available.value)
hear()
""",
        LD_LIBRARY_PATH=str(stub_folder),
        STUB_CONTEXT="1",
    )
    peer = agent.peer()
    assert client.hear() == [True, True, True]
    assert [client.hear(), client.hear()] == [13020, 13022], "captured work is recorded, not done"
    client.say()
    request = peer.expect(Kind.REQUEST)
    peer.grant(request.gpu, 1)
    assert client.hear() == 13020
    client.say()
    assert client.hear() == 13021
    assert client.hear() == 5 << 20, "what the driver says that graphs have reserved"
    agent.stop()


@pytest.mark.parametrize("off", [{"GPUSHARE_DISABLE": "1"}, {"GPUSHARE_SOCKET": None}])
def test_switched_off_the_program_gets_the_driver_itself(
    start: Start, stub_folder: Path, off: dict[str, str | None]
) -> None:
    client = start(
        ASKING
        + """
say([ours(by_name("cuInit")), ours(ask("cuMemPrefetchAsync", 12020)[1])])
library.cuInit(0)
say(len(os.listdir("/proc/self/task")))
""",
        LD_LIBRARY_PATH=str(stub_folder),
        **off,
    )
    assert client.hear() == [False, False]
    assert client.hear() == 1
    client.end()


EVERY_CALL = r"""
/* Calls each of these functions once, with zeros, and says what each answered. Linked with the driver, so that calls
   go to whoever exports the functions first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#define F(name) int name();
LIST
#undef F
int cuInit(), cuDevicePrimaryCtxRetain();
int main(int argc, char **argv) {
    int (*init)() = cuInit;
    void *context = NULL;
    if (strcmp(argv[1], "dlsym") == 0)
        *(void **)&init = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuInit");
    if (strcmp(argv[1], "cuGetProcAddress") == 0) cuGetProcAddress_v2("cuInit", &init, 12000, 0ll, 0ll);
    if (strcmp(argv[1], "nothing") != 0) {
        if (init(0)) return 3;
        if (cuDevicePrimaryCtxRetain(&context, 0)) return 4;
    }
#define F(name) \
    cuCtxSetCurrent(context); \
    printf("%s %d\n", #name, name(0ll, 0ll, 0ll, 0ll, 0ll, 0ll, 0ll, 0ll, 0ll, 0ll, 0ll, 0ll)); \
    fflush(stdout);
    LIST
    return 0;
}
"""


@pytest.fixture(scope="session")
def every_call(preload: Path, simgpu_libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program, linked against the simulated driver, that calls each function of it that the library exports."""
    ours, drivers = exported(preload), exported(simgpu_libraries / "libcuda.so.1")
    # the context has to stay for the calls that follow
    ends = {"cuInit", "cuCtxDestroy", "cuCtxDestroy_v2", "cuCtxDetach"} | {
        n for n in ours if n.startswith("cuDevicePrimaryCtxRe")
    }
    names = sorted({name for name in ours & drivers if name.startswith("cu")} - ends)
    assert len(names) > 100
    folder = tmp_path_factory.mktemp("every_call")
    (folder / "every.c").write_text(EVERY_CALL.replace("LIST", " ".join(f"F({name})" for name in names)))
    command = [*build.compiler(), "-std=gnu11", "-w", "-O1", "-fno-sanitize=all", "-o", str(folder / "every")]
    command += [str(folder / "every.c"), str(simgpu_libraries / "libcuda.so.1"), "-ldl"]
    subprocess.run(command, check=True)
    return folder / "every"


@pytest.mark.parametrize("how", ["link", "dlsym", "cuGetProcAddress", "nothing"])
def test_every_export_answers_as_the_driver_however_the_program_came_to_it(
    every_call: Path, environment: dict[str, str], socket_path: Path, gpus: list[bytes], how: str
) -> None:
    """Switched off, without a session, without an agent, and with one; `nothing`: before cuInit."""

    def answers(**more: str | None) -> str:
        merged = {name: value for name, value in (environment | more).items() if value is not None}
        done = subprocess.run([str(every_call), how], env=merged, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{more}: status {done.returncode} after {done.stdout.splitlines()[-1:]}"
        return done.stdout

    bare = answers(LD_PRELOAD=None)
    assert bare.count("\n") > 100
    assert answers(GPUSHARE_DISABLE="1") == bare
    assert answers(GPUSHARE_SOCKET=None) == bare
    assert answers() == bare
    agent = GenerousAgent(socket_path, gpus, total=1 << 29)
    assert answers() == bare
    agent.stop()


def test_without_a_driver_nothing_is_found(start: Start, tmp_path: Path) -> None:
    """The library exports cuInit; a program that looks whether there is a driver must not find that one."""
    client = start(
        """
        everything = c.CDLL(None)
        names = ("cuInit", "cuGetProcAddress_v2", "nvmlDeviceGetMemoryInfo", "getpid")
        say([hasattr(everything, name) for name in names])
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert client.hear() == [False, False, False, True]
    client.end()


def test_rtld_next_is_next_after_the_caller(start: Start, tmp_path: Path) -> None:
    """Both libraries come after ours; the asking one must find the word of the one behind it, not its own."""
    asks, has = tmp_path / "libasks.so", tmp_path / "libhas.so"
    compile_library(["-DASKS", '-DWORD="own"', str(HERE / "preload_next.c"), "-ldl"], asks)
    compile_library(['-DWORD="behind"', str(HERE / "preload_next.c")], has)
    client = start(
        f"""
        library = c.CDLL({str(asks)!r})
        library.next_word.restype = c.c_char_p
        say(library.next_word().decode())
        """,
        LD_PRELOAD=f"{preload_library()}:{asks}:{has}",
    )
    assert client.hear() == "behind"
    client.end()


def test_only_what_is_meant_is_exported(preload: Path) -> None:
    """Driver functions, NVML's, and dlsym at glibc's versions; no name of our own."""
    names = exported(preload)
    others = {name for name in names if not name.startswith("cu")}
    listed = (NATIVE / "preload" / "nvml" / "nvml.h").read_text()
    nvml = set(re.findall(r"^ +WRAPPED\((\w+)", listed, re.MULTILINE))
    assert "nvmlDeviceGetMemoryInfo_v2" in nvml
    assert {name.split("@")[0] for name in others} == {"dlsym", "__asan_default_options", *nvml}
    assert sum(name.startswith("dlsym@") for name in others) == 2
    assert "cuLaunchKernel" in names
    assert "cuLaunchKernel_ptsz" in names


ASKED = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
static int nothing(void) { return 0; }
EXPORT int cuInit(unsigned flags) { return 0; }
EXPORT int cuDriverGetVersion(int *version) { *version = 13050; return 0; }
EXPORT int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    printf("asked %s %d %d\n", name, version, (int)(flags >> 1 & 1));
    fflush(stdout);
    *out = !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2
         : !strcmp(name, "cuInit") ? (void *)cuInit
         : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion : (void *)nothing;
    if (status) *status = 0;
    return 0;
}
"""
"""A driver that says what CUDA's runtime asks it for. The runtime ends or crashes afterwards."""
ENTRY = re.compile(r'\b(?:WRAPPED|WATCHED|SUSPENDABLE|COUNTED)\(\s*\w+,\s*"(\w+)",\s*(\d+),\s*([01]),')
TWO_ENTRIES = re.compile(r'\b(?:STREAMED|IMPLICIT)\(\s*\w+,\s*"(\w+)",\s*(\d+),\s*(\d+),')


def test_every_abi_that_cudas_runtime_asks_for_of_a_wrapped_function_is_wrapped(tmp_path: Path) -> None:
    """One that is missing bypasses the library in the programs that were built for that version."""
    (tmp_path / "driver.c").write_text(ASKED)
    compile_library(["-Wl,-soname,libcuda.so.1", str(tmp_path / "driver.c")], tmp_path / "libcuda.so.1")
    done = subprocess.run(
        [sys.executable, "-c", "from cuda.bindings import runtime; runtime.cudaGetDeviceCount()"],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    asked = {
        (name, int(version), int(twin)) for name, version, twin in re.findall(r"asked (\w+) (\d+) (\d)", done.stdout)
    }
    assert len(asked) > 300, done.stderr
    tables = (NATIVE / "preload/driver/driver_calls.h").read_text()
    known = {(name, int(version), int(twin)) for name, version, twin in ENTRY.findall(tables)}
    for name, version, twin in TWO_ENTRIES.findall(tables):
        known |= {(name, int(version), 0), (name, int(twin), 1)}
    wrapped = {name for name, _, _ in known}
    assert {one for one in asked if one[0] in wrapped} - known == set()


MUSL_LOADER = Path(f"/lib/ld-musl-{platform.machine()}.so.1")
# Linked against the musl that is installed, without its headers and start files: the compiler would build all of musl.
MUSL_PROGRAM = r"""
int printf(const char *, ...), getpid(void);
int pthread_create(void **, void *, void *(*)(void *), void *), pthread_join(void *, void **);
void *dlsym(void *, const char *);
int __libc_start_main(int (*)(), int, char **, void *, void *, void *);
static void *work(void *x) { return x; }
int main() {
    void *thread;
    pthread_create(&thread, 0, work, 0);
    pthread_join(thread, 0);
    int (*get)(void) = (int (*)(void))dlsym((void *)0, "getpid");             /* RTLD_DEFAULT */
    void *init = dlsym((void *)0, "cuInit"), *next = dlsym((void *)-1, "puts"); /* RTLD_NEXT */
    printf("%d %d %d\n", get && get() == getpid(), init != 0, next != 0);
    return 0;
}
__attribute__((used)) static void begin(long *stack) {
    __libc_start_main(main, (int)stack[0], (char **)(stack + 1), 0, 0, 0);
}
#ifdef __x86_64__
__asm__(".globl _start\n_start: xor %ebp,%ebp\n mov %rsp,%rdi\n and $-16,%rsp\n call begin\n");
#else
__asm__(".globl _start\n_start: mov x29,#0\n mov x30,#0\n mov x0,sp\n and sp,x0,#-16\n b begin\n");
#endif
"""


@pytest.mark.skipif(not MUSL_LOADER.exists(), reason=f"no {MUSL_LOADER}: Debian's package musl has it")
def test_programs_of_musl_run_under_it_as_without_it(environment: dict[str, str], tmp_path: Path) -> None:
    """They find their own functions, and no driver: NVIDIA's needs glibc."""
    (tmp_path / "program.c").write_text(MUSL_PROGRAM)
    flags = ["-target", f"{platform.machine()}-linux-musl", "-nostdlib", "-fPIC", "-w", "-fno-sanitize=all"]
    flags += [str(MUSL_LOADER), f"-Wl,-dynamic-linker,{MUSL_LOADER}"]
    subprocess.run([*build.compiler(), *flags, "-o", tmp_path / "program", tmp_path / "program.c"], check=True)
    done = subprocess.run([tmp_path / "program"], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("1 0 1\n", "", 0)


def test_the_dynamic_linker_has_little_to_do_for_it(preload: Path) -> None:
    """It needs no library but libc, and its tables hold offsets: each process would pay for pointers. Each driver
    function that it calls has one pointer."""
    data = preload.read_bytes()
    relocations = sum(section[5] // 24 for section in sections_of(data) if section[1] == 4)  # SHT_RELA
    (dynamic,) = (section for section in sections_of(data) if section[1] == 6)
    tags = [struct.unpack_from("<q", data, dynamic[4] + at)[0] for at in range(0, dynamic[5], 16)]
    assert tags.count(1) == 1, "DT_NEEDED"
    assert relocations < 400


def sections_of(data: bytes) -> list[tuple[int, ...]]:
    """The section headers of an ELF file: (name, type, flags, address, offset, size, link, info, alignment, entry)."""
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]


def exported(library: Path) -> set[str]:
    """Names (with versions) that a library defines for others, from its dynamic symbol table."""
    data = library.read_bytes()
    sections = sections_of(data)

    def text(table: int, at: int) -> str:
        begin = sections[table][4] + at
        return data[begin : data.index(b"\0", begin)].decode()

    symbols = next(s for s in sections if s[1] == 11)  # SHT_DYNSYM
    versions = next(s for s in sections if s[1] == 0x6FFFFFFF)  # SHT_GNU_versym
    definitions = next((s for s in sections if s[1] == 0x6FFFFFFD), None)  # SHT_GNU_verdef
    named: dict[int, str] = {}
    if definitions:
        at = definitions[4]
        while True:
            _, _, index, _, _, auxiliary, following = struct.unpack_from("<HHHHIII", data, at)
            named[index] = text(definitions[6], struct.unpack_from("<I", data, at + auxiliary)[0])
            if not following:
                break
            at += following
    found = set()
    for i in range(symbols[5] // 24):
        name, info, other, section, _, _ = struct.unpack_from("<IBBHQQ", data, symbols[4] + 24 * i)
        if section == 0 or info >> 4 == 0 or other & 3 == 2:
            continue  # undefined, local or hidden
        (version,) = struct.unpack_from("<H", data, versions[4] + 2 * i)
        label = named.get(version & 0x7FFF, "") if version & 0x7FFF > 1 else ""
        found.add(text(symbols[6], name) + (f"@{label}" if label else ""))
    return found
