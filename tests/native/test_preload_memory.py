"""Allocations: what is converted, what is counted, what the program is told about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Kind
from tests.native.preload_agent import GenerousAgent, ScriptedAgent

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients", "tests.native.preload_stub"]
MIB = 1 << 20
TOTAL = 512 * MIB


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[GenerousAgent]:
    agent = GenerousAgent(socket_path, gpus[:1], total=TOTAL)
    yield agent
    agent.stop()


def account(agent: GenerousAgent) -> tuple[int, ...]:
    """What the last MEMORY frame said, once it is no longer changing."""
    time.sleep(0.1)
    return next((f.fields[:2] for _, f in reversed(agent.frames) if f.kind is Kind.MEMORY), (0, 0))


def nothing_taken(agent: GenerousAgent) -> bool:
    """Whether all memory is the driver's again within 4 s: a second of quiet, and the giving back."""
    deadline = time.monotonic() + 4
    while account(agent) != (0, 0) and time.monotonic() < deadline:
        pass
    return account(agent) == (0, 0)


def test_device_memory_is_converted_and_says_it_is_not(start: Start, agent: GenerousAgent) -> None:
    client = start("""
        d = Driver()
        at = d.alloc(10 * MIB)
        d.write(at, b"abcd")
        device = d.attribute(9, at)
        say([d.attribute(IS_MANAGED, at), d.attribute(MEMORY_TYPE, at + 5), device, d.attribute(RANGE_SIZE, at)])
        value = c.c_uint64()
        say(d.result("cuPointerGetAttribute", c.byref(value), c.c_int(4), c.c_uint64(at)))
        kinds = (c.c_int * 3)(IS_MANAGED, MEMORY_TYPE, 4)
        out = [c.c_uint64(9), c.c_uint64(9), c.c_uint64(9)]
        places = (c.c_void_p * 3)(*(c.addressof(o) for o in out))
        d("cuPointerGetAttributes", c.c_uint(3), kinds, places, c.c_uint64(at))
        say([out[0].value & 0xFF, out[1].value & 0xFFFFFFFF, out[2].value])
        base, size = c.c_uint64(), c.c_size_t()
        d("cuMemGetAddressRange_v2", c.byref(base), c.byref(size), c.c_uint64(at + 77))
        say([base.value == at, size.value])
        hear()
        d.free(at)
        say("freed")
        hear()
    """)
    assert client.hear() == [0, 2, 0, 10 * MIB]
    assert client.hear() == 1, "device memory has no host pointer"
    assert client.hear() == [0, 2, 0]
    assert client.hear() == [True, 10 * MIB]
    assert account(agent) == (10 * MIB, 0)
    client.say()
    client.hear()
    assert account(agent) == (0, 0)


def test_managed_memory_of_the_programs_own_stays_managed(start: Start, agent: GenerousAgent) -> None:
    client = start("""
        d = Driver()
        at = c.c_uint64()
        d("cuMemAllocManaged", c.byref(at), c.c_size_t(2 * 512 * MIB), c.c_uint(1))
        say(d.attribute(IS_MANAGED, at.value))
        hear()
    """)
    assert client.hear() == 1, "and it may be larger than the GPU, by the driver's own rules"
    assert account(agent) == (1024 * MIB, 0)


def test_a_share_looks_like_a_gpu_of_its_own(start: Start, agent: GenerousAgent) -> None:
    client = start("""
        import pynvml
        d = Driver()
        say([d.memory(), d.total()])
        at = d.alloc(100 * MIB)
        say(d.memory())
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        m = pynvml.nvmlDeviceGetMemoryInfo(handle)
        say([m.total, m.free, m.used])
        m = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        say([m.total, m.free, m.used])
        m = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(1))
        say(m.total)
        out = c.c_uint64(5)
        say([d.result("cuMemAlloc_v2", c.byref(out), c.c_size_t(413 * MIB)), out.value])
        say([d.result("cuMemAllocAsync", c.byref(out), c.c_size_t(413 * MIB), None), out.value])
        rest = d.alloc(412 * MIB)
        say(d.memory())
        d.free(at)
        d.free(rest)
        say(d.memory())
    """)
    assert client.hear() == [[TOTAL, TOTAL], TOTAL]
    left = TOTAL - 100 * MIB
    assert client.hear() == [left, TOTAL]
    assert client.hear() == [TOTAL, left, 100 * MIB]
    assert client.hear() == [TOTAL, left, 100 * MIB]
    assert client.hear() == 1024 * MIB, "a GPU that is not the session's"
    assert client.hear() == [2, 5], "out of memory, and nothing written"
    assert client.hear() == [2, 5]
    assert client.hear() == [0, TOTAL]
    assert client.hear() == [TOTAL, TOTAL]
    client.end()


