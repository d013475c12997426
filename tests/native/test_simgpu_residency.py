"""Where pages are: oversubscription, eviction, prefetch, and how several processes share a simulated GPU."""

from __future__ import annotations

import pytest

from tests.native.conftest import Program, Run, Start

MIB = 1 << 20
GIB = 1 << 30

HOLDER = """
machine = Machine()
address = machine.managed({size})
machine.launch("touch", address, {size}, 1000)
machine.synchronize()
say("ready")
while True:
    listen()
    before = stats()
    machine.launch("touch", address, {size}, 1000)
    machine.synchronize()
    after = stats()
    say({{name: after[name] - before[name] for name in ("faulted_in", "fault_evicted")}})
"""


def test_data_survives_oversubscription(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        total, words = machine.managed(8), 16 * 2**20 // 4
        blocks = [machine.managed(4 * words) for _ in range(6)]        # 96 MiB on 64 MiB
        rng = np.random.default_rng(1)
        expected = []
        for number, block in enumerate(blocks):
            data = rng.integers(0, 2**32, words, dtype=np.uint32)
            host(block, words)[:] = data
            expected.append(data + np.uint32(2 * number))
        for _ in range(2):
            for number, block in enumerate(blocks):
                machine.launch("add_u32", block, words, number)
        machine.synchronize()
        right = [bool((machine.read(block, words) == data).all()) for block, data in zip(blocks, expected)]
        found = stats()
        say([right, found["fault_evicted"], found["faulted_in"], found["memory_managed"]])
        """,
        SIMGPU_MEMORY="64MiB",
    )
    right, evicted, faulted, resident = heard
    assert right == [True] * 6
    # each pass, the reading one too, evicts what the one before brought in; all 96 MiB came from the host at first
    assert faulted >= 3 * 96 * MIB - 64 * MIB
    assert evicted >= faulted - 64 * MIB - 2 * MIB
    assert resident <= 64 * MIB


def test_first_touch_moves_nothing(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        one, two = machine.managed(64 << 20), machine.managed(64 << 20)
        host(two, 1 << 20)[:] = 1                                     # the host made the first 4 MiB of this one
        machine.launch("touch", one, 64 << 20, 0)
        machine.launch("touch", two, 64 << 20, 0)
        machine.synchronize()
        say(stats())
        """
    )
    assert heard["faulted_in"] == 4 * MIB
    assert heard["first_touched"] == 124 * MIB
    assert heard["fault_evicted"] == 0


def test_plain_memory_pushes_managed_pages_out(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        managed = machine.managed(768 << 20)
        host(managed, 1024)[:] = 77
        machine.launch("touch", managed, 768 << 20, 0)
        machine.synchronize()
        plain = machine.plain(640 << 20)
        found = stats()
        refused = code(cu.cuMemAlloc(512 << 20))
        machine.launch("add_u32", managed, 1024, 1)
        say([found["plain_evicted"], found["memory_managed"], refused, int(machine.read(managed, 1)[0])])
        """
    )
    assert heard == [384 * MIB, 384 * MIB, "CUDA_ERROR_OUT_OF_MEMORY", 78]


def test_pages_that_find_no_room_are_read_in_place(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        machine.plain(1 << 30)
        managed = machine.managed(8 << 20)
        machine.launch("fill_u32", managed, 2 << 20, 3)
        machine.synchronize()
        found = stats()
        say([int(host(managed, 2 << 20).sum()), found["remote"], found["memory_managed"]])
        """
    )
    assert heard == [3 * (2 << 20), 8 * MIB, 0]


def test_prefetch_is_bulk_and_faults_are_slow(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        size = 192 << 20
        address = machine.managed(size)
        machine.launch("touch", address, size, 0)
        def timed(work):
            start, end = machine.event(), machine.event()
            check(cu.cuEventRecord(start, 0))
            work()
            check(cu.cuEventRecord(end, 0))
            check(cu.cuEventSynchronize(end))
            return check(cu.cuEventElapsedTime(start, end))
        out = timed(lambda: machine.prefetch(address, size, place("host")))
        away = stats()["memory_managed"]
        into = timed(lambda: machine.prefetch(address, size, place("device")))
        none = timed(lambda: machine.prefetch(address, size, place("device")))
        machine.prefetch(address, size, place("host"))
        faults = timed(lambda: machine.launch("touch", address, size, 0))
        found = stats()
        say({"out": out, "into": into, "none": none, "faults": faults, "away": away, "stats": found})
        """,
        SIMGPU_H2D="4e9",
        SIMGPU_D2H="2e9",
        SIMGPU_FAULT="1e9",
    )
    bulk = 192 * MIB
    assert heard["away"] == 0
    assert heard["stats"]["prefetched_in"] == bulk
    assert heard["stats"]["prefetched_out"] == 2 * bulk
    assert heard["stats"]["faulted_in"] == bulk
    # never faster than the settings; slower only by what a loaded machine adds
    assert 1e3 * bulk / 2e9 - 1 <= heard["out"] < 1e3 * bulk / 2e9 + 150
    assert 1e3 * bulk / 4e9 - 1 <= heard["into"] < 1e3 * bulk / 4e9 + 150
    assert 1e3 * bulk / 1e9 - 1 <= heard["faults"] < 1e3 * bulk / 1e9 + 300
    assert heard["none"] < heard["into"]


def test_eviction_overlaps_with_prefetch(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        size = 896 << 20
        one, two = machine.managed(size), machine.managed(size)
        machine.launch("touch", two, size, 0)
        machine.prefetch(two, size, place("host"))
        machine.launch("touch", one, size, 0)
        machine.synchronize()
        start, end = machine.event(), machine.event()
        check(cu.cuEventRecord(start, 0))
        machine.prefetch(two, size, place("device"))
        check(cu.cuEventRecord(end, 0))
        machine.synchronize()
        say([check(cu.cuEventElapsedTime(start, end)), stats()["prefetch_evicted"]])
        """,
        SIMGPU_H2D="4e9",
        SIMGPU_D2H="4e9",
    )
    milliseconds, evicted = heard
    one_way = 1e3 * (896 * MIB) / 4e9
    assert evicted == 768 * MIB
    # one after the other it would be 1.86 times one way
    assert one_way - 1 <= milliseconds < 1.5 * one_way


