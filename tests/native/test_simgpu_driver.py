"""The simulated driver under NVIDIA's own Python bindings: devices, contexts, kernels, streams, events, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.conftest import Run, Start


def test_the_machine_is_as_its_settings_say(said: Run) -> None:
    heard = said(
        """
        check(cu.cuInit(0))
        device, attribute = check(cu.cuDeviceGet(1)), cu.CUdevice_attribute
        uuids = [check(cu.cuDeviceGetUuid(n)).bytes.hex() for n in range(2)]
        say({
            "version": check(cu.cuDriverGetVersion()), "count": check(cu.cuDeviceGetCount()), "uuids": uuids,
            "name": check(cu.cuDeviceGetName(64, device)).rstrip(b"\\0 ").decode(),
            "memory": check(cu.cuDeviceTotalMem(device)),
            "managed": check(cu.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0)),
            "pci": check(cu.cuDeviceGetPCIBusId(32, device)).rstrip(b"\\0 ").decode(),
            "beyond": code(cu.cuDeviceGet(2)),
        })
        """,
        SIMGPU_DEVICES="2",
        SIMGPU_MEMORY="2GiB",
        SIMGPU_MODEL="Test GPU",
    )
    assert len(set(heard.pop("uuids"))) == 2
    assert heard == {
        "version": 13000,
        "count": 2,
        "name": "Test GPU",
        "memory": 2 << 30,
        "managed": 1,
        "pci": "0000:02:00.0",
        "beyond": "CUDA_ERROR_INVALID_DEVICE",
    }


def test_settings_are_those_of_the_first_process(said: Run) -> None:
    program = "check(cu.cuInit(0)); say([check(cu.cuDeviceTotalMem(0)), check(cu.cuDeviceGetUuid(0)).bytes.hex()])"
    first = said(program, SIMGPU_MEMORY="512MiB")
    assert first[0] == 512 << 20
    assert said(program, SIMGPU_MEMORY="4GiB") == first


def test_a_wrong_setting_is_named(simulated: Start) -> None:
    program = simulated("say(code(cu.cuInit(0)))", SIMGPU_H2D="fast")
    assert program.hear() == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert "SIMGPU_H2D=fast is not a number" in program.finish()


def test_a_foreign_state_file_is_refused(simulated: Start, tmp_path: Path) -> None:
    (tmp_path / "simgpu.state").write_bytes(b"something else\n" * 100_000)
    program = simulated("say(code(cu.cuInit(0)))")
    assert program.hear() == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert "is not a state file of this version" in program.finish()


@pytest.mark.parametrize(
    ("visible", "order"), [("1,0", [1, 0]), ("1", [1]), ("0,9,1", [0]), ("{1}", [1]), ("{1},{0}", [1, 0])]
)
def test_visible_devices(said: Run, visible: str, order: list[int]) -> None:
    program = """
    check(cu.cuInit(0))
    say([check(cu.cuDeviceGetUuid(n)).bytes.hex() for n in range(check(cu.cuDeviceGetCount()))])
    """
    uuids = said(program, SIMGPU_DEVICES="2")
    texts = [f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}" for u in uuids]
    heard = said(program, CUDA_VISIBLE_DEVICES=visible.format(*texts))
    assert heard == [uuids[n] for n in order]


@pytest.mark.parametrize("visible", ["", "-1", "7", "GPU-00000000", "0,0"])
def test_no_visible_device(said: Run, visible: str) -> None:
    assert said("say(code(cu.cuInit(0)))", CUDA_VISIBLE_DEVICES=visible) == "CUDA_ERROR_NO_DEVICE"


def test_nothing_works_before_init_nor_in_a_fork(said: Run) -> None:
    heard = said(
        """
        before = [code(cu.cuDeviceGetCount()), code(cu.cuMemAlloc(4096))]
        machine = Machine()
        address = machine.plain(4096)
        machine.launch("fill_u32", address, 1024, 3)
        machine.synchronize()
        into, out = os.pipe()
        child = os.fork()
        if child == 0:
            codes = [cu.cuInit(0), cu.cuMemAlloc(4096), cu.cuCtxSynchronize(), cu.cuDeviceGetCount()]
            os.write(out, " ".join(map(code, codes)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        say([before, os.read(into, 1000).decode().split(), int(machine.read(address, 1)[0])])
        """
    )
    gone = "CUDA_ERROR_NOT_INITIALIZED"
    assert heard == [[gone] * 2, [gone] * 4, 3]


def test_contexts_are_a_stack(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        own = check(cu.cuCtxCreate(None, 0, machine.device))
        at = [int(check(cu.cuCtxGetCurrent())) == int(own)]
        check(cu.cuCtxPushCurrent(machine.context))
        at.append(int(check(cu.cuCtxGetCurrent())) == int(machine.context))
        check(cu.cuCtxPopCurrent())
        at.append(int(check(cu.cuCtxGetCurrent())) == int(own))
        address = check(cu.cuMemAlloc(1 << 20))
        free = check(cu.cuMemGetInfo())[0]
        check(cu.cuCtxDestroy(own))
        at.append(int(check(cu.cuCtxGetCurrent())) == int(machine.context))
        at.append(check(cu.cuMemGetInfo())[0] > free)   # its memory went with it
        at.append(check(cu.cuDevicePrimaryCtxGetState(machine.device))[1] == 1)
        check(cu.cuDevicePrimaryCtxRelease(machine.device))
        say([*at, code(cu.cuMemAlloc(4096)), code(cu.cuCtxSynchronize())])
        """
    )
    assert heard == [True] * 6 + ["CUDA_ERROR_CONTEXT_IS_DESTROYED"] * 2


def test_kernels_compute(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        n = 100_003
        words, floats_x, floats_y = machine.plain(4 * n), machine.managed(4 * n), machine.plain(4 * n)
        machine.launch("fill_u32", words, n, 0xFFFFFFF0)
        machine.launch("add_u32", words, n, 0x20)
        x, y = np.arange(n, dtype=np.float32), np.full(n, 0.5, dtype=np.float32)
        machine.write(floats_x, x)
        machine.write(floats_y, y)
        machine.launch("saxpy_f32", n, 1.5, floats_x, floats_y)
        total = machine.managed(8)
        host(total, 1, np.uint64)[:] = 1
        data = np.random.default_rng(7).integers(0, 2**32, n, dtype=np.uint32)
        other = machine.plain(4 * n)
        machine.write(other, data)
        machine.launch("checksum_u32", other, n, total)
        machine.synchronize()
        weights = 2 * np.arange(n, dtype=np.uint64) + 1
        expected = int((data.astype(np.uint64) * weights).sum()) + 1
        say([
            bool((machine.read(words, n) == 0x10).all()),
            bool((machine.read(floats_y, n, np.float32) == np.float32(1.5) * x + y).all()),
            int(host(total, 1, np.uint64)[0]) == expected % 2**64,
            check(cu.cuFuncGetName(machine.kernels["spin"])).decode(),
            list(check(cu.cuFuncGetParamInfo(machine.kernels["saxpy_f32"], 2))),
        ])
        """
    )
    assert heard == [True, True, True, "spin", [16, 8]]


def test_libraries_are_modules_without_a_context(said: Run) -> None:
    heard = said(
        """
        from tests.native.simgpu_program import PTX, ARGUMENTS
        machine = Machine()
        library = check(cu.cuLibraryLoadData(PTX.read_bytes() + b"\\0", None, None, 0, None, None, 0))
        kernel = check(cu.cuLibraryGetKernel(library, b"fill_u32"))
        machine.kernels["fill_u32"] = check(cu.cuKernelGetFunction(kernel))
        address = machine.plain(4096)
        machine.launch("fill_u32", address, 1024, 9)
        say([int(machine.read(address, 1024).sum()), check(cu.cuLibraryGetKernelCount(library)), len(ARGUMENTS)])
        """
    )
    assert heard == [9 * 1024, 6, 6]


def test_code_that_the_simulator_cannot_run(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        other = b".version 6.3\\n.target sm_70\\n.address_size 64\\n.visible .entry mine(.param .u64 p) { ret; }\\0"
        option = [cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        log = bytearray(200)
        result = code(cu.cuModuleLoadDataEx(other, 2, option, [log, len(log)]))
        say([result, log.rstrip(b"\\0").decode(), code(cu.cuModuleLoadData(b"\\x7fELF and so on\\0")),
             code(cu.cuModuleGetFunction(machine.module, b"mine"))])
        """
    )
    assert heard == [
        "CUDA_ERROR_INVALID_PTX",
        "the simulated GPU runs only its built-in kernels, by name (those of its kernels.ptx), and has none named mine",
        "CUDA_ERROR_INVALID_IMAGE",
        "CUDA_ERROR_NOT_FOUND",
    ]


def test_a_loader_that_leaves_no_room_for_a_message_finds_it_on_stderr(simulated: Start) -> None:
    """CUDA's core library, on which Numba loads its kernels, shows only the error code."""
    program = simulated(
        """
        machine = Machine()
        other = b".version 6.3\\n.target sm_70\\n.address_size 64\\n.visible .entry mine(.param .u64 p) { ret; }\\0"
        say([code(cu.cuLibraryLoadData(image, None, None, 0, None, None, 0))
             for image in (other, b"\\x50\\xed\\x55\\xba" + bytes(60), b"Python\\0")])
        """
    )
    assert program.hear() == ["CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_INVALID_IMAGE"]
    unknown, fat, neither = program.finish().splitlines()
    assert unknown.startswith("simgpu: the simulated GPU runs only its built-in kernels")
    assert unknown.endswith("and has none named mine")
    assert "fat binary" in fat
    assert "neither PTX text nor a CUDA ELF file" in neither


def test_machine_code_of_built_in_kernels_loads_by_their_names(said: Run) -> None:
    """As nvJitLink makes it of kernels.ptx: the ELF file has a section of parameters for each kernel."""
    heard = said(
        """
        import struct

        def elf(*kernels):
            names = [b"", b".shstrtab"] + [b".nv.constant0." + name for name in kernels] + [b".text.helper"]
            offsets, table = [], b""
            for name in names:
                offsets.append(len(table))
                table += name + b"\\0"
            at = 64 + len(table)
            magic = b"\\x7fELF\\2\\1\\1"
            header = struct.pack("<16sHHIQQQIHHHHHH", magic, 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, len(names), 1)
            sections = [struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64, len(table), 0, 0, 0, 0) for at in offsets]
            return header + table + b"".join(sections)

        machine = Machine()
        module = check(cu.cuModuleLoadData(elf(b"spin", b"fill_u32")))
        machine.kernels["fill_u32"] = check(cu.cuModuleGetFunction(module, b"fill_u32"))
        address = machine.plain(4096)
        machine.launch("fill_u32", address, 1024, 3)
        option = [cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        log = bytearray(200)
        numba = b"_ZN8__main__7add_oneB2v1E5ArrayIfLi1E1C7mutable7alignedE"
        result = code(cu.cuModuleLoadDataEx(elf(b"spin", numba), 2, option, [log, len(log)]))
        say([check(cu.cuModuleGetFunctionCount(module)), int(machine.read(address, 1024).sum()), result,
             log.rstrip(b"\\0").decode().endswith("and has none named " + numba.decode())])
        """
    )
    assert heard == [2, 3 * 1024, "CUDA_ERROR_INVALID_IMAGE", True]


def test_the_drivers_linker_links_named_kernels_and_says_which_it_lacks(said: Run, tmp_path: Path) -> None:
    """The way of Numba's own bindings: link PTX, load what comes of it."""
    (tmp_path / "libcudadevrt.a").write_bytes(b"!<arch>\n")
    heard = said(
        f"""
        library, missing = {str(tmp_path / "libcudadevrt.a")!r}.encode(), {str(tmp_path / "nothing")!r}.encode()
        """
        + """
        machine = Machine()
        PTX_TYPE, LIBRARY = cu.CUjitInputType.CU_JIT_INPUT_PTX, cu.CUjitInputType.CU_JIT_INPUT_LIBRARY
        text = PTX.read_bytes() + b"\\0"
        link = check(cu.cuLinkCreate(0, [], []))
        check(cu.cuLinkAddFile(link, LIBRARY, library, 0, [], []))
        check(cu.cuLinkAddData(link, PTX_TYPE, text, len(text), b"kernels", 0, [], []))
        image, size = check(cu.cuLinkComplete(link))
        late = code(cu.cuLinkAddData(link, PTX_TYPE, text, len(text), b"late", 0, [], []))
        module = check(cu.cuModuleLoadData(image))
        check(cu.cuLinkDestroy(link))
        machine.kernels["fill_u32"] = check(cu.cuModuleGetFunction(module, b"fill_u32"))
        address = machine.plain(4096)
        machine.launch("fill_u32", address, 1024, 5)

        option = [cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        log = bytearray(200)
        link = check(cu.cuLinkCreate(2, option, [log, len(log)]))
        other = b".version 6.3\\n.target sm_70\\n.address_size 64\\n.visible .entry mine(.param .u64 p) { ret; }"
        bad = code(cu.cuLinkAddData(link, PTX_TYPE, other, len(other), b"other", 0, [], []))
        no_file = code(cu.cuLinkAddFile(link, PTX_TYPE, missing, 0, [], []))
        check(cu.cuLinkDestroy(link))
        say([size > 0, check(cu.cuModuleGetFunctionCount(module)), int(machine.read(address, 1024).sum()), late, bad,
             log.rstrip(b"\\0").decode().endswith("has none named mine"), no_file])
        """
    )
    invalid = "CUDA_ERROR_INVALID_PTX"
    assert heard == [True, 6, 5 * 1024, "CUDA_ERROR_INVALID_HANDLE", invalid, True, "CUDA_ERROR_FILE_NOT_FOUND"]


def test_an_illegal_address_ends_the_context(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        kept = machine.plain(4096)
        machine.launch("fill_u32", int(kept) + (64 << 30), 1024, 1)
        first = code(cu.cuCtxSynchronize())
        then = [code(cu.cuMemAlloc(4096)), code(cu.cuStreamCreate(0))]
        check(cu.cuDevicePrimaryCtxReset(machine.device))
        again = Machine()
        address = again.plain(4096)
        again.launch("fill_u32", address, 1024, 4)
        say([first, then, int(again.read(address, 1)[0])])
        """
    )
    illegal = "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert heard == [illegal, [illegal] * 2, 4]


def test_bad_launches_are_refused(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        def attempt(*shape):
            return code(cu.cuLaunchKernel(machine.kernels["spin"], *shape, 0, 0, ((1,), (ctypes.c_uint64,)), 0))
        shapes = [(0, 1, 1, 1, 1, 1), (1, 1, 1, 2000, 1, 1), (1, 70000, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)]
        say([attempt(*shape) for shape in shapes])
        """
    )
    assert heard == ["CUDA_ERROR_INVALID_VALUE"] * 3 + ["CUDA_SUCCESS"]


def test_streams_keep_order_and_events_tell_time(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        stream, other = machine.stream(1), machine.stream(1)
        n = 1 << 16
        address = machine.plain(4 * n)
        start, middle, end = machine.event(), machine.event(), machine.event()
        check(cu.cuEventRecord(start, stream))
        machine.launch("spin", 30_000_000, stream=stream)
        machine.launch("fill_u32", address, n, 5, stream=stream)
        check(cu.cuEventRecord(middle, stream))
        busy = [cu.cuStreamQuery(stream), cu.cuEventQuery(middle), cu.cuEventElapsedTime(start, middle)]
        check(cu.cuStreamWaitEvent(other, middle, 0))
        machine.launch("add_u32", address, n, 2, stream=other)
        check(cu.cuEventRecord(end, other))
        check(cu.cuEventSynchronize(end))
        say([[code(one) for one in busy], code(cu.cuStreamQuery(stream)), int(machine.read(address, n).sum()) == 7 * n,
             check(cu.cuEventElapsedTime(start, middle)), check(cu.cuEventElapsedTime(middle, end))])
        """
    )
    busy, query, right, spun, after = heard
    assert busy == ["CUDA_ERROR_NOT_READY"] * 3
    assert (query, right) == ("CUDA_SUCCESS", True)
    assert 30 <= spun < 60
    assert 0 <= after < 30


def test_the_legacy_stream_waits_for_blocking_ones_and_they_for_it(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        blocking, free = machine.stream(0), machine.stream(1)
        address = machine.plain(4096)
        machine.launch("spin", 20_000_000, stream=blocking)
        machine.launch("fill_u32", address, 1024, 1, stream=blocking)
        machine.launch("add_u32", address, 1024, 10, stream=0)       # after the blocking stream's fill
        machine.launch("add_u32", address, 1024, 100, stream=blocking)  # after the legacy stream's add
        machine.launch("spin", 1000, stream=free)
        check(cu.cuStreamSynchronize(free))
        say(int(machine.read(address, 1)[0]))
        """
    )
    assert heard == 111


def test_host_functions_run_in_stream_order(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        stream, order = machine.stream(), []
        called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: order.append(data))
        pointer = ctypes.cast(called, ctypes.c_void_p).value
        machine.launch("spin", 5_000_000, stream=stream)
        check(cu.cuLaunchHostFunc(stream, pointer, 1))
        check(cu.cuLaunchHostFunc(stream, pointer, 2))
        queued = len(order)
        check(cu.cuStreamSynchronize(stream))
        say([queued, order])
        """
    )
    assert heard == [0, [1, 2]]


def test_a_full_queue_makes_launches_wait(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        stream, address = machine.stream(), machine.plain(4096)
        machine.launch("fill_u32", address, 1024, 0, stream=stream)
        for _ in range(5000):
            machine.launch("add_u32", address, 1024, 1, stream=stream)
        check(cu.cuStreamSynchronize(stream))
        say(int(machine.read(address, 1)[0]))
        """
    )
    assert heard == 5000


