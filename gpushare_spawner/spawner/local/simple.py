"""Servers as processes of the hub's own user, with shared GPUs: for demos and tests."""

from __future__ import annotations

import os

from jupyterhub.spawner import SimpleLocalProcessSpawner

from gpushare_spawner.spawner.local.mixin import GPUShareMixin


class GPUShareSimpleSpawner(GPUShareMixin, SimpleLocalProcessSpawner):
    """JupyterHub's SimpleLocalProcessSpawner with shared GPUs: any name works, and nobody is kept apart from anybody.

    Never for real users: every server runs as the hub's user.
    """

    def share_uid(self) -> int:
        """The hub's own uid."""
        return os.getuid()
