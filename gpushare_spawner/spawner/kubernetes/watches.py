"""A KubeSpawner with compute templates, whose watches of pods and reports are seen to."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

try:
    from kubespawner import KubeSpawner
except ImportError as error:
    raise ImportError(
        "GPUShareSpawner needs the package jupyterhub-kubespawner; "
        "install it with: pip install 'gpushare-spawner[kubernetes]'"
    ) from error

from traitlets import Unicode, default

from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.kubernetes.reflectors import (
    Dated,
    DatedPodReflector,
    ReportReflector,
    ViewStale,
    freshen,
    has_listed,
    is_watching,
)
from gpushare_spawner.spawner.kubernetes.snapshot import PODS, REPORTS

_TEMPLATES = "/etc/gpushare/templates"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_TEMPLATES_FOR = 0.5
"""Seconds for which templates are not looked for again."""


class WatchingSpawner(GPUShareBase, KubeSpawner):  # type: ignore[misc]
    """KubeSpawner's shared reflectors, brought back to life when they have died; and one more, of agents' reports.

    While there are no templates, everything is KubeSpawner's.
    """

    reports_namespace = Unicode(
        help="""
        The namespace in which the nodes' agents publish their reports: the hub's own.

        Default: ``$POD_NAMESPACE``, else that of the hub's service account, else ``KubeSpawner.namespace``.
        """,
    ).tag(config=True)

    @default("reports_namespace")
    def _default_reports_namespace(self) -> str:
        if os.environ.get("POD_NAMESPACE"):
            return os.environ["POD_NAMESPACE"]
        if _NAMESPACE_FILE.exists():
            return _NAMESPACE_FILE.read_text().strip()
        # a user's namespace is not the hub's
        return str(self._namespace_default() if self.enable_user_namespaces else self.namespace)

    def _templates(self) -> list[Template]:
        if self.templates_dir == _TEMPLATES and not os.path.isdir(_TEMPLATES):
            # nobody asked for templates: nothing to complain about
            return []
        # one start asks for them many times, and a folder may be on a slow disk
        kept: dict[str, Any] = self._shared(("templates now", self.templates_dir), dict)
        now = time.monotonic()
        if now - kept.get("looked", -_TEMPLATES_FOR) >= _TEMPLATES_FOR:
            kept.update(looked=now, templates=super()._templates())
        found: list[Template] = kept["templates"]
        return found

    @property
    def _reports_key(self) -> tuple[str, str]:
        return (REPORTS, self.reports_namespace)

    async def _start_reflector(self, kind: str, reflector_class: Any, replace: bool = False, **kwargs: Any) -> Any:
        """As KubeSpawner does. Where there are templates, a reflector that has died is brought back to life.

        Where that fails now, what it saw last is shown, as KubeSpawner does; nothing is placed by it.
        """
        if not self._templates():
            return await super()._start_reflector(kind, reflector_class, replace, **kwargs)
        key = self._get_reflector_key(kind)
        if kind == PODS:
            reflector_class = DatedPodReflector
            if self._undated(key):
                # from before there were templates: it does not say how fresh it is. One spawner replaces it for all
                async with self._shared(("replacing", *map(str, key)), asyncio.Lock):
                    return await self._watch_with(kind, reflector_class, replace or self._undated(key), **kwargs)
        return await self._watch_with(kind, reflector_class, replace, **kwargs)

    def _undated(self, key: tuple[Any, ...]) -> bool:
        known = self.reflectors.get(key)
        return known is not None and not isinstance(known, Dated)

    async def _watch_with(self, kind: str, reflector_class: Any, replace: bool, **kwargs: Any) -> Any:
        known = self.reflectors.get(self._get_reflector_key(kind))
        if known is not None and not replace:
            if not is_watching(known):
                try:
                    await freshen(known)
                except ViewStale as error:
                    if not has_listed(known):
                        raise
                    self.log.warning("%s; what was seen last is shown", error)
            return known
        starting = asyncio.ensure_future(super()._start_reflector(kind, reflector_class, replace, **kwargs))
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # a start that is called off must not leave the others waiting for a first list that never comes
        return await asyncio.shield(starting)

    async def _watch(self) -> None:
        """See to it that pods and reports are watched; the waiting room checks that they are watched well."""
        if self._reports_key not in self.reflectors:
            self.reflectors[self._reports_key] = ReportReflector(parent=self, namespace=self.reports_namespace)
        try:
            await self._start_watching_pods()
        except Exception as error:
            self.log.warning("Pods in %s are not watched yet: %s", self.namespace, error)

    async def _watch_pods_patiently(self) -> None:
        # a hub that starts takes a failed poll for a stopped server, and one failed list would do that to all of them
        for pause in (0.2, 0.5, 1.0, 2.0):
            try:
                await self._start_watching_pods()
                return
            except Exception as error:
                self.log.warning("Pods in %s are not watched yet: %s", self.namespace, error)
                await asyncio.sleep(pause)
        await self._start_watching_pods()
