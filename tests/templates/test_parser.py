"""Template files: what is wrong is said with file, line and field, and nothing is ever raised."""

from __future__ import annotations

import json
import re
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.command import schema_of
from gpushare_spawner.templates.parser import MAX_BYTES, TEMPLATE, Parsed, parse
from tests.present import present

GOOD = """\
# what an admin writes
name: quarter-gpu
display_name: 0.25 GPU
description: Prototyping and teaching.
gpu:
  fraction: 0.25
  memory: {oversubscribe: true, limit: 100%}
  models: ["*A100*", "*H100*"]
resources: {cpu: {guarantee: 1, limit: 4}, memory: {guarantee: 4Gi, limit: 16Gi}}
access: {groups: [ml-course], users: []}
limits: {per_user: 1}
idle: {downgrade_after: 15m, downgrade_to: 0.10, release_after: 45m, stop_after: 8h, warn_before: 5m}
kubespawner_override: {}
"""


def said(source: str | bytes) -> list[str]:
    """The problems as an admin reads them."""
    parsed = parse(TEMPLATE, source, "x.yaml")
    assert parsed.content is None
    assert parsed.problems
    return [str(problem) for problem in parsed.problems]


def card(more: str) -> str:
    return f"name: a\ndisplay_name: b\n{more}"


