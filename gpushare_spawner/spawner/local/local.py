"""Servers as processes of local users, with shared GPUs."""

from __future__ import annotations

from jupyterhub.spawner import LocalProcessSpawner

from gpushare_spawner.spawner.local.mixin import GPUShareMixin


class GPUShareLocalSpawner(GPUShareMixin, LocalProcessSpawner):
    """JupyterHub's LocalProcessSpawner with shared GPUs.

    Each hub user is a user of the machine. CPU and memory of a template are not enforced (the base class cannot);
    `GPUShareSystemdSpawner` does that.
    """
