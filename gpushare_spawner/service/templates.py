"""The templates in force under the admin's idle policy, and the quotas, for the culler and the dashboard.

`SessionTemplates` has the templates with the idle actions that apply to each user's sessions. The functions at the end
select the templates with a share to which a running session can change. `service.actions.share` checks whether the
units are free and whether a quota allows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path

from gpushare_spawner.idle.policy import QuietUntil, effective_idle, group_of, never_quiet
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import GpuReport, SessionReport
from gpushare_spawner.model.share import choice_of
from gpushare_spawner.model.template import GpuBypass, GpuTime, Template, TemplatePlacement
from gpushare_spawner.placement.request import suits
from gpushare_spawner.service.hub.client import HubUser
from gpushare_spawner.templates.folder import Policy, PolicyFolder, described

GroupsOf = Callable[[str], Collection[str] | None]
"""Function that returns a user's groups; None: unknown."""


def unknown_groups(user: str) -> None:
    """Return None, because no groups are known."""


class UserGroups:
    """The groups of running servers' users, from the hub's last list."""

    def __init__(self, users: Callable[[], Iterable[HubUser] | None]) -> None:
        self._users = users
        self._read: tuple[Iterable[HubUser] | None, Mapping[str, Collection[str] | None]] = None, {}
        """A list and its users' groups, set at once: the culler's threads call this too."""

    def __call__(self, user: str) -> Collection[str] | None:
        users, (seen, groups) = self._users(), self._read
        if users is not None and users is not seen:
            groups = {hub_user.name: hub_user.servers[0].groups for hub_user in users if hub_user.servers}
            self._read = users, groups
        return groups.get(user)


_NO_LAYERS = LayersFile()


class SessionTemplates(Mapping[str, Template]):
    """Templates by name. As a mapping, it has the templates for users without a group in the policy."""

    def __init__(
        self,
        templates: Mapping[str, Template],
        policy: IdlePolicy | None = None,
        groups_of: GroupsOf = unknown_groups,
        layers: LayersFile | None = None,
    ) -> None:
        """Apply a policy to templates. ``layers``: the nodes with other sharing layers; None if there are none."""
        self._templates = templates
        self._policy = policy
        self._groups_of = groups_of
        self._layers = layers or _NO_LAYERS
        self._made: dict[tuple[str, str | None], Template] = {}
        """Templates by name and policy group; empty: no group; None: unknown."""

    @classmethod
    def of(cls, templates: Mapping[str, Template]) -> SessionTemplates:
        """Return the argument if it is an instance of this class, else its templates without a policy."""
        return templates if isinstance(templates, cls) else cls(templates)

    @property
    def quiet_until(self) -> QuietUntil:
        """Function that returns the earliest time of an idle action."""
        return self._policy.quiet_until if self._policy is not None else never_quiet

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""
        if template.gpu is None:
            return False
        if template.gpu.layer is not None:
            return template.gpu.layer is LayerName.NATIVE
        return LayerName.NATIVE in self._layers.layers_for(template.gpu.models)

    def of_user(self, name: str | None, user: str) -> Template | None:
        """Return the template as it applies to this user's sessions; None if no template has this name."""
        if self._policy is None or not self._policy.groups:
            return self.get(name or "")
        groups = self._groups_of(user)
        group = None if groups is None else group_of(self._policy, groups) or ""
        return self._effective(name or "", group)

    def __getitem__(self, name: str) -> Template:
        template = self._effective(name, "")
        if template is None:
            raise KeyError(name)
        return template

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


class TemplateSource:
    """The folder of templates, reread when files change. Call it to get the templates."""

    def __init__(self, path: Path, groups_of: GroupsOf = unknown_groups) -> None:
        """Read the folder. ``groups_of`` returns a user's groups, for the idle policy."""
        self.path = path
        self._folder = PolicyFolder(path)
        self._groups_of = groups_of
        self._read: Policy | None = None
        self._now = SessionTemplates({})

    def __call__(self) -> SessionTemplates:
        policy = self._folder.load()
        if policy is not self._read:
            self._read = policy
            templates = {template.name: template for template in policy.templates}
            self._now = SessionTemplates(templates, policy.idle, self._groups_of, policy.layers)
        return self._now

    @property
    def problems(self) -> list[str]:
        """Problems of the folder, one sentence each."""
        policy = self._folder.load()
        return described(policy.problems)

    @property
    def needs_groups(self) -> bool:
        """Whether quotas or the idle policy depend on users' groups."""
        policy = self._folder.load()
        return policy.quotas is not None or (policy.idle is not None and bool(policy.idle.groups))

    def quotas(self) -> Quotas | None:
        """Return the quotas in force; None if there are no quotas."""
        return self._folder.load().quotas


def templates_of_kind(
    session: SessionReport, gpus: Iterable[GpuReport], templates: Mapping[str, Template], any_rules: bool = False
) -> list[Template]:
    """Return the templates with a share of GPUs of the session's kind, with memory of the same kind and its rules.

    ``gpus``: those of the session's node. A running session stays on its GPUs, so the templates have as many.
    ``any_rules``: for admins, also templates with other rules, see `_rules`. A user could evade the rules of one
    template with the share of another, because the session keeps its own template.
    """
    on = [gpu for gpu in gpus if gpu.uuid in session.gpus]
    own = templates.get(session.template)
    if not on:
        return []
    suitable, rules = [], _rules(own)
    for template in templates.values():
        gpu = template.gpu
        if (
            gpu is None
            or gpu.share.count != len(session.gpus)
            or not all(suits(gpu, session_gpu.model, session_gpu.memory_bytes) for session_gpu in on)
        ):
            continue
        if not any_rules and _rules(template) != rules:
            continue
        if own is None or own.gpu is None or own.gpu.memory.kind == gpu.memory.kind:
            suitable.append(template)
    return suitable


def _rules(template: Template | None) -> tuple[Hashable, ...]:
    """Return the rules that a change of the share must keep; none for an unknown template."""
    if template is None:
        return TemplatePlacement(), (), GpuTime(), GpuBypass(), "normal", True
    gpu = template.gpu
    of_gpu = (gpu.time, gpu.bypass) if gpu is not None else (GpuTime(), GpuBypass())
    return template.placement, template.labels, *of_gpu, template.priority, template.reclaimable


def allowed(templates: Iterable[Template], user: str, groups: Collection[str] | None) -> list[Template]:
    """Return the templates that a user may use. ``groups``: the user's groups; None: unknown, treated as none."""
    return [template for template in templates if template.access.allows(user, frozenset(groups or ()))]


def other_units(session: SessionReport, templates: Iterable[Template]) -> tuple[int, ...]:
    """Return the templates' shares without the session's own, smallest first, as `choice_of` writes them."""
    shares = {template.share for template in templates if template.share is not None} - {session.share}
    return tuple(map(choice_of, sorted(shares, key=lambda share: share.total_units)))
