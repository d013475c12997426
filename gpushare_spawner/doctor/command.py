"""``gpushare doctor``: the command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gpushare_spawner import __version__
from gpushare_spawner.clients.agent import default_control_socket
from gpushare_spawner.doctor import agent, cluster, driver, files, gpu, library, system
from gpushare_spawner.doctor.finding import Finding, Level, Machine
from gpushare_spawner.doctor.gpu_programs import PROGRAMS
from gpushare_spawner.model.quantity import parse_bytes
from gpushare_spawner.templates.folder import DEFAULT_FOLDER, default_folder
from gpushare_spawner.wording.amounts import plural, printable

_STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}

Groups = dict[str, list[Finding]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Check this machine: driver, kernel, containers, library, agent, config files and templates. Run it as root: "
        "the agent answers only its own user and root. The doctor changes nothing. The exit status is 1 if there is a "
        "problem."
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="the root folder of the machine to check, where a container has it mounted elsewhere. Every default path "
        "is below it (default: %(default)s)",
    )
    parser.add_argument(
        "--control-socket",
        type=Path,
        metavar="PATH",
        help="the agent's control socket (default: $GPUSHARE_CONTROL, else /run/gpushare/control.sock)",
    )
    parser.add_argument(
        "--templates-dir",
        type=Path,
        metavar="DIR",
        help=f"the folder of compute templates (default: $GPUSHARE_TEMPLATES, else {DEFAULT_FOLDER})",
    )
    parser.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"a folder of the hub's config files; may be repeated (default: {', '.join(map(str, files.FOLDERS))})",
    )
    parser.add_argument(
        "--gpu",
        nargs="*",
        metavar="PROGRAM",
        type=_program,
        help="also run programs on the first GPU, which takes minutes; default: those that are "
        f"installed of: {'; '.join(PROGRAMS)}",
    )
    parser.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        default=gpu.DEFAULT_SIZE,
        metavar="SIZE",
        help="GPU memory that each program of --gpu fills; it must be less than a quarter of the free memory "
        "(default: 1Gi)",
    )


def run(options: argparse.Namespace) -> int:
    """Check everything and print the findings. Return 1 if there is a problem, else 0."""
    groups = examine(options)
    if options.json:
        print(json.dumps(as_json(groups), indent=2))
    else:
        show(groups, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    return int(_count(groups, Level.PROBLEM) > 0)


def examine(options: argparse.Namespace) -> Groups:
    """Return all findings by group, in reading order."""
    machine = Machine(options.root)
    control_socket = options.control_socket or machine.path(default_control_socket())
    config_dirs = options.config_dir or [machine.path(folder) for folder in files.FOLDERS]
    templates_dir = options.templates_dir or machine.path(default_folder())
    on_driver, gpus = driver.check(machine)
    whole = tuple(device for device in gpus if device.mig is None)
    on_agent, report = agent.check(control_socket, gpus)
    groups = {
        "driver": on_driver,
        "kernel": system.check(machine),
        "containers": system.check_containers(whole, machine),
        "library": library.check(),
        "agent": on_agent,
        "claims": cluster.check_claims(report, machine),
        "cluster": cluster.check_gpus(machine),
        "config files": files.check_config(config_dirs, machine),
        "templates": files.check_templates(templates_dir, gpus, machine, cluster.reported_gpus(machine)),
    }
    if options.gpu is not None:
        groups["GPU programs"] = gpu.check(whole, options.gpu_memory, options.gpu)
    return groups


def as_json(groups: Mapping[str, list[Finding]]) -> dict[str, object]:
    """Return the findings as data for programs: version, whether all is well, and each finding with its group."""
    findings = [{"group": group, **asdict(finding)} for group, results in groups.items() for finding in results]
    return {"version": __version__, "ok": not _count(groups, Level.PROBLEM), "findings": findings}


def show(groups: Mapping[str, list[Finding]], out: Console) -> None:
    """Print the findings for people, by group, each with its remedy."""
    for group, findings in groups.items():
        out.print(Text(group, style="bold"))
        for finding in findings:
            line = Text("  ").append(f"{finding.level:8}", style=_STYLES[finding.level])
            out.print(line.append(f" {printable(finding.where)}: {printable(finding.what)}"), soft_wrap=True)
            if finding.remedy:
                out.print(Text(f"           -> {printable(finding.remedy)}"), soft_wrap=True)
    problems, notes = (_count(groups, level) for level in (Level.PROBLEM, Level.NOTE))
    out.print(f"{plural(problems, 'problem')}, {plural(notes, 'note')}.")


def _program(name: str) -> str:
    if name not in PROGRAMS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(map(repr, PROGRAMS))}")
    return name


def _count(groups: Mapping[str, list[Finding]], level: Level) -> int:
    return sum(finding.level is level for findings in groups.values() for finding in findings)
