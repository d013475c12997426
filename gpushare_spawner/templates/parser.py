"""Parser for the text of a template file or a reserved file, which returns the content or a list of problems.

YAML is parsed with the core schema of YAML 1.2 (``no`` is a string, ``1:30`` is not a number): one document, no tags,
no merge keys. The parser rejects early any input that could exhaust memory or time: text over 1 MiB, deep nesting,
aliases that expand to many values. The models (`model.part`) reject unknown fields, and `problems` words the message.
`templates.folder` reads files from disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import PlacementPins, Template
from gpushare_spawner.templates.problems import FieldPath, Problem, problems_of
from gpushare_spawner.wording.amounts import reason

MAX_BYTES = 1024 * 1024
"""Maximum size of a file; a longer file is rejected unread. A template has a few hundred bytes, quotas a few thousand.
"""
MAX_NODES = 10_000
"""Maximum number of values in one file, with aliases expanded."""
MAX_DEPTH = 32
"""Maximum number of levels of nesting."""

_MAP, _SEQ, _STR = (f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str"))


_NUMBER = re.compile(r"\+?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")

Content = TypeVar("Content", bound=BaseModel)


@dataclass(frozen=True)
class Parsed(Generic[Content]):
    """The content of a file, or its problems."""

    content: Content | None
    problems: tuple[Problem, ...] = ()
    lines: dict[FieldPath, int] = field(default_factory=dict)
    """The line of each field, counted from 1."""
    numbers: dict[FieldPath, str] = field(default_factory=dict)
    """The text of each number."""


@dataclass(frozen=True)
class FileKind(Generic[Content]):
    """A kind of file: its content, and the advice in its problems."""

    model: type[Content]
    title: str
    """The first word of log lines, such as "Quotas"."""
    begin: str
    """The first line of an example."""
    required: str
    """The advice on the minimum content, for an empty file."""
    usual: str
    """The usual number of values and levels in such a file, as a sentence."""
    content: str = ""
    """The only content of such a file, such as "quotas"; empty: one template."""
    most_nodes: int = MAX_NODES
    """Maximum number of values in one file, with aliases expanded."""

    @property
    def fallback(self) -> str:
        """The sentence on the version that stays in force after an error in the file."""
        return f"the last valid version of the {self.content} stays in force"

    @property
    def second_document(self) -> str:
        """The advice for a second document."""
        return f"write the {self.content} in one document" if self.content else "write each template in its own file"

    @property
    def split(self) -> str:
        """The advice for a file that is too long."""
        what = f"{self.content} only" if self.content else "one template in each file"
        return f"write {what}; keep data and scripts elsewhere"


TEMPLATE = FileKind(
    model=Template,
    title="Template",
    begin="name: quarter-gpu",
    required="write at least name and display_name",
    usual="a template has about 30 values, 5 levels deep",
)
QUOTAS = FileKind(
    model=Quotas,
    title="Quotas",
    begin="groups:",
    required="write at least  groups: {}  or delete the file",
    usual="a quota has about 10 values, and a team is 2 levels deeper than its group",
    content="quotas",
    most_nodes=10 * MAX_NODES,
)
IDLE_POLICY = FileKind(
    model=IdlePolicy,
    title="Idle policy",
    begin="defaults:",
    required="write at least  defaults: {}  or delete the file",
    usual="an idle policy has some tens of values, at most 5 levels deep",
    content="idle policy",
    most_nodes=10 * MAX_NODES,
)
LAYERS = FileKind(
    model=LayersFile,
    title="Layers",
    begin="rules:",
    required="write at least  rules: []  or delete the file",
    usual="layers have some tens of values, at most 6 levels deep",
    content="layers",
)


PLACEMENT = FileKind(
    model=PlacementPins,
    title="Placement",
    begin="users:",
    required="write at least  users: {}  or delete the file",
    usual="placement has about 3 values for each user, at most 4 levels deep",
    content="placement",
    most_nodes=10 * MAX_NODES,
)


class _Refused(Exception):
    """The text is not valid YAML for this kind of file."""

    def __init__(self, line: int | None, what: str, advice: str = "", where: FieldPath = ()) -> None:
        super().__init__(what)
        self.line, self.what, self.advice, self.where = line, what, advice, where

    def problem(self, file: str) -> Problem:
        return Problem(file, self.line, ".".join(map(str, self.where)), self.what, self.advice)


def parse(kind: FileKind[Content], source: bytes | str, file: str) -> Parsed[Content]:
    """Parse one file. ``file``: its name in problems. Raises nothing for any bytes."""
    text = ""
    try:
        text = _decoded(kind, source)
        _guard(kind, text)
        reader = _Reader(kind)
        data = reader.read(cast(yaml.Node, yaml.compose(text, Loader=yaml.BaseLoader)))
    except _Refused as refused:
        return Parsed(None, (refused.problem(file),))
    except Exception as error:  # PyYAML raises errors of any kind: \U00110000 is a ValueError of chr()
        return Parsed(None, (_yaml_problem(error, file, text),))
    if reader.refused:
        return Parsed(None, tuple(refused.problem(file) for refused in reader.refused))
    try:
        return Parsed(kind.model.model_validate(data), lines=reader.lines, numbers=reader.numbers)
    except ValidationError as error:
        problems = problems_of(error, kind.model, file, reader.lines)
        return Parsed(None, tuple(sorted(problems, key=lambda problem: problem.line or 0)), reader.lines)


def too_long(kind: FileKind[Any], file: str, size: int) -> Problem:
    """Return the problem for a file of ``size`` bytes, which is more than MAX_BYTES."""
    return Problem(file, None, "", f"the file has {size:,} bytes, more than the limit of {MAX_BYTES:,}", kind.split)


def _decoded(kind: FileKind[Any], source: bytes | str) -> str:
    data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
    if len(data) > MAX_BYTES:
        problem = too_long(kind, "", len(data))
        raise _Refused(None, problem.what, problem.advice)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"byte {data[error.start]:#04x} is not UTF-8"
        raise _Refused(line, what, "save the file as UTF-8") from None


def _guard(kind: FileKind[Any], text: str) -> None:
    """Reject, on the basis of parser events, input with too many expanded values or more than one document."""
    total = depth = documents = 0
    opened: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        line = _line(event)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _Refused(line, "a second document starts here", kind.second_document)
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            total += 1
            opened.append((event.anchor, total - 1))
            if depth > MAX_DEPTH:
                raise _Refused(line, f"nested more than {MAX_DEPTH} levels deep", kind.usual)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _Refused(line, f"the alias *{event.anchor} contains itself", "write the value out")
            total += sizes.get(event.anchor or "", 1)
        if total > kind.most_nodes:
            what = f"more than {kind.most_nodes:,} values, with aliases expanded"
            raise _Refused(line, what, kind.usual)
    if not documents:
        raise _Refused(None, "the file is empty", kind.required)


class _Reader:
    """Converter from nodes to plain data, which records the line of each field."""

    def __init__(self, kind: FileKind[Any]) -> None:
        self._kind = kind
        self.lines: dict[FieldPath, int] = {}
        self.numbers: dict[FieldPath, str] = {}
        self.refused: list[_Refused] = []

    def read(self, node: yaml.Node) -> dict[str, Any]:
        """Return the data of the whole document; problems are in ``refused``."""
        if not isinstance(node, yaml.MappingNode):
            what = f"has {_kind(node)}, not fields"
            raise _Refused(_line(node), what, f"begin with a line like  {self._kind.begin}")
        self.lines[()] = _line(node)
        return cast(dict[str, Any], self._value(node, ()))

    def _value(self, node: yaml.Node, path: FieldPath) -> Any:
        line = _line(node)
        self.lines.setdefault(path, line)
        if len(path) > MAX_DEPTH:  # only through aliases; the guard has checked literal nesting
            raise _Refused(line, f"nested more than {MAX_DEPTH} levels deep", self._kind.usual)
        expected = _MAP if isinstance(node, yaml.MappingNode) else _SEQ if isinstance(node, yaml.SequenceNode) else _STR
        if node.tag not in (expected, "!"):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.refused.append(_Refused(line, f"the tag {tag} is not allowed", "write the plain value", path))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(child, (*path, position)) for position, child in enumerate(node.value)]
        text: str = node.value
        if _NUMBER.fullmatch(text):
            self.numbers[path] = text
        try:
            return _scalar(text) if cast(yaml.ScalarNode, node).style is None else text
        except ValueError as error:
            what, _, advice = str(error).partition(": ")
            self.refused.append(_Refused(line, what, advice, path))
            return None

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in (_STR, "!"):
                what = f"{_kind(key_node)} cannot be the name of a field"
                self.refused.append(_Refused(line, what, "write  field: value", path))
                continue
            key = key_node.value
            here = (*path, key)
            if key == "<<" and key_node.style is None:
                self.refused.append(_Refused(line, "merge keys are not supported", "write the fields out", here))
            elif key in data:
                what = f"appears again, after line {self.lines[here]}"
                self.refused.append(_Refused(line, what, "keep one of the two", here))
            else:
                self.lines[here] = line
                data[key] = self._value(value_node, here)
        return data


def _scalar(text: str) -> Any:
    """Return the value of a plain scalar in YAML 1.2's core schema. Raises ValueError for an ambiguous number."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?0\d+", text):
        raise ValueError(f"{text} starts with 0, so it can mean an octal number: write 0o644 for octal, or use quotes")
    if re.fullmatch(r"[-+]?\d{1,300}", text):
        return int(text)
    if re.fullmatch(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}", text):
        return int(text, 0)
    if re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        return float(text.replace(".", "", 1))
    return text


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _line(marked: yaml.Event | yaml.Node) -> int:
    return marked.start_mark.line + 1 if marked.start_mark is not None else 1


