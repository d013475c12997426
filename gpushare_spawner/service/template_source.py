"""The templates in force, by name, with the idle policy, and the quotas, for the culler and the dashboard."""

from __future__ import annotations

from pathlib import Path

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.service.session_templates import GroupsOf, SessionTemplates, unknown_groups
from gpushare_spawner.templates.folder import TemplateFolder, Templates
from gpushare_spawner.templates.idle_file import idle_file
from gpushare_spawner.templates.layers_file import layers_file
from gpushare_spawner.templates.quota_file import QuotaFile


class TemplateSource:
    """Reads the folder again when files change. Call it to get the templates."""

    def __init__(self, path: Path, groups_of: GroupsOf = unknown_groups) -> None:
        """``groups_of``: a user's groups, for what the idle policy says of them."""
        self.path = path
        self._folder = TemplateFolder(path)
        self._quotas = QuotaFile(path)
        self._idle = idle_file(path)
        self._layers = layers_file(path)
        self._groups_of = groups_of
        self._read: tuple[Templates, IdlePolicy | None, LayersFile | None] | None = None
        self._now = SessionTemplates({})

    def __call__(self) -> SessionTemplates:
        read = self._folder.load(), self._idle.load().content, self._layers.load().content
        if read != self._read:
            self._read = read
            templates, policy, layers = read
            self._now = SessionTemplates({one.name: one for one in templates}, policy, self._groups_of, layers)
        return self._now

    @property
    def problems(self) -> list[str]:
        """What is wrong in the folder, one sentence each."""
        quotas = self._quotas.load()
        return [
            *(f"Template {problem}" for problem in self._folder.load().problems),
            *map(str, (*quotas.problems, *quotas.warnings, *self._idle.load().problems, *self._layers.load().problems)),
        ]

    @property
    def needs_groups(self) -> bool:
        """Whether quotas or the idle policy depend on users' groups."""
        policy = self._idle.load().content
        return self.quotas() is not None or (policy is not None and bool(policy.groups))

    def quotas(self) -> Quotas | None:
        """Return the quotas in force; None: there are none."""
        return self._quotas.load().quotas
