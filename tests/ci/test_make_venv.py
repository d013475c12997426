"""What `make demo` says where something is missing: one plain sentence, no traceback."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pip
import pytest

from tests.ci.conftest import SCRIPTS, Index

pytestmark = pytest.mark.usefixtures("no_settings")
ROOT = SCRIPTS.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What of a checkout make_venv.py looks at."""
    checkout = tmp_path / "checkout"
    shutil.copytree(SCRIPTS, checkout / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    native = checkout / "gpushare_spawner" / "native"
    native.mkdir(parents=True)
    for name in ("build.py", "hatch_build.py"):
        shutil.copy(ROOT / "gpushare_spawner" / "native" / name, native)
    return checkout


def make_venv(checkout: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_RETRIES": "1", "PIP_TIMEOUT": "5", **settings}
    return subprocess.run(
        [sys.executable, str(checkout / ".ci" / "make_venv.py"), "demo"],
        env=environment, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done
    assert done.stderr.startswith("gpushare: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr


@pytest.mark.slow
def test_no_network(checkout: Path) -> None:
    said = one_sentence(make_venv(checkout, PIP_INDEX_URL="http://127.0.0.1:1/simple"))
    assert "the package index cannot be reached" in said


def test_no_network_and_no_ensurepip(checkout: Path, tmp_path: Path) -> None:
    # Debian's python3 has neither pip nor ensurepip
    (tmp_path / "debian").mkdir()
    (tmp_path / "debian" / "ensurepip.py").write_text("raise ModuleNotFoundError(\"No module named 'ensurepip'\")")
    said = one_sentence(
        make_venv(checkout, PIP_INDEX_URL="http://127.0.0.1:1/simple", PYTHONPATH=str(tmp_path / "debian"))
    )
    assert "the package index cannot be reached" in said
    assert "127.0.0.1:1" in said


def test_no_compiler_for_this_machine(checkout: Path, index: Index, tmp_path: Path) -> None:
    # ensurepip as others than Debian have it: it installs the pip that runs here
    (tmp_path / "ensurepip.py").write_text(
        "import shutil, sysconfig\n"
        f"shutil.copytree({pip.__path__[0]!r}, sysconfig.get_path('purelib') + '/pip', dirs_exist_ok=True)\n"
    )
    # an index that has never heard of ziglang
    said = one_sentence(make_venv(checkout, PIP_INDEX_URL=index.url, PYTHONPATH=str(tmp_path)))
    assert "there is no C compiler for this machine" in said
    assert "ziglang" in said


def test_a_checkout_that_cannot_be_written(checkout: Path) -> None:
    (checkout / ".venv").write_text("a file where the folder should be")
    said = one_sentence(make_venv(checkout))
    assert ".venv" in said


def test_python_is_too_old(checkout: Path) -> None:
    script = checkout / ".ci" / "make_venv.py"
    old = f"import sys; sys.version_info = (3, 9, 2); sys.version = '3.9.2 (old)'; exec(open({str(script)!r}).read())"
    done = subprocess.run(
        [sys.executable, "-c", old], env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=30
    )
    assert "this needs Python 3.11 or later" in one_sentence(done)
    assert "3.9.2" in done.stderr


def test_it_parses_in_an_old_python() -> None:
    import ast

    # up to the check of the version nothing may need a newer grammar, and the whole file is read before any of it runs
    ast.parse((SCRIPTS / "make_venv.py").read_text(), feature_version=(3, 7))


COUNTED = "import make_venv; make_venv.counted(['sleep', '2.5'])"


def test_a_terminal_shows_the_seconds_of_a_long_step() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", COUNTED], cwd=SCRIPTS, stdout=theirs, check=True, timeout=30)
    os.close(theirs)
    shown = os.read(ours, 1000).decode()
    os.close(ours)
    assert "\r  1 s" in shown
    assert "\r  2 s" in shown
    assert shown.endswith("\r\033[K"), "the count is gone at the end"


def test_a_log_gets_no_count() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED], cwd=SCRIPTS, capture_output=True, check=True, timeout=30)
    assert done.stdout == b""


def test_each_step_is_shown_with_its_seconds_where_output_is_no_terminal() -> None:
    program = "from make_venv import finish, say; say('one'); say('two'); finish(); finish()"
    folder = Path(__file__).resolve().parents[2] / ".ci"
    shown = subprocess.check_output([sys.executable, "-c", program], cwd=folder, text=True)
    assert shown.splitlines() == ["gpushare: one ...", "  0 s", "gpushare: two ...", "  0 s"]