def test_a_good_template() -> None:
    parsed = parse(TEMPLATE, GOOD, "x.yaml")
    assert parsed.problems == ()
    assert present(present(parsed.content).share).units == 25
    assert present(parsed.content).idle.downgrade_after == 900
    assert present(parsed.content).resources.memory.limit == 16 * 2**30
    assert parsed.lines["gpu", "fraction"] == 6


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("gpu: {fraction: 0}", "x.yaml:3: gpu.fraction: 0 is out of range; write a fraction from 0.01 to 64"),
        ("gpu:\n  fraction: 65", "x.yaml:4: gpu.fraction: 65 is out of range; write a fraction"),
        ("gpu: {fraction: 0.25x}", "x.yaml:3: gpu.fraction: '0.25x' is not a fraction; write a fraction"),
        ("gpu: {fraction: .nan}", "x.yaml:3: gpu.fraction: nan is not a fraction; write a fraction"),
        ("gpu: {fraction: .inf}", "x.yaml:3: gpu.fraction: inf is not a fraction; write a fraction"),
        ("gpu: {fraction: 0.125}", "x.yaml:3: gpu.fraction: 0.125 is finer than 0.01; write a fraction"),
        ("gpu: {fraction: yes}", "x.yaml:3: gpu.fraction: 'yes' is not a fraction; write a fraction"),
        ("gpu: {fraction: [0.5]}", "x.yaml:3: gpu.fraction: [0.5] is not a fraction; write a fraction"),
        ("gpu: {models: [T4]}", "x.yaml:3: gpu: give fraction (a part of a GPU), count (whole GPUs), or both"),
        ("gpu: {count: 0}", "x.yaml:3: gpu.count: 0 is too small; write at least 1"),
        ("gpu: {count: 65}", "x.yaml:3: gpu.count: 65 is too large; write at most 64"),
        ("gpu: {count: '1'}", 'x.yaml:3: gpu.count: must be a whole number, not "1"; write a number without quotes'),
        (
            "gpu: 0.25",
            "x.yaml:3: gpu: must have fields, not 0.25; its fields are fraction, count, time, memory, bypass",
        ),
        ("gpu:\n  fraction: 0.5\n  modles: [a]", "x.yaml:5: gpu.modles: unknown field; did you mean 'models'?"),
        ("gpu: {fraction: 0.5, models: a100}", "x.yaml:3: gpu.models: must be a list, not a100; write [a100]"),
        (
            "gpu: {fraction: 0.5, memory: {limit: 12 apples}}",
            "x.yaml:3: gpu.memory.limit: '12 apples' is not an amount",
        ),
        ("displayname: x", "x.yaml:3: displayname: unknown field; did you mean 'display_name'?"),
        ("zzz: 1", "x.yaml:3: zzz: unknown field; known fields are name, display_name"),
        ("idle: {stop_after: 1:30}", "x.yaml:3: idle.stop_after: '1:30' is not a duration; write a duration like"),
        ("idle: {stop_after: -5}", "x.yaml:3: idle.stop_after: -5 is not a duration"),
        ("idle: {downgrade_after: 5m}", "x.yaml:3: idle: downgrade_after and downgrade_to belong together"),
        ("idle: {release_after: 5m}", "x.yaml:3: idle: downgrade_after and release_after need a gpu"),
        (
            "gpu: {count: 1}\nidle: {release_after: 9h,\n  stop_after: 8h}",
            "x.yaml:4: idle: stop_after (8 h) must be more than release_after (9 h)",
        ),
        (
            "gpu: {fraction: 0.1}\nidle: {downgrade_after: 1m, downgrade_to: 0.5}",
            "x.yaml:4: idle: downgrade_to (0.5) must be less than the share (0.1)",
        ),
        ("resources: {cpu: {guarantee: 4, limit: 2}}", "x.yaml:3: resources.cpu: the guarantee is more than the limit"),
        ("resources: {memory: {limit: 4Gb}}", "x.yaml:3: resources.memory.limit: '4Gb' is not an amount of memory"),
        ("default: maybe", "x.yaml:3: default: must be true or false, not maybe"),
        ("image: ''", "x.yaml:3: image: is empty; write a value, or remove the field"),
        ("kubespawner_override: [1]", "x.yaml:3: kubespawner_override: must have fields, not a list"),
        ("description: 7", 'x.yaml:3: description: must be text, not 7; put it in quotes: "7"'),
        (
            "gpu: {fraction: 0.5, layer: MIG}",
            "x.yaml:3: gpu.layer: must be native, time-slicing, mps, mig, hami, kai, dra,",
        ),
        (
            "gpu: {fraction: 0.5, memory: {engine: suspends}}",
            "x.yaml:3: gpu.memory.engine: must be managed or suspend, not suspends; did you mean 'suspend'?",
        ),
        (
            "gpu:\n  count: 2\n  memory:\n    engine: suspend",
            "x.yaml:6: gpu.memory.engine: suspend needs a share of one GPU; leave out the engine, or write count: 1",
        ),
        (
            "gpu:\n  fraction: 0.5\n  memory:\n    oversubscribe: false\n    engine: suspend",
            "x.yaml:7: gpu.memory.engine: suspend is a way to oversubscribe; leave out oversubscribe: false",
        ),
        (
            "gpu: {fraction: 0.25, time: {limit: 20%}}",
            "x.yaml:3: gpu.time.limit: 20% is less than the share, 25%; write at least 25%, or a smaller share",
        ),
        (
            "gpu: {fraction: 0.25, time: {limit: 0.3}}",
            "x.yaml:3: gpu.time.limit: 0.3 is not a percentage; write a whole number from 1% to 100%, like 25%",
        ),
        ("access: {groups: ml}", "x.yaml:3: access.groups: must be a list, not ml; write [ml]"),
        (
            "gpu: {count: 1}\nplacement:\n  apart_from: [a, b]\n  near: [b]",
            "x.yaml:6: placement.near: b is in apart_from too; remove it from one of them",
        ),
        (
            "gpu: {count: 1}\nplacement: {near: [a], alone: true}",
            "x.yaml:4: placement.alone: a session cannot be alone and near other sessions; remove alone, or near",
        ),
        (
            "gpu: {count: 1}\nplacement: {gpu: GPU-8F6B}",
            "x.yaml:4: placement.gpu: GPU-8F6B is no UUID of a GPU; write one like GPU-8f6b2c1e-",
        ),
        (
            "gpu: {count: 2}\nplacement: {gpu: GPU-8f6b2c1e-0000-5000-8000-0123456789ab}",
            "x.yaml:4: placement.gpu: is one GPU, and the share is 2 GPUs; remove the field",
        ),
        (
            "gpu: {count: 1}\nplacement: {apart: [a]}",
            "x.yaml:4: placement.apart: unknown field; did you mean 'apart_from'?",
        ),
        ("placement: {nodes: [n]}", "x.yaml:3: placement: needs a gpu; remove the field"),
    ],
)
def test_wrong_fields_are_named_with_what_would_be_right(more: str, expected: str) -> None:
    problems = said(card(more))
    assert len(problems) == 1
    assert problems[0].startswith(expected)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "x.yaml: the file is empty"),
        ("# only a comment\n", "x.yaml: the file is empty"),
        ("- a\n- b\n", "x.yaml:1: has a list, not fields"),
        ("just words", "x.yaml:1: has a single value, not fields"),
        ("name: a\nname: b\ndisplay_name: c", "x.yaml:2: name: appears again, after line 1; keep one"),
        (card("gpu:\n  count: 1\n  count: 2"), "x.yaml:5: gpu.count: appears again, after line 4"),
        (card("---\nname: b\n"), "x.yaml:3: a second document starts here"),
        (
            card("x: !!python/object/apply:os.system [ls]"),
            "x.yaml:3: x: the tag !!python/object/apply:os.system is not",
        ),
        (card("x: !secret y"), "x.yaml:3: x: the tag !secret is not allowed"),
        (card("x: !!binary aGk="), "x.yaml:3: x: the tag !!binary is not allowed"),
        (card("kubespawner_override: {mode: 0644}"), "x.yaml:3: kubespawner_override.mode: 0644 starts with 0"),
        (card("idle: &i {stop_after: 8h}\nx:\n  <<: *i"), "x.yaml:5: x.<<: merge keys are not supported"),
        (card("x: {[a]: b}"), "x.yaml:3: x: a list cannot be the name of a field"),
        (card("x: [1"), "x.yaml:3: is not YAML"),
        (card("x: *y"), "x.yaml:3: is not YAML: found undefined alias 'y'"),
        (card("\tx: y"), "x.yaml:3: is not YAML"),
        (card('x: "\\U00110000"'), "x.yaml: is not YAML"),
        (card("x: \x01"), "x.yaml: is not YAML: the character U+0001"),
        (b"name: a\n# caf\xe9\n", "x.yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("name: a\n".encode("utf-16"), "x.yaml:1: byte 0xff is not UTF-8"),
        (b"\x00" * 100, "x.yaml: is not YAML"),
        ("name: \ud800", "x.yaml:1: byte 0xed is not UTF-8"),
    ],
)
def test_what_is_no_template_at_all(source: bytes | str, expected: str) -> None:
    assert said(source)[0].startswith(expected)


