"""A session of another sharing layer, as the annotations and the label of its pod have it.

No agent knows such a session: its layer's scheduler has placed it. The hub counts it in quotas, and the service shows
and stops it. Sessions of our own are in `annotations`; their label is another one, so that agents leave these alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.model.kubernetes.annotations import QUOTA, SESSION, SHARE, TEMPLATE, AnnotationProblem
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

    session: str
    """The session's id, see `model.session_id`."""
    template: str
    layer: LayerName
    share: Share
    quota: str = ""
    """The account that the share is charged to; empty: none was chosen."""

    def annotations(self) -> dict[str, str]:
        """For the pod's metadata, beside `labels`."""
        written = {SESSION: self.session, TEMPLATE: self.template, SHARE: str(self.share.units)}
        if self.share.count > 1:
            written[GPU_COUNT] = str(self.share.count)
        if self.quota:
            written[QUOTA] = self.quota
        return written

    def labels(self) -> dict[str, str]:
        """For the pod's metadata."""
        return {LAYER: str(self.layer)}


def is_layer_session(labels: Mapping[str, str] | None) -> bool:
    """Return whether the labels are those of a pod with a share of another layer."""
    return LAYER in (labels or {})


def layer_session(labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None) -> LayerSession:
    """Return a session from its pod's labels and annotations. Raises AnnotationProblem."""
    given, layer = annotations or {}, (labels or {}).get(LAYER, "")
    problems = [f"the annotation {name} is missing" for name in (SESSION, TEMPLATE, SHARE) if not given.get(name)]
    if layer not in set(LayerName):
        problems.append(f"the label {LAYER} is {layer!r}: write one of {', '.join(LayerName)}")
    try:
        share = Share(int(given.get(SHARE) or 1), int(given.get(GPU_COUNT) or 1))
    except ValueError as error:
        problems.append(f"the annotations {SHARE} and {GPU_COUNT} are wrong: {error}")
    if problems:
        raise AnnotationProblem(problems)
    return LayerSession(given[SESSION], given[TEMPLATE], LayerName(layer), share, given.get(QUOTA, ""))
