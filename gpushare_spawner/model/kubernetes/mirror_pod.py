"""Pods that a node has made itself: the API server's mirrors of the kubelet's static pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod. The API server lets a node create no other pods (admission plugin NodeRestriction), and
nobody add or remove it later."""


def is_mirror(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata is that of a pod which a node has made.

    A node writes the labels and annotations of such a pod as it likes, so they say nothing of sessions.
    """
    owners = metadata.get("ownerReferences") or ()
    return MIRROR in (metadata.get("annotations") or {}) or any(owner.get("kind") == "Node" for owner in owners)
