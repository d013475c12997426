"""The form where there are templates: ours, or an admin's replacement of KubeSpawner's with templates as entries."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpushare_spawner.model.share import Share
from gpushare_spawner.spawner.form.form import OTHER, quota_now
from gpushare_spawner.spawner.kubernetes.profile_list import Offer, as_entry, default_card
from gpushare_spawner.spawner.options.profiles import UNLISTED, Profile
from gpushare_spawner.spawner.queue.availability import AvailabilityNow, UnknownNow
from gpushare_spawner.spawner.queue.queue_quotas import QuotaChoice


def has_own_form(form_template: str, template_paths: Sequence[str]) -> bool:
    """Return whether the admin has replaced KubeSpawner's form by another."""
    return form_template != "" or any(os.path.exists(os.path.join(path, "form.html")) for path in template_paths)


def offers_gpu(cards: Sequence[Profile]) -> bool:
    """Return whether one of the cards has a share of a GPU, so that the form needs to know what is free."""
    return any(card.template is not None and card.template.gpu is not None for card in cards)


def shown_as_chosen(chosen: Mapping[str, Any], cards: Sequence[Profile], offer: Offer) -> Mapping[str, Any]:
    """Return the options that our form shows: those chosen before, or the default card's where that one is gone."""
    standard = default_card(cards, offer.own_default)
    if standard is None or chosen.get("profile") in [card.slug for card in cards]:
        return chosen
    return {"profile": standard.slug}


def entries_of(
    cards: Sequence[Profile],
    offer: Offer,
    availability_now: AvailabilityNow | UnknownNow | None,
    quotas: Callable[[Share], Sequence[QuotaChoice]] = lambda share: (),
) -> list[dict[str, Any]]:
    """Return the entries for an admin's form, in KubeSpawner's terms. ``quotas``: see `Form.render`."""
    standard = default_card(cards, offer.own_default)
    own = {entry["slug"]: entry for entry in offer.own}
    entries = [
        as_entry(
            card,
            availability_now.availability(card.template) if availability_now is not None else None,
            quota_now(quotas(card.template.gpu.share)) if card.template.gpu is not None else "",
        )
        if card.template is not None
        else own[card.slug]
        for card in cards
    ]
    for entry in entries:
        entry["default"] = standard is not None and entry["slug"] == standard.slug
    return entries


def without_idle_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what our form means, which works without JavaScript: text fields are there even beside a listed choice."""
    meant = {}
    for name, value in options.items():
        listed = options.get(name.removesuffix(UNLISTED), OTHER) if name.endswith(UNLISTED) else OTHER
        if listed == OTHER and value != OTHER:
            meant[name] = value
    return meant
