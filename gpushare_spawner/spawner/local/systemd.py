"""Spawner of systemd units with shared GPUs, as used by The Littlest JupyterHub."""

from __future__ import annotations

import asyncio
import pwd

from gpushare_spawner.wording.amounts import missing_package

try:
    from systemdspawner import SystemdSpawner
except ImportError as error:
    raise ImportError(missing_package("GPUShareSystemdSpawner", error)) from error

from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.local.mixin import GPUShareMixin
from gpushare_spawner.wording import spawn_failures as words


class GPUShareSystemdSpawner(GPUShareMixin, SystemdSpawner):  # type: ignore[misc]
    """systemdspawner's SystemdSpawner with shared GPUs. CPU and memory limits of a template become limits of the unit.

    The unit gets the share in its environment file. Templates with a GPU are refused in two cases: with
    ``isolate_devices`` a unit has no GPU devices, and with ``dynamic_users`` the user for the session's socket is not
    known before the start.
    """

    def share_uid(self) -> int:
        """Return the uid of the unit's user."""
        for name in ("dynamic_users", "isolate_devices"):
            if getattr(self, name):
                self.log.error("Templates with a GPU cannot be started with c.SystemdSpawner.%s = True", name)
                raise SpawnRefused(words.setting_forbids_gpus(name), reason="bad-settings", status=500)
        return pwd.getpwnam(self._expand_user_vars(self.username_template)).pw_uid

    async def share_pid(self) -> int:
        """Return the pid of the unit's main process; 0 if it has none."""
        process = await asyncio.create_subprocess_exec(
            "systemctl", "show", "--property=MainPID", "--value", self.unit_name, stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await process.communicate()
        text = answer.decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0