@pytest.mark.parametrize("how", ["oversubscribe off", "GPUSHARE_MANAGED=0", "another GPU"])
def test_plain_memory_is_counted(start: Start, socket_path: Path, gpus: list[bytes], how: str) -> None:
    agent = GenerousAgent(socket_path, gpus, total=TOTAL, oversubscribed=how != "oversubscribe off")
    if how == "another GPU":
        agent.gpus = gpus[1:]
    client = start(
        """
        d = Driver()
        at = d.alloc(10 * MIB)
        say(d.attribute(IS_MANAGED, at))
        say(d.memory()[1])
        hear()
        """,
        GPUSHARE_MANAGED="0" if how == "GPUSHARE_MANAGED=0" else "1",
    )
    assert client.hear() == 0
    assert client.hear() == (1024 * MIB if how == "another GPU" else TOTAL)
    assert account(agent) == (0, 10 * MIB)
    agent.stop()


def test_pitched_memory(start: Start, agent: GenerousAgent) -> None:
    client = start("""
        d = Driver()
        at, pitch = c.c_uint64(), c.c_size_t()
        d("cuMemAllocPitch_v2", c.byref(at), c.byref(pitch), c.c_size_t(1000), c.c_size_t(30), c.c_uint(4))
        say([pitch.value, pitch.value % 512, d.attribute(IS_MANAGED, at.value), d.attribute(RANGE_SIZE, at.value)])
        wrong = (c.byref(at), c.byref(pitch), c.c_size_t(1000), c.c_size_t(30), c.c_uint(3))
        say(d.result("cuMemAllocPitch_v2", *wrong) != 0)
        say([d.result("cuMemAlloc_v2", *a) != 0 for a in ((None, c.c_size_t(8)), (c.byref(at), c.c_size_t(0)))])
        hear()
    """)
    assert client.hear() == [1024, 0, 0, 1024 * 30]
    assert client.hear() is True, "the driver's own opinion of an element of 3 bytes"
    assert client.hear() == [True, True]
    assert account(agent) == (1024 * 30, 0)


def test_stream_ordered_memory_keeps_the_streams_order(start: Start, agent: GenerousAgent) -> None:
    """A block freed in a stream is not given to another stream while the first one's work still uses it."""
    client = start("""
        d = Driver()
        n = 1 << 18
        fill, add = d.kernel("fill_u32"), d.kernel("add_u32")
        first, second = d.stream(), d.stream()
        keep = d.alloc(4 * n)
        at = d.alloc_async(4 * n, first)
        d.spin(0.15, first)
        d.fill(at, n, 5, first)
        d("cuMemcpyDtoDAsync_v2", c.c_uint64(keep), c.c_uint64(at), c.c_size_t(4 * n), first)
        d.free_async(at, first)
        say(d.memory()[0])                      # freed, as far as the program is concerned
        other = d.alloc_async(4 * n, second)    # must not be the block that `first` still uses
        d.fill(other, n, 6, second)
        same = d.alloc_async(4 * n, first)      # may be: the stream keeps the order
        d.fill(same, n, 7, first)
        d.synchronize()
        say([other != at, same == at])
        say([d.read(keep, 4)[0], d.read(other, 4)[0], d.read(same, 4)[0]])
        say([d.attribute(IS_MANAGED, other), d.attribute(RANGE_SIZE, other)])
        d.free(other)
        d.free_async(same, None)
        d.free(keep)
        say(d.memory()[0])
        hear()
    """)
    assert client.hear() == TOTAL - MIB
    assert client.hear() == [True, True]
    assert client.hear() == [5, 6, 7]
    assert client.hear() == [0, 1 << 20]
    assert client.hear() == TOTAL
    assert nothing_taken(agent)


TRUTH = """
import pynvml
pynvml.nvmlInit()
def resident():
    "MiB that this process has on the GPU, as the driver says."
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(process.usedGpuMemory for process in running if process.pid == os.getpid()) // MIB
def in_host():
    "MiB of host memory, where the simulated driver keeps all contents."
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) // 1024
def until(true, seconds=4):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()
def cell(size, stream=None, value=1):
    at = d.alloc_async(size, stream)
    d.fill(at, size // 4, value, stream)
    d.free_async(at, stream)
"""


