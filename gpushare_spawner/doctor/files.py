"""Checks of the admin's files: the agent's unit file, the hub's config files, and the compute templates.

Unit file and config files exist only on one machine. The hub and its service read the templates and the related files.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.mps import PROGRAM as MPS_PROGRAM
from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem, skipped
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import guaranteed_memory, smallest
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import PlacementPins
from gpushare_spawner.shipped import NotShipped, shipped
from gpushare_spawner.templates.command import layer_notes, layer_problems, legacy_notes
from gpushare_spawner.templates.folder import (
    IDLE_FILE,
    LAYERS_FILE,
    PLACEMENT_FILE,
    QUOTA_FILE,
    RESERVED,
    Policy,
    PolicyFolder,
)
from gpushare_spawner.templates.problems import Problem
from gpushare_spawner.wording.service import exceeds_cluster
from gpushare_spawner.wording.spawn_form import not_on_one_machine

UNIT = Path("/etc/systemd/system/gpushare-agent.service")
FOLDERS = (
    Path("/opt/tljh/config/jupyterhub_config.d"),
    Path("/etc/jupyterhub/jupyterhub_config.d"),
    Path("/usr/local/etc/jupyterhub/jupyterhub_config.d"),
)
"""The usual folders of hubs' config files."""
_SPAWNER, _SERVICE, _TLJH = "10-gpushare.py", "20-gpushare-service.py", "gpushare-tljh.py"


def check_config(folders: Iterable[Path], machine: Machine) -> list[Finding]:
    """Return the findings. ``folders``: possible folders of the hub's config files."""
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


_COPY = "Copy the templates that come with the package: `gpushare config-path templates` prints their folder."

_VALID = {
    QUOTA_FILE: "quotas are valid",
    IDLE_FILE: "the idle policy is valid",
    LAYERS_FILE: "the sharing layers are valid",
    PLACEMENT_FILE: "the placement of users and groups is valid",
}


def check_templates(
    folder: Path, gpus: tuple[Gpu, ...], machine: Machine, cluster_gpus: Collection[str] = ()
) -> list[Finding]:
    """Return the findings. In a cluster the templates are in the hub's pod, not on the node.

    ``cluster_gpus``: the UUIDs of the cluster's GPUs; empty if unknown.
    """
    if not folder.is_dir():
        if machine.on_node:
            return [skipped(str(folder), "does not exist: in a cluster the hub's pod has the templates")]
        return [problem(str(folder), "does not exist, so the form is empty", _COPY)]
    quiet = logging.Logger("gpushare.doctor", logging.CRITICAL)
    policy = PolicyFolder(folder, log=quiet).load()
    uuids = cluster_gpus if machine.on_node else {gpu.uuid for gpu in gpus}
    lacking = "no node of the cluster has" if machine.on_node else "this machine does not have"
    pins = policy.placement if policy.placement is not None else PlacementPins()
    named = [(policy.files[template.name], template.name, template.placement.gpu) for template in policy.templates]
    named += [(PLACEMENT_FILE, name, pin.gpu) for name, pin in (*pins.users.items(), *pins.groups.items())]
    results = [
        note(str(folder / file), f"{name} needs GPU {gpu}, which {lacking}", "Correct the UUID: `nvidia-smi -L`.")
        for file, name, gpu in named
        if uuids and gpu is not None and gpu not in uuids
    ]
    results += template_findings(folder, policy, gpus) + _mps_findings(folder, policy, machine)
    if not machine.on_node:
        results += _mig_findings(folder, policy, gpus)
        results += _refused_findings(folder, policy)
    # a cluster has GPUs on other nodes too
    return [*results, *_beside_findings(folder, policy, () if machine.on_node else gpus)]


