"""``gpushare templates``: check template files before a hub reads them, and print their JSON Schema."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpushare_spawner.model.quantity import format_bytes, format_seconds, resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.templates.folder import DEFAULT_FOLDER, TemplateFolder, Templates, default_folder
from gpushare_spawner.templates.schema import template_schema

LARGEST_GPU = 80 * 2**30
"""Bytes; what the shipped templates are made for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands' options."""
    parts = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = parts.add_parser(
        "check",
        help="say whether the templates of a folder are right",
        description="Reads every *.yaml and *.yml file of the folder. Exit status 1 if anything is wrong.",
    )
    check.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        help=f"default: the hub's, $GPUSHARE_TEMPLATES or {DEFAULT_FOLDER}",
    )
    parts.add_parser(
        "schema",
        help="print the JSON Schema of a template file",
        description="Editors complete and check templates with it: save it beside them and begin each file with "
        "# yaml-language-server: $schema=template.schema.json",
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; 0 when nothing is wrong, 1 when something is."""
    if options.action == "schema":
        print(json.dumps(template_schema(), indent=2))
        return 0
    if options.folder is not None:
        return check(options.folder)
    folder = default_folder()
    print(f"The folder of this machine's hub: {folder}")
    return check(folder)


def check(folder: Path) -> int:
    """Print the templates of the folder, and each problem on a line of its own. 0 when there is none."""
    quiet = logging.Logger("gpushare.templates", logging.CRITICAL)
    templates = TemplateFolder(folder, log=quiet).load()
    # a log or a file has no width to keep to
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if templates.templates:
        out.print(_table(templates))
    for problem in templates.problems:
        # one line each, unwrapped: editors and people jump to file:line
        out.print(Text(_printable(str(problem)), style="red"), soft_wrap=True)
    if templates.problems:
        out.print(f"{_number(len(templates.problems), 'problem')}, {_number(len(templates), 'good template')}.")
        return 1
    if not templates.templates:
        out.print(f"{folder}: no templates. A template is a file that ends in .yaml or .yml.")
        return 1
    for template in templates:
        if (note := _note(template)) is not None:
            out.print(Text(_printable(f"{templates.files[template.name]}: {note}"), style="yellow"), soft_wrap=True)
    out.print(f"{_number(len(templates), 'template')}, no problems.")
    return 0


def _table(templates: Templates) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("File", "Name", "Share", "Idle", "For"):
        table.add_column(heading, overflow="fold")
    for template in templates:
        name = template.name + (" (default)" if template.default else "")
        cells = (templates.files[template.name], name, _share(template), _idle(template), _access(template))
        table.add_row(*(Text(_printable(cell)) for cell in cells))
    return table


def _share(template: Template) -> str:
    return str(template.share) if template.share is not None else "no GPU"


def _idle(template: Template) -> str:
    idle, steps = template.idle, []
    for tier, words in (
        (Tier.DOWNGRADED, f"{idle.downgrade_to or 0:.2f} GPU"),
        (Tier.RELEASED, "released"),
        (Tier.STOPPED, "stopped"),
    ):
        after = idle.after(tier)
        if after is not None:
            steps.append(f"{words} after {format_seconds(after)}")
    return ", ".join(steps) or "nothing happens"


def _access(template: Template) -> str:
    groups = [f"group {group}" for group in template.access.groups]
    return ", ".join([*groups, *template.access.users]) or "everybody"


def _note(template: Template) -> str | None:
    """What the template promises on a GPU of up to `LARGEST_GPU` that the memory of its servers does not allow."""
    limit = template.resources.memory.limit
    gpu = template.gpu
    if limit is None or gpu is None or not gpu.memory.oversubscribe or gpu.share.units == UNITS_PER_GPU:
        return None
    guarantee = gpu.memory.guarantee or f"{gpu.share.units}%"
    if resolve_bytes(guarantee, LARGEST_GPU) <= limit:
        return None
    where = ""
    if str(guarantee).endswith("%"):
        part = resolve_bytes(guarantee, LARGEST_GPU) / LARGEST_GPU
        where = f" on GPUs of more than {format_bytes(limit / part)}"
    return (
        f"resources.memory.limit of {format_bytes(limit)} is less than the GPU memory that is guaranteed{where}: "
        "memory that could not be paged out is not allocated. "
        "Raise it to the guarantee and what the programs need beside it"
    )


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _printable(text: str) -> str:
    # a file's name may hold bytes that no encoding has, and a problem may quote control characters
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in safe)
