"""The service in The Littlest JupyterHub (TLJH), which has an idle culler of its own in its list of services.

TLJH reads our config file with load_subconfig: the file cannot see that list. What it says is joined with the list
afterwards, by ``LazyConfigValue.merge_into``, and there the other culler is dropped.
"""

from __future__ import annotations

import sys
from typing import Any

from traitlets.config.loader import Config, LazyConfigValue
from traitlets.log import get_logger

CULLER = "cull-idle"
"""The name of TLJH's culler in c.JupyterHub.services. (tljh/configurer.py, set_cull_idle_service)"""
_OPTIONS = ("timeout", "max_age", "concurrency", "remove_named_servers")
"""Settings of ``services.cull`` that `gpushare service` has under the same names. Not ``every``: a round of ours is
cheap and notices need short ones. Not ``users``: deleting users takes scopes that the service does not have."""


def culler_options() -> list[str]:
    """What ``tljh-config set services.cull...`` says, as options of `gpushare service`. Empty where TLJH's culler is
    disabled, and in other hubs."""
    if not _in_tljh():
        return []
    from tljh.configurer import load_config

    cull = load_config()["services"]["cull"]
    if not cull["enabled"]:
        return []
    if cull.get("users"):
        get_logger().warning(
            "gpushare: services.cull.users is ignored: no user is deleted (docs/explanation/culler.md, Scopes)"
        )
    return [f"--{name.replace('_', '-')}={str(cull[name]).lower()}" for name in _OPTIONS if cull.get(name) is not None]


def replace_culler(section: Config) -> None:
    """Drop TLJH's culler from earlier files' services; ``section`` is ``c.JupyterHub``. No effect in other hubs."""
    if not _in_tljh():
        return
    services = section.services
    if isinstance(services, LazyConfigValue):
        section.services = _WithoutCuller.of(services)
    else:
        section.services = _without_culler(services)


def _in_tljh() -> bool:
    # TLJH's main config file imports it before it reads ours
    return "tljh.configurer" in sys.modules


class _WithoutCuller(LazyConfigValue):
    @classmethod
    def of(cls, services: LazyConfigValue) -> _WithoutCuller:
        new = cls()
        new._prepend, new._inserts, new._extend = services._prepend, services._inserts, services._extend
        return new

    def merge_into(self, other: Any) -> Any:
        """With what earlier files have said, less the culler."""
        if isinstance(other, LazyConfigValue):
            other._prepend, other._extend = _without_culler(other._prepend), _without_culler(other._extend)
        else:
            other = _without_culler(other)
        return super().merge_into(other)


def _without_culler(services: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [service for service in services if service.get("name") != CULLER]
    if len(kept) < len(services):
        get_logger().info("gpushare: the service gpushare stops idle servers; TLJH's own culler is left out")
    return kept
