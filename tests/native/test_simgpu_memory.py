"""Memory on the simulated driver: every way to get it, copy it, set it, and ask about it."""

from __future__ import annotations

from tests.native.conftest import Run


def test_plain_memory_counts_and_ends(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        free = [check(cu.cuMemGetInfo())]
        big = machine.plain(768 << 20)
        free.append(check(cu.cuMemGetInfo()))
        refused = [code(cu.cuMemAlloc(512 << 20)), code(cu.cuMemAlloc(8 << 30)), code(cu.cuMemAlloc(0))]
        check(cu.cuMemFree(big))
        free.append(check(cu.cuMemGetInfo()))
        say([free, refused, code(cu.cuMemFree(big)), code(cu.cuMemFree(0))])
        """
    )
    free, refused, twice, null = heard
    total = 1 << 30
    assert free == [[total, total], [total - (768 << 20), total], [total, total]]
    assert refused == ["CUDA_ERROR_OUT_OF_MEMORY"] * 2 + ["CUDA_ERROR_INVALID_VALUE"]
    assert (twice, null) == ("CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS")


def test_small_allocations_share_a_page(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        addresses = [int(machine.plain(1000)) for _ in range(2000)]
        for number, address in enumerate(addresses):
            machine.launch("fill_u32", address, 250, number)
        right = all(int(machine.read(a, 250)[249]) == n for n, a in enumerate(addresses))
        used = check(cu.cuMemGetInfo())
        ranges = [int(v) for v in check(cu.cuMemGetAddressRange(addresses[5] + 3))]
        for address in addresses[::2] + addresses[1::2]:
            check(cu.cuMemFree(address))
        say([right, len(set(addresses)), all(a % 256 == 0 for a in addresses), used[1] - used[0],
             ranges == [addresses[5], 1000],
             check(cu.cuMemGetInfo())])
        """
    )
    right, distinct, aligned, used, ranges, free = heard
    assert (right, distinct, aligned, ranges) == (True, 2000, True, True)
    assert used == 2 << 20
    assert free == [1 << 30, 1 << 30]


def test_copies_of_every_shape(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        data = np.random.default_rng(3).integers(0, 256, (40, 64), dtype=np.uint8)
        pitched, pitch = check(cu.cuMemAllocPitch(64, 40, 4))
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = cu.CUmemorytype.CU_MEMORYTYPE_HOST, data.ctypes.data, 64
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, pitched, pitch
        copy.WidthInBytes, copy.Height = 64, 40
        check(cu.cuMemcpy2D(copy))
        rows = machine.read(pitched, pitch * 40, np.uint8).reshape(40, pitch)[:, :64]
        part = np.zeros((10, 16), dtype=np.uint8)
        back = cu.CUDA_MEMCPY2D()
        back.srcMemoryType, back.srcDevice, back.srcPitch = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, pitched, pitch
        back.srcXInBytes, back.srcY = 8, 5
        back.dstMemoryType, back.dstHost, back.dstPitch = cu.CUmemorytype.CU_MEMORYTYPE_HOST, part.ctypes.data, 16
        back.WidthInBytes, back.Height = 16, 10
        stream = machine.stream()
        check(cu.cuMemcpy2DAsync(back, stream))
        check(cu.cuStreamSynchronize(stream))
        one, two = machine.plain(4096), machine.managed(4096)
        check(cu.cuMemcpyHtoDAsync(one, data.ctypes.data, 2560, stream))
        check(cu.cuMemcpyDtoDAsync(two, one, 2560, stream))
        again = np.zeros(2560, dtype=np.uint8)
        check(cu.cuMemcpyDtoHAsync(again.ctypes.data, two, 2560, stream))
        check(cu.cuStreamSynchronize(stream))
        any_way = np.zeros(2560, dtype=np.uint8)
        check(cu.cuMemcpy(int(any_way.ctypes.data), one, 2560))
        say([bool((rows == data).all()), bool((part == data[5:15, 8:24]).all()), bool((again == data.ravel()).all()),
             bool((any_way == data.ravel()).all()), pitch, code(cu.cuMemcpyHtoD(one, data.ctypes.data, 1 << 30)),
             code(cu.cuMemcpyDtoH(again.ctypes.data, 4096, 16))])
        """
    )
    assert heard == [True] * 4 + [512] + ["CUDA_ERROR_INVALID_VALUE"] * 2


def test_batched_copies(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        stream = machine.stream()
        source, target = machine.plain(8192), machine.plain(8192)
        machine.launch("fill_u32", source, 1024, 1, stream=stream)
        machine.launch("fill_u32", int(source) + 4096, 1024, 2, stream=stream)
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        targets = [cu.CUdeviceptr(int(target) + at) for at in (4096, 0)]
        sources = [cu.CUdeviceptr(int(source) + at) for at in (0, 4096)]
        result = cu.cuMemcpyBatchAsync(targets, sources, [4096, 4096], 2, [attributes], [0], 1, stream)
        check(cu.cuStreamSynchronize(stream))
        say([code(result), [int(machine.read(int(target) + at, 1)[0]) for at in (0, 4096)]])
        """
    )
    assert heard == ["CUDA_SUCCESS", [2, 1]]


