"""A session of another sharing layer, as the label and the annotations of its pod have it.

No agent knows such a session: its layer's scheduler has placed it. The hub counts it in quotas, and the service shows
and stops it. Sessions of our own are in `annotations`; their label is another one, so that agents leave these alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.model.kubernetes.annotations import GPU, GPU_INDEX, AnnotationProblem, PodSession, pod_session
from gpushare_spawner.model.kubernetes.prefix import PREFIX
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.share import Share

LAYER = PREFIX + "layer"
"""Label: the sharing layer that gives the pod's server its GPU, where it is not ours."""
GPU_COUNT = PREFIX + "gpu-count"
"""Annotation: how many whole GPUs the session has; absent: its share is of one GPU."""
LAYER_SELECTOR = LAYER
"""Label selector: every pod with a share of another layer."""


@dataclass(frozen=True)
class LayerSession:
    """What the pod says of its session."""

    layer: LayerName
    session: PodSession
    """Its GPUs have no UUIDs here, since only the layer knows them: see `gpu_names`."""

    @property
    def share(self) -> Share:
        """What the session is entitled to."""
        return Share(self.session.share_units, len(self.session.gpus))

    def annotations(self) -> dict[str, str]:
        """For the pod's metadata, beside `labels`."""
        written = {name: text for name, text in self.session.annotations().items() if name not in (GPU, GPU_INDEX)}
        return {**written, GPU_COUNT: str(len(self.session.gpus))} if len(self.session.gpus) > 1 else written

    def labels(self) -> dict[str, str]:
        """For the pod's metadata."""
        return {LAYER: str(self.layer)}


def gpu_names(layer: LayerName, session: str, count: int) -> tuple[str, ...]:
    """Return names for the GPUs of a session, which no report has: only how many they are is known."""
    return tuple(f"{layer}/{session}/{index}" for index in range(count))


def is_layer_session(labels: Mapping[str, str] | None) -> bool:
    """Return whether the labels are those of a pod with a share of another layer."""
    return LAYER in (labels or {})


def layer_session(labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None) -> LayerSession:
    """Return a session from its pod's labels and annotations. Raises AnnotationProblem."""
    given, layer = annotations or {}, (labels or {}).get(LAYER, "")
    written = given.get(GPU_COUNT, "1")
    others = [name for name in LayerName if name is not LayerName.NATIVE]
    if layer not in others:
        raise AnnotationProblem([f"the label {LAYER} is {layer!r}: write one of {', '.join(others)}"])
    # Python refuses to read thousands of digits with an error of its own
    if not written.isdecimal() or len(written) > 2 or not 1 <= int(written) <= 64:
        raise AnnotationProblem([f"the annotation {GPU_COUNT} is {written!r}: write a whole number from 1 to 64"])
    indices = range(int(written))
    gpus = {GPU: ",".join(str(index) for index in indices), GPU_INDEX: ",".join(str(index) for index in indices)}
    session = pod_session({**given, **gpus})
    named = gpu_names(LayerName(layer), session.session, int(written))
    return LayerSession(LayerName(layer), dataclasses.replace(session, gpus=named))