def test_every_problem_of_a_file_is_told_in_the_order_of_lines() -> None:
    problems = said("gpu: {fraction: 65}\nlimits: {per_user: 0}\nfoo: 1\n")
    fields = [problem.split(": ")[1] for problem in problems]
    assert sorted(fields) == ["display_name", "foo", "gpu.fraction", "limits.per_user", "name"]
    numbers = [int(problem.split(":")[1]) for problem in problems]
    assert numbers == sorted(numbers)


def test_words_that_yaml_1_1_would_change_stay_words() -> None:
    parsed = parse(TEMPLATE, "name: 'no'\ndisplay_name: no\ndescription: 12:30", "x.yaml")
    assert present(parsed.content).display_name == "no"
    assert present(parsed.content).description == "12:30"


def test_a_byte_order_mark_and_windows_line_ends() -> None:
    assert parse(TEMPLATE, b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode(), "x.yaml").content is not None


def test_anchors_may_be_used() -> None:
    parsed = parse(TEMPLATE, card("kubespawner_override: {a: &x [1, 2], b: *x}"), "x.yaml")
    assert present(parsed.content).kubespawner_override == {"a": [1, 2], "b": [1, 2]}


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def nested_by_aliases() -> str:
    lines = ["a0: &a0 " + "[" * 20 + "]" * 20]
    return "\n".join(lines + [f"a{n}: &a{n} {'[' * 20}*a{n - 1}{']' * 20}" for n in range(1, 15)])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (laughs(9), "more than 10,000 values"),
        ("a: &a [*a]", "the alias *a contains itself"),
        ("a: &a {b: [{c: *a}]}", "the alias *a contains itself"),
        ("[" * 500_000, "nested more than 32 levels deep"),
        ("{a: " * 200_000, "nested more than 32 levels deep"),
        ("- " * 300_000, "nested more than 32 levels deep"),
        (nested_by_aliases(), "nested more than 32 levels deep"),
        ("a: [" + "1," * 20_000 + "]", "more than 10,000 values"),
        ("a: " + "b" * MAX_BYTES, "more than the limit of 1,048,576"),
    ],
)
def test_bombs_are_refused_before_they_grow(source: str, expected: str) -> None:
    started = time.monotonic()
    assert expected in said(source)[0]
    assert time.monotonic() - started < 20  # they would take hours, or all memory