def test_sets_of_every_width(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        address = machine.plain(65536)
        check(cu.cuMemsetD8(address, 0xAB, 65536))
        check(cu.cuMemsetD16(int(address) + 16, 0x1234, 4))
        check(cu.cuMemsetD32Async(int(address) + 64, 0xDEADBEEF, 2, 0))
        check(cu.cuMemsetD2D8(int(address) + 1024, 256, 1, 3, 4))
        data = machine.read(address, 65536, np.uint8)
        expected = np.full(65536, 0xAB, dtype=np.uint8)
        expected[16:24] = np.frombuffer(b"\\x34\\x12" * 4, dtype=np.uint8)
        expected[64:72] = np.frombuffer(b"\\xef\\xbe\\xad\\xde" * 2, dtype=np.uint8)
        for row in range(4):
            expected[1024 + 256 * row:1024 + 256 * row + 3] = 1
        say([bool((data == expected).all()), code(cu.cuMemsetD32(int(address) + 2, 0, 1)),
             code(cu.cuMemsetD8(address, 0, 1 << 30))])
        """
    )
    assert heard == [True, "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_VALUE"]


def test_host_memory(said: Run) -> None:
    heard = said(
        """
        import mmap
        machine = Machine()
        pinned = check(cu.cuMemHostAlloc(8192, cu.CU_MEMHOSTALLOC_DEVICEMAP))
        mapped = check(cu.cuMemHostGetDevicePointer(pinned, 0))
        machine.launch("fill_u32", mapped, 2048, 6)
        machine.synchronize()
        own = mmap.mmap(-1, 8192)
        address = ctypes.addressof(ctypes.c_char.from_buffer(own))
        before = code(cu.cuMemHostGetDevicePointer(address, 0))
        check(cu.cuMemHostRegister(address, 8192, 0))
        twice = code(cu.cuMemHostRegister(address, 8192, 0))
        machine.launch("fill_u32", address, 2048, 7)
        machine.synchronize()
        sums = [int(host(pinned, 2048).sum()), int(host(address, 2048).sum())]
        check(cu.cuMemHostUnregister(address))
        check(cu.cuMemFreeHost(pinned))
        say([sums, before, twice, code(cu.cuMemHostUnregister(address)), check(cu.cuMemGetInfo())])
        """
    )
    assert heard == [
        [6 * 2048, 7 * 2048],
        "CUDA_ERROR_INVALID_VALUE",
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        [1 << 30, 1 << 30],
    ]


def test_what_is_known_about_a_pointer(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        which = cu.CUpointer_attribute
        def ask(address):
            wanted = [which.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, which.CU_POINTER_ATTRIBUTE_IS_MANAGED,
                      which.CU_POINTER_ATTRIBUTE_RANGE_SIZE, which.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL]
            return [int(v) for v in check(cu.cuPointerGetAttributes(len(wanted), wanted, address))]
        plain, managed, pinned = machine.plain(5000), machine.managed(6000), check(cu.cuMemHostAlloc(7000, 0))
        say([ask(plain), ask(int(managed) + 10), ask(int(pinned)), ask(12345678),
             code(cu.cuPointerGetAttribute(which.CU_POINTER_ATTRIBUTE_IS_MANAGED, 12345678)),
             code(cu.cuIpcGetMemHandle(managed))])
        """
    )
    assert heard == [
        [2, 0, 5000, 0],
        [2, 1, 6000, 0],
        [1, 0, 7000, 0],
        [0, 0, 0, -2],
        "CUDA_ERROR_INVALID_VALUE",
        "CUDA_ERROR_INVALID_VALUE",
    ]


