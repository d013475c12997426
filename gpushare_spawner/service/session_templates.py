"""Templates with the idle actions that apply to each user's sessions, under the admin's idle policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from gpushare_spawner.idle import QuietUntil, effective_idle, group_of, never_quiet
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers import LayerName, LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.hub.client import HubUser

GroupsOf = Callable[[str], Collection[str] | None]
"""Returns a user's groups; None: they are not known."""


def unknown_groups(user: str) -> None:
    """Return that no groups are known."""


class UserGroups:
    """The groups of the users of running servers, by the hub's list. What it said last counts while it is silent."""

    def __init__(self, users: Callable[[], Iterable[HubUser] | None]) -> None:
        self._users = users
        self._seen: Iterable[HubUser] | None = None
        self._groups: Mapping[str, Collection[str] | None] = {}

    def __call__(self, user: str) -> Collection[str] | None:
        users = self._users()
        if users is not None and users is not self._seen:
            self._seen = users
            self._groups = {one.name: one.servers[0].groups for one in users if one.servers}
        return self._groups.get(user)


class SessionTemplates(Mapping[str, Template]):
    """Templates by name. As a mapping it shows what applies to users without a group of the policy."""

    def __init__(
        self,
        templates: Mapping[str, Template],
        policy: IdlePolicy | None = None,
        groups_of: GroupsOf = unknown_groups,
        layers: LayersFile | None = None,
    ) -> None:
        """``layers``: which nodes are shared by other layers than ours; None: none are."""
        self._templates = templates
        self._policy = policy
        self._groups_of = groups_of
        self._layers = layers or LayersFile()
        self._made: dict[tuple[str, str | None], Template] = {}
        """By the template's name, and the group of the policy; empty: no group, None: not known."""

    @classmethod
    def of(cls, templates: Mapping[str, Template]) -> SessionTemplates:
        """Return the same if it is one, else the templates without a policy."""
        return templates if isinstance(templates, cls) else cls(templates)

    @property
    def quiet_until(self) -> QuietUntil:
        """When an idle action can come at the earliest."""
        return self._policy.quiet_until if self._policy is not None else never_quiet

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""
        if template.gpu is None:
            return False
        if template.gpu.layer is not None:
            return template.gpu.layer is LayerName.NATIVE
        return LayerName.NATIVE in self._layers.layers_for(template.gpu.models)

    def of_user(self, name: str | None, user: str) -> Template | None:
        """Return the template as it applies to this user's sessions; None: there is none of this name."""
        if self._policy is None or not self._policy.groups:
            return self.get(name or "")
        groups = self._groups_of(user)
        group = None if groups is None else group_of(self._policy, groups) or ""
        return self._effective(name or "", group)

    def __getitem__(self, name: str) -> Template:
        found = self._effective(name, "")
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def _effective(self, name: str, group: str | None) -> Template | None:
        template = self._templates.get(name)
        if template is None or self._policy is None:
            return template
        made = self._made.get((name, group))
        if made is None:
            groups = None if group is None else (group,)
            idle = effective_idle(template, self._policy, groups)
            made = self._made[name, group] = template.model_copy(update={"idle": idle})
        return made
