"""Profiles on the form, the check of user options, and the settings of one spawn.

A profile is a compute template or an admin's own entry in KubeSpawner's profile_list conventions. `choose` checks a
request on the server, in the same way for the form and for the API. `Overrides` sets the traits of a
kubespawner_override on any spawner for one spawn, and restores them afterwards. The form's HTML and fields are handled
in ``form``.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jupyterhub.spawner import Spawner
from jupyterhub.utils import recursive_update
from markupsafe import Markup
from traitlets import TraitError

from gpushare_spawner.model.part import matches_whole
from gpushare_spawner.model.template import PlacementPin, Template
from gpushare_spawner.quota.accounts import Account
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.wording import spawn_form as words
from gpushare_spawner.wording.spawn_form import named

UNLISTED = "--unlisted-choice"
"""KubeSpawner's suffix for a user option that contains text instead of a listed choice."""


class ProfileError(ValueError):
    """An invalid profile of an admin; the message says where."""


@dataclass(frozen=True)
class Profile:
    """A card on the form."""

    slug: str
    display_name: str
    description: str = ""
    default: bool = False
    override: Mapping[str, Any] = field(default_factory=dict)
    """kubespawner_override: settings of the spawner."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """profile_options: further choices on the card."""
    template: Template | None = None
    """None for an admin's own entry of profile_list."""

    @classmethod
    def of_template(cls, template: Template) -> Profile:
        """Return the card of a compute template."""
        return cls(
            slug=template.name,
            display_name=template.display_name,
            description=template.description,
            default=template.default,
            override=template.kubespawner_override,
            options={name: option.model_dump(exclude_unset=True) for name, option in template.profile_options.items()},
            template=template,
        )

    @classmethod
    def of_entry(cls, entry: Any, number: int) -> Profile:
        """Return the card of an entry of ``profile_list``. Raises ProfileError for an invalid profile."""
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
        """The display name as plain text; a name in KubeSpawner's profiles may contain HTML."""
        return self.display_name.striptags() if isinstance(self.display_name, Markup) else self.display_name

    @property
    def name_in_sentences(self) -> str:
        """The profile's name as used in sentences of the form and the API."""
        return named(self.title, self.slug)

    def allows(self, user: str, groups: frozenset[str]) -> bool:
        """Return whether this user, a member of these groups, may start the profile."""
        return self.template is None or self.template.access.allows(user, groups)


def slug_of(display_name: str) -> str:
    """Return a slug (lower-case letters, digits and dashes) for a profile without one."""
    return re.sub(r"[^a-z0-9]+", "-", display_name.lower()).strip("-") or "profile"


def profiles(templates: Iterable[Template], entries: Sequence[Any] | Mapping[str, Any]) -> list[Profile]:
    """Return all cards: the templates in their order, then the admin's own profiles (a dict sorted by its keys).

    Raises ProfileError for an invalid entry, and for a duplicate slug.
    """
    if isinstance(entries, Mapping):
        # KubeSpawner uses the keys of a dict as slugs, and sorts by them
        entries = [{"slug": key, **_dict(entries[key])} for key in sorted(entries)]
    by_slug = {template.name: Profile.of_template(template) for template in templates}
    for number, entry in enumerate(entries, start=1):
        profile = Profile.of_entry(entry, number)
        if profile.slug in by_slug:
            raise ProfileError(f"profile_list, entry {number} ({profile.display_name}): slug {profile.slug!r} is taken")
        by_slug[profile.slug] = profile
    return list(by_slug.values())


def _dict(entry: Any) -> dict[str, Any]:
    return dict(entry) if isinstance(entry, Mapping) else {}


def default_of(offered: Sequence[Profile]) -> Profile | None:
    """Return the profile that is marked as default, else the first profile; None if there are no profiles."""
    return next((profile for profile in offered if profile.default), offered[0] if offered else None)


def resource_override(template: Template | None) -> dict[str, Any]:
    """Return the spawner's settings for the template's resources and image, without values that are not set."""
    if template is None:
        return {}
    cpu, memory = template.resources.cpu, template.resources.memory
    settings = {
        "cpu_guarantee": cpu.guarantee,
        "cpu_limit": cpu.limit,
        "mem_guarantee": memory.guarantee,
        "mem_limit": memory.limit,
        "image": template.image,
    }
    return {name: value for name, value in settings.items() if value is not None}


