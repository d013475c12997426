"""The reference pages' contents as Markdown, read from the code. Pure: nothing here knows Sphinx.

The directives of generated.py put these texts into the pages; tests/docs holds them against the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from prometheus_client.core import Metric
from tornado.routing import PathMatches
from tornado.web import Application, RequestHandler
from traitlets import HasTraits

from gpushare_spawner.model.frames import Feature, Kind
from gpushare_spawner.model.layers import IdleReach, Layer, LayerSource, Where
from gpushare_spawner.model.share import UNITS_PER_GPU

OURS = "gpushare_spawner."
FIRST_OF_AGENT = 64
"""Frames of this type and above are the agent's."""
E = TypeVar("E", bound=Enum)
METHODS = ("get", "head", "post", "put", "patch", "delete")


def cell(text: str) -> str:
    """Text for a cell of a table: on one line, with the cells' separator escaped."""
    return " ".join(text.split()).replace("|", r"\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in lines)


def markup(text: str) -> str:
    """A docstring or a help text as Markdown: ``code`` and `code` are both code."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text))


def plain(text: str) -> str:
    """Text that is no markup, like a command's help, as Markdown: options, variables and paths become code."""
    words = re.compile(r"(?<![\w/.])(--[a-z][a-z-]*|\$[A-Z_]+|/[a-z][\w/.-]*\w|\*\.\w+)")
    parts = words.split(" ".join(text.split()))
    escaped = [re.sub(r"([\\`*_<>\[\]])", r"\\\1", part) for part in parts[::2]]
    marked = [f"`{part}`" for part in parts[1::2]]
    said = "".join(part for pair in zip(escaped, [*marked, ""], strict=True) for part in pair)
    return said[:1].upper() + said[1:] + ("" if said[-1:] in ("", ".") else ".")


# -- sharing layers ---------------------------------------------------------------------------------------------------


def layers(declared: Iterable[Layer]) -> str:
    """A table of what each layer can."""
    head = ("layer", "`gpu.layer`", "smallest share", "memory", "time", "placed by", "beyond the GPU's memory",
            "several GPUs", "idle server", "where", "GPU use seen by")  # fmt: skip
    return table(head, (_layer(one) for one in declared))


def _layer(one: Layer) -> tuple[str, ...]:
    smallest = f"{one.smallest_units / UNITS_PER_GPU:g}" if one.smallest_units is not None else "replica or profile"
    reach = ", ".join(["stop", *(action for action in IdleReach if action in one.reach)])
    return (
        f"{one.title} (legacy)" if one.legacy else one.title,
        f"`{one.name}`",
        smallest,
        one.memory.value,
        one.compute.value,
        one.places.value,
        "yes" if one.oversubscribes else "no",
        "yes" if one.several_gpus else "no",
        reach,
        ", ".join("Kubernetes" if place is Where.KUBERNETES else place for place in Where if place in one.where),
        one.observed_by.value,
    )


def layer_notes(declared: Iterable[Layer]) -> str:
    """A list of what an admin must know of each layer, and which version of its source that is from."""
    return "\n".join(f"- **{one.title}**: {one.note}{_source(one.source)}" for one in declared)


def _source(source: LayerSource | None) -> str:
    if source is None:
        return ""
    files = ", ".join(f"`{file}`" for file in source.files)
    return f" Facts: {source.project} {source.version}{', ' if files else ''}{files}."


# -- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A setting of the product, or a group of them, as a row of a table."""

    name: str
    value: str
    """Type and unit, or the possible values."""
    default: str
    effect: str
    declared: str
    """Where the code declares it: two settings with the same place are one, at two uses of a class or an option."""

    @property
    def is_group(self) -> bool:
        """Whether the settings are its fields."""
        return self.value == FIELDS

    @property
    def row(self) -> tuple[str, ...]:
        return self.name, self.value, self.default, self.effect


FIELDS = "fields"
TRAITS = {
    "a unicode string": "text",
    "an int": "integer",
    "a float": "number",
    "a boolean": "true, false",
    "a list": "list",
    "a dict": "mapping",
}
HEAD = ("setting", "value", "default", "effect")


def settings(parts: Iterable[Setting]) -> str:
    """A table of settings."""
    return table(HEAD, (setting.row for setting in parts))


def declared_once(parts: Iterable[Setting]) -> dict[str, Setting]:
    """The settings without groups by the place of their declaration."""
    return {setting.declared: setting for setting in parts if not setting.is_group}


def spawner(name: str) -> type[HasTraits]:
    """The class of an entry point of `jupyterhub.spawners`. Raises KeyError."""
    found: type[HasTraits] = entry_points(group="jupyterhub.spawners")[name].load()
    return found


def own_settings(cls: type[HasTraits]) -> list[str]:
    """Names of the settings that our classes among its bases declare, in the order in which they stand in the code."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith(OURS)]
    configurable = cls.class_traits(config=True)
    names = [name for base in reversed(ours) for name in vars(base) if name in configurable]
    return list(dict.fromkeys(names))


def spawner_settings(name: str) -> Iterator[Setting]:
    """The settings that our classes add to a spawner."""
    cls = spawner(name)
    for setting in own_settings(cls):
        trait = cls.class_traits()[setting]
        owner = next(base for base in cls.__mro__ if setting in vars(base))
        value = TRAITS.get(trait.info(), trait.info())
        default = trait.default_value_repr()
        shown = "" if default in ("None", "''", "[]", "{}", "traitlets.Undefined") else f"`{default}`"
        yield Setting(f"`{setting}`", value, shown, markup(trait.help), f"{owner.__qualname__}.{setting}")


def command_settings(parser: argparse.ArgumentParser) -> Iterator[Setting]:
    """The arguments and options of a command and of its subcommands."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from command_settings(part)
        elif not isinstance(action, argparse._HelpAction):
            name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
            text = formatter._expand_help(action) if action.help else ""
            stated = re.search(r"\s*\(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)", text)
            effect = text.replace(stated[0], "") if stated else text
            yield Setting(
                f"`{name}`" if action.option_strings else f"`{parser.prog} {name}`",
                _argument(formatter, action),
                _stated(stated[1]) if stated else "",
                plain(effect),
                # an option that several commands share has the same text in all of them
                f"{name}: {text}" if action.option_strings else f"{parser.prog} {name}",
            )


def _argument(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    if action.nargs == 0:
        return "flag"
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    return formatter._format_args(action, action.dest.upper())


def _stated(default: str) -> str:
    return plain(f"x {default}").removeprefix("X ").removesuffix(".") if " " in default else f"`{default}`"


def environment_settings(of: str) -> Iterator[Setting]:
    """The environment variables of the config files, or of the library."""
    for name, value, default, effect in ENVIRONMENT[of]:
        yield Setting(f"`{name}`", value, default, effect, name)


ENVIRONMENT: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "config-files": (
        ("GPUSHARE_TEMPLATES", "path", "`/etc/gpushare/templates`", "folder of compute templates"),
        ("GPUSHARE_CONTROL", "path", "`/run/gpushare/control.sock`", "the agent's control socket"),
        ("GPUSHARE_NAMESPACE", "name", "`$POD_NAMESPACE`", "namespace of the users' pods in a cluster"),
        ("GPUSHARE_SERVICE_URL", "URL", "`http://127.0.0.1:10190`", "where the dashboard listens for the hub's proxy"),
        (
            "GPUSHARE_HISTORY",
            "SQLAlchemy URL; `false`: no history",
            "`gpushare-history.sqlite` beside the hub's SQLite database, else in the folder where the hub runs",
            "database of the [history](../guides/history.md)",
        ),
        (
            "GPUSHARE_NOTIFIERS",
            "path",
            "no messages",
            "file of [notifiers](notifiers.md): e-mail and webhooks for users whose tab is closed",
        ),
        (
            "GPUSHARE_SECRET_…",
            "text",
            "",
            "secrets that this file names; the service gets all variables with this beginning",
        ),
        (
            "GPUSHARE_SERVICE_OPTIONS",
            "words",
            "",
            "further [options of the service](commands.md), as on a command line",
        ),
    ),
    "library": (
        (
            "GPUSHARE_SOCKET",
            "path",
            "set by the agent",
            "the session's socket. Not set: the library hands out the driver's own functions and does nothing. The "
            "same in setuid programs",
        ),
        ("GPUSHARE_DISABLE", "`1`", "", "the same, with the socket set"),
        (
            "GPUSHARE_ENGINE",
            "`managed`, `suspend`, `observe`",
            "`managed`, also for any other value; set by the agent",
            "the memory engine. `suspend`: memory stays plain, and the agent "
            "[suspends](../explanation/native.md#engine-suspend) whole processes; `observe`: another layer shares the "
            "GPU, and the library [only reports bursts](../explanation/native.md#engine-observe). Read once, at the "
            "first look-up of a CUDA function",
        ),
        (
            "GPUSHARE_MANAGED",
            "`0`",
            "",
            "allocations stay plain device memory, which cannot leave the GPU. For programs that share GPU memory "
            "between processes",
        ),
        (
            "GPUSHARE_NVML",
            "`driver`",
            "[the share](../explanation/native.md#nvml)",
            "NVML, and so `nvidia-smi` and `nvitop`, shows the whole GPU and everybody's processes",
        ),
        (
            "GPUSHARE_LOG",
            "`off`, `error`, `info`, `debug`",
            "`error`",
            "messages of the library, to standard error, or with `debug,/path/to/file` to a file",
        ),
    ),
}
"""Variables of the hub that jupyterhub_config.d reads, and those of a CUDA process: name, value, default, effect."""


# -- templates --------------------------------------------------------------------------------------------------------


def schema_settings(schema: dict[str, Any]) -> Iterator[Setting]:
    """The fields that a JSON Schema describes, with those of nested objects."""
    return _fields(schema, schema, "", entries=True)


def file_fields(schema: dict[str, Any], part: str, *, nested: bool = True) -> str:
    """A table of the fields of one part of a file: ``file`` for the whole, or a definition of its schema.

    ``nested``: with the fields of the part's fields; never for the whole.
    """
    whole_file = part == "file"
    rows = _fields(schema if whole_file else schema["$defs"][part], schema, "")
    shown = [row.row for row in rows if (nested and not whole_file) or "." not in row.name]
    return table(("field", "value", "not given", "meaning"), shown)


def _fields(part: dict[str, Any], schema: dict[str, Any], prefix: str, entries: bool = False) -> Iterator[Setting]:
    """Yield the fields. ``entries``: with the fields of entries of lists, and of mappings by names of the admin."""
    for name, field in part["properties"].items():
        kinds = [kind for kind in field.get("anyOf", field.get("oneOf", [field])) if kind.get("type") != "null"]
        values = [kind.get("additionalProperties", kind.get("items")) for kind in kinds if entries]
        named = [value for value in values if isinstance(value, dict)]
        references = [kind["$ref"] for kind in (*kinds, *named) if "$ref" in kind]
        inner = next((schema["$defs"][one.rpartition("/")[2]] for one in references), None)
        if inner is not None and "enum" in inner:  # one of a few words
            kinds, inner = [inner], None
        required = name in part.get("required", ())
        # of text with a unit and a plain number the first: the page says once what plain numbers are
        value = FIELDS if inner is not None else _value(kinds[0])
        unit = f" {kinds[-1]['title']}" if "title" in kinds[-1] else ""
        default = "must be given" if required else _default(field.get("default"), inner is not None, unit)
        declared = f"{part.get('title', '')}.{name}"
        yield Setting(f"`{prefix}{name}`", value, default, markup(field["description"]), declared)
        if inner is not None and inner is not part:  # a part that contains itself has its fields once
            entry = "" if not named else "[]" if kinds[0].get("type") == "array" else ".NAME"
            yield from _fields(inner, schema, f"{prefix}{name}{entry}.", entries)


def chart_values(schema: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[Setting]:
    """The values of a chart, from its schema and its values.yaml. An object stands as its own values."""
    for name, field in schema["properties"].items():
        default = defaults.get(name)
        if "properties" in field and isinstance(default, dict) and default:
            yield from chart_values(field, default, f"{prefix}{name}.")
        else:
            shown = f"`{json.dumps(default)}`" if name in defaults else ""
            kinds = [field["type"]] if isinstance(field.get("type"), str) else field.get("type", ())
            value = " or ".join(_value({**field, "type": kind}) for kind in kinds if kind != "null")
            # requests and limits are handed to Kubernetes as they are: one setting
            declared = "resources" if prefix.startswith("resources.") else f"{prefix}{name}"
            yield Setting(f"`{prefix}{name}`", value, shown, markup(field["description"]), f"chart {declared}")


def _value(kind: dict[str, Any]) -> str:
    low, high = kind.get("minimum", kind.get("exclusiveMinimum")), kind.get("maximum")
    match kind["type"]:
        case _ if "enum" in kind:
            return ", ".join(f"`{value}`" for value in kind["enum"] if value)
        case _ if "title" in kind:
            return str(kind["title"])
        case "boolean":
            return "true, false"
        case "integer" | "number" if low is not None and high is not None:
            return f"{low} to {high}"
        case "integer" | "number" if low is not None:
            return f"{low} or more"
        case "string" if "maxLength" in kind:
            return f"text, at most {kind['maxLength']:,}"
        case "string":
            return "text"
        case "array":
            return "list"
        case "object":
            return "mapping"
    return str(kind["type"])


def _default(value: Any, is_object: bool, unit: str) -> str:
    if is_object or value in (None, "", [], {}):
        return ""
    if isinstance(value, float):
        return f"{value:g}{unit}"
    return str(value).lower() if isinstance(value, bool) else f"`{value}`"


# -- commands ---------------------------------------------------------------------------------------------------------


def command(parser: argparse.ArgumentParser, level: int = 2) -> str:
    """A command's arguments and options, and those of its subcommands below it."""
    said = [f"{'#' * level} {parser.prog}", plain(parser.description or "")]
    said += [f"```{{program}} {parser.prog}\n```"]
    below: list[argparse.ArgumentParser] = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        below += [
            part
            for action in actions
            if isinstance(action, argparse._SubParsersAction)
            for part in action.choices.values()
        ]
        actions = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
        if not actions:
            continue
        if group.title not in ("options", "positional arguments"):
            title = str(group.title)
            said += [f"**{title[:1].upper()}{title[1:]}.** {plain(group.description or '')}".strip()]
        said += [_option(parser, action) for action in actions]
    said += [command(part, level + 1) for part in below]
    return "\n\n".join(part for part in said if part) + "\n"


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = argparse.HelpFormatter(parser.prog)
    help_text = formatter._expand_help(action) if action.help else ""
    if not action.option_strings:
        return f"```{{option}} {formatter._format_action_invocation(action)}\n{plain(help_text)}\n```"
    value = "" if action.nargs == 0 else " " + formatter._format_args(action, action.dest.upper())
    names = ", ".join(name + value for name in action.option_strings)
    return f"```{{option}} {names}\n{plain(help_text)}\n```"


# -- metrics ----------------------------------------------------------------------------------------------------------


def metrics(families: Iterable[Metric]) -> str:
    """A table of metric families, by name."""
    rows = [
        (
            f"`{family.name}{'_total' if family.type == 'counter' else ''}`",
            family.type,
            ", ".join(f"`{label}`" for label in family._labelnames),  # type: ignore[attr-defined]  # all families have it
            plain(family.documentation),
        )
        for family in sorted(families, key=lambda family: family.name)
    ]
    return table(("metric", "type", "labels", "meaning"), rows)


# -- addresses --------------------------------------------------------------------------------------------------------


def addresses(application: Application) -> str:
    """What an application answers: each route with its method and the docstring of its handler. No files of pages."""
    said = []
    for rule in application.wildcard_router.rules:
        assert isinstance(rule.matcher, PathMatches)
        handler, path = rule.target, rule.matcher.regex.pattern.rstrip("$")
        # stylesheets and scripts are the pages' own
        if not handler.__module__.startswith(OURS) or "/static/" in path:
            continue
        for method in METHODS:
            function = getattr(handler, method)
            if function is getattr(RequestHandler, method):
                continue
            text = markup(handler.__doc__ or "")
            said.append(f"### `{method.upper()} {path}`\n\n{text}")
    return "\n\n".join(said) + "\n"


def rest_api(document: Mapping[str, Any]) -> str:
    """The operations of an OpenAPI document: what each needs and answers, its arguments, and a request with curl."""
    prefix = document["servers"][0]["url"]
    said = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            said.append(f"### `{method.upper()} {path}`\n\n{markup(operation['description'])}")
            scopes = [scope for way in operation["security"] for scope in way.get("token", ())]
            if scopes:
                said.append(f"Scope of a token: {' or '.join(f'`{scope}`' for scope in scopes)}.")
            arguments = [(f"`{one['name']}`", one["in"], plain(one["description"])) for one in operation["parameters"]]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = document["components"]["schemas"].get(
                body.get("schema", {}).get("$ref", "").rpartition("/")[2], {}
            )
            arguments += [
                (f"`{name}`", "body", plain(field.get("description", "")))
                for name, field in schema.get("properties", {}).items()
            ]
            if arguments:
                said.append(table(("argument", "in", "meaning"), arguments))
            sent = f" -d '{json.dumps(body['example'])}'" if "example" in body else ""
            said.append(
                f'```console\n$ curl -X {method.upper()} -H "Authorization: token $TOKEN"{sent} '
                f"https://hub.example.org{prefix}{path}\n```"
            )
    return "\n\n".join(said) + "\n"


# -- data -------------------------------------------------------------------------------------------------------------


def fields(path: str) -> str:
    """The fields of a class, `module:Class`, with type, default and the text below each; and the class's own text."""
    module, _, name = path.partition(":")
    cls = getattr(import_module(module), name)
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith(OURS)]
    rows = [row for base in ours for row in _declared(base)]
    return markup(cls.__doc__ or "") + "\n\n" + table(("field", "type", "not given", "meaning"), rows) + "\n"


def frames(part: str) -> str:
    """The frames of the session socket, or its feature bits. ``part``: notebook, agent or features. Raises KeyError."""
    if part == "features":
        return table(
            ("bit", "name", "meaning"),
            ((str(flag.value.bit_length() - 1), flag.name or "", text) for flag, text in members(Feature)),
        )
    agent = {"notebook": False, "agent": True}[part]
    rows = ((str(kind.value), kind.name, text) for kind, text in members(Kind) if (kind >= FIRST_OF_AGENT) is agent)
    return table(("type", "name", "fields"), rows)


def members(cls: type[E]) -> Iterator[tuple[E, str]]:
    """Each member of an enum with the text below it, empty if there is none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for line, after in itertools.pairwise([*tree.body, None]):
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = markup(str(after.value.value))
            yield cls[line.targets[0].id], text


def _declared(cls: type) -> Iterator[tuple[str, ...]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = markup(str(after.value.value))
        kind = re.sub(r"Annotated\[(.+?), Field\(.*\)\]", r"\1", ast.unparse(line.annotation))
        default = ast.unparse(line.value) if line.value is not None else ""
        if only := re.fullmatch(r"Literal\[([^,]+)\]", kind):
            kind, default = only[1], ""
        yield f"`{line.target.id}`", f"`{kind}`", f"`{default}`" if default else "", text
