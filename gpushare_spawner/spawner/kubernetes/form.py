"""The cluster's form, and the choice that a user's options describe.

Cards are compute templates and the profiles of KubeSpawner's ``profile_list``. The form is ours, or an admin's
replacement for KubeSpawner's form, with templates as entries. `spawner.options` checks options of templates, and
KubeSpawner checks options of profiles.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from gpushare_spawner.model.part import matches_start
from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.form import quota_now
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.options import MAX_TEXT, UNLISTED, Choice, Profile, resource_override
from gpushare_spawner.spawner.queue.availability import Availability, AvailabilityNow, UnknownNow
from gpushare_spawner.spawner.queue.quotas import QuotaChoice
from gpushare_spawner.wording import spawn_form as words

SHOWN = ("display_name", "description", "display_name_in_choices", "validation_message")
"""Fields of a profile, its options and their choices that the form shows; in KubeSpawner they may contain HTML."""


@dataclass(frozen=True)
class Offer:
    """All cards of the cluster, before users and groups are checked."""

    cards: tuple[Profile, ...]
    """Templates first, then the admin's profiles."""
    own: tuple[dict[str, Any], ...]
    """The admin's profiles, as KubeSpawner completes them."""
    own_default: str | None
    """The slug of the profile that the admin marked as default."""
    clashes: tuple[str, ...]
    """Names of templates that are not offered because a profile has the same slug."""

    @classmethod
    def of(cls, templates: Iterable[Template], written: Any, own: Sequence[dict[str, Any]]) -> Offer:
        """Return the offer. ``written``: the admin's ``profile_list``; ``own``: that list, completed by KubeSpawner."""
        taken, cards, clashes = {str(entry["slug"]) for entry in own}, [], []
        for template in templates:
            if template.name in taken:
                clashes.append(template.name)
            else:
                cards.append(Profile.of_template(template))
        cards += map(card_of, own)
        return cls(tuple(cards), tuple(own), marked_default(written, own), tuple(clashes))

    def card(self, slug: Any) -> Profile | None:
        """Return the card with a slug; None if there is none."""
        return next((card for card in self.cards if card.slug == slug), None)

    def default_of(self, cards: Sequence[Profile]) -> Profile | None:
        """Return the card for a spawn without a profile in its options. ``cards``: the cards that the user may start.

        The order is: the profile that the admin marked as default, the template marked as default, KubeSpawner's
        default (its first profile), the first template.
        """
        marked = [profile for profile in cards if profile.template is not None and profile.default]
        own = [profile for profile in cards if profile.template is None]
        for profile in own:
            if profile.slug == self.own_default:
                return profile
        first_own = next((profile for profile in own if profile.default), own[0] if own else None)
        return next(iter(marked), first_own) or next(iter(cards), None)

    def entries(
        self,
        cards: Sequence[Profile],
        availability_now: AvailabilityNow | UnknownNow | None,
        quotas: Callable[[Template], Sequence[QuotaChoice]] = lambda template: (),
    ) -> list[dict[str, Any]]:
        """Return the entries for an admin's form, in KubeSpawner's terms. ``quotas``: see `Form.render`."""
        standard = self.default_of(cards)
        own = {entry["slug"]: entry for entry in self.own}
        entries = [
            as_entry(
                card,
                availability_now.availability(card.template) if availability_now is not None else None,
                quota_now(quotas(card.template)),
            )
            if card.template is not None
            else own[card.slug]
            for card in cards
        ]
        for entry in entries:
            entry["default"] = standard is not None and entry["slug"] == standard.slug
        return entries

    def choose(
        self,
        options: Any,
        allowed: Callable[[Sequence[Profile]], Sequence[Profile]],
        choose_template: Callable[[Sequence[Profile], Any], Choice],
        own_profile: Callable[[str, Sequence[Mapping[str, Any]]], Mapping[str, Any]],
    ) -> Choice:
        """Return the choice that ``options`` describe; if they name no profile, the default card.

        ``allowed`` returns the cards that the user may start, ``choose_template`` checks options of templates, and
        ``own_profile`` returns the profile with a slug after KubeSpawner's own check (ValueError). Raises SpawnRefused.
        """
        options = {} if options is None else options
        slug = options.get("profile") if isinstance(options, Mapping) else None
        if isinstance(options, Mapping) and not slug:
            standard = self.default_of(allowed(self.cards))
            slug = standard.slug if standard is not None else None
            options = {**options, "profile": slug}
        card = self.card(slug)
        if card is None or card.template is not None:
            return choose_template(self.cards, options)
        # checked before the start, so that the user gets a clear error
        try:
            profile = own_profile(card.slug, self.own)
        except ValueError as error:
            raise SpawnRefused(str(error), reason="bad-options") from None
        check_choices(profile, options)
        return Choice(card)


