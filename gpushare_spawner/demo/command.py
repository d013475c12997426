"""``gpushare demo``: the command, the files in users' homes, and templates with short idle times.

With these idle times the demo shows all idle actions within five minutes. Processes and folders are in machine.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from gpushare_spawner.demo.machine import (
    PROGRAMS,
    DemoFolder,
    Processes,
    Stack,
    free_ports,
    is_loopback,
    next_free,
    own_gpus,
    simulated_state,
    why_not,
)
from gpushare_spawner.model.quantity import parse_seconds
from gpushare_spawner.native import simulated_driver
from gpushare_spawner.wording.amounts import duration, missing_package

NOTEBOOK = Path(__file__).with_name("gpu-sharing.ipynb")
_PROFILE_SAYS = "# The demo writes this file anew as long as it has these two lines only."
_OWN_PROFILE = re.compile(
    r'(?:# The demo writes this file anew as long as it has these two lines only\.\n)?export PATH=[^\n]*:"?\$PATH"\n'
)
"""A .profile that this version or an older version of the demo has written."""


def prepare_home(spawner: Any) -> None:
    """Write the demo's files that are missing from the home. A hook for `Spawner.pre_spawn_hook`."""
    home = Path(spawner.home_dir_template.format(username=spawner.user.name))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    notebook = home / NOTEBOOK.name
    if not notebook.exists():
        shutil.copyfile(NOTEBOOK, notebook)
    lab = home / ".jupyter" / "labconfig" / "page_config.json"
    if not lab.exists():
        # JupyterLab asks each new user for permission to fetch news, and in the demo every user is new
        lab.parent.mkdir(parents=True, exist_ok=True)
        lab.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    profile = home / ".profile"
    if not profile.exists() or _OWN_PROFILE.fullmatch(profile.read_text(errors="replace")):
        # JupyterLab's terminals are login shells, and Debian's /etc/profile resets PATH
        profile.write_text(f'{_PROFILE_SAYS}\nexport PATH={shlex.quote(os.environ[PROGRAMS])}:"$PATH"\n')


ALL_WORK = {"min_use": 0}
"""Setting with which all GPU work counts as use, because the demo's cells are small."""
SHORT = {"downgrade_after": "1m", "release_after": "2m", "stop_after": "30m", "warn_before": "20s"}
DOWNGRADE_TO = 0.10


def write_demo_templates(shipped: Path, into: Path) -> None:
    """Write each template in `shipped` to the folder `into`, with short idle times. Raises OSError.

    Other templates in `into` are removed. An invalid template is copied unchanged, so that the hub reports it.
    """
    into.mkdir(parents=True, exist_ok=True)
    for stale in into.glob("*.y*ml"):
        stale.unlink()
    for path in sorted(shipped.glob("*.y*ml")):
        text = path.read_text()
        try:
            template = yaml.safe_load(text)
        except yaml.YAMLError:
            template = None
        if isinstance(template, dict):
            text = yaml.safe_dump(shortened(template), sort_keys=False, allow_unicode=True)
        (into / path.name).write_text(text)


def shortened(template: dict[str, Any]) -> dict[str, Any]:
    """Return the template with short times for its idle actions. All GPU work counts as use.

    A template with more than 0.10 GPU that releases its share has a downgrade too, so that the demo shows each action.
    """
    idle = template.get("idle")
    if not isinstance(idle, dict):
        return template
    if "release_after" in idle and template.get("gpu", {}).get("fraction", 1.0) > DOWNGRADE_TO:
        idle = {"downgrade_after": "", "downgrade_to": DOWNGRADE_TO, **idle}
    return {
        **template,
        "idle": {**idle, **ALL_WORK, **{step: SHORT[step] for step in SHORT if step in idle or step == "warn_before"}},
    }


ROOT = Path(__file__).resolve().parent.parent.parent
"""The checkout."""
PATIENCE = 90.0
"""Seconds within which the agent and the hub must answer; a slow machine needs about 20 s."""


_OF_NOTEBOOKS = ("jupyterlab", "numpy", "cuda")
"""Packages of the extra `demo` that the demo's notebook servers need; the hub starts without them."""