def template_findings(folder: Path, policy: Policy, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Return the findings on the templates for a machine with these GPUs."""
    wrong = [fault for fault in policy.problems if fault.file not in RESERVED]
    results = [problem(*_problem_texts(folder, fault)) for fault in wrong]
    if not policy.templates and not wrong:
        results.append(problem(str(folder), "has no templates, so the form is empty", _COPY))
    for template in policy.templates:
        share = template.gpu
        if share is not None and gpus and not any(share.accepts(gpu.whole_model) for gpu in gpus):
            what = f"{template.name} needs a GPU model that this machine does not have: {', '.join(share.models)}"
            remedy = "Correct `gpu.models` if the template is for this machine."
            results.append(note(str(folder / policy.files[template.name]), what, remedy))
    if policy.templates:
        results.append(ok(str(folder), f"templates: {', '.join(template.name for template in policy.templates)}"))
    return results


def _mps_findings(folder: Path, policy: Policy, machine: Machine) -> list[Finding]:
    """Return a finding on the program that MPS needs; no finding if no template names MPS."""
    named = [
        template.name
        for template in policy.templates
        if template.gpu is not None and template.gpu.layer is LayerName.MPS
    ]
    if not named:
        return []
    program = machine.program(MPS_PROGRAM)
    if program:
        return [ok(MPS_PROGRAM, f"is installed as {program}; templates with MPS: {', '.join(named)}")]
    what = f"is not installed, and {folder / policy.files[named[0]]} shares GPUs by MPS"
    remedy = "On one machine install the compute utilities of the NVIDIA driver; in a cluster MPS is on its nodes."
    return [note(MPS_PROGRAM, what, remedy)]


def _refused_findings(folder: Path, policy: Policy) -> list[Finding]:
    """Return findings on templates with a layer that needs Kubernetes, or allows fewer GPUs on one machine."""
    remedy = "Nothing to do if the folder is that of a cluster's hub."
    return [
        note(str(folder / policy.files[template.name]), cannot, remedy)
        for template in policy.templates
        if (cannot := not_on_one_machine(template))
    ]


def _mig_findings(folder: Path, policy: Policy, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Return findings on MIG templates that no instance on this machine can serve. `gpus`: empty if unknown."""
    results = []
    for template in policy.templates:
        share = template.gpu
        if share is None or share.layer is not LayerName.MIG or not gpus:
            continue
        profiles = [gpu.mig.profile for gpu in gpus if gpu.mig is not None and share.accepts(gpu.whole_model)]
        if smallest(profiles, share.share.units, guaranteed_memory(share.memory.guarantee)) is None:
            what = f"no MIG instance of this machine holds the share of {template.name}"
            remedy = "Create an instance that holds it, or correct the template: see docs/guides/other-layers.md."
            results.append(note(str(folder / policy.files[template.name]), what, remedy))
    return results


def _beside_findings(folder: Path, policy: Policy, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Yield the findings on each related file that exists. `gpus`: the hub's GPUs; empty if unknown."""
    for name, content in policy.beside.items():
        yield from (note(*_problem_texts(folder, warning)) for warning in policy.warnings if warning.file == name)
        if name == QUOTA_FILE:
            units = sum(gpu.capacity(UNITS_PER_GPU) for gpu in gpus)
            exceeds = exceeds_cluster(policy.quotas, units) if policy.quotas is not None and gpus else None
            if exceeds is not None:
                yield note(str(folder / name), exceeds, "Lower some guarantees: not all can hold at once.")
        if name == LAYERS_FILE and policy.layers is not None:
            yield from (problem(*_problem_texts(folder, wrong)) for wrong in layer_problems(policy))
            remedy = "Nothing to do if you intend that. The reference of sharing layers says what each layer can do."
            for text in (*layer_notes(policy), *legacy_notes(policy)):
                yield note(str(folder / name), text, remedy)
        wrong_fields = [fault for fault in policy.problems if fault.file == name]
        yield from (problem(*_problem_texts(folder, fault)) for fault in wrong_fields)
        if content is not None and not wrong_fields:
            yield ok(str(folder / name), _VALID[name])


def _problem_texts(folder: Path, wrong: Problem) -> tuple[str, str, str]:
    """Return the place, the text and the remedy for a problem."""
    place = wrong.file if wrong.line is None else f"{wrong.file}:{wrong.line}"
    what = f"{wrong.field}: {wrong.what}" if wrong.field else wrong.what
    advice = wrong.advice or f"Correct it, and check again: `gpushare templates check {folder}`."
    return str(folder / place), what, advice[0].upper() + advice[1:]
