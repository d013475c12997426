"""The package without its extras, and with each of them alone: every subcommand and every module.

In the quick tests an import hook hides the distributions that an installation without extras and one for clusters lack,
computed from the metadata of what is installed. The slow test makes an environment for each extra.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpushare_spawner.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("", "kubernetes", "systemd", "postgresql", "demo")
"""The extras for users; empty: the base dependencies alone."""
HOOK = Path(__file__).with_name("hidden_modules.py")

NEED = {
    "kubernetes": (
        "gpushare_spawner.agent.kubernetes.",
        "gpushare_spawner.service.kubernetes.",
        "gpushare_spawner.spawner.kubernetes.",
    ),
    "systemd": ("gpushare_spawner.spawner.local.systemd",),
    "demo": ("gpushare_spawner.notebook.extension",),
}
"""Extra -> prefixes of the modules that may need it."""
ELSEWHERE = (
    "gpushare_spawner.spawner.local.tljh",  # in the hub of The Littlest JupyterHub
    "gpushare_spawner.native.hatch_build",  # while the package is built
    "gpushare_spawner.demo.jupyterhub_config",  # the hub runs it
)
INVOCATIONS: dict[str, list[list[str]]] = {
    "agent": [["--kubernetes", "--namespace", "hub"], ["--kubernetes", "observe", "--namespace", "hub"]],
    "service": [
        ["--namespace", "hub", "--history", "off"],
        ["--history", "postgresql+psycopg://nobody@127.0.0.1:1/none"],
    ],
    "templates": [["check", str(ROOT / "templates")], ["schema"]],
    "status": [[], ["--json"]],
    "keep": [["1h"]],
    "release": [[]],
    "smi": [[]],
    "doctor": [[], ["--json"], ["--gpu"]],
    "config-path": [[]],
}
"""Subcommand -> arguments with which it ends by itself on a machine that has a kubelet's folder and nothing else."""
SENTENCE = re.compile(
    r"needs the Python package (\S+), which is not installed\. Install it with: pip install ('[^']+')"
)
LACKING = {
    "agent --kubernetes --namespace hub": "kubernetes",
    "agent --kubernetes observe --namespace hub": "kubernetes",
    "service --namespace hub --history off": "kubernetes",
    "service --history postgresql+psycopg://nobody@127.0.0.1:1/none": "postgresql",
    "doctor": "kubernetes",
    "doctor --json": "kubernetes",
    "doctor --gpu": "kubernetes",
}
"""Invocation -> the extra whose absence it reports; the others need none."""
PROGRAM = """
import contextlib, importlib, io, json, logging, pkgutil, sys, traceback
import gpushare_spawner
from gpushare_spawner.cli import main

modules, outcomes = {}, {}
for module in pkgutil.walk_packages(gpushare_spawner.__path__, "gpushare_spawner.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except Exception as error:
        modules[module.name] = repr(error)
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    logging.root.handlers.clear()  # a command's basicConfig writes to its own standard error
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc(file=said)
            status = 1
    outcomes[" ".join(arguments)] = [status, said.getvalue()]
print(json.dumps([modules, outcomes]))
"""
"""Imports every module and runs each invocation. All in one process: to start Python for each takes a minute."""


def installed_with(extra: str) -> set[str]:
    """Return the names of the distributions that an installation with this extra has."""
    chosen: dict[str, set[str]] = {}
    left = [("gpushare-spawner", {extra} if extra else set[str]())]
    while left:
        name, extras = left.pop()
        if name in chosen and extras <= chosen[name]:
            continue
        chosen[name] = chosen.get(name, set()) | extras
        try:
            requirements = importlib.metadata.distribution(name).requires or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": one}) for one in ("", *chosen[name])):
                left.append((canonicalize_name(requirement.name), set(requirement.extras)))
    return set(chosen)


def hidden_modules(extra: str) -> list[str]:
    """Return the top-level modules that an installation with this extra lacks."""
    present = installed_with(extra)
    return sorted(
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not any(canonicalize_name(name) in present for name in distributions)
    )


