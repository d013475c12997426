"""Mirror pods: the API server's copies of the kubelet's static pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod. The API server lets a node create no other pods (admission plugin NodeRestriction), and
no client add or remove the annotation later."""


def is_mirror(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata is that of a pod that a node has made.

    A node can set any labels and annotations of such a pod, so they do not describe sessions.
    """
    owners = metadata.get("ownerReferences") or ()
    return MIRROR in (metadata.get("annotations") or {}) or any(owner.get("kind") == "Node" for owner in owners)
