"""The reference says what the code says: all of it, and nothing of the machine that builds the site."""

from __future__ import annotations

import argparse
import re
import socket
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import generated
import pytest
import reference_text

from gpushare_spawner import cli
from gpushare_spawner.model import control
from gpushare_spawner.model.frames import Feature, Kind
from gpushare_spawner.model.layers import LAYERS, LayerName

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
PRELOAD = ROOT / "gpushare_spawner" / "native" / "preload"
# that of The Littlest JupyterHub extends gpushare-systemd, and needs the package tljh
SPAWNERS = sorted(
    point.name
    for point in entry_points(group="jupyterhub.spawners")
    if point.value.startswith("gpushare_spawner") and point.name != "gpushare-tljh"
)


def page(name: str) -> str:
    return (PAGES / name).read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPAWNERS)
def test_every_setting_of_a_spawner_has_a_text(name: str) -> None:
    cls = reference_text.spawner(name)
    own = reference_text.own_settings(cls)
    assert {"templates_dir", "queue_length", "queue_timeout"} <= set(own)
    assert [setting for setting in own if not cls.class_traits()[setting].help] == []


def test_the_settings_page_shows_every_part() -> None:
    assert re.findall(r"{gpushare-settings} ([\w-]+)", page("settings.md")) == list(generated.SETTINGS)


def test_the_product_has_at_most_300_settings() -> None:
    declared = {place for part in generated.SETTINGS.values() for place in reference_text.declared_once(part())}
    assert 200 < len(declared) <= 300


@pytest.mark.parametrize("part", generated.SETTINGS)
def test_every_setting_has_a_value_and_an_effect(part: str) -> None:
    settings = list(generated.SETTINGS[part]())
    assert settings
    assert [setting.name for setting in settings if not setting.effect] == []
    # those of the chart that are files of their own
    assert {setting.name for setting in settings if not setting.value} <= {
        "`quotas`",
        "`idlePolicy`",
        "`layers`",
        "`placement`",
    }


def test_the_settings_of_the_two_named_spawners_are_those_of_all() -> None:
    shown = {name for one in ("gpushare-local", "gpushare-kube") for name in names(one)}
    assert {name for one in SPAWNERS for name in names(one)} == shown
    assert "share_unit_size" in names("gpushare-kube")
    assert "agent_socket" not in names("gpushare-kube")


def names(spawner: str) -> list[str]:
    return reference_text.own_settings(reference_text.spawner(spawner))


def test_the_settings_have_every_variable_that_a_config_file_reads() -> None:
    read = re.compile(r"""environ(?:\.get\(|\[)["'](GPUSHARE_\w+)|, "(GPUSHARE_\w+)"\)""")
    texts = [path.read_text() for path in (ROOT / "jupyterhub_config.d").glob("[12]0-*.py")]
    found = {"".join(names) for text in texts for names in read.findall(text)}
    assert found | {"GPUSHARE_SECRET_…"} == {setting.declared for setting in generated.SETTINGS["config-files"]()}