def test_long_comments_and_long_words_are_only_read() -> None:
    assert parse(TEMPLATE, card("# " + "x" * 200_000 + "\ndescription: ok"), "x.yaml").content is not None
    assert "has 200000 characters" in said(card("description: " + "x" * 200_000))[0]


def reports_only_problems(source: str | bytes) -> Parsed[Template]:
    """Whatever comes in: a template or problems, each with its file and words."""
    parsed = parse(TEMPLATE, source, "x.yaml")
    assert (parsed.content is None) == bool(parsed.problems)
    for problem in parsed.problems:
        assert problem.file == "x.yaml"
        assert problem.what
        assert "\n" not in str(problem)
        assert problem.line is None or problem.line >= 1
    return parsed


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes(source: bytes) -> None:
    reports_only_problems(source)


@given(st.text(alphabet=string.printable + "é\u2028\U0001f600", max_size=200))
@settings(deadline=None)
def test_any_text(source: str) -> None:
    reports_only_problems(source)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_good_text_with_something_else_in_it(data: st.DataObject) -> None:
    source = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(source)))
        end = data.draw(st.integers(start, min(len(source), start + 20)))
        piece = data.draw(
            st.sampled_from(["", ":", "- ", "{", "]", "&a ", "*a", "!!x ", "\n", "  ", "'", '"', "|", "%", "?"])
        )
        source = source[:start] + piece + source[end:]
    reports_only_problems(source)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*schema_of("template")["properties"], "unknown", "1", ""])
PARTS = st.sampled_from(
    ["fraction", "count", "models", "cpu", "memory", "limit", "downgrade_after", "groups", "per_user"]
)


@given(st.dictionaries(FIELDS, VALUES | st.dictionaries(PARTS, VALUES, max_size=3), max_size=5))
@example({"gpu": {"fraction": None, "memory": {"\n": None}}})
@example({"a\u2028b\x1b[2J": 1})
@settings(deadline=None, max_examples=200)
def test_any_values_in_the_fields(data: dict[str, Any]) -> None:
    base = {"name": "a", "display_name": "b"}
    reports_only_problems(yaml.safe_dump({**base, **data}, allow_unicode=True))


def test_the_schema_describes_every_field() -> None:
    schema = schema_of("template")
    assert schema["required"] == ["name", "display_name"]
    assert not schema["additionalProperties"]
    for part in [schema, *schema["$defs"].values()]:
        assert part["description"]
        assert [name for name, field in part.get("properties", {}).items() if not field.get("description")] == []


def test_the_examples_in_the_reference_are_right() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/templates.md").read_text()
    examples = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if block.startswith("name:")]
    assert len(examples) >= 3
    assert [parse(TEMPLATE, example, "docs").problems for example in examples] == [()] * len(examples)


@pytest.mark.parametrize("pattern", ["'(?=x)a'", r"'(a)\1'", "'[a-z'"])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_named_with_its_line(pattern: str) -> None:
    text = f"profile_options:\n  image:\n    unlisted_choice:\n      validation_regex: {pattern}\n"
    (wrong,) = parse(TEMPLATE, card(text), "x.yaml").problems
    assert (wrong.line, wrong.field) == (6, "profile_options.image.unlisted_choice.validation_regex")
    assert "not supported" in wrong.what
    assert "without look-around and backreferences" in wrong.advice


def test_a_tab_in_the_indentation_is_named() -> None:
    (wrong,) = parse(TEMPLATE, card("idle:\n\trelease_after: 10m\n"), "x.yaml").problems
    assert str(wrong) == "x.yaml:4: is not YAML: line 4 begins with a tab; use spaces"


