"""``gpushare demo``: the command."""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from gpushare_spawner.demo.folder import DemoFolder
from gpushare_spawner.demo.gpus import own_gpus, simulated_state
from gpushare_spawner.demo.ports import free_ports, is_loopback, next_free, why_not
from gpushare_spawner.demo.processes import Processes
from gpushare_spawner.demo.short_idle_times import write_demo_templates
from gpushare_spawner.demo.stack import Stack
from gpushare_spawner.native import simulated_driver

ROOT = Path(__file__).resolve().parent.parent.parent
"""The checkout."""
PATIENCE = 90.0
"""Seconds until the hub must answer; a slow machine needs about 20."""


class Trouble(Exception):
    """Why the demo cannot go on, in a sentence for people."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--ip", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".demo", help="where the demo keeps its state (default: .demo)"
    )
    parser.add_argument("--simulate", action="store_true", help="simulated GPUs even where there are real ones")


def run(options: argparse.Namespace) -> int:
    """Run the demo until Ctrl-C, SIGTERM or the end of the terminal."""
    try:
        return demo(options)
    except Trouble as trouble:
        print(f"gpushare: {trouble}", file=sys.stderr)
        return 1


def demo(options: argparse.Namespace) -> int:
    """Start everything, wait, stop everything. Raises Trouble."""
    fragments, shipped = ROOT / "jupyterhub_config.d", ROOT / "templates"
    if not fragments.is_dir() or not shipped.is_dir():
        raise Trouble(f"the demo runs from a checkout of the repository; there is no {fragments}")
    folder = DemoFolder(options.dir)
    try:
        folder.make()
        running = folder.lock()
    except OSError as error:
        raise Trouble(f"the demo cannot write its state: {error.strerror} ({error.filename})") from None
    if running is not None:
        where = f" at {running['url']}" if "url" in running else ""
        who = f" (process {running['pid']})" if "pid" in running else ""
        raise Trouble(f"a demo is already running{where}{who}. Stop it with Ctrl-C in its terminal, or use its address")
    if reason := why_not(options.ip, options.port):
        # ports below 1024 are root's, and some numbers are no ports: from the usual one on
        below = options.port if 1024 <= options.port < 65535 else 7999
        advice = f" Choose another one: make demo PORT={next_free(options.ip, below)}" if "port" in reason else ""
        raise Trouble(f"{reason}.{advice}")

    models = [] if options.simulate else own_gpus()
    if not models:
        try:
            simulated_driver()
        except FileNotFoundError as missing:
            found = "" if options.simulate else "no NVIDIA GPU was found here, and "
            raise Trouble(f"{found}{missing}") from None
    say(shared_gpus(models, options.simulate))
    if not is_loopback(options.ip):
        say(f"listening on {options.ip}: whoever reaches this address can run programs here as you, without a password")
    hub_port, proxy_port, service_port = free_ports(3)
    stack = Stack(
        folder=folder,
        fragments=fragments,
        ip=options.ip,
        port=options.port,
        hub_port=hub_port,
        proxy_port=proxy_port,
        service_port=service_port,
        simulated=not models,
    )
    try:
        write_demo_templates(shipped, folder.templates)
        folder.say_where(stack.url)
        for log in (folder.agent_log, folder.hub_log):
            log.unlink(missing_ok=True)
        simulated_state(folder.root).unlink(missing_ok=True)
    except OSError as error:
        raise Trouble(f"the demo cannot write its state: {error.strerror} ({error.filename})") from None
    try:
        with Processes() as processes:
            return watch(stack, processes)
    finally:
        simulated_state(folder.root).unlink(missing_ok=True)


def shared_gpus(models: list[str], simulate: bool) -> str:
    """Which GPUs it is going to be."""
    if models:
        return f"sharing this machine's GPUs: {', '.join(models)}"
    reason = "as you asked" if simulate else "no NVIDIA GPU was found here"
    return f"sharing two simulated GPUs of 16 GiB ({reason}): what they compute is real, how fast is not"


def watch(stack: Stack, processes: Processes) -> int:
    """Start the agent and the hub, say when they answer, and wait for the end. Raises Trouble when one of them ends."""
    folder = stack.folder
    try:
        agent_command, agent_environment = stack.agent()
        hub_command, hub_environment = stack.hub()
    except FileNotFoundError as missing:
        raise Trouble(str(missing)) from None
    say(f"starting the agent and the hub; their logs are in {shown(folder.root)}")
    processes.start("agent", agent_command, folder.agent_log, agent_environment)
    stopped = wait_until(processes, folder, folder.control_socket.exists, "agent")
    if not stopped:
        processes.start("hub", hub_command, folder.hub_log, hub_environment)
        stopped = wait_until(processes, folder, lambda: answers(f"{stack.url}/hub/health"), "hub")
    if not stopped:
        say_ready(stack)
        while not processes.wait(3600):
            check(processes, folder)
    say("stopping the notebook servers, the hub and the agent")
    # the hub first: it stops its notebook servers, its service and its proxy itself
    for name, patience in (("hub", 30.0), ("agent", 10.0)):
        if processes.has(name):
            processes.stop(name, patience)
    say(f"the demo has ended; its files stay in {shown(folder.root)}")
    return 0


def wait_until(processes: Processes, folder: DemoFolder, ready: Callable[[], bool], name: str) -> bool:
    """Wait until `ready()` is true: False. True if somebody wants to stop first. Raises Trouble after a while."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if processes.wait(0.2):
            return True
        check(processes, folder)
        if time.monotonic() > deadline:
            raise Trouble(f"the {name} does not answer after {PATIENCE:.0f} s; see {shown(folder.root)}/{name}.log")
    return False


def check(processes: Processes, folder: DemoFolder) -> None:
    """Raises Trouble, with the last lines of its log, if a process has ended by itself."""
    name = processes.ended()
    if name is None:
        return
    log = folder.root / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines()[-12:]
    raise Trouble(f"the {name} has ended by itself; the last lines of {shown(log)}:\n  " + "\n  ".join(lines))


def answers(url: str) -> bool:
    """Whether the hub is there."""
    # never through a proxy of the environment: this is our own machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def say_ready(stack: Stack) -> None:
    """What to do now."""
    print(
        f"""
    JupyterHub:  {stack.url}

    Log in with any name; there is no password. The name admin is the administrator's.
    For the whole story use two browser windows, the second one private, and log in
    as two users; each takes "0.25 GPU" and runs gpu-sharing.ipynb.
    Idle shares shrink after 1 minute here, and are released after 2.

    Ctrl-C ends everything.
""",
        flush=True,
    )


def say(text: str) -> None:
    """A line for the one who started it; a closed terminal is no reason to fall over."""
    try:
        print(f"gpushare: {text}", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def shown(path: Path) -> str:
    """The path as short as it can be said here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
