"""Which templates no layer of `layers.yaml` can serve, and which nodes are left out for the others."""

from __future__ import annotations

from collections.abc import Iterator

from gpushare_spawner.model.layers import LAYERS, BrokenPromise, LayerName, LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.folder import Templates
from gpushare_spawner.templates.layers_file import LAYERS_FILE
from gpushare_spawner.templates.problems import Problem, line_of

Broken = dict[LayerName, tuple[BrokenPromise, ...]]


def layer_problems(templates: Templates, layers: LayersFile) -> list[Problem]:
    """Return what each template promises that none of the layers on its nodes keeps: no server can have it."""
    return [
        problem
        for template in templates
        if (broken := broken_by_layer(template, layers)) and all(broken.values())
        for problem in _problems(template, broken, templates)
    ]


def layer_notes(templates: Templates, layers: LayersFile) -> list[str]:
    """Return why a template is not offered on the nodes of a layer, where it is offered on others."""
    return [
        f"{templates.files[template.name]}: not offered on nodes of the layer {layer}: {ones[0].what}"
        for template in templates
        if not all((broken := broken_by_layer(template, layers)).values())
        for layer, ones in broken.items()
        if ones
    ]


def broken_by_layer(template: Template, layers: LayersFile) -> Broken:
    """Return what a template without a layer of its own promises in vain, by the layers that can be its layer."""
    if template.gpu is None or template.gpu.layer is not None:
        return {}
    return {layer: template.broken_promises(layer) for layer in layers.layers_for(template.gpu.models)}


def _problems(template: Template, broken: Broken, templates: Templates) -> Iterator[Problem]:
    file, lines = templates.files[template.name], templates.lines.get(template.name, {})
    seen = set()
    for layer, ones in broken.items():
        for one in ones:
            if one not in seen:
                seen.add(one)
                what = f"{one.what} (its nodes have the layer {layer} by {LAYERS_FILE})"
                yield Problem(file, line_of(tuple(one.field.split(".")), lines), one.field, what, one.advice)


def legacy_notes(templates: Templates, layers: LayersFile | None) -> list[str]:
    """Return a warning for each layer in use whose project is not maintained any more."""
    named = {
        template.gpu.layer for template in templates if template.gpu is not None and template.gpu.layer is not None
    }
    used = named | ({rule.layer for rule in layers.rules} if layers is not None else set())
    return [
        f"layer {layer}: {LAYERS[layer].title} is not maintained any more; it is supported for clusters that still "
        "run it"
        for layer in LAYERS
        if layer in used and LAYERS[layer].legacy
    ]
