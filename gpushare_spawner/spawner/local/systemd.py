"""Servers as systemd units, with shared GPUs: what The Littlest JupyterHub runs."""

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
    """systemdspawner's SystemdSpawner with shared GPUs. CPU and memory limits of a template become those of the unit.

    The share reaches the unit in its environment file. With ``isolate_devices`` a unit has no GPU devices, and with
    ``dynamic_users`` nobody knows beforehand whom the session's socket must let in: then templates with a GPU are
    refused.
    """

    def share_uid(self) -> int:
        """The uid of the unit's user."""
        for name in ("dynamic_users", "isolate_devices"):
            if getattr(self, name):
                self.log.error("Templates with a GPU cannot be started with c.SystemdSpawner.%s = True", name)
                raise SpawnRefused(words.setting_forbids_gpus(name), reason="bad-settings", status=500)
        return pwd.getpwnam(self._expand_user_vars(self.username_template)).pw_uid

    async def share_pid(self) -> int:
        """The main process of the unit; 0 where there is none."""
        process = await asyncio.create_subprocess_exec(
            "systemctl", "show", "--property=MainPID", "--value", self.unit_name, stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await process.communicate()
        text = answer.decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0