def replaced(value: Any, text: str) -> Any:
    """Return a copy of an unlisted choice's override with ``{value}`` replaced by the user's text."""
    if isinstance(value, str):
        # Do not use str.format: braces in an admin's text (JSON, for example) must be preserved.
        return value.replace("{value}", text)
    if isinstance(value, Mapping):
        return {key: replaced(item, text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(item, text) for item in value]
    return value


MAX_TEXT = 1000
"""Longest text of an unlisted choice, in characters."""

QUOTA_OPTION = "quota"
"""The user option that names the account to charge: a group, or the user for their own quota."""


PLACEMENT_OPTION = "placement"
"""The user option by which an admin names the GPU or nodes of one spawn, see `PlacementPin`."""


def pinned(template: Template, pins: Iterable[tuple[str, PlacementPin]]) -> Template:
    """Return the template under pins, each with its origin. Raises SpawnRefused if they contradict it."""
    for origin, pin in pins:
        try:
            template = template.pinned(pin)
        except ValueError as error:
            text = words.contradicts(template.display_name, str(error), origin)
            raise SpawnRefused(text, reason="placement", status=409) from None
    return template


@dataclass(frozen=True)
class Choice:
    """A profile with the options chosen on its card."""

    profile: Profile
    overrides: tuple[Mapping[str, Any], ...] = ()
    """Settings of the spawner for the chosen options, in the order of the card's options."""
    alternatives: tuple[Template, ...] = ()
    """The other templates that the user may start."""
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there are no quotas."""
    user_units: int | None = None
    """Units of 1 % that the user's sessions in that quota may have in total on one GPU; None if there is no limit."""

    def under(self, pins: Sequence[tuple[str, PlacementPin]]) -> Choice:
        """Return the choice with pinned templates, without alternatives that cannot be. Raises SpawnRefused."""
        profile, alternatives = self.profile, []
        if not pins or profile.template is None:
            return self
        for other in self.alternatives:
            with contextlib.suppress(SpawnRefused):
                alternatives.append(pinned(other, pins))
        bound = replace(profile, template=pinned(profile.template, pins))
        return replace(self, profile=bound, alternatives=tuple(alternatives))


def choose(
    options: Any,
    profiles: Sequence[Profile],
    *,
    user: str,
    groups: frozenset[str],
    running: Mapping[str, int],
    others: frozenset[str] = frozenset(),
    accounts: Sequence[Account] = (),
) -> Choice:
    """Return the choice that ``options`` describe. Raises SpawnRefused, with a sentence for the user, for any mistake.

    ``running``: the number of the user's other servers that run or start, by profile. ``others``: names of options for
    the admin's own hooks. ``accounts``: the user's accounts, the default first; empty: no quotas.
    """
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise SpawnRefused(words.not_an_object(options), reason="bad-options")
    offered = [profile for profile in profiles if profile.allows(user, groups)]
    profile = _profile(options, profiles, offered)
    ours = ["profile", *([QUOTA_OPTION] if accounts else [])]
    unknown = [
        name for name in options if name not in ours and name not in others and _option(name) not in profile.options
    ]
    if unknown:
        accepted = list(dict.fromkeys([*ours, *profile.options]))
        raise SpawnRefused(words.unknown_option(unknown[0], profile.display_name, accepted), reason="unknown-option")
    limit = _limit(profile)
    if limit is not None and not _within_limit(profile, running):
        raise SpawnRefused(words.limit_reached(limit, profile.display_name), reason="per-user-limit", status=409)
    account = _account(profile, options, accounts)
    return Choice(
        profile,
        tuple(_override(profile, name, option, options) for name, option in profile.options.items()),
        tuple(
            other.template
            for other in offered
            if other.template is not None and other is not profile and _within_limit(other, running)
        ),
        account.key if account is not None else "",
        account.quota.per_user.weight_units if account is not None else None,
    )


def _account(profile: Profile, options: Mapping[str, Any], accounts: Sequence[Account]) -> Account | None:
    """Return the chosen account, or the user's default account; None if no account counts the profile's servers."""
    accounts = chargeable(accounts, profile.template) if profile.template is not None else ()
    if not accounts:
        return None
    # a profile may have its own option of that name
    name = None if QUOTA_OPTION in profile.options else options.get(QUOTA_OPTION)
    if name is None or name == "":
        return accounts[0]
    for account in accounts:
        if account.name == name:
            return account
    raise SpawnRefused(words.unknown_quota(name, [account.name for account in accounts]), reason="unknown-quota")


def chargeable(accounts: Sequence[Account], template: Template) -> Sequence[Account]:
    """Return the accounts that a server can be charged to: without a GPU, only if one counts CPU or memory."""
    counted = template.gpu is not None or any(account.counts_resources for account in accounts)
    return accounts if counted else ()


def _profile(options: Mapping[str, Any], profiles: Sequence[Profile], offered: Sequence[Profile]) -> Profile:
    slug = options.get("profile")
    if slug is None or slug == "":
        profile = default_of(offered)
        if profile is None:
            raise SpawnRefused(words.NO_TEMPLATE, reason="no-template", status=403)
        return profile
    if not isinstance(slug, str):
        raise SpawnRefused(words.not_a_name(slug), reason="bad-options")
    for profile in offered:
        if profile.slug == slug:
            return profile
    names = [profile.name_in_sentences for profile in offered]
    for profile in profiles:
        if profile.slug == slug:
            raise SpawnRefused(words.not_allowed(profile.name_in_sentences, names), reason="not-allowed", status=403)
    raise SpawnRefused(words.unknown_template(slug, names), reason="unknown-template")


def _limit(profile: Profile) -> int | None:
    return profile.template.limits.per_user if profile.template is not None else None


def _within_limit(profile: Profile, running: Mapping[str, int]) -> bool:
    limit = _limit(profile)
    return limit is None or running.get(profile.slug, 0) < limit


def _option(name: Any) -> str:
    return str(name).removesuffix(UNLISTED)


def _matches(where: str, pattern: str, text: str) -> bool:
    """Return whether the whole text matches an admin's pattern. Raises SpawnRefused for an unsupported pattern."""
    try:
        return matches_whole(pattern, text)
    except ValueError as error:
        raise SpawnRefused(words.unusable_pattern(where, str(error)), reason="bad-template", status=500) from None


def _override(profile: Profile, name: str, option: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the override for the choice of one option on the card."""
    where = f"{profile.display_name}, {option.get('display_name') or name}"
    choices: Mapping[str, Any] = option.get("choices") or {}
    unlisted: Mapping[str, Any] = option.get("unlisted_choice") or {}
    text = options.get(name + UNLISTED)
    if text is not None and text != "":
        if not unlisted.get("enabled"):
            raise SpawnRefused(words.only_listed_choices(where, choices), reason="unknown-choice")
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise SpawnRefused(words.text_too_long(where, MAX_TEXT), reason="bad-options")
        pattern = unlisted.get("validation_regex")
        # match the whole text, as the pattern attribute of the form's field does
        if pattern and not _matches(where, pattern, text):
            advice = unlisted.get("validation_message") or f"it must match {pattern}"
            raise SpawnRefused(words.text_does_not_match(where, text, advice), reason="unknown-choice")
        return dict(replaced(unlisted.get("kubespawner_override") or {}, text))
    key = options.get(name)
    if key is None or key == "":
        key = next((key for key, choice in choices.items() if choice.get("default")), next(iter(choices), None))
        if key is None:
            return {}
    if not isinstance(key, str) or key not in choices:
        raise SpawnRefused(words.unknown_choice(where, key, choices), reason="unknown-choice")
    return choices[key].get("kubespawner_override") or {}


class Overrides:
    """The traits of one spawner that a spawn has changed, with their previous values."""

    def __init__(self, spawner: Spawner, also: Collection[str] = ()) -> None:
        """Store the spawner. ``also``: names of plain attributes that can be set like traits."""
        self._spawner = spawner
        self.also = also
        self._before: dict[str, Any] = {}

    def apply_choice(self, choice: Choice) -> None:
        """Set the traits of a choice: the template's resources, its overrides, then the overrides of the options.

        Raises SpawnRefused, see `apply`.
        """
        profile = choice.profile
        template = profile.name_in_sentences
        resources = resource_override(profile.template)
        if "image" in resources and not self._spawner.has_trait("image"):
            runs = type(self._spawner).__name__
            self._spawner.log.debug("The template %s names an image; %s runs no containers", template, runs)
            del resources["image"]
        for settings in (resources, profile.override, *choice.overrides):
            self.apply(settings, template)

    def apply(self, settings: Mapping[str, Any], template: str) -> None:
        """Set traits as KubeSpawner does: merge dicts into the current value, call callables with the spawner.

        Raises SpawnRefused, with the setting's name, for an unknown trait or an invalid value.
        """
        for name, value in settings.items():
            if not self._spawner.has_trait(name) and name not in self.also:
                raise self._wrong(template, f"{type(self._spawner).__name__} has no setting {name!r}")
            if callable(value):
                value = value(self._spawner)
            current = getattr(self._spawner, name)
            self._before.setdefault(name, current)
            value = _merged(current, value)
            try:
                setattr(self._spawner, name, value)
            except TraitError as error:
                raise self._wrong(template, f"{name!r} cannot be {value!r}: {error}") from None

    def instead(self, profile: Profile, names: Sequence[str]) -> Mapping[str, Any] | None:
        """Return the values that these traits would have with this profile, without setting them.

        None if the values are known only at a spawn: a value is a function, or a choice on the profile's card sets a
        trait.
        """
        chosen_later = [override for option in profile.options.values() for override in _overrides_of(option)]
        if any(name in override for override in chosen_later for name in names):
            return None
        traits: dict[str, Any] = {}
        for name in names:
            value = profile.override.get(name)
            if callable(value):
                return None
            before = self._before.get(name, getattr(self._spawner, name))
            traits[name] = _merged(before, value) if name in profile.override else before
        return traits

    def undo(self) -> None:
        """Restore the values that the traits had before the first `apply`."""
        for name, value in self._before.items():
            setattr(self._spawner, name, value)
        self._before.clear()

    def _wrong(self, template: str, why: str) -> SpawnRefused:
        # This is an admin's mistake, not the user's: the message says so, and the hub's log has the details.
        self._spawner.log.error("The template %s: %s", template, why)
        return SpawnRefused(words.cannot_apply(template, why), reason="bad-template", status=500)


def _merged(current: Any, value: Any) -> Any:
    """Return the new value of a trait; a dict is merged into the current value."""
    if not isinstance(value, Mapping) or not isinstance(current, dict):
        return value
    merged = copy.deepcopy(current)
    recursive_update(merged, copy.deepcopy(dict(value)))
    return merged


def _overrides_of(option: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the overrides of an option's choices."""
    for choice in (*(option.get("choices") or {}).values(), option.get("unlisted_choice") or {}):
        yield choice.get("kubespawner_override") or {}
