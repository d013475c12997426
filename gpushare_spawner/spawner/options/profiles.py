"""What can be chosen: compute templates and the admin's own profiles, in KubeSpawner's profile_list conventions."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from gpushare_spawner.model.template import Template
from gpushare_spawner.wording.spawn.options import named

UNLISTED = "--unlisted-choice"
"""KubeSpawner's suffix of a user option that holds text instead of a listed choice."""


class ProfileError(ValueError):
    """A profile that an admin wrote makes no sense; the message says where."""


@dataclass(frozen=True)
class Profile:
    """One card on the form."""

    slug: str
    display_name: str
    description: str = ""
    default: bool = False
    override: Mapping[str, Any] = field(default_factory=dict)
    """kubespawner_override: settings of the spawner."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """profile_options: further choices on the card."""
    template: Template | None = None
    """None for a profile that an admin wrote into profile_list."""

    @classmethod
    def of_template(cls, template: Template) -> Profile:
        """The card of a compute template."""
        return cls(
            slug=template.name,
            display_name=template.display_name,
            description=template.description,
            default=template.default,
            override=template.kubespawner_override,
            options={name: one.model_dump(exclude_unset=True) for name, one in template.profile_options.items()},
            template=template,
        )

    @classmethod
    def of_entry(cls, entry: Any, number: int) -> Profile:
        """An entry of ``profile_list``. Raises ProfileError for what is no profile."""
        where = f"profile_list, entry {number}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("display_name"), str):
            raise ProfileError(f"{where}: a profile is a dict with at least a display_name")
        where += f" ({entry['display_name']})"
        for name in ("kubespawner_override", "profile_options"):
            if not isinstance(entry.get(name) or {}, Mapping):
                raise ProfileError(f"{where}: {name} must be a dict")
        slug = entry.get("slug") or slug_of(entry["display_name"])
        if not isinstance(slug, str):
            raise ProfileError(f"{where}: slug must be a string")
        return cls(
            slug=slug,
            display_name=entry["display_name"],
            description=str(entry.get("description") or ""),
            default=bool(entry.get("default")),
            override=entry.get("kubespawner_override") or {},
            options=entry.get("profile_options") or {},
        )

    @property
    def title(self) -> str:
        """The display name as plain text; KubeSpawner's may hold HTML."""
        return self.display_name.striptags() if isinstance(self.display_name, Markup) else self.display_name

    @property
    def name_in_sentences(self) -> str:
        """What the form and the API call it."""
        return named(self.title, self.slug)

    def allows(self, user: str, groups: frozenset[str]) -> bool:
        """Whether this user, a member of these groups, may have it."""
        return self.template is None or self.template.access.allows(user, groups)

    def as_kubespawner(self) -> dict[str, Any]:
        """The card as an entry of KubeSpawner's ``profile_list``; resources and image are part of the override."""
        return {
            "slug": self.slug,
            "display_name": self.display_name,
            "description": self.description,
            "default": self.default,
            "kubespawner_override": {**resource_override(self.template), **copy.deepcopy(dict(self.override))},
            "profile_options": copy.deepcopy(dict(self.options)),
        }


def slug_of(display_name: str) -> str:
    """A slug for a profile that has none: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", display_name.lower()).strip("-") or "profile"


def profiles(templates: Iterable[Template], entries: Sequence[Any] | Mapping[str, Any]) -> list[Profile]:
    """All cards: the templates in their order, then the admin's own profiles; those of a dict by their keys.

    Raises ProfileError for an entry that is no profile, and for a slug that is taken.
    """
    if isinstance(entries, Mapping):
        # KubeSpawner takes the keys of a dict as slugs, and sorts by them
        entries = [{"slug": key, **_dict(entries[key])} for key in sorted(entries)]
    found: dict[str, Profile] = {}
    for profile in [Profile.of_template(template) for template in templates]:
        found.setdefault(profile.slug, profile)
    for number, entry in enumerate(entries, start=1):
        profile = Profile.of_entry(entry, number)
        if profile.slug in found:
            raise ProfileError(f"profile_list, entry {number} ({profile.display_name}): slug {profile.slug!r} is taken")
        found[profile.slug] = profile
    return list(found.values())


def _dict(entry: Any) -> dict[str, Any]:
    return dict(entry) if isinstance(entry, Mapping) else {}


def default_of(offered: Sequence[Profile]) -> Profile | None:
    """The profile of a spawn that names none: the one marked default, else the first; None if there is none at all."""
    return next((profile for profile in offered if profile.default), offered[0] if offered else None)


def resource_override(template: Template | None) -> dict[str, Any]:
    """Settings of the spawner from the template's resources and image; those not given are left out."""
    if template is None:
        return {}
    cpu, memory = template.resources.cpu, template.resources.memory
    wanted = {
        "cpu_guarantee": cpu.guarantee,
        "cpu_limit": cpu.limit,
        "mem_guarantee": memory.guarantee,
        "mem_limit": memory.limit,
        "image": template.image,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def replaced(value: Any, text: str) -> Any:
    """A copy of an unlisted choice's override with ``{value}`` replaced by what the person wrote."""
    if isinstance(value, str):
        # not str.format: braces in what an admin wrote (JSON, for instance) must survive
        return value.replace("{value}", text)
    if isinstance(value, Mapping):
        return {key: replaced(item, text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(item, text) for item in value]
    return value
