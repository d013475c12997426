"""What a cluster's scheduler says of a pod that fits nowhere, in words for the server's user."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SENTENCES = (
    (r"Insufficient gpushare-spawner\.io/gpu-\d+", "it does not offer the units of the GPU that its agent reports"),
    (r"cannot allocate all claims", "it does not offer the share of the GPU that its agent reports"),
    (r".*the (?P<what>\S+) feature is disabled.*", "the feature gate {what} is off in the cluster's scheduler"),
    (r"Insufficient cpu", "it has too little free CPU"),
    (r"Insufficient memory", "it has too little free memory"),
    (r"Insufficient ephemeral-storage", "it has too little free ephemeral storage"),
    (r"Insufficient (?P<what>\S+)", "it has too little free {what}"),
    (r"Too many pods", "it runs as many pods as it may"),
    (r".*taint.*node\.kubernetes\.io/(not-ready|unreachable).*", "it is not ready"),
    (r".*taint.*\{(?P<what>[^:}]+).*", "the server does not tolerate its taint {what}"),
    (r".*taint.*", "the server does not tolerate one of its taints"),
    (r"node\(s\) were unschedulable", "it is cordoned"),
    (r".*(affinity/selector|plugin\(s\) \[NodeAffinity\])", "it does not match the server's node selector or affinity"),
    (r".*volume node affinity conflict", "a volume of the server cannot be used there"),
    (r".*max volume count", "it has as many volumes attached as it may"),
    (r".*unbound immediate PersistentVolumeClaims", "a persistent volume claim of the server is not bound"),
    (r'persistentvolumeclaim "(?P<what>[^"]+)" not found', "the persistent volume claim {what} does not exist"),
    (r".*free ports.*", "a port that the server needs is taken there"),
)
"""The scheduler's reasons as regular expressions (kubernetes pkg/scheduler/framework/plugins, 1.25 to 1.36), and what
they mean for a node, after "node-a: "."""


def missing(reasons: Iterable[str]) -> str:
    """Return what is missing on a node, as half a sentence; unknown reasons stay in the scheduler's words."""
    return " and ".join(dict.fromkeys(_plain(reason) for reason in reasons))


def not_taken(node: str, what: str) -> str:
    """Return that a node cannot take the server, without a full stop. ``what`` is missing there: half a sentence."""
    return f"Node {node} cannot take the server: {what}"


def cannot_start(what: str) -> str:
    """Return that no node can take the server, without a full stop. ``what`` is missing: half a sentence."""
    return f"The server cannot start: {what}"


def _plain(reason: str) -> str:
    for pattern, sentence in _SENTENCES:
        if found := re.fullmatch(pattern, reason):
            return sentence.format(**{name: text for name, text in found.groupdict().items() if text is not None})
    return reason
