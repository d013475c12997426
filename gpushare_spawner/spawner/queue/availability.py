"""Whether a template could start now, for its card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers.mig import MigProfile
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Demand, PlacementRequest
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.inventory import GpuKind
from gpushare_spawner.spawner.queue.other_layers import AskedServer, Kept, OtherLayers, Outcome
from gpushare_spawner.spawner.queue.placement_check import PlacementCheck, Verdict
from gpushare_spawner.spawner.queue.positions import Positions
from gpushare_spawner.spawner.queue.queue import Alternative, SpawnQueue, Startable
from gpushare_spawner.wording.spawn import queue as words
from gpushare_spawner.wording.spawn.cards import gpu_models
from gpushare_spawner.wording.spawn.layers import not_on_one_machine


@dataclass(frozen=True)
class Availability:
    """What a card says about now. ``kind`` is for colours and programs, ``text`` for people."""

    kind: Literal["now", "wait", "never", "unknown"]
    text: str
    detail: str = ""
    gpus: tuple[GpuKind, ...] = ()
    """GPUs that would do, free or not."""
    borrowed: int = 0
    """Units of each GPU that idle sessions would lend; nothing is guaranteed of these."""
    layer: LayerName | None = None
    """Another sharing layer than the native one that the server would have; None: that of the template."""
    profile: MigProfile | None = None
    """That of the MIG instance that the server would have; None: it would have none, or which one is not known."""


NO_GPU_NEEDED = Availability("now", words.STARTS_NOW)
UNKNOWN = Availability("unknown", words.UNKNOWN, words.UNKNOWN_DETAIL)
UNKNOWN_AFTER_ERROR = Availability("unknown", words.UNKNOWN, words.UNKNOWN_AFTER_ERROR)


class UnknownNow:
    """Stands for `AvailabilityNow` after an error in placement."""

    def availability(self, template: Template) -> Availability:
        """Return that nothing is known of what the template needs."""
        return NO_GPU_NEEDED if template.gpu is None else UNKNOWN_AFTER_ERROR


def _raised(error: Exception) -> None:
    raise error


@dataclass(frozen=True)
class AvailabilityNow:
    """What a spawn would meet now: the GPUs, what is left on them, and the queue."""

    check: PlacementCheck
    queue: SpawnQueue
    where: str = "this machine"
    ineligible: Callable[[Template], frozenset[str]] = lambda _: frozenset()
    """Returns the nodes that cannot take a server of a template whatever is free there."""
    tenant: Tenant = field(default_factory=lambda: Tenant(""))
    """Whose spawn it would be; without a name: any user's."""
    failed: Callable[[Exception], object] = _raised
    """Called with an error in placement; unless it raises, what the error concerns is shown as unknown."""
    _met: dict[Demand, Availability] = field(default_factory=dict, repr=False)
    _prepared: set[Demand] = field(default_factory=set, repr=False)
    _requests: dict[int, tuple[Template, PlacementRequest]] = field(default_factory=dict, repr=False)
    """By the identity of the template, which is kept beside it."""

    def availability(self, template: Template) -> Availability:
        """What a spawn of this template would meet."""
        if template.gpu is None:
            return NO_GPU_NEEDED
        try:
            return self._availability(template)
        except Exception as error:
            self.failed(error)
            return UNKNOWN_AFTER_ERROR

    def _availability(self, template: Template) -> Availability:
        layers = self.check.snapshot.other_layers(template)
        if layers is not None:
            return self._by_layers(template, layers, self.ineligible(template))
        cannot = not_on_one_machine(template)
        return Availability("never", words.NO_SUITABLE_GPU, cannot) if cannot else self._native(template)

    def _native(self, template: Template) -> Availability:
        gpus, request = self.check.snapshot.suiting(template), self._request(template)
        met = self._met_by(request)
        if met.layer is LayerName.MIG and met.profile is None:
            instances = [kind.mig.profile for kind in gpus if kind.mig is not None]
            met = replace(met, profile=min(instances, key=lambda one: one.size, default=None))
        return replace(met, gpus=gpus)

    def suitable_gpus(self, template: Template) -> str:
        """Return the GPUs that would do for a template, free or not, for people; empty: none is known."""
        found = models_of(self.check.snapshot.suiting(template))
        return gpu_models(template.gpu.share, found) if template.gpu is not None else ""

    def preparing(self, templates: Iterable[Template]) -> Iterator[None]:
        """Do in pieces what `availability` needs."""
        for template in templates:
            if template.gpu is not None and self.check.snapshot.native(template):
                yield from self._preparing(self._request(template))

    def startable(self, alternatives: Iterable[Alternative], instead_of: str = "") -> tuple[Startable, ...]:
        """Return which of these templates would start now.

        ``instead_of``: the claim of the spawn that would end first; it is not in the way.
        """
        would_start = (one.template for one in alternatives if self._would_start(one, instead_of))
        return tuple(Startable(template.name, template.display_name) for template in would_start)

    def preparing_startable(self, alternatives: Iterable[Alternative]) -> Iterator[None]:
        """Do in pieces what `startable` needs."""
        for one in alternatives:
            if one.template.gpu is not None and self.check.snapshot.native(one.template):
                yield from self._preparing(self._alternative(one))

    def _would_start(self, one: Alternative, instead_of: str) -> bool:
        if one.template.gpu is None:
            return True
        try:
            return self._has_capacity(one, instead_of)
        except Exception as error:
            self.failed(error)
            return False

    def _has_capacity(self, one: Alternative, instead_of: str) -> bool:
        layers = self.check.snapshot.other_layers(one.template)
        if layers is not None:
            return self._by_layers(one.template, layers, one.ineligible(), instead_of).kind == "now"
        if not_on_one_machine(one.template):
            return False
        request = self._alternative(one)
        return self._met_by(request).kind == "now" or self.check.fits_without(request, (instead_of,))

    def _request(self, template: Template) -> PlacementRequest:
        known = self._requests.get(id(template))
        if known is None:
            request = replace(self.check.snapshot.request(template), ineligible=self.ineligible(template))
            known = self._requests[id(template)] = (template, request)
        return known[1]

    def _alternative(self, one: Alternative) -> PlacementRequest:
        return replace(self.check.snapshot.request(one.template), ineligible=one.ineligible())

    def _preparing(self, request: PlacementRequest) -> Iterator[None]:
        if request.demand not in self._prepared:
            self._prepared.add(request.demand)
            yield from self.check.preparing(request)
        yield

    def _met_by(self, request: PlacementRequest) -> Availability:
        met = self._met.get(request.demand)
        if met is None:
            met = self._met[request.demand] = self._meets(request)
        return met

    def _by_layers(
        self, template: Template, layers: OtherLayers, ineligible: frozenset[str], instead_of: str = ""
    ) -> Availability:
        kept = Kept(self.queue.kept_elsewhere(instead_of))
        found = layers.verdict(AskedServer(template, self.tenant, ineligible=ineligible), kept)
        native = self._native(template) if layers.native(template) else None
        gpus = (*(native.gpus if native is not None else ()), *found.gpus)
        if native is not None and native.kind == "now" and found.outcome is not Outcome.NOW:
            return replace(native, gpus=gpus)
        layer = found.offer.layer if found.offer is not None else None
        if found.outcome is Outcome.NOW:
            now = Availability("now", words.STARTS_NOW) if found.known else UNKNOWN
            return replace(now, gpus=gpus, layer=layer, profile=found.profile)
        if found.outcome is Outcome.WAIT or (native is not None and native.kind == "wait"):
            position = words.position(Positions(self.check, self.queue).ahead_of_template(template))
            why = found.why if found.outcome is Outcome.WAIT or native is None else native.detail
            return Availability("wait", position, why, gpus, layer=layer, profile=found.profile)
        return Availability("never", words.NO_SUITABLE_GPU, found.why, gpus, layer=layer)

    def _meets(self, request: PlacementRequest) -> Availability:
        verdict = self.check.verdict(request)
        place = verdict.placement
        layer = place.layer if place is not None else request.layer
        met = self._said(request, verdict)
        if place is not None and layer is LayerName.MIG:
            instance = self.check.snapshot.gpus[place.gpus[0]].mig
            met = replace(met, profile=instance.profile if instance is not None else None)
        return met if layer is LayerName.NATIVE else replace(met, layer=layer)

    def _said(self, request: PlacementRequest, verdict: Verdict) -> Availability:
        if verdict.placement is not None and verdict.placement.borrowed:
            borrowed = verdict.placement.borrowed
            return Availability("now", words.STARTS_ON_LENT, words.LENT_DETAIL, borrowed=borrowed)
        if verdict.outcome is Outcome.NOW:
            return Availability("now", words.STARTS_NOW)
        if verdict.outcome is Outcome.NEVER:
            return Availability("never", self._why_never(verdict), verdict.why)
        position = words.position(Positions(self.check, self.queue).ahead_of(request))
        return Availability("wait", position, verdict.why)

    def _why_never(self, verdict: Verdict) -> str:
        if verdict.ineligible:
            return words.NO_SUITABLE_NODE
        return words.NO_SUITABLE_GPU if verdict.unsuitable else words.too_large(self.where)


def models_of(gpus: tuple[GpuKind, ...]) -> Mapping[str, int]:
    """How many there are of each model."""
    counted: dict[str, int] = {}
    for kind in gpus:
        counted[kind.model] = counted.get(kind.model, 0) + kind.count
    return counted
