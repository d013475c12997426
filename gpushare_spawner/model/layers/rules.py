"""Which layer the GPUs of a node are shared by: the content of `layers.yaml`.

Pure data. Reference for admins: docs/reference/layers.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from gpushare_spawner.model.layers.declaration import LAYERS, LayerName, Where
from gpushare_spawner.model.layers.options import AllOptions, LayerOptions


class _Part(BaseModel):
    # A misspelt field must be an error, not a setting without effect.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LayerRule(_Part):
    """The layer of some nodes. A rule without `nodes` and `models` applies to all."""

    nodes: dict[str, str] = {}
    """Labels that a node must have, all of them, like `{pool: teaching}`. Not given: any node."""
    models: tuple[str, ...] = ()
    """Patterns of GPU model names, like `["*A100*"]`; `*` stands for any text, case is ignored. Not given: any GPU."""
    layer: LayerName
    """The layer that shares the GPUs of these nodes."""
    options: AllOptions = AllOptions()
    """Options by layer, for these nodes alone. They override those of the whole file, field by field."""

    @model_validator(mode="after")
    def _own_options(self) -> LayerRule:
        others = self.options.given() - {self.layer}
        if others:
            raise ValueError(
                f"options of {', '.join(sorted(others))} have no effect in a rule of layer {self.layer}: move them to "
                "a rule of that layer"
            )
        return self

    def applies(self, labels: Mapping[str, str], model: str) -> bool:
        """Return whether the rule is for a node with these labels and a GPU with this model name."""
        if any(labels.get(name) != value for name, value in self.nodes.items()):
            return False
        return not self.models or any(matches(model, pattern) for pattern in self.models)

    def hides(self, later: LayerRule) -> bool:
        """Return whether a later rule is never used: this one applies to all nodes that it applies to.

        On one machine a rule also counts behind those of layers that do not work there, and behind the rules for GPUs
        in the other mode as to MIG: see `machine_layer`.
        """
        if not self.nodes.items() <= later.nodes.items() or not (
            not self.models or (later.models and {*later.models} <= {*self.models})
        ):
            return False
        on_a_machine = Where.ONE_MACHINE in LAYERS[later.layer].where and not later.nodes
        first_there = Where.ONE_MACHINE in LAYERS[self.layer].where and (
            (self.layer is LayerName.MIG) is (later.layer is LayerName.MIG)
        )
        return first_there or not on_a_machine

    def may_apply(self, models: Iterable[str]) -> bool:
        """Return whether the rule is likely for a GPU that these patterns accept; no patterns: they accept any.

        For texts that no node is at hand for; `applies` is exact.
        """
        models = tuple(models)
        if not models or not self.models:
            return True
        return any(_alike(mine, other) for mine in self.models for other in models)


class LayersFile(_Part):
    """Layers by node and GPU model. Nodes without a rule have the layer `native`."""

    rules: tuple[LayerRule, ...] = ()
    """The first rule that applies to a node counts."""
    options: AllOptions = AllOptions()
    """Options by layer, for all nodes."""

    @field_validator("rules")
    @classmethod
    def _all_count(cls, rules: tuple[LayerRule, ...]) -> tuple[LayerRule, ...]:
        for number, later in enumerate(rules):
            first = next((place for place, rule in enumerate(rules[:number]) if rule.hides(later)), None)
            if first is not None:
                raise ValueError(
                    f"rule {number + 1} (layer {later.layer}) is never used: rule {first + 1} (layer "
                    f"{rules[first].layer}) applies to all its nodes, and the first rule counts; move it before that "
                    "one, or remove it"
                )
        return rules

    def rule_of(self, labels: Mapping[str, str], model: str) -> LayerRule | None:
        """Return the rule of a node with these labels and GPUs of this model; None: no rule applies."""
        return next((rule for rule in self.rules if rule.applies(labels, model)), None)

    def layer_of(self, labels: Mapping[str, str], model: str) -> LayerName:
        """Return the layer of a node with these labels and GPUs of this model."""
        rule = self.rule_of(labels, model)
        return rule.layer if rule is not None else LayerName.NATIVE

    def options_of(self, layer: LayerName, rule: LayerRule | None = None) -> LayerOptions:
        """Return a layer's options on the nodes of a rule; None: on nodes without a rule."""
        options = self.options.of(layer)
        own = rule.options.of(layer) if rule is not None else None
        return (
            options
            if own is None
            else options.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})
        )

    def layers_for(self, models: Iterable[str]) -> tuple[LayerName, ...]:
        """Return the layers by which a template with these patterns of GPU models can be served, without repetition."""
        models = tuple(models)
        found = [rule.layer for rule in self.rules if rule.may_apply(models)]
        everywhere = any(not rule.nodes and not rule.models for rule in self.rules)
        return tuple(dict.fromkeys(found if everywhere else [*found, LayerName.NATIVE]))


def machine_layer(rules: LayersFile, model: str, *, mig: bool) -> LayerName | None:
    """Return the layer of GPUs of this model on one machine, where no node has labels; None: no template without a
    layer of its own can have them.

    The first rule counts whose layer works on one machine. The rules of layer `mig` are for GPUs in MIG mode (``mig``),
    which no other layer can share. Without a rule the layer is `native`.
    """
    for rule in rules.rules:
        works = Where.ONE_MACHINE in LAYERS[rule.layer].where and (rule.layer is LayerName.MIG) is mig
        if works and rule.applies({}, model):
            return rule.layer
    return None if mig else LayerName.NATIVE


def matches(model: str, pattern: str) -> bool:
    """Return whether a GPU's model name matches a pattern; case is ignored.

    Labels of nodes have dashes in place of spaces: "NVIDIA-A100-SXM4-80GB" matches what "NVIDIA A100-SXM4-80GB" does.
    """
    name, wanted = model.lower(), pattern.lower()
    return fnmatchcase(name, wanted) or fnmatchcase(name.replace(" ", "-"), wanted.replace(" ", "-"))


def _alike(first: str, second: str) -> bool:
    """Return whether one pattern is a special case of the other: "*A100*" and "*A100-SXM4*", not "*A100*" and "*T4*".

    Patterns like "*A100*" and "*80GB*" have models in common too, which only the nodes' own names tell.
    """
    return matches(first.strip("*"), second) or matches(second.strip("*"), first)
