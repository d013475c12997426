"""Sharing layers: what each can do, what admins set for it, and which nodes it is used on. Pure data."""

from gpushare_spawner.model.layers.declaration import (
    LAYER_VARIABLE,
    LAYERS,
    Enforcement,
    IdleReach,
    Layer,
    LayerName,
    ObservedBy,
    PlacedBy,
    Source,
    Where,
)
from gpushare_spawner.model.layers.options import (
    AllOptions,
    DraOptions,
    HamiOptions,
    KaiOptions,
    KubeShareOptions,
    LayerOptions,
    MetaGpuOptions,
    MigOptions,
    NvshareOptions,
    ReplicaOptions,
)
from gpushare_spawner.model.layers.promises import BrokenPromise, Promises, broken_promises
from gpushare_spawner.model.layers.rules import LayerRule, LayersFile, machine_layer, matches

__all__ = [
    "LAYERS",
    "LAYER_VARIABLE",
    "AllOptions",
    "BrokenPromise",
    "DraOptions",
    "Enforcement",
    "HamiOptions",
    "IdleReach",
    "KaiOptions",
    "KubeShareOptions",
    "Layer",
    "LayerName",
    "LayerOptions",
    "LayerRule",
    "LayersFile",
    "MetaGpuOptions",
    "MigOptions",
    "NvshareOptions",
    "ObservedBy",
    "PlacedBy",
    "Promises",
    "ReplicaOptions",
    "Source",
    "Where",
    "broken_promises",
    "machine_layer",
    "matches",
]
