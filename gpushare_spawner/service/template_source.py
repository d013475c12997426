"""The templates in force, by name, and the quotas, for the culler and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.folder import TemplateFolder
from gpushare_spawner.templates.quota_file import QuotaFile


class TemplateSource:
    """Reads the folder again when files change. Call it to get the templates."""

    def __init__(self, path: Path) -> None:
        self._folder = TemplateFolder(path)
        self._quotas = QuotaFile(path)

    def __call__(self) -> Mapping[str, Template]:
        return {template.name: template for template in self._folder.load()}

    @property
    def problems(self) -> list[str]:
        """What is wrong in the folder, one sentence each."""
        quotas = self._quotas.load()
        return [
            *(f"Template {problem}" for problem in self._folder.load().problems),
            *map(str, (*quotas.problems, *quotas.warnings)),
        ]

    def quotas(self) -> Quotas | None:
        """Return the quotas in force; None: there are none."""
        return self._quotas.load().quotas
