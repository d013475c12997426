"""What a template promises that a sharing layer cannot keep. Pure data and rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpushare_spawner.model.layers.declaration import Enforcement, IdleReach, Layer, LayerName
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU, Share


@dataclass(frozen=True)
class Promises:
    """The parts of a template that not every layer can keep. What the template does not give promises nothing."""

    share: Share
    engine: str | None = None
    oversubscribe: bool = False
    guarantee: str | None = None
    limit: str | None = None
    downgrade: bool = False
    release: bool = False


@dataclass(frozen=True)
class BrokenPromise:
    """A field of a template that a layer cannot keep."""

    field: str
    """With dots, like ``gpu.memory.limit``."""
    what: str
    """What the layer does instead."""
    advice: str
    """What would be right."""


def broken_promises(promises: Promises, layer: Layer) -> tuple[BrokenPromise, ...]:
    """Return what the layer cannot keep; empty: it keeps all."""
    if layer.name is LayerName.NATIVE:
        return ()
    return (*_of_share(promises.share, layer), *_of_memory(promises, layer), *_of_idle(promises, layer))


def _of_share(share: Share, layer: Layer) -> Iterator[BrokenPromise]:
    if share.count > 1 and not layer.several_gpus:
        yield BrokenPromise("gpu.count", f"{layer.title} gives a server one GPU", "write count: 1, or a fraction")
    if layer.largest_units < share.units < UNITS_PER_GPU:
        most = f"{layer.largest_units / UNITS_PER_GPU:.2f}"
        what = f"a part of a GPU with {layer.title} is at most {most}"
        yield BrokenPromise("gpu.fraction", what, f"write {most} or less, or count: 1")
    if share.units < (layer.smallest_units or 0):
        least = f"{(layer.smallest_units or 0) / UNITS_PER_GPU:.2f}"
        yield BrokenPromise(
            "gpu.fraction", f"the smallest share of {layer.title} is {least}", f"write at least {least}"
        )


def _of_memory(promises: Promises, layer: Layer) -> Iterator[BrokenPromise]:
    if promises.engine is not None:
        what = "the memory engine is a part of the layer native"
        yield BrokenPromise("gpu.memory.engine", what, "remove the line")
    if promises.oversubscribe and not layer.oversubscribes:
        what = f"{layer.title} does not move GPU memory to host memory"
        yield BrokenPromise("gpu.memory.oversubscribe", what, "write oversubscribe: false, or remove the line")
    if promises.guarantee is not None and layer.memory is Enforcement.NONE:
        what = f"{layer.title} does not divide GPU memory"
        yield BrokenPromise("gpu.memory.guarantee", what, "remove the line")
    if promises.limit is None:
        return
    own = promises.guarantee or f"{promises.share.units}%"
    if layer.memory in (Enforcement.NONE, Enforcement.ACCOUNTED):
        if promises.limit != "100%":
            what = f"{layer.title} does not limit GPU memory: a session can allocate all of it"
            yield BrokenPromise("gpu.memory.limit", what, "remove the line")
    elif _size(promises.limit) != _size(own):
        what = f"with {layer.title} a session has the memory of its guarantee ({own}), and no more"
        yield BrokenPromise("gpu.memory.limit", what, "remove the line")


def _size(written: str) -> tuple[bool, int]:
    """Return an amount so that equal ones are equal however they are written; a percentage is equal to no bytes."""
    return written.endswith("%"), resolve_bytes(written, 10**12)


def _of_idle(promises: Promises, layer: Layer) -> Iterator[BrokenPromise]:
    what = f"with {layer.title} an idle server keeps its GPU until it stops"
    advice = "write stop_after alone"
    if promises.downgrade and IdleReach.DOWNGRADE not in layer.reach:
        yield BrokenPromise("idle.downgrade_after", what, advice)
    if promises.release and IdleReach.RELEASE not in layer.reach:
        yield BrokenPromise("idle.release_after", what, advice)
