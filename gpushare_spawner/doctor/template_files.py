"""The compute templates that the hub and its service read."""

from __future__ import annotations

import logging
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.finding import Finding, note, ok, problem, skipped
from gpushare_spawner.templates.folder import TemplateFolder, Templates

_COPY = "Copy those that come with the package, to begin with: `gpushare config-path templates` prints where they are."


def check(folder: Path, gpus: tuple[Gpu, ...], on_node: bool) -> list[Finding]:
    """The findings. `on_node`: this is a node of a cluster, where the hub has the templates."""
    if not folder.is_dir():
        if on_node:
            return [skipped(str(folder), "is not there: on a cluster the hub's pod has the templates")]
        return [problem(str(folder), "is not there: the form would be empty", _COPY)]
    return findings(
        folder, TemplateFolder(folder, log=logging.Logger("gpushare.doctor", logging.CRITICAL)).load(), gpus
    )


def findings(folder: Path, templates: Templates, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """What the templates mean on a machine with these GPUs."""
    found = []
    for wrong in templates.problems:
        place = wrong.file if wrong.line is None else f"{wrong.file}:{wrong.line}"
        what = f"{wrong.field}: {wrong.what}" if wrong.field else wrong.what
        advice = wrong.advice or f"Correct it; `gpushare templates check {folder}` checks again."
        found.append(problem(str(folder / place), what, advice[0].upper() + advice[1:]))
    if not templates.templates and not templates.problems:
        found.append(problem(str(folder), "has no templates: the form would be empty", _COPY))
    for template in templates:
        share = template.gpu
        if share is not None and gpus and not any(share.accepts(gpu.model) for gpu in gpus):
            what = f"{template.name} asks for GPU models that are not here: {', '.join(share.models)}"
            found.append(note(str(folder / templates.files[template.name]), what, "Correct `gpu.models`, or leave it."))
    if templates.templates:
        found.append(ok(str(folder), f"templates: {', '.join(template.name for template in templates)}"))
    return found