def card_of(entry: Mapping[str, Any]) -> Profile:
    """Return the card for an initialized KubeSpawner profile. Its texts are HTML, as in KubeSpawner."""
    return Profile(
        slug=str(entry["slug"]),
        display_name=Markup(entry["display_name"]),
        description=Markup(entry.get("description") or ""),
        default=bool(entry.get("default")),
        override=entry.get("kubespawner_override") or {},
        options={name: _marked(option) for name, option in (entry.get("profile_options") or {}).items()},
    )


def marked_default(written: Any, initialized: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the slug of the profile that an admin marked as default; None if KubeSpawner marked its first profile."""
    entries = written.values() if isinstance(written, Mapping) else written or []
    if not any(entry.get("default") for entry in entries):
        return None
    return next((str(entry["slug"]) for entry in initialized if entry.get("default")), None)


def check_choices(entry: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise SpawnRefused for a choice that a KubeSpawner profile does not have; KubeSpawner itself would fail."""
    for name, option in (entry.get("profile_options") or {}).items():
        choice = options.get(name)
        if options.get(name + UNLISTED) or not choice:
            continue
        choices = option.get("choices") or {}
        if not isinstance(choice, str) or choice not in choices:
            where = f"{_plain(entry['display_name'])}, {_plain(option.get('display_name') or name)}"
            plain = {
                key: {"display_name": _plain(listed.get("display_name") or key)} for key, listed in choices.items()
            }
            raise SpawnRefused(words.unknown_choice(where, choice, plain), reason="unknown-choice")


def checked_texts(profiles: Sequence[Mapping[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Return KubeSpawner's profiles without text patterns, after checking the user's texts in linear time.

    KubeSpawner would match the texts with `re` in the event loop. Raises ValueError, as KubeSpawner does.
    """
    slug = options.get("profile") if isinstance(options, Mapping) else None
    return [_checked(profile, options if profile.get("slug") == slug else {}) for profile in profiles]


def _checked(profile: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, option in (profile.get("profile_options") or {}).items():
        unlisted = dict(option.get("unlisted_choice") or {})
        pattern, text = unlisted.pop("validation_regex", None), options.get(name + UNLISTED)
        if pattern and text and unlisted.get("enabled"):
            where = f"{profile.get('display_name')}, {option.get('display_name') or name}"
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                raise ValueError(words.text_too_long(where, MAX_TEXT))
            try:
                matches = matches_start(pattern, text)
            except ValueError as error:
                raise ValueError(words.unusable_pattern(where, str(error))) from None
            if not matches:
                # KubeSpawner's own text
                raise ValueError(f"Received unlisted_choice for {name} that failed validation regex.")
        checked[name] = {**option, "unlisted_choice": unlisted} if "unlisted_choice" in option else option
    return {**profile, "profile_options": checked} if checked else dict(profile)


def _plain(html: Any) -> str:
    """Return an admin's text without its HTML tags."""
    return Markup(html).striptags()


def as_entry(profile: Profile, now: Availability | None, quota: str = "") -> dict[str, Any]:
    """Return a template as a KubeSpawner profile for an admin's own form, with escaped text.

    ``gpushare`` contains additional data: ``kind`` (now, wait, never, unknown), ``text``, ``detail``, and ``quota``,
    the state of the user's quota for a spawn now (empty without quotas).
    """
    entry: dict[str, Any] = {
        "slug": profile.slug,
        "display_name": str(escape(profile.display_name)),
        "description": str(escape(profile.description)),
        "default": profile.default,
        # resources and image are settings too
        "kubespawner_override": {**resource_override(profile.template), **copy.deepcopy(dict(profile.override))},
        "profile_options": {name: _escaped(option) for name, option in profile.options.items()},
    }
    if now is not None:
        texts = {"kind": now.kind, "text": now.text, "detail": now.detail, "quota": quota}
        entry["gpushare"] = {name: str(escape(text)) for name, text in texts.items()}
    return entry


def _marked(option: Mapping[str, Any]) -> Any:
    """Return an option with its displayed fields marked as HTML."""
    marked: dict[str, Any] = {}
    for key, value in option.items():
        if isinstance(value, Mapping) and key != "kubespawner_override":
            marked[key] = _marked(value)
        else:
            marked[key] = Markup(value) if key in SHOWN and isinstance(value, str) else value
    return marked


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: copy.deepcopy(item) if key == "kubespawner_override" else _escaped(item) for key, item in value.items()
        }
    return str(escape(value)) if isinstance(value, str) else copy.deepcopy(value)


NAMES = ("pvc_name", "pod_name", "dns_name", "secret_name")
"""Plain attributes of KubeSpawner that a ``kubespawner_override`` may set like traits."""


def names_template(options: Any, templates: Sequence[Template]) -> bool:
    """Return whether the options name a template."""
    slug = options.get("profile") if isinstance(options, dict) else None
    return bool(slug) and any(template.name == slug for template in templates)
