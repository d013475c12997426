"""The culler's settings, from the command line of `gpushare service`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpushare_spawner.idle import KeepRule
from gpushare_spawner.model.template import Idle, KeepLimits
from gpushare_spawner.model.tier import UseRule

LEAST_USE = 1 / 60
"""The part of its first idle time for which a session has to use the GPU to keep its share. Ours: 5 s of 5 minutes.
Then a session that uses the GPU for less than 0.1 % of 4 hours keeps its full share for less than 10 % of them: it can
pay for the time at the beginning and for two times more."""
MOST_MIN_USE = 15.0
"""GPU seconds. Ours: a user who comes back to a template of long idle times does not wait longer for the full share,
and 0.1 % of 4 hours are 14.4 s."""


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
    min_use: float | None = None
    """GPU seconds that count as use of a share; 0: all GPU work counts; None: `LEAST_USE` of the template's first idle
    time."""
    idle_when: Literal["always", "pressure"] = "always"
    """Whether idle shares are taken always, or only while a spawn waits that can use the units."""
    keep_longest: float = KeepRule.longest
    """The longest keep of a user, where the template does not say."""
    keep_per_day: int = KeepRule.per_day
    keep_at_once: int = KeepRule.at_once
    concurrency: int = 10
    """Idle actions at a time; 0: any number."""

    def use_rule(self, idle: Idle) -> UseRule:
        """Return how much GPU work counts as use for a template."""
        first = idle.first_after or UseRule().window
        given = idle.min_use if idle.min_use is not None else self.min_use
        least = given if given is not None else min(MOST_MIN_USE, first * LEAST_USE)
        return UseRule(min_use=least, window=first)

    def keep_rule(self, idle: Idle | None) -> KeepRule:
        """Return what users may keep of a template's shares; None: the template is gone."""
        limits = (idle.keep if idle is not None else None) or KeepLimits()
        return KeepRule(
            limits.longest if limits.longest is not None else self.keep_longest,
            limits.per_day if limits.per_day is not None else self.keep_per_day,
            limits.at_once if limits.at_once is not None else self.keep_at_once,
        )

    def only_under_pressure(self, idle: Idle) -> bool:
        """Return whether a template's idle shares are taken only while a spawn waits that can use the units."""
        return (idle.when or self.idle_when) == "pressure"

    def may_stop(self, server_name: str) -> bool:
        """Return whether the culler may stop servers of this name (empty: default servers)."""
        return self.cull_named_servers if server_name else self.cull_default_servers
