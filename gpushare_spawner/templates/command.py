"""``gpushare templates``: checks template files and related files before a hub reads them, and prints JSON Schemas.

One command checks all files of a folder: templates, quotas, idle policy and layers. It also reports templates that no
layer in `layers.yaml` can serve. The JSON Schemas are for editors. The files are read by `templates.folder`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpushare_spawner.idle.policy import effective_idle
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers import LAYERS, LayerName, MemoryEngine
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import BrokenPromise, PlacementPins, Template, TemplateGpu
from gpushare_spawner.templates.folder import (
    DEFAULT_FOLDER,
    LAYERS_FILE,
    QUOTA_FILE,
    RESERVED,
    Policy,
    PolicyFolder,
    default_folder,
    read_file,
)
from gpushare_spawner.templates.parser import TEMPLATE
from gpushare_spawner.templates.problems import Problem, bare_numbers, line_of
from gpushare_spawner.wording.amounts import memory, plural, printable
from gpushare_spawner.wording.pod_requests import perhaps_not_requested
from gpushare_spawner.wording.service import exceeds_cluster
from gpushare_spawner.wording.spawn_form import idle_actions

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def file_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file, with a description of each field.

    The schema contains each field and its type. Rules that involve several fields, such as the order of the idle
    actions, are enforced only by the check of the file.
    """
    schema = model.model_json_schema(mode="validation")
    parts = [schema, *schema.get("$defs", {}).values()]
    for part in parts:
        for described in part.get("properties", {}).values():
            described.pop("title", None)  # only repeats the field's name, in capitals
    sentence = (model.__doc__ or "").partition(". ")[0] + "."
    return {"$schema": DIALECT, **schema, "title": title, "description": sentence}


Broken = dict[LayerName, tuple[BrokenPromise, ...]]


def layer_problems(policy: Policy) -> list[Problem]:
    """Return the promises of templates that no layer on their nodes can keep; no server can use such a template."""
    return [
        problem
        for template in policy.templates
        if (broken := broken_by_layer(template, policy)) and all(broken.values())
        for problem in _problems(template, broken, policy)
    ]


def layer_notes(policy: Policy) -> list[str]:
    """Return why templates that other nodes offer are not offered on the nodes of a layer."""
    return [
        f"{policy.files[template.name]}: not offered on nodes of the layer {layer}: {promises[0].what}"
        for template in policy.templates
        if not all((broken := broken_by_layer(template, policy)).values())
        for layer, promises in broken.items()
        if promises
    ]


def broken_by_layer(template: Template, policy: Policy) -> Broken:
    """Return the broken promises of a template that names no layer, by its possible layers."""
    if template.gpu is None or template.gpu.layer is not None or policy.layers is None:
        return {}
    return {layer: template.broken_promises(layer) for layer in policy.layers.layers_for(template.gpu.models)}


def _problems(template: Template, broken: Broken, policy: Policy) -> Iterator[Problem]:
    file, lines = policy.files[template.name], policy.lines.get(template.name, {})
    seen = set()
    for layer, promises in broken.items():
        for promise in promises:
            if promise not in seen:
                seen.add(promise)
                what = f"{promise.what} (its nodes have the layer {layer} by {LAYERS_FILE})"
                yield Problem(
                    file, line_of(tuple(promise.field.split(".")), lines), promise.field, what, promise.advice
                )


def _label_notes(policy: Policy) -> Iterator[str]:
    """Yield a warning for each label in `placement` that no template has: the rule has no effect."""
    given = {label for template in policy.templates for label in template.labels}
    for template in policy.templates:
        for field in ("near", "apart_from"):
            for label in sorted({*getattr(template.placement, field)} - given):
                yield f"{policy.files[template.name]}: placement.{field}: no template has the label {label}"


def legacy_notes(policy: Policy) -> list[str]:
    """Return a warning for each layer in use if its project is no longer maintained."""
    named = [template.gpu.layer for template in policy.templates if template.gpu is not None]
    used = {*named, *(rule.layer for rule in policy.layers.rules)} if policy.layers is not None else {*named}
    return [
        f"layer {layer}: {LAYERS[layer].title} is not maintained any more; it is supported for clusters that still "
        "run it"
        for layer in LAYERS
        if layer in used and LAYERS[layer].legacy
    ]


