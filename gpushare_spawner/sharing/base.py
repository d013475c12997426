"""A sharing layer: renders a share that was granted into what a notebook server is started from.

What a server is started from differs: a process has an environment, a pod has a manifest. A layer takes the form as it
is without a GPU and returns it with the share. It only renders: it asks no agent and no API server. One module for each
layer; native_process.py and native_pod.py are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from gpushare_spawner.model.layers import LayerOptions, LayerRule
from gpushare_spawner.model.layers.mig import MigProfile
from gpushare_spawner.model.session_id import session_id
from gpushare_spawner.model.template import Gpu, Template
from gpushare_spawner.sharing.cluster_facts import ClusterFacts

Environment: TypeAlias = dict[str, str]
"""What a process is started with."""
PodSpec: TypeAlias = dict[str, Any]
"""A pod's manifest, as plain data."""

Form = TypeVar("Form", Environment, PodSpec)


@dataclass(frozen=True)
class Tenant:
    """The user of the notebook server."""

    user: str
    server: str = ""
    """The server's name; the default server has none."""
    uid: int = 0
    """The user id of the server's processes; not used in a cluster."""
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there are no quotas."""
    user_units: int | None = None
    """What the user's sessions in that quota have at most together on one GPU, in units of 1 %; None: no bound."""

    @property
    def session(self) -> str:
        """The session's id."""
        return session_id(self.user, self.server)


class SharingLayer(Protocol[Form]):
    """One granted share of a kind of GPU sharing."""

    name: ClassVar[str]
    """The kind, as admins write it."""

    def render(self, form: Form) -> Form:
        """Return the form with the share in it; the one given is not changed."""


class LayerCannot(ValueError):
    """A layer has no way to give a server this share; the message is a sentence for the admin."""


@dataclass(frozen=True)
class LayerRequest:
    """One share that a layer with a scheduler of its own is asked for.

    Nothing is placed: the scheduler chooses node and GPU when it sees the pod.
    """

    tenant: Tenant
    template: Template
    options: LayerOptions
    """Those of the layer, see `LayersFile.options_of`."""
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    """``nodes``: only those that the rule applies to, and that the server can run on."""
    rule: LayerRule | None = None
    """The rule of `layers.yaml` that the options are from; the pod is kept on the rule's nodes. None: there is none."""

    @property
    def gpu(self) -> Gpu:
        """The template's share of GPUs. Raises ValueError for a template without a GPU."""
        if self.template.gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU: there is nothing to share")
        return self.template.gpu

    @property
    def models(self) -> tuple[str, ...]:
        """The patterns of GPU model names that nodes are chosen by: the template's, else the rule's; empty: any."""
        return self.gpu.models or (self.rule.models if self.rule is not None else ())


@dataclass(frozen=True)
class LayerCapacity:
    """What a layer has for servers of one template, by what it publishes."""

    servers: int = 0
    """Servers that could start now: GPU, CPU, memory and pods of the nodes are counted."""
    at_most: int = 0
    """Servers that an empty cluster could run; 0: none ever, so that it is no use to wait."""
    limited_by: str = ""
    """What else holds servers up, as half a sentence, like a queue's limit; empty: nothing."""
    by_node: Mapping[str, int] = field(default_factory=dict, compare=False)
    """How many of these servers each node could start now, whatever else holds servers up."""
    able: frozenset[str] = field(default=frozenset(), compare=False)
    """Nodes that could start one if nothing ran there, and that take new pods."""
    profile: MigProfile | None = None
    """That of the MIG device that a server gets; None: it gets none."""
