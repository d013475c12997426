"""What a person asked for, checked on the server: the same for the form and for the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.model.template import Template
from gpushare_spawner.model.text_pattern import matches_whole
from gpushare_spawner.quota import Account
from gpushare_spawner.spawner.options.profiles import UNLISTED, Profile, default_of, replaced
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import options as words

MAX_TEXT = 1000
"""Longest text that an unlisted choice may have."""

QUOTA_OPTION = "quota"
"""The user option that names the group whose quota is used, or the user for their own."""


@dataclass(frozen=True)
class Choice:
    """A profile, and what was chosen on its card."""

    profile: Profile
    overrides: tuple[Mapping[str, Any], ...] = ()
    """Settings of the spawner that the choices ask for, in the order of the card's options."""
    alternatives: tuple[Template, ...] = ()
    """The other templates that the user may start."""
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there are no quotas."""
    user_units: int | None = None
    """What the user's sessions in that quota have at most together on one GPU, in units of 1 %; None: no bound."""


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
    """The choice that ``options`` stand for. Raises SpawnRefused, with a sentence for the person, for anything wrong.

    ``running`` counts the user's other servers that run or are starting, by profile. ``others`` are names of options
    that belong to the admin's own hooks. ``accounts``: those of the user, the default first; empty: no quotas.
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
        known = list(dict.fromkeys([*ours, *profile.options]))
        raise SpawnRefused(words.unknown_option(unknown[0], profile.display_name, known), reason="unknown-option")
    limit = _limit(profile)
    if limit is not None and not _within_limit(profile, running):
        raise SpawnRefused(words.limit_reached(limit, profile.display_name), reason="per-user-limit", status=409)
    account = _account(profile, options, accounts)
    return Choice(
        profile,
        tuple(_chosen(profile, name, option, options) for name, option in profile.options.items()),
        tuple(
            other.template
            for other in offered
            if other.template is not None and other is not profile and _within_limit(other, running)
        ),
        account.key if account is not None else "",
        account.quota.per_user.weight_units if account is not None else None,
    )


def _account(profile: Profile, options: Mapping[str, Any], accounts: Sequence[Account]) -> Account | None:
    """Return the account that was chosen, or the user's first one; None for a profile without a GPU."""
    if not accounts or profile.template is None or profile.template.gpu is None:
        return None
    # a profile's own option of that name is not ours
    name = None if QUOTA_OPTION in profile.options else options.get(QUOTA_OPTION)
    if name is None or name == "":
        return accounts[0]
    for account in accounts:
        if account.name == name:
            return account
    raise SpawnRefused(words.unknown_quota(name, [account.name for account in accounts]), reason="unknown-quota")


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
    """Return whether the whole text matches an admin's pattern. Raises SpawnRefused for one that is not supported."""
    try:
        return matches_whole(pattern, text)
    except ValueError as error:
        raise SpawnRefused(words.unusable_pattern(where, str(error)), reason="bad-template", status=500) from None


def _chosen(profile: Profile, name: str, option: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The override of one option of the card."""
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
        # the whole text, as the pattern attribute of the form's field has it
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
