"""The settings that `GPUShareSpawner` adds to those of KubeSpawner: texts, defaults and checks.

Each function makes one trait, for the spawner's class to hold. Settings of all our spawners are in `spawner.base`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from traitlets import Bool, Float, Integer, TraitError, Unicode

from gpushare_spawner.model.report import MOST_OVERCOMMIT
from gpushare_spawner.model.share import UNITS_PER_GPU

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where the kubelet writes the namespace of a pod that has a service account."""


def reports_namespace() -> Any:
    """Make ``reports_namespace``; its default is `namespace_of_hub`, or KubeSpawner's."""
    return Unicode(
        help="""
        The namespace in which the nodes' agents publish their reports: the hub's own.

        Default: ``$POD_NAMESPACE``, else that of the hub's service account, else ``KubeSpawner.namespace``.
        """,
    ).tag(config=True)


def share_unit_size() -> Any:
    """Make ``share_unit_size``; `valid_share_unit_size` checks its value."""
    return Integer(
        1,
        min=1,
        max=100,
        help="""
        How many units of 1 % of a GPU one device of the agents' device plugin stands for; the agents' ``--unit-size``.
        """,
    ).tag(config=True)


def claims_overcommit() -> Any:
    """Make ``claims_overcommit``."""
    return Float(
        1.0,
        min=1,
        max=MOST_OVERCOMMIT,
        help="""
        How many times the units of a GPU may be promised at most on nodes where pods get GPUs by claims: the agents'
        ``--overcommit`` (the chart's ``gpus.overcommit``).

        The status of such a node does not say how many units its GPUs have. A report with more units is refused.
        """,
    ).tag(config=True)


def view_patience() -> Any:
    """Make ``view_patience``, in seconds."""
    return Float(
        20.0,
        min=0,
        help="""
        Seconds that a spawn waits while what the GPUs hold is not known, before it is refused: the cluster's API does
        not answer, or no agent has published a report within two minutes.
        """,
    ).tag(config=True)


def nodes_are_added() -> Any:
    """Make ``nodes_are_added``."""
    return Bool(
        False,
        help="""
        Whether nodes are added to the cluster now and then with GPU models that no node has now, or with more GPUs,
        CPU or memory than any node has now.

        Then a spawn that none of the present nodes could take, even when nothing runs there, waits in the queue for
        such a node.
        Without this setting it is refused at once, and its user reads what is missing. The queue itself makes no pod
        for a spawn that waits, so a cluster autoscaler adds no node for it: set this where nodes come by a schedule,
        for placeholder pods, or by hand.
        """,
    ).tag(config=True)


def start_attempts() -> Any:
    """Make ``start_attempts``."""
    return Integer(
        4,
        min=1,
        help="""
        How often a server with a share is tried at most when a node does not admit its pod, or the cluster's API
        fails.

        A node may be given a pod on what it said a moment ago: its GPU went away, or was given to somebody. Each
        attempt looks at the GPUs anew, and leaves the node that refused alone for 10 s. A pod that the scheduler does
        not bring onto its node, for want of CPU or memory for instance, does not count: it is tried on the other nodes,
        one after the other. All of this together is part of ``Spawner.start_timeout``.
        """,
    ).tag(config=True)


def namespace_of_hub() -> str:
    """Return the namespace of the pod that this process runs in; empty outside of a cluster."""
    if os.environ.get("POD_NAMESPACE"):
        return os.environ["POD_NAMESPACE"]
    return NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else ""


def claimed_capacity(overcommit: float) -> int:
    """Return the units that a GPU has at most on a node with claims. ``overcommit``: see `claims_overcommit`."""
    return round(overcommit * UNITS_PER_GPU)


def valid_share_unit_size(size: int) -> int:
    """Return the size if it divides a GPU's units. Raises TraitError."""
    if UNITS_PER_GPU % size:
        raise TraitError(f"share_unit_size {size} does not divide {UNITS_PER_GPU}: use one like 1, 5 or 25")
    return size