def test_processes_evict_each_other(simulated: Start) -> None:
    """Alone a process keeps its pages; with another of the same size each brings all its pages back every time."""
    size = 640 * MIB
    first = simulated(HOLDER.format(size=size), SIMGPU_FAULT="20e9")
    assert first.hear() == "ready"
    first.say()
    assert first.hear() == {"faulted_in": 0, "fault_evicted": 0}
    second = simulated(HOLDER.format(size=size))
    assert second.hear() == "ready"
    for program in (first, second, first, second):
        program.say()
        moved = program.hear()
        assert moved["faulted_in"] >= 2 * size - GIB
        assert moved["fault_evicted"] == moved["faulted_in"]
    second.kill()
    first.say()
    first.hear()
    first.say()
    assert first.hear() == {"faulted_in": 0, "fault_evicted": 0}


def test_thrashing_takes_far_longer_than_taking_turns(simulated: Start) -> None:
    program = """
    machine = Machine()
    size = 768 << 20
    address = machine.managed(size)
    say("ready")
    listen()
    began = time.monotonic()
    for _ in range(4):
        machine.launch("touch", address, size, 20_000_000)
    machine.synchronize()
    say(time.monotonic() - began)
    """

    def ready() -> Program:
        started = simulated(program, SIMGPU_FAULT="6e9")
        assert started.hear() == "ready"
        return started

    alone = ready()
    alone.say()
    solo = alone.hear()
    alone.finish()
    both = [ready(), ready()]
    for one in both:
        one.say()
    together = max(one.hear() for one in both)
    assert together > 2 * 2 * solo


def test_two_processes_get_half_the_gpu_each(simulated: Start) -> None:
    program = """
    machine = Machine()
    say("ready")
    listen()
    start, end = machine.event(), machine.event()
    check(cu.cuEventRecord(start, 0))
    for _ in range({count}):
        machine.launch("spin", {ns})
    check(cu.cuEventRecord(end, 0))
    machine.synchronize()
    say(check(cu.cuEventElapsedTime(start, end)))
    """
    # one with a single long kernel, one with many short ones
    both = [simulated(program.format(count=1, ns=300_000_000)), simulated(program.format(count=300, ns=1_000_000))]
    for one in both:
        assert one.hear() == "ready"
    for one in both:
        one.say()
    times = [one.hear() for one in both]
    assert min(times) > 450
    assert max(times) < 1500


@pytest.mark.parametrize("moment", ["computing", "faulting", "prefetching", "copying"])
def test_a_killed_process_leaves_nothing(simulated: Start, moment: str) -> None:
    victim = simulated(
        """
        machine = Machine()
        size = 512 << 20
        plain, managed = machine.plain(256 << 20), machine.managed(size)
        machine.launch("touch", managed, size, 0)
        machine.synchronize()
        source = np.zeros(64 << 20, dtype=np.uint8)
        say("ready")
        def out_and_in(bring):
            machine.prefetch(managed, size, place("host"))
            bring()
        moments = {
            "computing": lambda: machine.launch("spin", 10_000_000_000),
            "faulting": lambda: out_and_in(lambda: machine.launch("touch", managed, size, 0)),
            "prefetching": lambda: out_and_in(lambda: machine.prefetch(managed, size, place("device"))),
            "copying": lambda: check(cu.cuMemcpyHtoD(plain, source.ctypes.data, source.nbytes)),
        }
        while True:
            moments[os.environ["MOMENT"]]()
        """,
        MOMENT=moment,
    )
    survivor = simulated(
        """
        machine = Machine()
        say("ready")
        listen()
        began = time.monotonic()
        machine.launch("spin", 1_000_000)
        address = machine.plain(1000 << 20)         # all that the victim held is free again
        machine.launch("fill_u32", address, 1024, 4)
        value = int(machine.read(address, 1)[0])
        say([value, time.monotonic() - began, check(cu.cuMemGetInfo())[0]])
        """
    )
    assert victim.hear() == survivor.hear() == "ready"
    victim.kill()
    survivor.say()
    value, seconds, free = survivor.hear()
    assert value == 4
    assert free == GIB - 1000 * MIB
    assert seconds < 5


def test_killed_again_and_again_the_state_stays_whole(simulated: Start, said: Run) -> None:
    program = """
    machine = Machine()
    address, size = machine.managed(700 << 20), 700 << 20
    say("ready")
    while True:
        machine.launch("touch", address, size, 100_000)
        machine.prefetch(address, 100 << 20, place("host"))
        machine.plain(4096)
    """
    for _ in range(4):
        pair = [simulated(program, SIMGPU_PAGE="64KiB", SIMGPU_FAULT="200e9") for _ in range(2)]
        for one in pair:
            assert one.hear() == "ready"
        for one in pair:
            one.kill()
    heard = said(
        """
        machine = Machine()
        address = machine.plain(1 << 30)
        machine.launch("fill_u32", address, 1024, 2)
        say([int(machine.read(address, 1)[0]), stats()["memory_managed"], stats()["memory_free"]])
        """
    )
    assert heard == [2, 0, 0]
