"""The files of an admin on one machine: the agent's unit file and the hub's config files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.doctor.finding import Finding, note, ok, problem, skipped
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
    """What the probe saw."""

    unit: Path
    unit_text: str | None = None
    programs: Mapping[str, bool] = field(default_factory=dict)
    """Program in the unit's ExecStart -> whether it is there."""
    folders: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    """Folder that is there -> name and text of its files with names of ours."""
    shipped: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of our config files."""


def check(folders: Iterable[Path] = FOLDERS, unit: Path = UNIT) -> list[Finding]:
    """The findings."""
    return findings(probe(folders, unit))


def probe(folders: Iterable[Path], unit: Path) -> FileFacts:
    """Look."""
    ours = _shipped()
    text = _text(unit)
    return FileFacts(
        unit=unit,
        unit_text=text,
        programs={program: Path(program).is_file() for program in started_by(text or "")},
        folders={
            folder: {name: said for name in ours if (said := _text(folder / name)) is not None}
            for folder in folders
            if folder.is_dir()
        },
        shipped=ours,
    )


def findings(facts: FileFacts) -> list[Finding]:
    """What the facts mean."""
    found = _unit(facts)
    for folder, texts in facts.folders.items():
        found += _folder(folder, texts, facts.shipped)
    if not facts.folders:
        found.append(skipped("config files", "no folder jupyterhub_config.d was found: name it with --config-dir"))
    return found


def started_by(unit: str) -> list[str]:
    """The programs of the lines ExecStart in a unit file."""
    lines = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    return [shlex.split(line)[0].lstrip("-+@:!") for line in lines if line.strip()]


def _unit(facts: FileFacts) -> list[Finding]:
    where = str(facts.unit)
    if facts.unit_text is None:
        return [skipped(where, "is not there: the agent is not a service of systemd, or has another unit")]
    missing = [program for program, there in facts.programs.items() if not there]
    if missing:
        remedy = "Correct the path in ExecStart, then `systemctl daemon-reload && systemctl restart gpushare-agent`."
        return [problem(where, f"starts {', '.join(missing)}, which does not exist", remedy)]
    return [ok(where, f"starts {', '.join(facts.programs)}")]


def _folder(folder: Path, texts: Mapping[str, str], present: Mapping[str, str]) -> list[Finding]:
    if not texts:
        what = "has no config file of gpushare"
        remedy = (
            "Copy them: `gpushare config-path jupyterhub_config.d` prints where they are. Nothing to do if yours do it."
        )
        return [note(str(folder), what, remedy)]
    found = []
    if _TLJH in texts and len(texts) > 1:
        others = " and ".join(sorted(set(texts) - {_TLJH}))
        what = f"{_TLJH} reads the others itself: with {others} beside it a role is defined twice"
        found.append(problem(str(folder), what, f"Remove {others}: the hub does not start with both."))
    for name, text in sorted(texts.items()):
        where = str(folder / name)
        try:
            compile(text, where, "exec")
        except SyntaxError as error:
            remedy = f"Copy the file of this package again: {name}."
            found.append(problem(f"{where}:{error.lineno}", f"is no Python: {error.msg}", remedy))
            continue
        if text != present[name]:
            what = "differs from the file of this package: it is older, newer or edited"
            found.append(note(where, what, f'Compare: diff {where} "$(gpushare config-path {name})"'))
        else:
            found.append(ok(where, "is the file of this package"))
    if _SPAWNER in texts and _SERVICE not in texts:
        what = f"{_SERVICE} is missing: there is no idle culler and no dashboard"
        found.append(note(str(folder), what, "Copy it too."))
    return found


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