def test_the_map_of_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    block = text[text.index("gpushare_spawner/\n") :].partition("```")[0]
    packages = {path.parent.name for path in (ROOT / "gpushare_spawner").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", block, flags=re.MULTILINE)) == packages


# -- templates --------------------------------------------------------------------------------------------------------


def test_every_field_of_a_template_has_a_row_with_value_and_meaning() -> None:
    schema = generated.template_schema()
    fields = {setting.name.strip("`"): setting.row for setting in generated.SETTINGS["templates"]()}
    named = {name for part in [schema, *schema["$defs"].values()] for name in part.get("properties", ())}
    assert {name.rpartition(".")[2] for name in fields} >= named
    assert fields["name"][2] == "must be given"
    assert fields["gpu.count"][1] == "1 to 64"
    assert fields["gpu.memory.limit"][1:3] == ("percent like 80%, bytes like 12Gi", "`100%`")
    assert fields["idle.warn_before"][1:3] == ("duration like 15m", "300 seconds")
    assert [name for name, cells in fields.items() if not cells[1] or not cells[3]] == []


def test_every_field_of_the_idle_policy_and_the_notifiers_has_a_row_with_a_meaning() -> None:
    for schema in (generated.template_schema("idle"), generated.notifier_schema()):
        for part in ("file", *schema["$defs"]):
            found = list(rows(reference_text.file_fields(schema, part)))
            assert found
            assert all(len(row) == 4 and row[1] and row[3] for row in found)


def test_every_field_of_a_quota_has_a_row_with_value_and_meaning() -> None:
    schema = generated.template_schema("quotas")
    tables = {part: list(rows(reference_text.file_fields(schema, part))) for part in ("file", "Group", "Reclaim")}
    of_file, fields, reclaim = ({cells[0].strip("`"): cells for cells in table} for table in tables.values())
    assert of_file.keys() == {"field", "---", *schema["properties"]}
    parts = {"per_user": "PerUser", "cpu": "CpuAmounts", "memory": "MemoryAmounts"}
    for budget in ("budget", "per_user.budget"):
        parts |= {budget: "HoursBudget", f"{budget}.term": "TermDates"}
    inner = {f"{part}.{name}" for part, kind in parts.items() for name in schema["$defs"][kind]["properties"]}
    assert fields.keys() == {"field", "---", *schema["$defs"]["Group"]["properties"], *inner}
    assert reclaim.keys() == {"field", "---", *schema["$defs"]["Reclaim"]["properties"]}
    assert fields["guarantee"][1:3] == ["0 to 1000000", "0"]
    assert [cells for part in tables.values() for cells in part if not cells[1] or not cells[3]] == []


def test_every_value_of_the_chart_has_a_row_with_its_default() -> None:
    schema, defaults = generated.chart()
    shown = {setting.name.strip("`"): setting for setting in reference_text.chart_values(schema, defaults)}
    assert {name.partition(".")[0] for name in shown} == schema["properties"].keys()
    assert shown["gpus.from"].default == '`"claim"`'
    assert shown["hub.readCapacity"].default == "`true`"


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_of_a_command_is_there_with_a_text(name: str) -> None:
    parser = generated.command_parser(name)
    text = reference_text.command(parser)
    parsers = [parser]
    for one in parsers:
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif not isinstance(action, argparse._HelpAction):
                shown = action.option_strings[0] if action.option_strings else str(action.metavar)
                assert re.search(rf"{{option}} {re.escape(shown)}.*\n\S", text), shown


def test_commands_say_nothing_of_the_machine_that_builds_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_CONTROL", "/of/the/builder.sock")
    monkeypatch.setenv("NODE_NAME", "builder")
    text = "".join(reference_text.command(generated.command_parser(name)) for name in cli.COMMANDS)
    assert "/of/the/builder" not in text
    assert "builder" not in text
    assert socket.gethostname() not in text.split()


def test_help_is_shown_as_text_and_not_as_markup() -> None:
    assert reference_text.plain("files *.yaml of $HOME, see --dir") == "Files `*.yaml` of `$HOME`, see `--dir`."
    assert reference_text.plain("a_b [c] <d>.") == r"A\_b \[c\] \<d\>."


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["service", "agent-without-token", "agent-with-token"])
def test_every_metric_family_has_a_row_with_a_meaning(part: str) -> None:
    families = generated.metric_families(part)
    shown = rows(reference_text.metrics(families))[2:]
    assert len(shown) == len(families) > 4
    assert all(cells[3] for cells in shown)
    assert f"{{gpushare-metrics}} {part}" in page("metrics.md")


def test_metrics_are_named_as_prometheus_sees_them_with_their_labels() -> None:
    shown = {cells[0]: cells for cells in rows(reference_text.metrics(generated.metric_families("service")))}
    assert shown["`gpushare_session_gpu_seconds_total`"][1:3] == ["counter", "`node`, `user`, `server`, `template`"]
    assert shown["`gpushare_gpu_units`"][1:3] == ["gauge", "`node`, `gpu`, `uuid`, `model`, `kind`"]


def test_metrics_of_sessions_are_not_among_those_without_a_token() -> None:
    without = {family.name for family in generated.metric_families("agent-without-token")}
    assert not [name for name in without if "session_" in name]
    assert "gpushare_session_memory_bytes" in {f.name for f in generated.metric_families("agent-with-token")}


# -- addresses --------------------------------------------------------------------------------------------------------


SERVICE = "/services/gpushare"
ADDRESSES = {
    "service": [f"{SERVICE}/", SERVICE, f"{SERVICE}/history", f"{SERVICE}/metrics"],
    "agent": ["/metrics"],
    "notebook": ["/user/ada/gpushare/status", "/user/ada/gpushare/cells"],
}


@pytest.mark.parametrize(("part", "wanted"), ADDRESSES.items())
def test_every_address_of_ours_is_there_with_a_text(part: str, wanted: list[str]) -> None:
    text = reference_text.addresses(generated.application(part))
    assert re.findall(r"### `GET (\S+)`\n\n\S", text) == wanted
    assert f"{{gpushare-addresses}} {part}" in page("addresses.md")


def test_every_operation_of_the_rest_api_is_there_with_its_arguments_and_a_request() -> None:
    from gpushare_spawner.service.api.api import OPERATIONS, openapi_document

    text = reference_text.rest_api(openapi_document("/services/gpushare/"))
    assert "{gpushare-rest-api}" in page("rest-api.md")
    for one in OPERATIONS:
        part = text.partition(f"### `{one.method} /{one.path}`\n\n")[2].partition("\n### ")[0]
        assert part, one.name
        assert f"$ curl -X {one.method} " in part
        assert all(f"| `{name}` |" in part for name in (*one.query.model_fields, *one.body.model_fields)), one.name
        assert all(scope in part for scope in one.needs.scopes)


# -- sockets ----------------------------------------------------------------------------------------------------------