@pytest.mark.parametrize(
    "text", ['description: "one\ngpu: {fraction: 0.5}\nimage: "two"\n', 'description: "one\nimage: two\n']
)
def test_an_open_quote_is_reported_where_it_opens(text: str) -> None:
    (wrong,) = parse(TEMPLATE, card(text), "x.yaml").problems
    assert wrong.line == 3
    assert "a quote opens in line 3" in wrong.what


@pytest.mark.parametrize(
    ("memory", "right"),
    [
        ("{guarantee: 12Gi, limit: 8Gi}", False),
        ("{guarantee: 120%}", False),
        ("{guarantee: 50%, limit: 25%}", False),
        ("{guarantee: 8Gi, limit: 8Gi}", True),
        ("{guarantee: 8Gi, limit: 50%}", True),
    ],
)
def test_a_guarantee_of_gpu_memory_is_at_most_the_limit(memory: str, right: bool) -> None:
    problems = parse(TEMPLATE, card(f"gpu: {{fraction: 0.5, memory: {memory}}}\n"), "x.yaml").problems
    assert (not problems) == right
    assert right or "is more than the limit" in problems[0].what


def with_text(value: Any, text: str, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what follows from a value when another text stands in the place of one of its texts, keys included; each
    with the field's name in problems."""
    if isinstance(value, str):
        yield ".".join(path), text
    elif isinstance(value, list):
        for number, one in enumerate(value):
            for field, changed in with_text(one, text, path):
                yield field, [*value[:number], changed, *value[number + 1 :]]
    elif isinstance(value, dict):
        for key, one in value.items():
            for field, changed in with_text(one, text, (*path, key)):
                yield field, {**value, key: changed}


SHOWN: dict[str, Any] = {
    "name": "a",
    "display_name": "A quarter",
    "description": "Prototyping.",
    "gpu": {"fraction": 0.25, "models": ["*A100*"]},
    "image": "quay.io/jupyter/base-notebook",
    "access": {"groups": ["physics", "ml"], "users": ["ann"]},
    "profile_options": {
        "page": {
            "display_name": "Page",
            "choices": {"lab": {"display_name": "JupyterLab"}, "tree": {"default": True}},
            "unlisted_choice": {
                "enabled": True,
                "display_name": "Another page",
                "display_name_in_choices": "Another",
                "validation_message": "A page of the server.",
            },
        }
    },
}
"""A template with all texts that users read."""
CASES = [
    (field, changed)
    for field, changed in with_text(SHOWN, "LETTER 0.25 GPU")
    if field != "name"
] + [
    ("profile_options", SHOWN | {"profile_options": {"LETTER": SHOWN["profile_options"]["page"]}}),
    ("profile_options.page.choices", SHOWN | {"profile_options": {"page": {"choices": {"LETTER": {}}}}}),
]  # fmt: skip


def test_a_template_with_all_texts_is_right() -> None:
    assert parse(TEMPLATE, yaml.safe_dump(SHOWN), "x.yaml").problems == ()
    assert len(CASES) == 14


@pytest.mark.parametrize(("field", "template"), CASES, ids=[field for field, _ in CASES])
@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\x1b", "\a", "\x7f", "\u200f", "\u2028"])
def test_letters_that_hide_or_reorder_text_are_refused(field: str, template: dict[str, Any], letter: str) -> None:
    text = json.dumps(template).replace("LETTER", f"\\u{ord(letter):04x}")
    (wrong,) = parse(TEMPLATE, text, "x.yaml").problems
    assert wrong.field.startswith(field)
    assert f"U+{ord(letter):04X}" in wrong.what
    assert wrong.advice == "remove it"
    assert letter not in str(wrong)


@pytest.mark.parametrize("label", ["2", "2.5"])
def test_a_label_of_a_choice_can_be_a_number(label: str) -> None:
    text = card(f"profile_options: {{cpus: {{display_name: CPUs, choices: {{two: {{display_name: {label}}}}}}}}}\n")
    parsed = parse(TEMPLATE, text, "x.yaml")
    assert parsed.problems == ()
    choices = present(parsed.content).profile_options["cpus"].choices
    assert present(choices)["two"].display_name == label
