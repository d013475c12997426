"""Checks the compute templates that the hub and its service read."""

from __future__ import annotations

import logging
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.mps import PROGRAM as MPS_PROGRAM
from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem, skipped
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layer_rules import LayersFile, guaranteed_memory, smallest
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.templates.command import layer_notes, layer_problems, legacy_notes
from gpushare_spawner.templates.files import (
    IDLE_FILE,
    LAYERS_FILE,
    QUOTA_FILE,
    FileInForce,
    QuotaFile,
    QuotasInForce,
    idle_file,
    layers_file,
)
from gpushare_spawner.templates.folder import TemplateFolder, Templates
from gpushare_spawner.templates.problems import Problem
from gpushare_spawner.wording.service import exceeds_cluster
from gpushare_spawner.wording.spawn_form import not_on_one_machine

_COPY = "Copy the templates that come with the package: `gpushare config-path templates` prints their folder."


def check(folder: Path, gpus: tuple[Gpu, ...], machine: Machine) -> list[Finding]:
    """Return the findings. On a node of a cluster the hub's pod has the templates."""
    if not folder.is_dir():
        if machine.on_node:
            return [skipped(str(folder), "does not exist: in a cluster the hub's pod has the templates")]
        return [problem(str(folder), "does not exist, so the form is empty", _COPY)]
    quiet = logging.Logger("gpushare.doctor", logging.CRITICAL)
    templates = TemplateFolder(folder, log=quiet).load()
    results = findings(folder, templates, gpus) + _mps_findings(folder, templates, machine)
    if not machine.on_node:
        results += _mig_findings(folder, templates, gpus)
        results += _refused_findings(folder, templates)
    # in a cluster there are other GPUs than this node's
    results += quota_findings(folder, QuotaFile(folder, log=quiet).load(), () if machine.on_node else gpus)
    results += idle_findings(folder, idle_file(folder, log=quiet).load())
    return results + layer_findings(folder, templates, layers_file(folder, log=quiet).load())


def findings(folder: Path, templates: Templates, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Return the findings about the templates on a machine with these GPUs."""
    results = []
    for wrong in templates.problems:
        results.append(problem(*_problem_texts(folder, wrong)))
    if not templates.templates and not templates.problems:
        results.append(problem(str(folder), "has no templates, so the form is empty", _COPY))
    for template in templates:
        share = template.gpu
        if share is not None and gpus and not any(share.accepts(gpu.whole_model) for gpu in gpus):
            what = f"{template.name} needs a GPU model that this machine does not have: {', '.join(share.models)}"
            remedy = "Correct `gpu.models` if the template is for this machine."
            results.append(note(str(folder / templates.files[template.name]), what, remedy))
    if templates.templates:
        results.append(ok(str(folder), f"templates: {', '.join(template.name for template in templates)}"))
    return results


def _mps_findings(folder: Path, templates: Templates, machine: Machine) -> list[Finding]:
    """Return whether the program that MPS needs exists; none if no template names MPS."""
    named = [
        template.name for template in templates if template.gpu is not None and template.gpu.layer is LayerName.MPS
    ]
    if not named:
        return []
    program = machine.program(MPS_PROGRAM)
    if program:
        return [ok(MPS_PROGRAM, f"is here, as {program}; templates with MPS: {', '.join(named)}")]
    what = f"is not installed, and {folder / templates.files[named[0]]} shares GPUs by MPS"
    remedy = "On one machine install the compute utilities of the NVIDIA driver; in a cluster MPS is on its nodes."
    return [note(MPS_PROGRAM, what, remedy)]


def _refused_findings(folder: Path, templates: Templates) -> list[Finding]:
    """Return the templates with a layer for Kubernetes only, or with too many GPUs for it on one machine."""
    remedy = "Nothing to do if the folder is that of a cluster's hub."
    return [
        note(str(folder / templates.files[template.name]), cannot, remedy)
        for template in templates
        if (cannot := not_on_one_machine(template))
    ]


def _mig_findings(folder: Path, templates: Templates, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Return the templates with MIG that no instance of this machine can serve. `gpus`: empty if unknown."""
    results = []
    for template in templates:
        share = template.gpu
        if share is None or share.layer is not LayerName.MIG or not gpus:
            continue
        profiles = [gpu.mig.profile for gpu in gpus if gpu.mig is not None and share.accepts(gpu.whole_model)]
        if smallest(profiles, share.share.units, guaranteed_memory(share.memory.guarantee)) is None:
            what = f"no MIG instance of this machine holds the share of {template.name}"
            remedy = "Make an instance that holds it, or correct the template: see docs/guides/other-layers.md."
            results.append(note(str(folder / templates.files[template.name]), what, remedy))
    return results


def quota_findings(folder: Path, quotas: QuotasInForce, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Return the findings about quotas.yaml; none if there is no such file.

    `gpus`: the GPUs of the hub; empty if unknown.
    """
    results = [problem(*_problem_texts(folder, wrong)) for wrong in quotas.problems]
    results += [note(*_problem_texts(folder, warning)) for warning in quotas.warnings]
    if quotas.quotas is None:
        return results
    exceeds = exceeds_cluster(quotas.quotas, sum(gpu.capacity(UNITS_PER_GPU) for gpu in gpus)) if gpus else None
    if exceeds is not None:
        results.append(note(str(folder / QUOTA_FILE), exceeds, "Lower some guarantees: not all can hold at once."))
    if not quotas.problems:
        results.append(ok(str(folder / QUOTA_FILE), "quotas are valid"))
    return results


def idle_findings(folder: Path, idle: FileInForce[IdlePolicy]) -> list[Finding]:
    """Return the findings about idle.yaml; none if there is no such file."""
    results = [problem(*_problem_texts(folder, wrong)) for wrong in idle.problems]
    if idle.content is not None and not idle.problems:
        results.append(ok(str(folder / IDLE_FILE), "the idle policy is valid"))
    return results


def layer_findings(folder: Path, templates: Templates, layers: FileInForce[LayersFile]) -> list[Finding]:
    """Return the findings about layers.yaml and the templates of its layers; none if there is no file."""
    results = [problem(*_problem_texts(folder, wrong)) for wrong in layers.problems]
    if layers.content is None:
        return results
    results += [problem(*_problem_texts(folder, wrong)) for wrong in layer_problems(templates, layers.content)]
    remedy = "Nothing to do if you intend that. The reference of sharing layers says what each layer can do."
    for text in (*layer_notes(templates, layers.content), *legacy_notes(templates, layers.content)):
        results.append(note(str(folder / LAYERS_FILE), text, remedy))
    if not layers.problems:
        results.append(ok(str(folder / LAYERS_FILE), "the sharing layers are valid"))
    return results


def _problem_texts(folder: Path, wrong: Problem) -> tuple[str, str, str]:
    """Return the place, the text and the remedy of a problem."""
    place = wrong.file if wrong.line is None else f"{wrong.file}:{wrong.line}"
    what = f"{wrong.field}: {wrong.what}" if wrong.field else wrong.what
    advice = wrong.advice or f"Correct it, and check again: `gpushare templates check {folder}`."
    return str(folder / place), what, advice[0].upper() + advice[1:]
