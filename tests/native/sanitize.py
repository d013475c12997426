"""The C code under sanitizers: ``python -m tests.native.sanitize [--seconds 5] [address] [thread]``.

Builds libgpushare.so and the simulated driver with gcc (or clang), once with AddressSanitizer and UBSan and once
with ThreadSanitizer, and runs preload_stress.c on them against an agent that grants, revokes and suspends at random:
with and without oversubscription, and with engine suspend. Without oversubscription the driver also suspends the
program again and again, of which the library knows nothing. Exit status 0: no finding. Where no compiler with
sanitizers is there, says so in one sentence and exits with 0.

ThreadSanitizer knows C11 atomics but not membarrier(2); the library is built so that launches use a fence instead,
which is the path of kernels without membarrier.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

import gpushare_simgpu

from gpushare_spawner.doctor import gpu_programs
from gpushare_spawner.model.frames import Feature, Kind
from tests.libraries import NATIVE, SIMGPU
from tests.native.preload_agent import Peer, ScriptedAgent

HERE = Path(__file__).parent
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    # gcc warns of each fence, whose meaning ThreadSanitizer does not know: every launch has one
    "thread": ["-fsanitize=thread", "-DGATE_ALWAYS_FENCES", "-Wno-tsan"],
}
OPTIONS = {
    # what the program leaves to its end belongs to driver objects that live as long as it does
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"exitcode=99:second_deadlock_stack=1:suppressions={HERE / 'preload_tsan.supp'}",
}


class RestlessAgent(ScriptedAgent):
    """Grants at once, revokes after a few milliseconds, pages out and in as it likes; suspends and resumes processes
    that can be suspended."""

    suspended = 0
    """Suspensions that a process was ready for."""

    def serve(self) -> None:
        while True:
            threading.Thread(target=self._one, args=(self.peer(3600), random.Random(1)), daemon=True).start()

    def observed(self, peer: gpu_programs.ScriptedPeer) -> None:
        """Answer a question for NVML, mostly."""
        peer.send(Kind.WELCOME, 25, 0, 25, 0, 1, len(self.gpus), Feature.USE)
        for gpu in self.gpus:
            peer.send(Kind.DEVICE, self.total, self.total // 4, gpu=gpu)
            for pid in range(random.randrange(40)):
                peer.send(Kind.SESSION_MEMORY, 1, pid, 1 << 20, gpu=gpu)
                peer.send(Kind.USE, pid, 1, 2, gpu=gpu)
            if random.random() < 0.8:
                peer.send(Kind.STATUS, 25, 0, 25, 0, 25, 1 << 20, 0, self.total, gpu=gpu)
        peer.close()

    def _one(self, peer: Peer, chance: random.Random) -> None:
        lease = suspension = 0
        revoke_at = 0.0
        suspends = peer.hello is not None and bool(peer.hello.fields[3] & Feature.SUSPEND)
        while True:
            try:
                frame = peer.hear(0.002)
                if frame is None:
                    return
                if frame.kind is Kind.SUSPEND_READY:
                    self.suspended += frame.fields[5]
                    time.sleep(chance.choice((0, 0.001, 0.02)))
                    peer.send(Kind.RESUMED, suspension)
                if suspends and (frame.kind is Kind.RELEASE or chance.random() < 0.05):
                    suspension += 1
                    peer.send(Kind.SUSPEND, suspension)
                if frame.kind is Kind.REQUEST:
                    lease += 1
                    pace = chance.choice((0, 0.0001, 0.005))
                    peer.grant(frame.gpu, lease, prefetch=chance.choice((0, 1 << 20, 1 << 40)), pace=pace)
                    if chance.random() < 0.5:
                        peer.grant(frame.gpu, lease, pace=chance.choice((0, 0.001)))
                    revoke_at = time.monotonic() + chance.random() / 20
            except TimeoutError:
                pass
            except OSError:
                return
            if revoke_at and time.monotonic() > revoke_at:
                revoke_at = 0.0
                try:
                    peer.revoke(self.gpus[0], lease, page_out=chance.choice((0, 1 << 20, 1 << 40)))
                    if chance.random() < 0.3:
                        peer.send(Kind.PAGE_OUT, 1 << 20, gpu=self.gpus[0])
                except OSError:
                    return


def compiler(flags: list[str], folder: Path) -> str | None:
    """A C compiler that can build and run a program with these sanitizers."""
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    for name in ("gcc", "clang"):
        if not shutil.which(name):
            continue
        built = subprocess.run([name, *flags, "-o", str(folder / "probe"), str(probe)], capture_output=True)
        if built.returncode == 0 and subprocess.run([str(folder / "probe")], capture_output=True).returncode == 0:
            return name
    return None


def sources(folder: Path, library: str) -> list[Path]:
    """The C sources of a library, as libraries.toml beside them names them."""
    named = tomllib.loads((folder / "libraries.toml").read_text())[library]["sources"]
    return sorted(path for pattern in named for path in folder.glob(pattern))


def libraries(cc: str, flags: list[str], folder: Path) -> None:
    """Build libgpushare.so, libcuda.so.1 and the stress program into the folder. Raises CalledProcessError."""
    common = [
        cc,
        "-std=gnu11",
        "-O1",
        "-g",
        "-fPIC",
        "-pthread",
        "-fno-omit-frame-pointer",
        "-fvisibility=hidden",
        *flags,
    ]
    shared = [*common, "-shared"]
    preload = sources(NATIVE, "libgpushare.so")
    driver, nvml = sources(SIMGPU, "libcuda.so.1"), sources(SIMGPU, "libnvidia-ml.so.1")

    def run(*command: object) -> None:
        subprocess.run([str(part) for part in command], check=True, cwd=NATIVE)

    run(
        *shared, "-DWITHOUT_DLSYM", "-I", NATIVE / "preload", "-Wl,-soname,libgpushare.so",
        "-o", folder / "libgpushare.so", *preload, "-ldl",
    )  # fmt: skip
    symbolic = ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
    # The simulated driver's locks are its own futexes, of which ThreadSanitizer knows nothing. What UBSan finds there
    # is printed; only those in the preload library, which runs in people's programs, end the run.
    plain = [part for part in shared if part not in ("-fsanitize=thread", "-fno-sanitize-recover=undefined")]
    run(*plain, "-I", SIMGPU, *symbolic, "-o", folder / "libcuda.so.1", *driver, "-ldl", "-lrt", "-lm")
    run(
        *plain, "-I", SIMGPU, "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-Bsymbolic", "-o", folder / "libnvidia-ml.so.1",
        *nvml, "-lrt",
    )  # fmt: skip
    run(
        *common, "-Wl,--no-as-needed", "-o", folder / "stress", HERE / "preload_stress.c",
        folder / "libgpushare.so", folder / "libcuda.so.1",
        folder / "libnvidia-ml.so.1", f"-Wl,-rpath,{folder}",
    )  # fmt: skip


def first_gpu(folder: Path, environment: dict[str, str]) -> bytes:
    """The UUID of the simulated GPU: asked by a program of its own, built without sanitizers."""
    source = folder / "uuid.c"
    source.write_text(
        "#include <stdio.h>\nint cuInit(unsigned); int cuDeviceGetUuid(void *, int);\n"
        "int main(void) { char u[16]; if (cuInit(0) || cuDeviceGetUuid(u, 0)) return 1;\n"
        "return fwrite(u, 16, 1, stdout) != 1; }\n"
    )
    command = ["gcc" if shutil.which("gcc") else "clang", "-o", folder / "uuid", source, folder / "libcuda.so.1"]
    flags = [flag for flag in environment["SANITIZER_FLAGS"].split() if flag.startswith("-fsanitize=address")]
    subprocess.run([str(part) for part in [*command, *flags, f"-Wl,-rpath,{folder}"]], check=True)
    return subprocess.run([str(folder / "uuid")], env=environment, check=True, capture_output=True).stdout


class Suspender(threading.Thread):
    """Suspends a process by the driver and brings it back, again and again, until it ends."""

    def __init__(self, program: subprocess.Popen[str], environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.times = 0
        self._program = program
        # the caller's driver is one without sanitizers, on the same state
        own = environment | {"LD_LIBRARY_PATH": str(gpushare_simgpu.folder())}
        command = [sys.executable, str(HERE / "checkpoint_caller.py")]
        self._caller = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _ask(self, *call: object) -> bool:
        assert self._caller.stdin is not None
        assert self._caller.stdout is not None
        self._caller.stdin.write(json.dumps(call) + "\n")
        self._caller.stdin.flush()
        return bool(json.loads(self._caller.stdout.readline())[0] == "CUDA_SUCCESS")

    def run(self) -> None:
        pid = self._program.pid
        while self._program.poll() is None:
            if self._ask("lock", pid, 200):
                self.times += self._ask("checkpoint", pid) and self._ask("restore", pid)
                self._ask("unlock", pid)
            time.sleep(0.02)
        self._caller.kill()
        self._caller.communicate()


def check(name: str, seconds: int) -> bool:
    """Build and run with one sanitizer. True: no finding, or none can be had here."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        flags = SANITIZERS[name]
        cc = compiler(flags[:1], folder)
        if cc is None:
            print(f"sanitize: skipped {name}: neither gcc nor clang can build and run programs with {flags[0]} here")
            return True
        libraries(cc, flags, folder)
        environment = os.environ | OPTIONS | {
            "SIMGPU_STATE": str(folder / "state"), "SIMGPU_MEMORY": "256MiB",
            "SIMGPU_CHECKPOINT_MANAGED": "refuse", "SANITIZER_FLAGS": " ".join(flags),
            "GPUSHARE_SOCKET": str(folder / "session.sock"), "GPUSHARE_LOG": "error",
        }  # fmt: skip
        gpu = first_gpu(folder, {k: v for k, v in environment.items() if k != "GPUSHARE_SOCKET"})
        clean = True
        for memory, engine in (("managed", "managed"), ("plain", "managed"), ("suspendable", "suspend")):
            agent = RestlessAgent(
                folder / "session.sock", [gpu], total=1 << 28, oversubscribed=memory == "managed",
                welcome_features=Feature.SUSPEND,
            )  # fmt: skip
            threading.Thread(target=agent.serve, daemon=True).start()
            program = [str(folder / "stress"), str(gpushare_simgpu.KERNELS), str(seconds)]
            stress = subprocess.Popen(
                program, env=environment | {"GPUSHARE_ENGINE": engine},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            suspender = Suspender(stress, environment) if memory == "plain" else None
            if suspender:
                suspender.start()
            said, errors = stress.communicate(timeout=seconds * 20 + 60)
            agent.stop()
            times = suspender.times if suspender else agent.suspended
            result = said.strip() or "no result"
            print(
                f"sanitize: {name} with {cc}, {memory} memory, suspended {times} times: {result}; "
                f"status {stress.returncode}"
            )
            if errors:
                print(errors[-20000:])
            clean = clean and stress.returncode == 0 and (engine == "managed" or times > 0)
        return clean


def main() -> int:
    """Command line; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=5, help="how long each stress run takes (default 5)")
    parser.add_argument("sanitizers", nargs="*", choices=[*SANITIZERS, []], help="default: all")
    options = parser.parse_args()
    results = [check(name, options.seconds) for name in options.sanitizers or SANITIZERS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