def variables(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a process that has a hub which does not answer, and nothing else of this machine."""
    hub = {"JUPYTERHUB_API_TOKEN": "secret", "JUPYTERHUB_API_URL": "http://127.0.0.1:1/hub/api"}
    return {"PATH": os.defpath, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), **hub}


def environment(tmp_path: Path, extra: str) -> dict[str, str]:
    """Return the variables of a process that sees the packages of this extra only, and nothing of this machine."""
    hook = tmp_path / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(
        HOOK.read_text().replace("MODULES = ()", f"MODULES = {hidden_modules(extra)}")
    )
    return {**variables(tmp_path), "PYTHONPATH": str(hook)}


def gpushare(environment: dict[str, str], python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "gpushare_spawner.cli", *arguments]
    return subprocess.run(command, env=environment, cwd=environment["HOME"], capture_output=True, text=True)


@pytest.mark.parametrize("extra", ["", "kubernetes"])
def test_each_module_and_each_subcommand_works_or_names_the_extra_that_is_missing(tmp_path: Path, extra: str) -> None:
    check(environment(tmp_path, extra), sys.executable, tmp_path, extra)


def check(environment: dict[str, str], python: str, tmp_path: Path, extra: str) -> None:
    (tmp_path / "var/lib/kubelet").mkdir(parents=True)
    root = ["--root", str(tmp_path)]
    given = {" ".join([command, *one]): [command, *one] for command, many in INVOCATIONS.items() for one in many}
    if extra == "postgresql":
        # it would wait for the database
        del given["service --history postgresql+psycopg://nobody@127.0.0.1:1/none"]
    runs = [*given.values(), *([command, "--help"] for command in COMMANDS)]
    own = [[*words, *root] if words[0] == "doctor" and "--help" not in words else words for words in runs]
    done = subprocess.run(
        [python, "-c", PROGRAM, json.dumps(own)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    modules, outcomes = json.loads(done.stdout)

    allowed = [prefix for other, prefixes in NEED.items() if other != extra for prefix in prefixes]
    assert not {name: error for name, error in modules.items() if not name.startswith((*ELSEWHERE, *allowed))}
    # the hook hides what it should
    assert extra == "kubernetes" or "gpushare_spawner.agent.kubernetes.grpc_socket" in modules

    for words, outcome in zip(runs, outcomes.items(), strict=True):
        invocation, (status, said) = " ".join(words), outcome[1]
        assert "Traceback" not in said, f"{invocation}: {said}"
        assert said.strip(), invocation
        if words[1:] == ["--help"]:
            assert status == 0, f"{invocation}: {said}"
            assert said.startswith(f"usage: gpushare {words[0]}")
        lacking = LACKING.get(invocation)
        expected = set() if lacking in (None, extra) else {f"'gpushare-spawner[{lacking}]'"}
        assert {command for _, command in SENTENCE.findall(said)} == expected, f"{invocation}: {said}"


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra != "demo"])
def test_the_demo_without_its_packages_names_them(tmp_path: Path, extra: str) -> None:
    done = gpushare(environment(tmp_path, extra), sys.executable, "demo", "--dir", str(tmp_path / "demo"))
    assert done.returncode == 1
    assert done.stderr == (
        "gpushare: The demo needs the Python package jupyterlab, which is not installed. "
        "Install it with: pip install 'gpushare-spawner[demo]'\n"
    )


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("gpushare_spawner.spawner.kubernetes.spawner", "kubernetes"),
        ("gpushare_spawner.spawner.local.systemd", "systemd"),
    ],
)
def test_a_spawner_without_its_packages_names_them(tmp_path: Path, module: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env=environment(tmp_path, ""),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert SENTENCE.findall(done.stderr.splitlines()[-1])[0][1] == f"'gpushare-spawner[{extra}]'"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_real_environment_with_this_extra_alone(tmp_path: Path, extra: str) -> None:
    folder = tmp_path / "venv"
    python = str(make_environment(folder, extra))
    check(variables(tmp_path), python, tmp_path, extra)


def make_environment(folder: Path, extra: str) -> Path:
    """Make a virtual environment of links to the distributions that are installed here; return its Python.

    pip would install the same files, in half a minute for each extra.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    site = next((folder / "lib").glob("python*/site-packages"))
    for name in installed_with(extra) - {"gpushare-spawner"}:
        link(name, site)
    (site / "checkout.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def link(name: str, site: Path) -> None:
    """Link the modules and the metadata of a distribution; one for other platforms is not there."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return
    for file in distribution.files or ():
        # not scripts and shared data, which stand outside
        if ".." not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.path.abspath(str(distribution.locate_file(file))))
