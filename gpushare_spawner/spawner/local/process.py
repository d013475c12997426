"""Spawners of processes that run as local users, or all as the hub's own user (for demos and tests)."""

from __future__ import annotations

import os

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from gpushare_spawner.spawner.local.mixin import GPUShareMixin


class GPUShareLocalSpawner(GPUShareMixin, LocalProcessSpawner):  # type: ignore[misc]
    """JupyterHub's LocalProcessSpawner with shared GPUs.

    Each hub user is a user of the machine. The base class cannot enforce a template's CPU and memory limits;
    `GPUShareSystemdSpawner` can.
    """

    enforces_resources = False


class GPUShareSimpleSpawner(GPUShareMixin, SimpleLocalProcessSpawner):  # type: ignore[misc]
    """JupyterHub's SimpleLocalProcessSpawner with shared GPUs. Any user name works, and users are not isolated.

    Do not use it for real users: every server runs as the hub's user.
    """

    enforces_resources = False

    def share_uid(self) -> int:
        """Return the hub's own uid."""
        return os.getuid()