def test_stream_ordered_memory_and_pools(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        stream = machine.stream()
        total = check(cu.cuMemGetInfo())[0]
        attribute = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        pool = check(cu.cuDeviceGetDefaultMemPool(machine.device))
        address = check(cu.cuMemAllocAsync(512 << 20, stream))
        machine.launch("fill_u32", address, 1000, 3, stream=stream)
        read = np.zeros(1000, dtype=np.uint32)
        check(cu.cuMemcpyDtoHAsync(read.ctypes.data, address, 4000, stream))
        used = [int(check(cu.cuMemPoolGetAttribute(pool, attribute)))]
        check(cu.cuMemFreeAsync(address, stream))
        # there is no room for this one until the free is reached
        second = check(cu.cuMemAllocAsync(768 << 20, stream))
        check(cu.cuMemFreeAsync(second, stream))
        check(cu.cuStreamSynchronize(stream))
        used.append(int(check(cu.cuMemPoolGetAttribute(pool, attribute))))
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = place("device", 0)
        own = check(cu.cuMemPoolCreate(properties))
        third = check(cu.cuMemAllocFromPoolAsync(4096, own, stream))
        keep = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        check(cu.cuMemPoolSetAttribute(own, keep, cu.cuuint64_t(77)))
        threshold = int(check(cu.cuMemPoolGetAttribute(own, keep)))
        check(cu.cuMemPoolTrimTo(own, 0))
        check(cu.cuMemFree(third))
        check(cu.cuMemPoolDestroy(own))
        say([int(read.sum()), used, threshold, check(cu.cuMemGetInfo())[0] == total, code(cu.cuMemPoolDestroy(pool))])
        """
    )
    assert heard == [3000, [512 << 20, 0], 77, True, "CUDA_ERROR_INVALID_VALUE"]


def test_virtual_memory_management(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = place("device", 0)
        step = check(cu.cuMemGetAllocationGranularity(properties,
                     cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        at = check(cu.cuMemAddressReserve(4 * step, 0, 0, 0))
        handles = [check(cu.cuMemCreate(step, properties, 0)) for _ in range(2)]
        for number, handle in enumerate(handles):
            check(cu.cuMemMap(int(at) + number * step, step, 0, handle, 0))
        access = cu.CUmemAccessDesc()
        access.location = place("device", 0)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cu.cuMemSetAccess(at, 2 * step, [access], 1))
        words = 2 * step // 4
        machine.launch("fill_u32", at, words, 5)           # over both mappings
        alias = check(cu.cuMemAddressReserve(step, 0, 0, 0))
        check(cu.cuMemMap(alias, step, 0, handles[1], 0))
        check(cu.cuMemSetAccess(alias, step, [access], 1))
        machine.launch("add_u32", alias, step // 4, 1)       # the same bytes under another address
        both = [int(machine.read(at, 1)[0]), int(machine.read(int(at) + step, 1)[0])]
        used = check(cu.cuMemGetInfo())
        for handle in handles:
            check(cu.cuMemRelease(handle))
        check(cu.cuMemUnmap(alias, step))
        check(cu.cuMemUnmap(at, 2 * step))
        check(cu.cuMemAddressFree(alias, step))
        check(cu.cuMemAddressFree(at, 4 * step))
        say([both, used[1] - used[0] == 2 * step, check(cu.cuMemGetInfo())[0] == used[1],
             code(cu.cuMemCreate(8 << 30, properties, 0))])
        """
    )
    assert heard == [[5, 6], True, True, "CUDA_ERROR_OUT_OF_MEMORY"]


def test_advice_is_remembered(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        which, advice = cu.CUmem_range_attribute, cu.CUmem_advise
        address, size = machine.managed(8 << 20), 8 << 20
        def ask(attribute, at=address, length=size):
            return check(cu.cuMemRangeGetAttribute(4, attribute, at, length))
        before = ask(which.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION)
        check(cu.cuMemAdvise(address, size, advice.CU_MEM_ADVISE_SET_READ_MOSTLY, place("device")))
        check(cu.cuMemAdvise(address, 4 << 20, advice.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place("device")))
        machine.prefetch(address, size, place("host"))
        machine.synchronize()
        say([before, ask(which.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY),
             ask(which.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, address, 4 << 20),
             ask(which.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION),
             ask(which.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION),
             code(cu.cuMemPrefetchAsync(machine.plain(4096), 4096, place("device"), 0, 0))])
        """
    )
    assert heard == [-2, 1, 0, -2, -1, "CUDA_ERROR_INVALID_VALUE"]


def test_values_between_streams(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        first, second = machine.stream(1), machine.stream(1)
        flag, data = machine.plain(8), machine.plain(4096)
        check(cu.cuMemsetD32(flag, 0, 2))
        check(cu.cuStreamWaitValue32(second, flag, 1, 1))
        machine.launch("add_u32", data, 1024, 1, stream=second)
        waits = code(cu.cuStreamQuery(second))
        machine.launch("fill_u32", data, 1024, 40, stream=first)
        check(cu.cuStreamWriteValue32(first, flag, 1, 0))
        check(cu.cuStreamSynchronize(second))
        say([waits, int(machine.read(data, 1)[0])])
        """
    )
    assert heard == ["CUDA_ERROR_NOT_READY", 41]


