"""Replaces the idle culler of The Littlest JupyterHub (TLJH), which is in TLJH's list of services.

TLJH reads the config file with load_subconfig, so the file cannot see that list. The file's own list is joined with it
later, by ``LazyConfigValue.merge_into``, and there TLJH's culler is removed.
"""

from __future__ import annotations

import sys
from typing import Any

from traitlets.config.loader import Config, LazyConfigValue
from traitlets.log import get_logger

CULLER = "cull-idle"
"""The name of TLJH's culler in c.JupyterHub.services. (tljh/configurer.py, set_cull_idle_service)"""
_OPTIONS = ("timeout", "max_age", "concurrency", "remove_named_servers")
"""Settings of ``services.cull`` that `gpushare service` has with the same names. Not ``every``: rounds are cheap here,
and notices need short ones. Not ``users``: the service lacks the scopes to delete users."""


def culler_options() -> list[str]:
    """Return the settings of ``tljh-config set services.cull...`` as options of `gpushare service`. Empty if TLJH's
    culler is disabled, and in other hubs."""
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
    """Remove TLJH's culler from earlier files' services; ``section`` is ``c.JupyterHub``. No effect in other hubs."""
    if not _in_tljh():
        return
    services = section.services
    if isinstance(services, LazyConfigValue):
        section.services = _WithoutCuller.of(services)
    else:
        section.services = _without_culler(services)


def _in_tljh() -> bool:
    # TLJH's main config file imports this module before it reads other files
    return "tljh.configurer" in sys.modules


class _WithoutCuller(LazyConfigValue):
    @classmethod
    def of(cls, services: LazyConfigValue) -> _WithoutCuller:
        new = cls()
        new._prepend, new._inserts, new._extend = services._prepend, services._inserts, services._extend
        return new

    def merge_into(self, other: Any) -> Any:
        """Return the list joined with that of earlier files, without TLJH's culler."""
        if isinstance(other, LazyConfigValue):
            other._prepend, other._extend = _without_culler(other._prepend), _without_culler(other._extend)
        else:
            other = _without_culler(other)
        return super().merge_into(other)


def _without_culler(services: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [service for service in services if service.get("name") != CULLER]
    if len(kept) < len(services):
        get_logger().info("gpushare: the service gpushare stops idle servers and replaces TLJH's idle culler")
    return kept
