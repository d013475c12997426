"""The culler's settings, from the command line of `gpushare service`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CullerSettings:
    """Names and meanings are those of jupyterhub-idle-culler, where it has the option. Times are seconds, 0: never."""

    timeout: float = 0.0
    """For servers without a template, and for users."""
    max_age: float = 0.0
    """For all servers (and users), busy or not."""
    cull_every: float = 10.0
    cull_users: bool = False
    cull_admin_users: bool = True
    cull_default_servers: bool = True
    cull_named_servers: bool = True
    remove_named_servers: bool = False
    dry_run: bool = False
    """Decide, log and show idle actions, and carry out none."""
    concurrency: int = 10
    """Idle actions at a time; 0: any number."""

    def may_stop(self, server_name: str) -> bool:
        """Return whether the culler may stop servers of this name (empty: default servers)."""
        return self.cull_named_servers if server_name else self.cull_default_servers
