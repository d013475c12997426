"""Checks the admin's files on one machine: the agent's unit file and the hub's config files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem, skipped
from gpushare_spawner.shipped import NotShipped, shipped

UNIT = Path("/etc/systemd/system/gpushare-agent.service")
FOLDERS = (
    Path("/opt/tljh/config/jupyterhub_config.d"),
    Path("/etc/jupyterhub/jupyterhub_config.d"),
    Path("/usr/local/etc/jupyterhub/jupyterhub_config.d"),
)
"""Where hubs have their config files."""
_SPAWNER, _SERVICE, _TLJH = "10-gpushare.py", "20-gpushare-service.py", "gpushare-tljh.py"


@dataclass(frozen=True)
class FileFacts:
    """Facts that the probe has read."""

    unit: Path
    unit_text: str | None = None
    programs: Mapping[str, bool] = field(default_factory=dict)
    """Program in the unit's ExecStart -> whether it exists."""
    folders: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    """Folder that exists -> name and text of its files that have names of shipped config files."""
    shipped: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of the shipped config files."""


def check(folders: Iterable[Path], machine: Machine) -> list[Finding]:
    """Return the findings. ``folders``: where the hub's config files can be."""
    return findings(probe(folders, machine))


def probe(folders: Iterable[Path], machine: Machine) -> FileFacts:
    """Read the facts."""
    ours = _shipped()
    unit = machine.path(UNIT)
    text = _text(unit)
    return FileFacts(
        unit=unit,
        unit_text=text,
        programs={program: machine.path(Path(program)).is_file() for program in started_by(text or "")},
        folders={
            folder: {name: text for name in ours if (text := _text(folder / name)) is not None}
            for folder in folders
            if folder.is_dir()
        },
        shipped=ours,
    )


def findings(facts: FileFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    results = _unit(facts)
    for folder, texts in facts.folders.items():
        results += _folder(folder, texts, facts.shipped)
    if not facts.folders:
        results.append(skipped("config files", "no folder jupyterhub_config.d was found: give it with --config-dir"))
    return results


def started_by(unit: str) -> list[str]:
    """Return the programs of the ExecStart lines in a unit file."""
    lines = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    return [shlex.split(line)[0].lstrip("-+@:!") for line in lines if line.strip()]


def _unit(facts: FileFacts) -> list[Finding]:
    where = str(facts.unit)
    if facts.unit_text is None:
        return [skipped(where, "does not exist: the agent is not a systemd service, or has another unit file")]
    missing = [program for program, there in facts.programs.items() if not there]
    if missing:
        remedy = "Correct the path in ExecStart, then `systemctl daemon-reload && systemctl restart gpushare-agent`."
        return [problem(where, f"starts {', '.join(missing)}, which does not exist", remedy)]
    return [ok(where, f"starts {', '.join(facts.programs)}")]


def _folder(folder: Path, texts: Mapping[str, str], present: Mapping[str, str]) -> list[Finding]:
    if not texts:
        what = "has no config file of gpushare"
        remedy = (
            "Copy them: `gpushare config-path jupyterhub_config.d` prints their folder. Nothing to do if your own "
            "files replace them."
        )
        return [note(str(folder), what, remedy)]
    results = []
    if _TLJH in texts and len(texts) > 1:
        others = " and ".join(sorted(set(texts) - {_TLJH}))
        what = f"{_TLJH} reads {others} itself: with both, a role is defined twice and the hub does not start"
        results.append(problem(str(folder), what, f"Remove {others}."))
    for name, text in sorted(texts.items()):
        where = str(folder / name)
        try:
            compile(text, where, "exec")
        except SyntaxError as error:
            remedy = f"Copy {name} of this package again."
            results.append(problem(f"{where}:{error.lineno}", f"is not valid Python: {error.msg}", remedy))
            continue
        if text != present[name]:
            what = "differs from this package's file: it is older, newer or edited"
            results.append(note(where, what, f'Compare: diff {where} "$(gpushare config-path {name})"'))
        else:
            results.append(ok(where, "is this package's file"))
    if _SPAWNER in texts and _SERVICE not in texts:
        what = f"{_SERVICE} is missing: there is no idle culler and no dashboard"
        results.append(note(str(folder), what, f"Copy {_SERVICE} too."))
    return results


def _shipped() -> dict[str, str]:
    try:
        return {name: shipped(name).read_text() for name in (_SPAWNER, _SERVICE, _TLJH)}
    except NotShipped:
        return {}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
