"""What the form and the queue say of a server whose GPU another sharing layer gives."""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.model.layers import LAYERS, Layer, LayerName, Where
from gpushare_spawner.model.layers.mig import MigProfile
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.wording.amounts import memory
from gpushare_spawner.wording.layers import kept_within

NOT_READ_YET = "The hub has not read the cluster's nodes and pods yet."


def needs_cluster(template: str, title: str) -> str:
    """Return that a template's layer is none for this machine."""
    return (
        f"The template {template} shares GPUs by {title}, which works on Kubernetes only. Tell the admin: remove "
        "gpu.layer from the template."
    )


def needs_one_gpu(template: str, layer: Layer) -> str:
    """Return that a layer on one machine gives a server no second GPU."""
    why = (
        "CUDA uses one MIG instance only"
        if layer.name is LayerName.MIG
        else "On one machine each GPU has an MPS daemon of its own, and a server can use one of them"
    )
    return (
        f"The template {template} asks for several GPUs by {layer.title}. {why}. Tell the admin: write count: 1, or a "
        "fraction."
    )


def not_on_one_machine(template: Template) -> str:
    """Return why a template's layer gives a server on one machine no GPU; empty: it can give one."""
    if template.gpu is None:
        return ""
    layer = LAYERS[template.gpu.layer or LayerName.NATIVE]
    if Where.ONE_MACHINE not in layer.where:
        return needs_cluster(template.display_name, layer.title)
    if layer.name is not LayerName.NATIVE and template.gpu.share.count > 1:
        return needs_one_gpu(template.display_name, layer)
    return ""


def no_instance(share: Share, profiles: Iterable[str]) -> str:
    """Return that no MIG instance of this machine is large enough. ``profiles``: of those that there are."""
    there = ", ".join(sorted(set(profiles)))
    if not there:
        return "This machine has no MIG instance. Choose another template, or ask the admin."
    return (
        f"No MIG instance that the template accepts holds {share} with the memory that it guarantees. This machine "
        f"has: {there}. Choose another template, or ask the admin."
    )


def layer_taken(share: Share) -> str:
    """Return that the GPUs on which a share by MPS would fit have sessions that share them in another way."""
    return (
        f"{share} is free on a GPU, but the sessions there do not use {LAYERS[LayerName.MPS].title}, and a GPU cannot "
        "have both kinds. The server starts when they have ended."
    )


def no_node(layers: Iterable[LayerName]) -> str:
    """Return that no node that the server can run on has one of the layers."""
    titles = " or ".join(LAYERS[name].title for name in layers)
    return f"No node that this server can run on shares its GPUs by {titles}. Ask the admin."


def not_understood(title: str) -> str:
    """A layer publishes something that this version fails on."""
    return f"The hub cannot read what {title} says is free. The hub's log has the error."


def unreadable(title: str) -> str:
    """Return that the hub cannot say what a server needs of a layer, since it may not read the cluster."""
    return (
        f"The hub may not read the cluster's nodes and pods, which it needs for {title}. Tell the admin: the agents' "
        "chart gives the right with hub.readCapacity."
    )


def other_object(kind: str, name: str, namespace: str) -> str:
    """Return that somebody else has made an object with the name of one that a layer needs."""
    return (
        f"The {kind} {name} in namespace {namespace} asks for something else than the template: the hub did not make "
        f"it. Delete it, or ask the admin to: kubectl -n {namespace} delete {kind.lower()} {name}"
    )


def none_free(title: str, share: Share, limited_by: str) -> str:
    """Return that a layer has nothing free for the share. ``limited_by``: what else is short, as half a sentence."""
    return f"Not enough free capacity: this needs {share}, and {title} has no free place for it{_because(limited_by)}."


def never_free(title: str, share: Share, limited_by: str) -> str:
    """Return that a layer could not serve the share even if nothing ran. ``limited_by``: as half a sentence."""
    return f"No GPU that {title} shares can give {share}{_because(limited_by)}. Choose another template."


def _because(limited_by: str) -> str:
    return f" ({limited_by})" if limited_by else ""


def placed(title: str) -> str:
    """Return that a spawn need not wait any longer."""
    return f"{title} has a free place. Its scheduler chooses the GPU."


def terms(layer: Layer, profile: MigProfile | None = None) -> str:
    """Return by what a server's GPU is shared, and what that makes of its share, for its card.

    ``profile``: that of the MIG instance that the server gets; None: it gets none, or which one is not known.
    """
    if profile is None:
        return f"By {layer.title}. {kept_within(layer)}"
    return f"By {layer.title}. A server has a MIG instance ({profile.name}) alone: {_size(profile)}."


def _size(profile: MigProfile) -> str:
    size = memory(profile.memory_bytes)
    if profile.slices == profile.compute_slices:
        return f"one whole GPU, with {size} of memory"
    return f"{instance_time(profile)} and {size} of memory"


def instance_time(profile: MigProfile) -> str:
    """Return the part of a GPU's time that a MIG instance has."""
    return f"{profile.slices}/{profile.compute_slices} of one GPU's time"