def test_the_control_sockets_page_has_every_request() -> None:
    union = get_args(get_args(control.Request)[0])
    assert len(union) >= 6
    for request in union:
        assert f"model.control:{request.__name__}\n" in page("control-socket.md")


def test_fields_of_a_class_come_with_type_default_and_text_also_those_of_its_base() -> None:
    shown = {cells[0]: cells for cells in rows(reference_text.fields("gpushare_spawner.model.control:OpenRequest"))}
    assert shown["`version`"][1] == "`1`"
    assert shown["`op`"][1] == "`'open'`"
    assert shown["`confirm_within`"][1:3] == ["`float`", "`600.0`"]
    assert shown["`uid`"][3] == "The user id that can connect to the session's socket."


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ("notebook", {kind.value: kind.name for kind in Kind if kind < 64}),
        ("agent", {kind.value: kind.name for kind in Kind if kind >= 64}),
        ("features", {feature.value.bit_length() - 1: feature.name for feature in Feature}),
    ],
)
def test_every_frame_and_feature_of_the_protocol_has_a_row_with_a_meaning(part: str, wanted: dict[int, str]) -> None:
    shown = list(rows(reference_text.frames(part)))[2:]
    assert {int(cells[0]): cells[1] for cells in shown} == wanted
    assert [cells[1] for cells in shown if len(cells) != 3 or not cells[2]] == []
    assert f"{{gpushare-frames}} {part}" in page("protocol.md")


def test_the_librarys_frames_are_those_of_the_code() -> None:
    header = (PRELOAD / "platform" / "frames.h").read_text()
    in_c = {name: int(value) for name, value in re.findall(r"FRAME_(\w+) = (\d+),", header)}
    assert len(in_c) > 20
    assert in_c.items() <= {kind.name: kind.value for kind in Kind}.items()
    features = {name: int(value) for name, value in re.findall(r"FEATURE_(\w+) = (\d+)", header)}
    assert features == {str(feature.name): feature.value for feature in Feature}


def test_the_settings_have_exactly_the_variables_that_the_library_reads() -> None:
    sources = "\n".join(path.read_text() for path in sorted(PRELOAD.rglob("*.c")))
    read = set(re.findall(r'getenv\("(GPUSHARE_\w+)"\)', sources))
    read |= set(re.findall(r'"(GPUSHARE_\w+)"', sources))
    assert {setting.declared for setting in generated.SETTINGS["library"]()} == read
    levels = re.findall(r'{"(\w+)", LOG_', (PRELOAD / "platform" / "log.c").read_text())
    assert levels
    values = {setting.declared: setting.value for setting in generated.SETTINGS["library"]()}
    assert all(f"`{level}`" in values["GPUSHARE_LOG"] for level in levels)


# -- sharing layers ---------------------------------------------------------------------------------------------------


def test_the_table_of_layers_says_what_the_declarations_say() -> None:
    found = {cells[1].strip("`"): cells for cells in rows(reference_text.layers(LAYERS.values()))[2:]}
    assert set(found) == set(LayerName)
    assert found["native"][0] == "gpushare"
    assert found["native"][2:9] == [
        "0.01", "software", "software", "ledger", "yes", "yes", "stop, downgrade, release, resize"
    ]  # fmt: skip
    assert found["mig"][2:9] == ["replica or profile", "hardware", "hardware", "scheduler", "no", "yes", "stop"]
    assert found["kai"][3:5] == ["accounted", "accounted"]
    assert found["nvshare"][0] == "nvshare (legacy)"
    assert {name for name, cells in found.items() if "one machine" in cells[9]} == {"native", "mps", "mig"}
    # a library of their own, or one that can be switched on, is preloaded by these
    assert {name for name, cells in found.items() if cells[10] == "NVML"} == {"hami", "kai", "nvshare", "kubeshare"}


def test_the_notes_name_the_source_of_each_layer() -> None:
    text = reference_text.layer_notes(LAYERS.values())
    for layer in LAYERS.values():
        assert f"- **{layer.title}**: {layer.note}" in text
        assert layer.source is None or f"Facts: {layer.source.project} {layer.source.version}" in text


def test_every_field_of_the_layers_file_is_on_its_page() -> None:
    schema = generated.template_schema("layers")
    shown = re.findall(r"{gpushare-layer-fields} (\w+)", page("layers.md"))
    options = [name for name in schema["$defs"] if name.endswith("Options") and name != "AllOptions"]
    assert set(shown) == {"file", "LayerRule", *options}
    fields = {cells[0].strip("`") for part in shown for cells in rows(reference_text.file_fields(schema, part))[2:]}
    assert {"rules", "nodes", "models", "layer", "queue", "strategy", "consumable", "replicas"} <= fields


def test_the_page_of_layers_has_a_row_for_what_each_pod_gets() -> None:
    text = page("layers.md").partition("## What a pod gets")[2]
    named = {name.strip() for cells in rows(text)[2:] for name in cells[0].split(",")}
    assert named == {layer.value for layer in LayerName} - {"native"}