def test_freed_blocks_go_back_to_the_driver_when_the_gpu_has_been_quiet(start: Start, agent: GenerousAgent) -> None:
    """Five cells of sizes that do not serve each other: all of it is the driver's again a second later."""
    client = start(
        TRUTH
        + """
d = Driver()
before = in_host()
for size in (20, 30, 40, 60, 80):
    cell(size * MIB)
    d.synchronize()
say([resident() <= 230, d.memory()[0] // MIB])
say([until(lambda: resident() == 0), until(lambda: in_host() < before + 30)])
at = d.alloc_async(10 * MIB)
d.fill(at, 100, 7)
d.synchronize()
say(d.read(at, 1)[0])
d.free_async(at)
hear()
"""
    )
    assert client.hear() == [True, TOTAL // MIB], "to the program they are free at once"
    assert client.hear() == [True, True]
    assert client.hear() == 7
    assert nothing_taken(agent)


def test_freed_blocks_stay_for_the_next_step_over_a_short_pause(start: Start, agent: GenerousAgent) -> None:
    client = start(
        TRUTH
        + """
d = Driver()
stream = d.stream()
addresses = set()
for step in range(4):
    for size in (10, 30, 20):
        at = d.alloc_async(size * MIB - 512 * step, stream)
        d.fill(at, 1024, 1, stream)
        addresses.add(at)
        d.free_async(at, stream)
    d.synchronize()
    time.sleep(0.1)
say(len(addresses))
hear()
"""
    )
    assert client.hear() == 3
    assert account(agent)[0] >= 60 * MIB, "what is cached takes memory: the agent is told"


@pytest.mark.slow
def test_the_cache_is_bounded_by_what_was_in_use_at_once(start: Start, agent: GenerousAgent) -> None:
    """Within one burst, sizes that never fit each other."""
    client = start(
        TRUTH
        + """
d = Driver()
stream = d.stream()
most = 0
for i in range(40):
    cell((20 + 7 * (i % 13)) * MIB + i * 4 * MIB, stream)
    most = max(most, resident())
say(most)
d.synchronize()
"""
    )
    largest = 20 + 7 * 12 + 39 * 4
    assert client.hear() <= 2 * largest + 10, "MiB"
    client.end()


def test_allocations_get_what_is_cached_when_memory_is_short(start: Start, agent: GenerousAgent) -> None:
    """By fit, or given back to the driver first: of any kind, within the limit, while the stream is still busy."""
    client = start(
        TRUTH
        + """
d = Driver()
stream = d.stream()
for i in range(20):
    at = d.alloc_async(300 * MIB, stream)
    d.fill(at, 1024, i, stream)
    d.free_async(at, stream)
d.spin(0.05, stream)
say([d.memory()[0], resident()])
at = d.alloc(400 * MIB)
d.fill(at, 1024, 9)
d.synchronize()
say([d.read(at, 1)[0], resident() <= 402])
d.free(at)
d.free_async(d.alloc_async(300 * MIB, stream), stream)
at = d.alloc_async(500 * MIB, stream)
d.fill(at, 1024, 5, stream)
d.synchronize()
say(d.read(at, 1)[0])
"""
    )
    free, resident = client.hear()
    assert free == TOTAL
    assert resident <= 302
    assert client.hear() == [9, True]
    assert client.hear() == 5
    client.end()


def test_a_block_serves_another_stream_only_after_its_own_has_passed(start: Start, agent: GenerousAgent) -> None:
    client = start(
        TRUTH
        + """
d = Driver()
first, second, third = d.stream(), d.stream(), d.stream()
at = d.alloc_async(8 * MIB, first)
d.fill(at, 1024, 1, first)
d.spin(0.2, first)
d.free_async(at, first)
other = d.alloc_async(8 * MIB, second)
d("cuStreamSynchronize", first)
again = d.alloc_async(7 * MIB, third)
d.free_async(again, third)
d("cuStreamDestroy_v2", third)
time.sleep(0.05)
last = d.alloc_async(8 * MIB, second)
small = d.alloc_async(5 * MIB, second)
say([other != at, again == at, last == at, small != at])
hear()
"""
    )
    assert client.hear() == [True, True, True, True], "and no block serves an allocation that would waste most of it"


def test_a_block_that_is_freed_twice_is_refused_as_by_the_driver(start: Start, agent: GenerousAgent) -> None:
    """And stays one block: two allocations never get the same memory."""
    client = start("""
        d = Driver()
        at = d.alloc_async(4 * MIB)
        d.free_async(at)
        say([d.result("cuMemFree_v2", c.c_uint64(at)), d.result("cuMemFreeAsync", c.c_uint64(at), None)])
        say(d.alloc_async(4 * MIB) != d.alloc_async(4 * MIB))
    """)
    assert client.hear() == [1, 1]
    assert client.hear() is True
    client.end()


def test_a_cached_block_of_another_context_goes_back_too(start: Start, agent: GenerousAgent) -> None:
    """The thread's own current context is as it was."""
    client = start(
        TRUTH
        + """
d = Driver()
other, now = c.c_void_p(), c.c_void_p()
d("cuCtxCreate_v2", c.byref(other), c.c_uint(0), c.c_int(0))
d.load()
cell(50 * MIB)
d.synchronize()
d("cuCtxSetCurrent", d.context)
del d.module
cell(40 * MIB)
d.synchronize()
say(until(lambda: resident() == 0))
d("cuCtxGetCurrent", c.byref(now))
say(now.value == d.context.value)
hear()
"""
    )
    assert client.hear() is True
    assert client.hear() is True


def test_allocations_while_capturing_are_the_drivers(start: Start, agent: GenerousAgent) -> None:
    """In a capturing stream the program gets what it gets without the library: a node, or the driver's refusal."""
    code = """
        d = Driver()
        stream = d.stream()
        d("cuStreamBeginCapture_v2", stream, c.c_int(0))
        at = c.c_uint64()
        graph = c.c_void_p()
        say([d.result("cuMemAllocAsync", c.byref(at), c.c_size_t(4096), stream),
             d.result("cuMemFreeAsync", at, stream) if at.value else None,
             d.result("cuStreamEndCapture", stream, c.byref(graph))])
    """
    bare = start(code, LD_PRELOAD=None)
    shared = start(code)
    assert shared.hear() == bare.hear()
    shared.end()


VMM = """
d = Driver(enter=False)
class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location),
                ("win", c.c_void_p), ("flags", c.c_uint64)]
def create(size, kind=1):
    prop, handle = Prop(1, 0, Location(kind, 0), None, 0), c.c_uint64()
    d("cuMemCreate", c.byref(handle), c.c_size_t(size), c.byref(prop), c.c_uint64(0))
    return handle
def map_(at, size, handle):
    d("cuMemMap", c.c_uint64(at), c.c_size_t(size), c.c_size_t(0), handle, c.c_uint64(0))
def unmap(at, size):
    d("cuMemUnmap", c.c_uint64(at), c.c_size_t(size))
def taken():
    return d.memory()[1] - d.memory()[0]
"""


@pytest.fixture
def stub(stub_folder: Path, socket_path: Path) -> Iterator[dict[str, str]]:
    """An agent for the stub's only GPU, and the environment for programs on it."""
    agent = GenerousAgent(socket_path, [bytes([7]) * 16], total=TOTAL)
    yield {"LD_LIBRARY_PATH": str(stub_folder), "STUB_CONTEXT": "1"}
    agent.stop()


def test_physical_memory_counts_until_released_and_unmapped(start: Start, stub: dict[str, str]) -> None:
    """In either order, with several mappings, and with a handle that was retained again."""
    client = start(
        VMM
        + """
steps = []
first = create(4 * MIB)
host = create(64 * MIB, kind=2)
map_(1 << 40, 2 * MIB, first)
map_((1 << 40) + 2 * MIB, 2 * MIB, first)
d("cuMemRelease", first)
steps.append(taken())
unmap(1 << 40, 2 * MIB)
steps.append(taken())
again = c.c_uint64()
d("cuMemRetainAllocationHandle", c.byref(again), c.c_void_p((1 << 40) + 3 * MIB))
unmap(1 << 40, 4 * MIB)
steps.append(taken())
d("cuMemRelease", again)
steps.append(taken())
try:
    create(1 << 40)
except CudaError as error:
    steps.append(error.code)
say(steps)
""",
        **stub,
    )
    assert client.hear() == [4 * MIB, 4 * MIB, 4 * MIB, 0, 2]
    client.end()


def test_handle_that_was_retained_under_another_value_and_an_unmap_that_fails(
    start: Start, stub: dict[str, str]
) -> None:
    """Memory counts until both values of its handle are released, and stays counted while it is mapped."""
    client = start(
        VMM
        + """
base, steps = 1 << 40, []
first = create(4 * MIB)
map_(base, 4 * MIB, first)
again = c.c_uint64()
d("cuMemRetainAllocationHandle", c.byref(again), c.c_void_p(base + MIB))
answer = c.c_int.in_dll(d.library, "stub_unmap_answers")
answer.value = 1
steps.append(d.result("cuMemUnmap", c.c_uint64(base), c.c_size_t(4 * MIB)))
answer.value = 0
d("cuMemRelease", again)
d("cuMemRelease", first)
steps.append(taken())
unmap(base, 4 * MIB)
steps.append(taken())
# one unmap of many mappings, and of none beside them
chunks = [create(MIB) for _ in range(8)]
for number, chunk in enumerate(chunks):
    map_(base + number * MIB, MIB, chunk)
    d("cuMemRelease", chunk)
unmap(base + 2 * MIB, 4 * MIB)
steps.append(taken())
unmap(base + 16 * MIB, 4 * MIB)
unmap(base, 8 * MIB)
steps.append(taken())
say([again.value != first.value, steps])
""",
        **stub,
    )
    assert client.hear() == [True, [1, 4 * MIB, 0, 4 * MIB, 0]]
    client.end()


CHUNKS = """
def chunks(number):
    began = time.process_time()
    found = []
    for i in range(number):
        found.append(create(64 << 10))
        map_((1 << 40) + (i << 16), 64 << 10, found[-1])
    middle = time.process_time()
    for i, handle in enumerate(found):
        unmap((1 << 40) + (i << 16), 64 << 10)
        d("cuMemRelease", handle)
    return (time.process_time() - middle) / number, (middle - began) / number
chunks(500)
# the least of several: a neighbour can take the caches
few = min(chunks(500)[0] for _ in range(5))
many = min(chunks(8000)[0] for _ in range(3))
say([few, many, taken()])
"""


def test_giving_back_memory_costs_the_same_with_many_chunks_as_with_few(start: Start, stub: dict[str, str]) -> None:
    """PyTorch's expandable segments hold a chunk for each 2 MiB. Oldest first, which a list has at its end."""
    client = start("import time\n" + VMM + CHUNKS, **stub)
    few, many, left = client.hear()
    assert left == 0
    assert many < 2 * few, f"{1e6 * many:.1f} us a chunk of 8,000, {1e6 * few:.1f} us of 500"
    client.end()


def test_memory_of_a_green_context_is_the_primary_contexts(start: Start, stub: dict[str, str]) -> None:
    """The stub ends the program where a context is used that was destroyed."""
    client = start(
        VMM
        + """
active = c.c_int.in_dll(d.library, "stub_primary_active")
steps = []
for held in (2, 1):  # by others too; by the green context alone
    active.value, green, popped = held, c.c_void_p(4096 * held), c.c_void_p()
    d("cuCtxPushCurrent_v2", green)
    at = d.alloc(3 * MIB)
    d("cuCtxPopCurrent_v2", c.byref(popped))
    d("cuGreenCtxDestroy", green)
    steps.append(taken())
    if held > 1:
        d.free(at)
        steps.append(taken())
say(steps)
hear()
""",
        **stub,
    )
    assert client.hear() == [3 * MIB, 0, 0]
    client.say()
    client.end()


MANAGED_POOLS = """
d = Driver()
class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Props(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location), ("win", c.c_void_p),
                ("size", c.c_size_t), ("usage", c.c_ushort), ("reserved", c.c_ubyte * 54)]
device = Location(1, 0)
own, default, current, plain = (c.c_void_p() for _ in range(4))
d("cuMemPoolCreate", c.byref(own), c.byref(Props(2, 0, device)))
d("cuMemPoolCreate", c.byref(plain), c.byref(Props(1, 0, device)))
d("cuMemGetDefaultMemPool", c.byref(default), c.byref(device), c.c_int(2))
d("cuMemGetMemPool", c.byref(current), c.byref(device), c.c_int(2))
said = []
for pool in (own, default, current, plain):
    at, before = c.c_uint64(), d.memory()[0]
    d("cuMemAllocFromPoolAsync", c.byref(at), c.c_size_t(8 * MIB), pool, None)
    said.append([d.attribute(IS_MANAGED, at.value), d.attribute(MEMORY_TYPE, at.value)])
    if counted:
        said[-1].append(before - d.memory()[0])
    d("cuMemFreeAsync", at, None)
d.synchronize()
say(said)
"""


def test_pools_of_managed_memory_answer_as_without_the_library(start: Start, agent: GenerousAgent) -> None:
    """CUDA 13 has them: what the program asked for as managed memory is that, and is counted."""
    bare = start("counted = False\n" + MANAGED_POOLS, LD_PRELOAD=None)
    shared = start("counted = True\n" + MANAGED_POOLS)
    without, under = bare.hear(), shared.hear()
    assert [one[0] for one in without] == [1, 1, 1, 0]
    assert [one[:2] for one in under] == without
    assert [one[2] for one in under] == [8 * MIB] * 4
    bare.end()
    shared.end()


ARRAY = """
class Array(c.Structure):
    _fields_ = [("w", c.c_size_t), ("h", c.c_size_t), ("format", c.c_int), ("channels", c.c_uint)]
"""


def test_arrays_and_graph_memory_are_counted(start: Start, stub: dict[str, str]) -> None:
    client = start(
        VMM
        + ARRAY
        + """
class Array3D(c.Structure):
    _fields_ = [("w", c.c_size_t), ("h", c.c_size_t), ("d", c.c_size_t),
                ("format", c.c_int), ("channels", c.c_uint), ("flags", c.c_uint)]
array, cube, mipmap = c.c_void_p(), c.c_void_p(), c.c_void_p()
d("cuArrayCreate_v2", c.byref(array), c.byref(Array(1024, 1024, 0x20, 4)))
steps = [taken()]
d("cuArray3DCreate_v2", c.byref(cube), c.byref(Array3D(64, 64, 64, 0x10, 1, 0)))
steps.append(taken())
d("cuMipmappedArrayCreate", c.byref(mipmap), c.byref(Array3D(64, 64, 0, 0x01, 1, 0)), c.c_uint(2))
steps.append(taken())
for destroy, handle in (("cuArrayDestroy", array), ("cuArrayDestroy", cube), ("cuMipmappedArrayDestroy", mipmap)):
    d(destroy, handle)
steps.append(taken())
d("cuGraphAddMemAllocNode", None, None, None, c.c_size_t(0), None)
steps.append(taken())
say(steps)
""",
        **stub,
    )
    plane, cube, mipmap = 16 * MIB, 64**3 * 2, 64 * 64 + 32 * 32
    assert client.hear() == [plane, plane + cube, plane + cube + mipmap, 0, 5 * MIB]
    client.end()


def test_an_array_of_a_normalized_format_counts_one_or_two_bytes_for_each_channel(
    start: Start, stub: dict[str, str]
) -> None:
    """CU_AD_FORMAT_UNORM_INT8X1 to SNORM_INT16X4: 0xc0 to 0xcb."""
    client = start(
        VMM
        + ARRAY
        + """
array, steps = c.c_void_p(), []
for format, channels in zip(range(0xc0, 0xcc), (1, 2, 4) * 4):
    d("cuArrayCreate_v2", c.byref(array), c.byref(Array(1024, 1024, format, channels)))
    steps.append(taken())
    d("cuArrayDestroy", array)
say(steps)
""",
        **stub,
    )
    assert client.hear() == [channels * MIB for channels in (1, 2, 4, 2, 4, 8) * 2]
    client.end()


def test_where_managed_memory_fails_the_plain_call_serves(start: Start, stub: dict[str, str]) -> None:
    client = start(
        VMM
        + """
at = d.alloc(3 * MIB)
say([taken(), d.result("cuIpcGetMemHandle", c.create_string_buffer(64), c.c_uint64(at))])
d.free(at)
say(taken())
""",
        **stub,
        STUB_NO_MANAGED="1",
    )
    assert client.hear() == [3 * MIB, 0], "plain memory: it can be shared between processes"
    assert client.hear() == 0
    client.end()


def test_ipc_of_converted_memory_is_refused_clearly_and_once(start: Start, stub: dict[str, str]) -> None:
    client = start(
        VMM
        + """
at = d.alloc(MIB)
say([d.result("cuIpcGetMemHandle", c.create_string_buffer(64), c.c_uint64(at)) for _ in range(2)])
""",
        **stub,
    )
    assert client.hear() == [1, 1]
    assert client.end().count("GPUSHARE_MANAGED=0") == 1


def test_switched_off_by_the_user_memory_stays_plain(start: Start, stub: dict[str, str]) -> None:
    client = start(
        VMM + "say(d.result('cuIpcGetMemHandle', c.create_string_buffer(64), c.c_uint64(d.alloc(MIB))))",
        **stub,
        GPUSHARE_MANAGED="0",
    )
    assert client.hear() == 0
    client.end()


def test_pools_serve_managed_memory_too(start: Start, agent: GenerousAgent) -> None:
    client = start("""
        d = Driver()
        pool = c.c_void_p()
        d("cuDeviceGetDefaultMemPool", c.byref(pool), c.c_int(0))
        at = c.c_uint64()
        d("cuMemAllocFromPoolAsync", c.byref(at), c.c_size_t(3 * MIB), pool, None)
        d.write(at.value, b"pool")
        say([d.read(at.value, 4).decode(), d.memory()[0]])
        d.free_async(at.value)
        say(d.memory()[0])
        hear()
    """)
    assert client.hear() == ["pool", TOTAL - 4 * MIB], "blocks have whole 2 MiB, and count so"
    assert client.hear() == TOTAL


MOST_USED = """
import pynvml
pynvml.nvmlInit()
handle, most, ended = pynvml.nvmlDeviceGetHandleByIndex(0), 0, threading.Event()
threading.Thread(target=lambda: (hear(), ended.set())).start()
say("watching")
while not ended.is_set():
    most = max(most, pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    time.sleep(0.002)
say(most)
"""
"""Says the most memory that the driver showed on the first GPU; without the library."""


@pytest.mark.parametrize("call", ["alloc_async", "alloc"])
def test_driver_never_holds_more_than_the_limit_while_a_free_waits_for_its_stream(
    start: Start, socket_path: Path, gpus: list[bytes], call: str
) -> None:
    """300 MiB are freed behind work of half a second, and 252 more would be 552 of 512 until then."""
    agent = GenerousAgent(socket_path, gpus[:1], total=TOTAL, oversubscribed=False)
    watcher = start(MOST_USED, LD_PRELOAD=None)
    watcher.hear()
    client = start(
        f"""
        d = Driver()
        stream = d.stream()
        first = d.alloc_async(300 * MIB, stream)
        d.spin(0.5, stream)
        d.free_async(first, stream)
        says_used = d.memory()
        began = time.monotonic()
        second = d.{call}(252 * MIB)
        say([TOTAL - says_used[0], time.monotonic() - began])
        d.write(second, b"abcd")
        say(d.read(second, 4).decode())
        hear()
    """.replace("TOTAL", str(TOTAL))
    )
    used, waited = client.hear()
    assert used == 300 * MIB, "the driver holds it still"
    assert waited > 0.3
    assert client.hear() == "abcd"
    watcher.say()
    assert watcher.hear() <= TOTAL
    assert account(agent) == (0, 252 * MIB)
    agent.stop()


def test_pending_free_is_waited_for_at_the_limit_only(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    agent = GenerousAgent(socket_path, gpus[:1], total=TOTAL, oversubscribed=False)
    client = start("""
        d = Driver()
        stream = d.stream()
        first = d.alloc_async(200 * MIB, stream)
        d.spin(0.5, stream)
        d.free_async(first, stream)
        began = time.monotonic()
        second = d.alloc_async(200 * MIB, stream)
        say(time.monotonic() - began)
        d.synchronize()
        hear()
    """)
    assert client.hear() < 0.3
    # the end of the burst is when the driver has taken the first back
    assert account(agent) in ((0, 400 * MIB), (0, 200 * MIB))
    time.sleep(0.6)
    assert account(agent) == (0, 200 * MIB)
    agent.stop()


def test_plain_stream_ordered_memory_beyond_the_limit_is_refused(
    start: Start, socket_path: Path, gpus: list[bytes]
) -> None:
    agent = GenerousAgent(socket_path, gpus[:1], total=TOTAL, oversubscribed=False)
    client = start("""
        d = Driver()
        first, out = d.alloc_async(300 * MIB), c.c_uint64(5)
        say([d.result("cuMemAllocAsync", c.byref(out), c.c_size_t(213 * MIB), None), out.value])
        second = d.alloc_async(212 * MIB)
        say(d.memory()[0])
        d.free_async(first)
        d.synchronize()
        say(d.memory()[0])
    """)
    assert client.hear() == [2, 5]
    assert client.hear() == 0
    assert client.hear() == 300 * MIB
    client.end()
    agent.stop()


def test_what_a_pool_has_for_reuse_serves_the_next_allocation(start: Start, stub: dict[str, str]) -> None:
    """A program that sets a release threshold keeps its pool: 400 of 512 MiB are reserved, and unused."""
    client = start(
        VMM
        + """
reserved, at = c.c_uint64.in_dll(d.library, "stub_pool_reserved"), c.c_uint64()
def alloc(mib):
    return d.result("cuMemAllocAsync", c.byref(at), c.c_size_t(mib * MIB), None)
say([alloc(1), taken()])
reserved.value = 400 * MIB
say([taken(), alloc(300), taken(), alloc(99), taken()])
c.c_uint64.in_dll(d.library, "stub_pool_used").value = 400 * MIB
say([alloc(113), alloc(112), taken()])
""",
        **stub,
        GPUSHARE_MANAGED="0",
    )
    assert client.hear() == [0, 1 * MIB]
    assert client.hear() == [400 * MIB, 0, 400 * MIB, 0, 400 * MIB]
    # 401 MiB are allocated by the library's count, and of 112 more the driver has nothing: 513 is one too many
    assert client.hear() == [2, 0, 512 * MIB]
    client.end()


def test_a_context_takes_its_memory_with_it(start: Start, agent: GenerousAgent) -> None:
    client = start("""
        d = Driver()
        d.alloc(7 * MIB)
        d.spin(0.001)
        d("cuDevicePrimaryCtxRelease_v2", c.c_int(0))
        d.enter()
        say(d.memory()[0])
        at = d.alloc(MIB)
        del d.module
        d.fill(at, 10, 3)
        d.synchronize()
        say(d.read(at, 1)[0])
        other = c.c_void_p()
        d("cuCtxCreate_v2", c.byref(other), c.c_uint(0), c.c_int(0))
        d.load()
        more = d.alloc(5 * MIB)
        d.fill(more, 10, 4)
        d.synchronize()
        say([d.read(more, 1)[0], d.memory()[0]])
        d("cuCtxDestroy_v2", other)
        d("cuCtxSetCurrent", d.context)
        say(d.memory()[0])
        hear()
    """)
    assert client.hear() == TOTAL
    assert client.hear() == 3
    assert client.hear() == [4, TOTAL - 6 * MIB]
    assert client.hear() == TOTAL - MIB


def test_oversubscribed_sessions_keep_their_contents(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    """Two processes, 2 x 700 MiB on a GPU of 1 GiB, taking turns three times by bulk moves."""
    agent = ScriptedAgent(socket_path, gpus, total=1024 * MIB)
    code = """
        d = Driver()
        n, seed = 700 * MIB // 4, hear()
        at, out = d.alloc(4 * n), d.alloc(8)
        checksum = d.kernel("checksum_u32")
        d.fill(at, n, seed)
        for turn in range(3):
            d.launch(d.kernel("add_u32"), c.c_uint64(at), c.c_uint64(n), c.c_uint32(1))
            d.synchronize()
            say("turn")
            hear()
        d.write(out, bytes(8))
        d.launch(checksum, c.c_uint64(at), c.c_uint64(n), c.c_uint64(out))
        say(int.from_bytes(d.read(out, 8), "little"))
        hear()
    """
    clients = [start(code), start(code)]
    for seed, client in enumerate(clients, 100):
        client.say(seed)
    peers = [agent.peer(), agent.peer()]
    by_pid = {peer.hello.fields[1]: peer for peer in peers if peer.hello}
    ordered = [by_pid[client.process.pid] for client in clients]
    lease = 0
    calm = (Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.PAGED_IN, Kind.PAGED_OUT, Kind.RELEASE)
    for turn in range(4):
        for peer, client in zip(ordered, clients, strict=True):
            peer.expect(Kind.REQUEST, skip=calm)
            lease += 1
            peer.grant(gpus[0], lease, prefetch=1024 * MIB)
            said = client.hear()
            peer.revoke(gpus[0], lease, page_out=1024 * MIB)
            peer.expect(Kind.PAGED_OUT, skip=calm)
            if turn < 3:
                assert said == "turn"
                client.say()
            else:
                n, value = 700 * MIB // 4, 100 + clients.index(client) + 3
                assert said == value * (n * n) % (1 << 64), "sum of value * (2i + 1) over n words"
    agent.stop()