def test_two_devices(said: Run) -> None:
    heard = said(
        """
        one, two = Machine(0), Machine(1)
        there = two.plain(4096)
        check(cu.cuCtxSetCurrent(one.context))
        here = one.plain(4096)
        one.launch("fill_u32", here, 1024, 12)
        check(cu.cuMemcpyPeer(there, two.context, here, one.context, 4096))
        moving = one.managed(4 << 20)
        one.launch("fill_u32", moving, 1 << 20, 1)
        one.synchronize()
        resident = [stats(0)["memory_managed"], stats(1)["memory_managed"]]
        check(cu.cuCtxSetCurrent(two.context))
        two.launch("add_u32", moving, 1 << 20, 1)
        two.synchronize()
        say([int(two.read(there, 1)[0]), resident, [stats(0)["memory_managed"], stats(1)["memory_managed"]],
             int(host(moving, 1 << 20).sum()), check(cu.cuDeviceCanAccessPeer(0, 1))])
        """,
        SIMGPU_DEVICES="2",
    )
    assert heard == [12, [4 << 20, 0], [0, 4 << 20], 2 << 20, 1]


SLOW_WORK_AND_A_COPY = """
    machine = Machine()
    stream = machine.stream(1)
    n = {words}
    address = machine.plain(4 * n)
    pageable, pinned = np.zeros(n, dtype=np.uint32), host(check(cu.cuMemHostAlloc(4 * n, 0)), n)
    registered = np.zeros(n, dtype=np.uint32)
    check(cu.cuMemHostRegister(registered.ctypes.data, registered.nbytes, 0))
    half = np.zeros(2 * n, dtype=np.uint32)
    check(cu.cuMemHostRegister(half.ctypes.data, half.nbytes // 4, 0))

    def busy():
        machine.launch("spin", 80_000_000, stream=stream)
        machine.launch("add_u32", address, n, 1, stream=stream)

    def at_once(call, *arguments):
        "Whether the stream still works when the call returns, and how long the call took."
        began = time.monotonic()
        check(call(*arguments, stream))
        took = time.monotonic() - began
        return [code(cu.cuStreamQuery(stream)) == "CUDA_SUCCESS", took > 0.04]
"""


def test_an_asynchronous_copy_to_pageable_memory_is_done_when_it_returns(said: Run) -> None:
    """CUDA's manual, "API synchronization behavior": only pinned memory makes a copy to the host asynchronous."""
    heard = said(
        SLOW_WORK_AND_A_COPY.format(words=100_000)
        + """
    machine.write(address, np.full(n, 41, dtype=np.uint32))
    targets = {"pageable": pageable, "pinned": pinned, "registered": registered, "half registered": half[:n]}
    found = {}
    for name, target in targets.items():
        busy()
        found[name] = at_once(cu.cuMemcpyDtoHAsync, target.ctypes.data, address, 4 * n)
        found[name].append(int(target[-1]))
        check(cu.cuStreamSynchronize(stream))
        found[name].append(int(target[-1]))
    busy()
    found["rows"] = [code(cu.cuMemcpyAsync(pageable.ctypes.data, address, 4 * n, stream)), int(pageable[0])]
    busy()
    found["host to host"] = at_once(cu.cuMemcpyAsync, registered.ctypes.data, pinned.ctypes.data, 4 * n)
    say(found)
    """
    )
    assert heard == {
        "pageable": [True, True, 42, 42],
        "pinned": [False, False, 0, 43],
        "registered": [False, False, 0, 44],
        "half registered": [True, True, 45, 45],
        "rows": ["CUDA_SUCCESS", 46],
        "host to host": [True, True],
    }


def test_an_asynchronous_copy_from_pageable_memory_has_read_the_memory_when_it_returns(said: Run) -> None:
    """Small ones are put aside, and the call does not wait; larger ones are waited for. Pinned memory is read later."""
    code = (
        SLOW_WORK_AND_A_COPY
        + """
    found = {{}}
    for name, source in {{"pageable": pageable, "pinned": pinned}}.items():
        source[:] = 1
        busy()
        found[name] = at_once(cu.cuMemcpyHtoDAsync, address, source.ctypes.data, 4 * n)
        source[:] = 2
        check(cu.cuStreamSynchronize(stream))
        found[name].append(sorted(set(machine.read(address, n).tolist())))
    say(found)
    """
    )
    small, large = said(code.format(words=1000)), said(code.format(words=100_000))
    assert small == {"pageable": [False, False, [1]], "pinned": [False, False, [2]]}
    assert large == {"pageable": [True, True, [1]], "pinned": [False, False, [2]]}
