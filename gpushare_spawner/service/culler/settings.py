"""What the culler is told on the command line."""

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
    concurrency: int = 10
    """Deeds at a time."""

    def may_stop(self, server_name: str) -> bool:
        """Whether servers of this name (empty: default servers) may be stopped at all."""
        return self.cull_named_servers if server_name else self.cull_default_servers
