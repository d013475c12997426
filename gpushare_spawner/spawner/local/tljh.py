"""Spawner for The Littlest JupyterHub (TLJH); its users are users of the machine, named jupyter-NAME.

Requires the package ``tljh``, which is part of TLJH's hub environment and not on any package index.
"""

from __future__ import annotations

import subprocess

try:
    from tljh.normalize import generate_system_username
    from tljh.user import ensure_user
    from tljh.user_creating_spawner import UserCreatingSpawner
except ImportError as error:
    raise ImportError(
        "GPUShareTLJHSpawner runs in the hub of The Littlest JupyterHub, and the package tljh is not here; "
        "on other machines use the spawner gpushare-systemd or gpushare-local"
    ) from error

from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.local.systemd import GPUShareSystemdSpawner
from gpushare_spawner.wording import spawn_failures as words


class GPUShareTLJHSpawner(GPUShareSystemdSpawner, UserCreatingSpawner):  # type: ignore[misc]
    """TLJH's own spawner with shared GPUs. All settings of TLJH's spawner and of SystemdSpawner apply.

    TLJH creates the user on the machine when the server starts. The session's socket needs that user earlier, so this
    spawner creates the user when the GPU is reserved.
    """

    def share_uid(self) -> int:
        """Return the uid of the unit's user; create the user if necessary."""
        name = generate_system_username("jupyter-" + self.user.name)
        try:
            ensure_user(name)
        except (OSError, subprocess.CalledProcessError) as error:
            self.log.error("TLJH cannot create the user %s: %s", name, error)
            raise SpawnRefused(words.user_not_made(name), reason="no-user", status=500) from error
        # UserCreatingSpawner.start sets the same name
        self.username_template = name
        return super().share_uid()
