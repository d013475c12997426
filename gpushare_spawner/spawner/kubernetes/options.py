"""What a user's options stand for in a cluster: a template, or a profile of KubeSpawner's ``profile_list``.

The options of templates are checked by `spawner.options.validation`, those of profiles by KubeSpawner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.kubernetes.profile_list import Offer, check_choices, default_card
from gpushare_spawner.spawner.options.profiles import Profile
from gpushare_spawner.spawner.options.validation import Choice
from gpushare_spawner.spawner.spawn_refused import SpawnRefused

NAMES = ("pvc_name", "pod_name", "dns_name", "secret_name")
"""Plain attributes of KubeSpawner that a ``kubespawner_override`` may set as if they were traits."""


def choose(
    offer: Offer,
    options: Any,
    allowed: Callable[[Sequence[Profile]], Sequence[Profile]],
    check_template: Callable[[Sequence[Profile], Any], Choice],
    own_profile: Callable[[str, Sequence[Mapping[str, Any]]], Mapping[str, Any]],
) -> Choice:
    """Return the choice that ``options`` stand for; without a profile in them, the default card's.

    ``allowed`` leaves the cards that the user may have, ``check_template`` checks options of templates, and
    ``own_profile`` gives the profile of a slug after KubeSpawner's own check (ValueError). Raises SpawnRefused.
    """
    options = {} if options is None else options
    slug = options.get("profile") if isinstance(options, Mapping) else None
    if isinstance(options, Mapping) and not slug:
        standard = default_card(allowed(offer.cards), offer.own_default)
        slug = standard.slug if standard is not None else None
        options = {**options, "profile": slug}
    card = offer.card(slug)
    if card is None or card.template is not None:
        return check_template(offer.cards, options)
    # checked before anything is started, so that the answer is a clear one
    try:
        profile = own_profile(card.slug, offer.own)
    except ValueError as error:
        raise SpawnRefused(str(error), reason="bad-options") from None
    check_choices(profile, options)
    return Choice(card)


def choose_template(
    offer: Offer, options: Mapping[str, Any], check: Callable[[Sequence[Profile], Any], Choice]
) -> Choice | None:
    """Return the choice for options that name a template; None where the name is a profile's of ``profile_list``.

    ``check`` checks the options of templates. Raises SpawnRefused.
    """
    card = offer.card(options["profile"])
    return check(offer.cards, options) if card is not None and card.template is not None else None


def names_template(options: Any, templates: Sequence[Template]) -> bool:
    """Return whether the options name a template."""
    slug = options.get("profile") if isinstance(options, dict) else None
    return bool(slug) and any(template.name == slug for template in templates)
