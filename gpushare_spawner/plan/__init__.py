"""``gpushare plan``: how many GPUs a hub needs, from what its admin has before the installation. The command.

`sources` reads, `cluster` runs the product's parts in virtual time, `answers` searches, `page` shows the result.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

# The other modules are imported by `run`: they take a second, which `gpushare plan --help` must not.
if TYPE_CHECKING:
    from gpushare_spawner.plan.answers import Answers, Goal
    from gpushare_spawner.plan.servers import Trace

GIB = 2**30


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Say how many GPUs this hub needs: with a whole GPU for each notebook, with static parts, with shares, and "
        "with shares and idle actions. The hub's queue, placement, quotas, idle policy and arbiter run in virtual time "
        "on the servers that were recorded. Nothing is changed. The exit status is 1 if nothing could be read."
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="JupyterHub's logs (also .gz), JupyterHub's database or that of `gpushare service` (a SQLite file or an "
        "SQLAlchemy URL), the service's log, or CSV: user,server,start,end,gpus,memory_gib for servers (also: group, "
        "template), user,start,end for GPU work (also: utilization). Times are ISO or seconds since the epoch",
    )
    parser.add_argument(
        "--templates",
        type=Path,
        metavar="DIR",
        help="the folder of compute templates; their limits for each user apply (default: the shipped templates, "
        "without limits)",
    )
    parser.add_argument("--quotas", type=Path, metavar="FILE", help="the quotas file (default: that in --templates)")
    parser.add_argument(
        "--gpus",
        type=_gpus,
        default=(None, 80 * GIB),
        metavar="NUMBERxMEMORY",
        help="the GPUs that there are, like 24x80GiB (default: as many as whole GPUs need, with 80 GiB)",
    )
    parser.add_argument(
        "--wait-p95",
        default="1m",
        metavar="TIME",
        help="95 %% of the spawns wait at most so long (default: %(default)s)",
    )
    parser.add_argument(
        "--start-delay",
        default="2s",
        metavar="TIME",
        help="GPU work starts at most so late in 95 %% of the cases (default: %(default)s)",
    )
    parser.add_argument(
        "--prometheus", metavar="URL", help="also read DCGM's metrics by pod, like http://prometheus:9090"
    )
    parser.add_argument(
        "--time-zone",
        type=_zone,
        metavar="ZONE",
        help="of times without one, like Europe/Berlin (default: this machine's)",
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same answers (default: 1)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with plots: one file, dark and light"
    )


def _gpus(text: str) -> tuple[int | None, int]:
    match = re.fullmatch(r"(\d+)(?:\s*[xX*]\s*(\d+(?:\.\d+)?)\s*(?:GiB|Gi|GB|G)?)?", text.strip())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs with their memory; write it like 24x80GiB")
    return int(match[1]), int(float(match[2] or 80) * GIB)


def _zone(text: str) -> ZoneInfo:
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time zone; write one like Europe/Berlin") from None


def run(options: argparse.Namespace) -> int:
    """Read the sources, and print the answers; returns the exit status."""
    from rich.console import Console

    from gpushare_spawner.plan import answers, page

    try:
        goal = _goal(options)
        trace = _read(options, goal)
        for problem in trace.problems:
            print(f"gpushare plan: {problem}", file=sys.stderr)
        if trace.problem_count > len(trace.problems):
            print(f"gpushare plan: {trace.problem_count - len(trace.problems)} more problems", file=sys.stderr)
        with Console(stderr=True).status("reading") as status:
            # only a terminal shows it
            found = answers.answer(trace, goal, status.update)
    except ValueError as error:
        print(f"gpushare plan: {error}", file=sys.stderr)
        return 1
    if options.html is not None:
        try:
            options.html.write_text(page.html(found, trace, goal), encoding="utf-8")
        except OSError as error:
            print(f"gpushare plan: cannot write {options.html}: {error.strerror or error}", file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps(_as_json(found, trace, goal)))
    else:
        page.show(found, trace, goal)
    return 0


def _goal(options: argparse.Namespace) -> Goal:
    from gpushare_spawner.model.quantity import parse_seconds
    from gpushare_spawner.plan.answers import Goal
    from gpushare_spawner.shipped import shipped
    from gpushare_spawner.templates.folder import PolicyFolder, described, read_file
    from gpushare_spawner.templates.parser import QUOTAS

    folder = options.templates if options.templates is not None else shipped("templates")
    policy = PolicyFolder(folder).load()
    for problem in described(policy.problems):
        print(f"gpushare plan: {problem}", file=sys.stderr)
    templates = tuple(template for template in policy.templates if template.gpu is not None)
    if not templates:
        raise ValueError(f"{folder} has no valid template with a GPU")
    quotas = policy.quotas
    if options.quotas is not None:
        parsed = read_file(QUOTAS, options.quotas)
        for problem in described(parsed.problems):
            print(f"gpushare plan: {problem}", file=sys.stderr)
        if parsed.content is None:
            raise ValueError(f"{options.quotas} has no valid quotas")
        quotas = parsed.content
    gpus, memory = options.gpus
    return Goal(
        templates,
        quotas,
        gpus,
        memory,
        parse_seconds(options.wait_p95),
        parse_seconds(options.start_delay),
        seed=options.seed,
        limits=options.templates is not None,
    )


def _read(options: argparse.Namespace, goal: Goal) -> Trace:
    from gpushare_spawner.plan.sources import Reading

    shares = {template.name: template.share.fraction for template in goal.templates if template.share is not None}
    reading = Reading(options.time_zone, shares)
    reading.idle_times(
        {template.name: after for template in goal.templates if (after := template.idle.first_after) is not None}
    )
    for source in options.sources:
        reading.read(source)
    if options.prometheus:
        reading.prometheus(options.prometheus)
    return reading.finish()


def _as_json(found: Answers, trace: Trace, goal: Goal) -> dict[str, object]:
    from gpushare_spawner.plan.answers import STATIC_PARTS

    return {
        **asdict(found),
        "ways": {
            answer.way: {key: value for key, value in asdict(answer).items() if key != "way"} for answer in found.ways
        },
        "goal": {
            "wait_p95": goal.wait_p95,
            "start_delay": goal.start_delay,
            "gpu_memory_bytes": goal.memory,
            "static_parts": STATIC_PARTS,
            "templates": [template.name for template in goal.templates],
        },
        "seed": goal.seed,
        "problems": trace.problems,
        "problem_count": trace.problem_count,
    }