class DemoFailed(Exception):
    """The demo cannot start or continue; the message has the reason."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--ip", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=ROOT / ".demo", help="folder for the demo's state (default: .demo)")
    parser.add_argument("--simulate", action="store_true", help="use simulated GPUs even if there are real ones")


def run(options: argparse.Namespace) -> int:
    """Run the demo until Ctrl-C, SIGTERM or the end of the terminal."""
    try:
        return demo(options)
    except DemoFailed as failure:
        print(f"gpushare: {failure}", file=sys.stderr)
        return 1


def demo(options: argparse.Namespace) -> int:
    """Start everything, wait, stop everything. Raises DemoFailed."""
    config_files, shipped = ROOT / "jupyterhub_config.d", ROOT / "templates"
    if not config_files.is_dir() or not shipped.is_dir():
        raise DemoFailed(f"the demo runs from a checkout of the repository; there is no {config_files}")
    try:
        for package in _OF_NOTEBOOKS:
            importlib.import_module(package)
    except ImportError as error:
        raise DemoFailed(missing_package("The demo", error)) from None
    folder = DemoFolder(options.dir)
    with _writing_state():
        folder.make()
        running = folder.lock()
    if running is not None:
        where = f" at {running['url']}" if "url" in running else ""
        process = f" (process {running['pid']})" if "pid" in running else ""
        raise DemoFailed(
            f"a demo is already running{where}{process}. Open its address, or stop it with Ctrl-C in its terminal."
        )
    if reason := why_not(options.ip, options.port):
        # Only root can use ports below 1024, and ports above 65535 do not exist: propose a port from 8000 on.
        below = options.port if 1024 <= options.port < 65535 else 7999
        advice = f" Choose another port: make demo PORT={next_free(options.ip, below)}" if "port" in reason else ""
        raise DemoFailed(f"{reason}.{advice}")

    models = [] if options.simulate else own_gpus()
    if not models:
        try:
            simulated_driver()
        except FileNotFoundError as missing:
            cause = "" if options.simulate else "no NVIDIA GPU was found, and "
            raise DemoFailed(f"{cause}{missing}") from None
    say(shared_gpus(models, options.simulate))
    if not is_loopback(options.ip):
        say(f"warning: anyone who reaches {options.ip} and knows the password can run programs as you here")
    # every account on this machine can reach the port, and a login can run programs as the demo's owner
    password = secrets.token_urlsafe(9)
    stack = Stack(
        folder, config_files, options.ip, options.port, free_ports(3), simulated=not models, password=password
    )
    with _writing_state():
        write_demo_templates(shipped, folder.templates)
        if not models:
            folder.write_nvidia_smi()
        folder.write_address(stack.url)
        for log in (folder.agent_log, folder.hub_log):
            log.unlink(missing_ok=True)
        simulated_state(folder.root).unlink(missing_ok=True)
    try:
        with Processes() as processes:
            return watch(stack, processes)
    finally:
        simulated_state(folder.root).unlink(missing_ok=True)


def shared_gpus(models: list[str], simulate: bool) -> str:
    """Return a sentence on the GPUs that the demo shares."""
    if models:
        return f"sharing this machine's GPUs: {', '.join(models)}"
    reason = "with --simulate" if simulate else "no NVIDIA GPU was found"
    return f"sharing two simulated GPUs of 16 GiB ({reason}); results are computed, times are simulated"


@contextlib.contextmanager
def _writing_state() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DemoFailed(f"the demo cannot write its state: {error.strerror} ({error.filename})") from None


def watch(stack: Stack, processes: Processes) -> int:
    """Start agent and hub, print the address, and wait for the end. Raises DemoFailed if one of them ends."""
    folder = stack.folder
    say(f"starting agent and hub; their logs are in {shown(folder.root)}")
    processes.start("agent", *stack.agent(), folder.agent_log)
    stopped = wait_until(processes, folder, folder.control_socket.exists, "agent")
    if not stopped:
        processes.start("hub", *stack.hub(), folder.hub_log)
        stopped = wait_until(processes, folder, lambda: answers(f"{stack.url}/hub/health"), "hub")
    if not stopped:
        say_ready(stack)
        while not processes.wait(3600):
            check(processes, folder)
    say("stopping notebook servers, hub and agent")
    # the hub first: it stops its notebook servers, its service and its proxy itself
    for name, patience in (("hub", 30.0), ("agent", 10.0)):
        processes.stop(name, patience)
    say(f"the demo has ended; its files stay in {shown(folder.root)}")
    return 0


def wait_until(processes: Processes, folder: DemoFolder, ready: Callable[[], bool], name: str) -> bool:
    """Wait until `ready()` is true. Raises DemoFailed after PATIENCE seconds.

    Returns True if the demo must stop before `ready()` is true.
    """
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if processes.wait(0.2):
            return True
        check(processes, folder)
        if time.monotonic() > deadline:
            raise DemoFailed(f"no answer from the {name} after {PATIENCE:.0f} s; see {shown(folder.root)}/{name}.log")
    return False


def check(processes: Processes, folder: DemoFolder) -> None:
    """Raise DemoFailed if a process has ended by itself, with the last lines of its log."""
    name = processes.ended()
    if name is None:
        return
    log = folder.root / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines()[-12:]
    raise DemoFailed(f"the {name} has ended by itself; the last lines of {shown(log)}:\n  " + "\n  ".join(lines))


def answers(url: str) -> bool:
    """Return whether the hub answers."""
    # ignore proxies from the environment, because the hub is on this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def say_ready(stack: Stack) -> None:
    """Print the hub's address and the next steps."""
    downgrade, release = (duration(parse_seconds(SHORT[name])) for name in ("downgrade_after", "release_after"))
    print(
        f"""
    JupyterHub:  {stack.url}

    Password:    {stack.password}

    Log in with any name and this password. The user admin is an administrator.
    To see sharing, open two browser windows, the second one private. Log in as
    two users, start "0.25 GPU" in each, and run gpu-sharing.ipynb in both.
    In the demo, a share without GPU work is downgraded after {downgrade} and released after {release};
    the time counts from the last GPU work. Before the first GPU work, 5 minutes pass until the downgrade.

    Press Ctrl-C to stop the demo.
""",
        flush=True,
    )


def say(text: str) -> None:
    """Print a line. A closed terminal is not an error."""
    try:
        print(f"gpushare: {text}", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def shown(path: Path) -> str:
    """Return the path, relative to the working directory if it is below that."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