SCHEMAS: dict[str, tuple[type[BaseModel], str]] = {
    "template": (Template, "Compute template"),
    "quotas": (Quotas, "Quotas"),
    "idle": (IdlePolicy, "Idle policy"),
    "layers": (LayersFile, "Layers"),
    "placement": (PlacementPins, "Placement"),
}
"""The model and title of each kind of file."""


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file, see `SCHEMAS`. Raises KeyError."""
    return file_schema(*SCHEMAS[kind])


LARGEST_GPU = 80 * 2**30
"""The largest GPU memory in bytes for which the shipped templates are made."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands' options."""
    parts = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = parts.add_parser(
        "check",
        help="check the templates, the quotas, the idle policy and the sharing layers of a folder",
        description="Reads each *.yaml and *.yml file of the folder; quotas.yaml has quotas, idle.yaml idle actions "
        "for all templates, layers.yaml the sharing layers of nodes, placement.yaml the GPUs of users and groups, the "
        "others templates. A template is a problem too "
        "if it promises what its layer cannot keep. The exit status is 1 if there is a problem.",
    )
    check.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        help=f"folder of template files; default: the folder of this machine's hub, $GPUSHARE_TEMPLATES or "
        f"{DEFAULT_FOLDER}",
    )
    check.add_argument("--json", action="store_true", help="print a JSON object: folder, templates, problems, warnings")
    check.add_argument(
        "--gpus",
        metavar="N",
        type=_gpus,
        help="number of GPUs of the machine or cluster: warns where the guarantees of quotas.yaml add up to more",
    )
    schema = parts.add_parser(
        "schema",
        help="print the JSON Schema of a template file, of quotas.yaml, idle.yaml, layers.yaml or placement.yaml",
        description="Editors use the schema to complete and check the files. Save it in the templates' folder as "
        "template.schema.json, and begin each file with # yaml-language-server: $schema=template.schema.json",
    )
    schema.add_argument(
        "of",
        metavar="FILE",
        choices=SCHEMAS,
        nargs="?",
        default="template",
        help="template (default), quotas, idle, layers or placement",
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand. Return 0 if there is no problem, else 1."""
    if options.action == "schema":
        print(json.dumps(schema_of(options.of), indent=2))
        return 0
    folder = options.folder
    if folder is None:
        folder = default_folder()
        if not options.json:
            print(f"Checking the folder of this machine's hub: {folder}")
    return check(folder, options.gpus, options.json)


def check(folder: Path, gpus: int | None = None, as_json: bool = False) -> int:
    """Print the templates of the folder, and each problem on a separate line. Return 0 if there is no problem, else 1.

    ``gpus``: the number of GPUs, to be compared with the guarantees of quotas; None: unknown. ``as_json``: print one
    JSON object instead.
    """
    policy = PolicyFolder(folder, log=logging.Logger("gpushare.templates", logging.CRITICAL)).load()
    problems = [str(problem) for problem in (*policy.problems, *layer_problems(policy))]
    if not problems and not policy.templates:
        problems = [f"{folder}: no templates. Template files end in .yaml or .yml."]
    warnings = [] if problems else _warnings(folder, policy, gpus)
    if as_json:
        shown = [
            {"file": policy.files[template.name], **template.model_dump(mode="json")} for template in policy.templates
        ]
        results = {"problems": list(map(printable, problems)), "warnings": list(map(printable, warnings))}
        print(json.dumps({"folder": printable(str(folder)), "templates": shown, **results}, indent=2))
        return 1 if problems else 0
    # output to a log or a file has no width limit
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if policy.templates:
        out.print(_table(policy))
    for lines, colour in ((problems, "red"), (warnings, "yellow")):
        for line in lines:
            # print each problem on one unwrapped line, so that editors can jump to file:line
            out.print(Text(printable(line), style=colour), soft_wrap=True)
    if problems:
        out.print(f"{plural(len(problems), 'problem')}, {plural(len(policy.templates), 'valid template')}.")
        return 1
    beside = [name for name, content in policy.beside.items() if content is not None and name != QUOTA_FILE]
    files = [plural(len(policy.templates), "template"), *_number_of(policy.quotas), *beside]
    out.print(f"{', '.join(files)}, no problems.")
    return 0


def _warnings(folder: Path, policy: Policy, gpus: int | None) -> list[str]:
    """Return the warnings for the admin of a folder without problems."""
    warnings = [
        f"{policy.files[template.name]}: {note}"
        for template in policy.templates
        for note in (
            _memory_note(template, policy.layers),
            _requests_note(template),
            _reclaim_note(template, policy.quotas),
        )
        if note
    ]
    for path in sorted(folder.glob("*.y*ml")):
        kind = RESERVED.get(path.name, TEMPLATE)
        read = read_file(kind, path)
        warnings += map(str, bare_numbers(kind.model, path.name, read.numbers, read.lines))
    warnings += map(str, policy.warnings)
    warnings += [*_label_notes(policy), *layer_notes(policy), *legacy_notes(policy)]
    if policy.quotas is not None and gpus is not None:
        exceeds = exceeds_cluster(policy.quotas, gpus * UNITS_PER_GPU)
        warnings += [f"{QUOTA_FILE}: {exceeds}"] if exceeds else []
    return warnings


def _number_of(quotas: Quotas | None) -> list[str]:
    if quotas is None:
        return []
    return [plural(int("default" in quotas.model_fields_set) + len(quotas.all_quotas), "quota")]


def _gpus(value: str) -> int:
    """Return a number of GPUs. Raises argparse.ArgumentTypeError."""
    if not value.isdecimal() or not value.isascii() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of GPUs: write a whole number, like 8")
    return int(value)


def _table(policy: Policy) -> Table:
    """Return the templates as a table, with the idle actions for users in no group of the policy."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("File", "Name", "Share", "Idle", "Access"):
        table.add_column(heading, overflow="fold")
    for template in policy.templates:
        name = template.name + (" (default)" if template.default else "")
        idle = _idle(template, policy.idle)
        cells = (policy.files[template.name], name, _share(template), idle, _access(template))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _share(template: Template) -> str:
    if template.gpu is None:
        return "no GPU"
    layer = template.gpu.layer or LayerName.NATIVE
    return str(template.gpu.share) + ("" if layer is LayerName.NATIVE else f" by {LAYERS[layer].title}")


def _idle(template: Template, policy: IdlePolicy | None) -> str:
    if policy is not None:
        template = template.model_copy(update={"idle": effective_idle(template, policy)})
    return "; ".join(idle_actions(template)) or "no idle actions"


def _access(template: Template) -> str:
    groups = [f"group {group}" for group in template.access.groups]
    return ", ".join([*groups, *template.access.users]) or "all users"


def _memory_note(template: Template, layers: LayersFile | None) -> str | None:
    """Return a note if the servers' host memory limits the guaranteed GPU memory on GPUs of up to `LARGEST_GPU`."""
    limit = template.resources.memory.limit
    gpu = template.gpu
    if limit is None or gpu is None or not gpu.memory.oversubscribe or LayerName.NATIVE not in _layers(gpu, layers):
        return None
    if gpu.share.units == UNITS_PER_GPU and gpu.memory.engine is not MemoryEngine.SUSPEND:
        return None
    guarantee = gpu.memory.guarantee or f"{gpu.share.units}%"
    if resolve_bytes(guarantee, LARGEST_GPU) <= limit:
        return None
    where = ""
    if str(guarantee).endswith("%"):
        part = resolve_bytes(guarantee, LARGEST_GPU) / LARGEST_GPU
        where = f" on GPUs of more than {memory(limit / part)}"
    return (
        f"resources.memory.limit ({memory(limit)}) is less than the guaranteed GPU memory{where}: GPU memory that "
        "cannot be paged out to host memory is refused. Set the limit to at least the guarantee and what the programs "
        "need themselves."
    )


def _reclaim_note(template: Template, quotas: Quotas | None) -> str | None:
    """Return a note if ``reclaimable: false`` has no effect, or if each spawn of the template is refused for it."""
    if template.reclaimable:
        return None
    if quotas is None:
        return f"reclaimable: false has no effect without {QUOTA_FILE}"
    if any(quota.guaranteed_units for quota in (quotas.default, *quotas.all_quotas)):
        return None
    return f"reclaimable: false: each spawn is refused, because {QUOTA_FILE} guarantees no GPUs"


def _layers(gpu: TemplateGpu, layers: LayersFile | None) -> frozenset[LayerName]:
    """Return the layers that can give a template its GPU."""
    if gpu.layer is not None:
        return frozenset({gpu.layer})
    return frozenset({LayerName.NATIVE} if layers is None else layers.layers_for(gpu.models))


def _requests_note(template: Template) -> str | None:
    """Return a note if servers of the template can lack a request; Kubernetes then cannot lower requests."""
    if template.idle.release_resources is None:
        return None
    cpu, host, override = template.resources.cpu, template.resources.memory, template.kubespawner_override
    # a limit without a request is requested in full
    given = {
        "cpu": (cpu.guarantee, cpu.limit, override.get("cpu_guarantee"), override.get("cpu_limit")),
        "memory": (host.guarantee, host.limit, override.get("mem_guarantee"), override.get("mem_limit")),
    }
    missing = [name for name, amounts in given.items() if all(amount is None for amount in amounts)]
    return perhaps_not_requested(missing) if missing else None
