"""The templates in force, by name, for the culler and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.folder import TemplateFolder


class TemplateSource:
    """Reads the folder again when files change. Call it to get the templates."""

    def __init__(self, path: Path) -> None:
        self._folder = TemplateFolder(path)

    def __call__(self) -> Mapping[str, Template]:
        return {template.name: template for template in self._folder.load()}

    @property
    def problems(self) -> list[str]:
        """What is wrong in the folder, one sentence each."""
        return [f"Template {problem}" for problem in self._folder.load().problems]
