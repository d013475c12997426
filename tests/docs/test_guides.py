"""docs/guides: commands that can be copied name files, options and paths that exist."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from traitlets.config.loader import PyFileConfigLoader

from gpushare_spawner.cli import COMMANDS
from gpushare_spawner.model.kubernetes.objects import DRIVER, REPORT_SELECTOR, resource_name
from gpushare_spawner.sharing.dra import CLAIM_TEMPLATE_LABELS
from gpushare_spawner.shipped import shipped

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = sorted(GUIDES.glob("*.md"))
SINGLE = GUIDES / "single-machine.md"
PLACED = {
    "jupyterhub_config.py": "/etc/jupyterhub/",
    "10-gpushare.py": "/etc/jupyterhub/jupyterhub_config.d/",
    "20-gpushare-service.py": "/etc/jupyterhub/jupyterhub_config.d/",
    "gpushare-agent.service": "/etc/systemd/system/",
    "jupyterhub.service": "/etc/systemd/system/",
    "templates": "/etc/gpushare/",
}


def commands(page: Path, section: str = "") -> list[str]:
    """The commands of the page's blocks, without prompts; of one section where it is named."""
    text = page.read_text()
    if section:
        text = next(part for part in re.split(r"(?m)^## ", text) if part.startswith(f"{section}\n"))
    lines = []
    for kind, block in re.findall(r"(?ms)^ *```(bash|console)\n(.*?)^ *```", text):
        stripped = [line.strip() for line in block.splitlines()]
        lines += [line.removeprefix("$ ") for line in stripped if line and (kind == "bash" or line.startswith("$ "))]
    return lines


@functools.cache
def options_of(command: str) -> set[str]:
    """All options of a subcommand of gpushare, and of its own subcommands."""
    parser = argparse.ArgumentParser()
    COMMANDS[command][1]().configure(parser)
    parsers = [parser]
    for one in parsers:
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return {option for one in parsers for option in one._option_string_actions}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_commands_copy_come_with_the_package(page: Path) -> None:
    names = [name for line in commands(page) for name in re.findall(r"gpushare config-path ([\w./-]+)", line)]
    for name in names:
        assert shipped(name).exists()
    if page in (SINGLE, GUIDES / "littlest-jupyterhub.md"):
        assert len(names) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_subcommands_and_options_exist(page: Path) -> None:
    text = page.read_text()
    for command, rest in re.findall(
        r"\bgpushare (agent|service|doctor|templates|status|config-path|demo)\b([^\n`|]*)", text
    ):
        given = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))
        assert given <= options_of(command) | {"--help"}, f"gpushare {command}{rest}"


def test_the_install_commands_put_each_file_where_the_hub_and_systemd_look() -> None:
    lines = [line for line in commands(SINGLE) if "config-path" in line]
    found = {}
    for line in lines:
        name = re.findall(r"config-path ([\w./-]+)", line)[0]
        found[name] = shlex.split(line)[-1]
    assert found == PLACED


def test_what_units_and_config_start_is_in_an_environment_that_the_guide_makes() -> None:
    made = {line.split()[-1] for line in commands(SINGLE) if " -m venv " in line}
    assert made == {"/opt/jupyterhub", "/opt/notebook"}
    unit, config = shipped("jupyterhub.service").read_text(), shipped("jupyterhub_config.py").read_text()
    agent = next(line for line in commands(SINGLE) if "ExecStart" in line)
    for text in (unit, config, agent):
        for path in re.findall(r"(/opt/[\w-]+)/bin/", text):
            assert path in made
    assert "-f /etc/jupyterhub/jupyterhub_config.py" in unit
    assert "StateDirectory=jupyterhub\n" in unit
    # the paths in the hub's config are those of that state folder
    assert set(re.findall(r"/var/lib/[\w-]+", config)) == {"/var/lib/jupyterhub"}


def test_uninstalling_removes_what_installing_made() -> None:
    removed = [word for line in commands(SINGLE, "Uninstall") if " rm " in line for word in line.split() if "/" in word]
    places = [f"{folder}{name}" for name, folder in PLACED.items()]
    for place in [*places, "/opt/jupyterhub", "/opt/notebook", "/var/lib/jupyterhub", "/run/gpushare"]:
        assert any(place == path or place.startswith(f"{path}/") for path in removed), place
    disabled = next(line for line in commands(SINGLE, "Uninstall") if "disable" in line)
    assert {"jupyterhub", "gpushare-agent"} <= set(disabled.split())


def test_what_stays_after_uninstalling_on_kubernetes_has_the_names_that_the_program_uses() -> None:
    text = (GUIDES / "kubernetes-upgrades.md").read_text()
    section = next(part for part in re.split(r"(?m)^## ", text) if part.startswith("Uninstall\n"))
    rows = [line for line in section.splitlines() if line.strip().startswith("|")]
    claim_templates = ",".join(f"{name}={value}" for name, value in CLAIM_TEMPLATE_LABELS.items())
    assert re.findall(r"kubectl -n jhub delete (\w+) -l (\S+?)`", "\n".join(rows)) == [
        ("configmaps", REPORT_SELECTOR),
        ("resourceclaimtemplates", claim_templates),
    ]
    node = yaml.safe_load((shipped("helm-values") / "gpushare-agent" / "values.yaml").read_text())["node"]
    removed = [path for row in rows for path in re.findall(r"`rm -r (\S+)`", row)]
    assert removed == [node["hostDir"], f"{node['kubeletDir']}/plugins/{DRIVER}"]
    assert f"`{node['hostDir']}` on each node" in section
    assert f"`{resource_name(0).replace('0', 'N')}: 0`" in section
    # "/" in a JSON pointer (RFC 6901)
    assert f"/status/capacity/{resource_name(0).replace('/', '~1')}" in section


def test_the_hubs_config_with_the_two_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jupyterhub_config.d"
    folder.mkdir()
    for name in ("10-gpushare.py", "20-gpushare-service.py"):
        (folder / name).write_text(shipped(name).read_text())
    text = shipped("jupyterhub_config.py").read_text()
    assert "/etc/jupyterhub/jupyterhub_config.d" in text
    (tmp_path / "main.py").write_text(text.replace("/etc/jupyterhub/jupyterhub_config.d", str(folder)))
    config: Any = PyFileConfigLoader("main.py", str(tmp_path)).load_config()
    assert config.JupyterHub.spawner_class == "gpushare-systemd"
    assert [service["name"] for service in config.JupyterHub.services.get_value([])] == ["gpushare"]
    assert config.Spawner.cmd == ["/opt/notebook/bin/jupyterhub-singleuser"]


def test_troubleshooting_quotes_sentences_that_the_program_says() -> None:
    package = GUIDES.parents[1] / "gpushare_spawner"
    sources = "\n".join(
        path.read_text(encoding="utf-8") for kind in ("py", "html") for path in package.rglob(f"*.{kind}")
    )
    # a sentence may be written as several literals
    text = re.sub(r'"\s*f?"', "", sources)
    quoted = re.findall(r"`([^`\n]+)`", (GUIDES / "troubleshooting.md").read_text(encoding="utf-8"))
    parts = [part.strip(" .") for sentence in quoted for part in sentence.split("…")]
    commands = ("gpushare ", "nvidia-smi ", "ERROR: ld.so")
    sentences = [part for part in parts if len(part.split()) >= 4 and not part.startswith(commands)]
    assert len(sentences) >= 8
    for sentence in sentences:
        assert sentence in text, sentence