def _yaml_problem(error: Exception, file: str, text: str) -> Problem:
    advice = "check indentation, quotes and brackets near there"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        lines = text.splitlines()
        line = lines[mark.line] if mark.line < len(lines) else ""
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return Problem(
                file, mark.line + 1, "", f"is not YAML: line {mark.line + 1} begins with a tab", "use spaces"
            )
        opened = _open_quote(text, mark.line)
        if opened is not None:
            what = f"a quote opens in line {opened + 1} and is not closed there"
            return Problem(file, opened + 1, "", what, "close it, or write text of several lines with  |")
        why = " ".join(filter(None, (error.context, error.problem)))
        return Problem(file, mark.line + 1, "", f"is not YAML: {why} (column {mark.column + 1})", advice)
    if isinstance(error, yaml.reader.ReaderError):
        what = f"is not YAML: the character {_character(error.character)} at position {error.position} is not allowed"
        return Problem(file, None, "", what, "remove it; YAML is plain text")
    return Problem(file, None, "", f"is not YAML: {reason(error)}", advice)


def _open_quote(text: str, line: int) -> int | None:
    """Return the line of the opening quote that caused an error at ``line``; None if no quote caused it."""
    opened = None
    try:
        for token in yaml.scan(text, Loader=yaml.BaseLoader):
            quoted = isinstance(token, yaml.ScalarToken) and token.style in ("'", '"')
            if quoted and token.start_mark.line < token.end_mark.line == line:
                opened = token.start_mark.line
    except yaml.MarkedYAMLError as error:
        if error.context == "while scanning a quoted scalar" and error.context_mark is not None:
            return int(error.context_mark.line)
    return opened


def _character(value: object) -> str:
    return f"U+{value:04X}" if isinstance(value, int) else repr(value)
