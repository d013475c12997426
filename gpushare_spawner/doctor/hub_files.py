"""Checks the admin's files on one machine: the agent's unit file and the hub's config files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
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


def check(folders: Iterable[Path], machine: Machine) -> list[Finding]:
    """Return the findings. ``folders``: where the hub's config files can be."""
    results = [_unit(machine)]
    ours = _shipped()
    present = [folder for folder in folders if folder.is_dir()]
    for folder in present:
        texts = {name: text for name in ours if (text := _text(folder / name)) is not None}
        results += _folder(folder, texts, ours)
    if not present:
        results.append(skipped("config files", "no folder jupyterhub_config.d was found: give it with --config-dir"))
    return results


def started_by(unit: str) -> list[str]:
    """Return the programs of the ExecStart lines in a unit file."""
    lines = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    return [shlex.split(line)[0].lstrip("-+@:!") for line in lines if line.strip()]


def _unit(machine: Machine) -> Finding:
    path = machine.path(UNIT)
    where, text = str(path), _text(path)
    if text is None:
        return skipped(where, "does not exist: the agent is not a systemd service, or has another unit file")
    programs = started_by(text)
    missing = [program for program in programs if not machine.path(Path(program)).is_file()]
    if missing:
        remedy = "Correct the path in ExecStart, then `systemctl daemon-reload && systemctl restart gpushare-agent`."
        return problem(where, f"starts {', '.join(missing)}, which does not exist", remedy)
    return ok(where, f"starts {', '.join(programs)}")


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