def test_null_launches_check_and_do_nothing(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        address = machine.plain(4096)
        check(cu.cuMemsetD32(address, 8, 1024))
        machine.launch("fill_u32", address, 1024, 1)
        bad = code(cu.cuLaunchKernel(machine.kernels["spin"], 0, 1, 1, 1, 1, 1, 0, 0, ((1,), (ctypes.c_uint64,)), 0))
        say([int(machine.read(address, 1)[0]), bad])
        """,
        SIMGPU_NULL_LAUNCH="1",
    )
    assert heard == [8, "CUDA_ERROR_INVALID_VALUE"]


def test_get_proc_address_in_both_versions(said: Run) -> None:
    heard = said(
        """
        library = ctypes.CDLL("libcuda.so.1")
        def first(name, version, flags=0):
            out = ctypes.c_void_p()
            return library.cuGetProcAddress(name, ctypes.byref(out), version, ctypes.c_uint64(flags)), out.value
        def second(name, version, flags=0):
            out, status, flags = ctypes.c_void_p(), ctypes.c_int(-1), ctypes.c_uint64(flags)
            error = library.cuGetProcAddress_v2(name, ctypes.byref(out), version, flags, ctypes.byref(status))
            return error, out.value, status.value
        def symbol(name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        say({
            "alloc": first(b"cuMemAlloc", 12080) == (0, symbol("cuMemAlloc_v2")),
            "old_prefetch": second(b"cuMemPrefetchAsync", 12000) == (0, symbol("cuMemPrefetchAsync"), 0),
            "new_prefetch": second(b"cuMemPrefetchAsync", 12020) == (0, symbol("cuMemPrefetchAsync_v2"), 0),
            "per_thread": second(b"cuMemcpyHtoD", 12000, 2) == (0, symbol("cuMemcpyHtoD_v2_ptds"), 0),
            "per_thread_async": second(b"cuLaunchKernel", 12000, 2) == (0, symbol("cuLaunchKernel_ptsz"), 0),
            "no_other_form": second(b"cuMemAlloc", 12000, 2) == (0, symbol("cuMemAlloc_v2"), 0),
            "itself": [second(b"cuGetProcAddress", 11030)[1] == symbol("cuGetProcAddress"),
                       second(b"cuGetProcAddress", 12000)[1] == symbol("cuGetProcAddress_v2")],
            "unknown": [first(b"cuNothing", 12000), second(b"cuNothing", 12000)],
            "too_old": second(b"cuMemAllocAsync", 11000),
            "too_new": second(b"cuMemAlloc", 14000)[0],
        })
        """
    )
    unknown, too_old, too_new, itself = (heard.pop(key) for key in ("unknown", "too_old", "too_new", "itself"))
    assert set(heard.values()) == {True}
    assert itself == [True, True]
    assert unknown == [[500, None], [500, None, 1]]
    assert too_old == [500, None, 2]
    assert too_new == 1


def test_every_listed_function_is_exported(said: Run) -> None:
    heard = said(
        """
        import pathlib, re
        import gpushare_simgpu
        table = pathlib.Path(gpushare_simgpu.__file__).parent / "cuda" / "driver" / "function_table.h"
        rows = re.findall(r'(?:ONE|TWO)\\("(\\w+)", (\\d+), (\\w+)(?:, (\\w+))?\\)', table.read_text())
        library = ctypes.CDLL("libcuda.so.1")
        for _, _, function, per_thread in rows:
            getattr(library, function)
            if per_thread:
                getattr(library, per_thread)
        keys = [(name, int(version)) for name, version, _, _ in rows]
        say([len(rows) > 200, len(set(keys)) == len(keys), keys == sorted(keys)])
        """
    )
    assert heard == [True, True, True]


def test_capture_makes_a_graph_that_can_be_launched_again(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        stream, side = machine.stream(1), machine.stream(1)
        n = 4096
        address, copy = machine.plain(4 * n), machine.plain(4 * n)
        fork, joined = machine.event(), machine.event()
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuMemsetD32(address, 0, n))
        check(cu.cuStreamBeginCapture(stream, mode))
        machine.launch("add_u32", address, n, 1, stream=stream)
        check(cu.cuEventRecord(fork, stream))
        check(cu.cuStreamWaitEvent(side, fork, 0))
        check(cu.cuMemcpyDtoDAsync(copy, address, 4 * n, side))
        check(cu.cuEventRecord(joined, side))
        check(cu.cuStreamWaitEvent(stream, joined, 0))
        status = check(cu.cuStreamIsCapturing(side)).name
        graph = check(cu.cuStreamEndCapture(stream))
        nothing_ran = int(machine.read(address, 1)[0])
        runnable = check(cu.cuGraphInstantiate(graph, 0))
        for _ in range(3):
            check(cu.cuGraphLaunch(runnable, stream))
        check(cu.cuStreamSynchronize(stream))
        say([status, nothing_ran, int(machine.read(address, 1)[0]), int(machine.read(copy, n).sum()) == 3 * n,
             check(cu.cuGraphGetNodes(graph, 10))[1], check(cu.cuStreamIsCapturing(side)).name])
        """
    )
    active, none = "CU_STREAM_CAPTURE_STATUS_ACTIVE", "CU_STREAM_CAPTURE_STATUS_NONE"
    assert heard == [active, 0, 3, True, 2, none]


def test_a_capture_refuses_what_it_cannot_hold(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        mode = cu.CUstreamCaptureMode
        def capture(how, call):
            stream = machine.stream(1)
            check(cu.cuStreamBeginCapture(stream, how))
            machine.launch("spin", 1, stream=stream)
            return [code(call(stream)), code(cu.cuStreamEndCapture(stream))]
        local, everybody = mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, mode.CU_STREAM_CAPTURE_MODE_GLOBAL
        say([
            capture(local, lambda s: cu.cuStreamSynchronize(s)),
            capture(local, lambda s: cu.cuCtxSynchronize()),
            capture(everybody, lambda s: cu.cuMemAlloc(4096)),
            capture(everybody, lambda s: cu.cuStreamQuery(s)),
            capture(mode.CU_STREAM_CAPTURE_MODE_RELAXED, lambda s: cu.cuMemAlloc(4096)),
        ])
        """
    )
    unsupported, broken = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert heard == [
        [unsupported, broken],
        [unsupported, broken],
        [unsupported, "CUDA_SUCCESS"],
        [unsupported, broken],
        ["CUDA_SUCCESS", "CUDA_SUCCESS"],
    ]
