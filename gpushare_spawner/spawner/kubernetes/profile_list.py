"""What is offered in a cluster: KubeSpawner's profiles beside compute templates; cards, the default, their choices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from gpushare_spawner.model.template import Template
from gpushare_spawner.model.text_pattern import matches_start
from gpushare_spawner.spawner.options.profiles import UNLISTED, Profile
from gpushare_spawner.spawner.options.validation import MAX_TEXT
from gpushare_spawner.spawner.queue.availability import Availability
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import options as words

SHOWN = ("display_name", "description", "display_name_in_choices", "validation_message")
"""Fields of a profile, its options and their choices that the form shows, and that may hold HTML in KubeSpawner's."""


@dataclass(frozen=True)
class Offer:
    """What all users together may choose."""

    cards: tuple[Profile, ...]
    """Templates first, then the admin's profiles."""
    own: tuple[dict[str, Any], ...]
    """The admin's profiles, as KubeSpawner completes them."""
    own_default: str | None
    """The slug of the profile that the admin marked as default."""
    clashes: tuple[str, ...]
    """Names of templates that are left out, because a profile has that slug."""

    @classmethod
    def of(cls, templates: Iterable[Template], written: Any, own: Sequence[dict[str, Any]]) -> Offer:
        """``written``: ``profile_list`` as the admin wrote it; ``own``: as KubeSpawner completes it."""
        offered, clashes = cards(tuple(templates), own)
        return cls(tuple(offered), tuple(own), marked_default(written, own), tuple(clashes))

    def card(self, slug: Any) -> Profile | None:
        """Return the card of a slug; None where there is none."""
        return next((card for card in self.cards if card.slug == slug), None)


def card_of(entry: Mapping[str, Any]) -> Profile:
    """The card of an (initialized) KubeSpawner profile. What an admin wrote there is HTML, as KubeSpawner has it."""
    return Profile(
        slug=str(entry["slug"]),
        display_name=Markup(entry["display_name"]),
        description=Markup(entry.get("description") or ""),
        default=bool(entry.get("default")),
        override=entry.get("kubespawner_override") or {},
        options={name: _marked(option) for name, option in (entry.get("profile_options") or {}).items()},
    )


def cards(templates: Sequence[Template], own: Sequence[Mapping[str, Any]]) -> tuple[list[Profile], list[str]]:
    """All cards, templates first, and the names of templates left out because a profile has that slug already."""
    taken = {str(entry["slug"]) for entry in own}
    offered = [Profile.of_template(template) for template in templates if template.name not in taken]
    clashes = [template.name for template in templates if template.name in taken]
    return offered + [card_of(entry) for entry in own], clashes


def default_card(offered: Sequence[Profile], own_default: str | None) -> Profile | None:
    """The card of a spawn that names none.

    ``own_default`` is the slug of the profile that the admin marked as default. It counts first, then the template
    marked so, then KubeSpawner's rule (its first profile), then the first template.
    """
    marked = [profile for profile in offered if profile.template is not None and profile.default]
    own = [profile for profile in offered if profile.template is None]
    for profile in own:
        if profile.slug == own_default:
            return profile
    first_own = next((profile for profile in own if profile.default), own[0] if own else None)
    return next(iter(marked), first_own) or next(iter(offered), None)


def marked_default(written: Any, initialized: Sequence[Mapping[str, Any]]) -> str | None:
    """The slug of the profile that an admin marked as default; None where it was KubeSpawner that marked the first."""
    entries = written.values() if isinstance(written, Mapping) else written or []
    if not any(entry.get("default") for entry in entries):
        return None
    return next((str(entry["slug"]) for entry in initialized if entry.get("default")), None)


def check_choices(entry: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises SpawnRefused for a choice that a KubeSpawner profile does not have; KubeSpawner itself fails on it."""
    for name, option in (entry.get("profile_options") or {}).items():
        choice = options.get(name)
        if options.get(name + UNLISTED) or not choice:
            continue
        choices = option.get("choices") or {}
        if not isinstance(choice, str) or choice not in choices:
            where = f"{_plain(entry['display_name'])}, {_plain(option.get('display_name') or name)}"
            plain = {key: {"display_name": _plain(one.get("display_name") or key)} for key, one in choices.items()}
            raise SpawnRefused(words.unknown_choice(where, choice, plain), reason="unknown-choice")


def checked_texts(profiles: Sequence[Mapping[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Return KubeSpawner's profiles without patterns of texts, after a check of the user's texts in linear time.

    KubeSpawner would match them with `re`, in the event loop. Raises ValueError, as KubeSpawner does.
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
                # KubeSpawner's own sentence
                raise ValueError(f"Received unlisted_choice for {name} that failed validation regex.")
        checked[name] = {**option, "unlisted_choice": unlisted} if "unlisted_choice" in option else option
    return {**profile, "profile_options": checked} if checked else dict(profile)


def _plain(html: Any) -> str:
    """Return what an admin wrote for the form, without its tags."""
    return Markup(html).striptags()


def as_entry(profile: Profile, now: Availability | None, quota: str = "") -> dict[str, Any]:
    """A template as an entry for an admin's own form, which takes KubeSpawner's profiles: its text is escaped.

    ``gpushare`` holds what is known of it beyond that: ``kind`` (now, wait, never, unknown), ``text``, ``detail``, and
    ``quota``: what the user's quota says about a spawn now, empty where there are no quotas.
    """
    entry: dict[str, Any] = _escaped(profile.as_kubespawner())
    entry["profile_options"] = {name: _escaped_deep(option) for name, option in profile.options.items()}
    if now is not None:
        told = {"kind": now.kind, "text": now.text, "detail": now.detail, "quota": quota}
        entry["gpushare"] = {name: str(escape(text)) for name, text in told.items()}
    return entry


def _marked(option: Mapping[str, Any]) -> Any:
    """An option with what is shown of it as HTML."""
    marked: dict[str, Any] = {}
    for key, value in option.items():
        if isinstance(value, Mapping) and key != "kubespawner_override":
            marked[key] = _marked(value)
        else:
            marked[key] = Markup(value) if key in SHOWN and isinstance(value, str) else value
    return marked


def _escaped(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: str(escape(value)) if key in SHOWN else value for key, value in entry.items()}


def _escaped_deep(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: copy.deepcopy(item) if key == "kubespawner_override" else _escaped_deep(item)
            for key, item in value.items()
        }
    return str(escape(value)) if isinstance(value, str) else copy.deepcopy(value)
