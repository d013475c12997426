"""Form on which a user chooses a template. Renders cards as HTML and reads user options from submitted fields.

Does not check the options: see ``options``. On Kubernetes KubeSpawner reads the fields: see kubernetes/spawner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape

from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.hub import ShareAdvice
from gpushare_spawner.spawner.options import QUOTA_OPTION, UNLISTED, Profile, default_of
from gpushare_spawner.spawner.queue.availability import (
    NO_GPU_NEEDED,
    UNKNOWN,
    Availability,
    AvailabilityNow,
    UnknownNow,
    models_of,
)
from gpushare_spawner.spawner.queue.quotas import QuotaChoice
from gpushare_spawner.wording import service as quota_texts
from gpushare_spawner.wording import spawn_form
from gpushare_spawner.wording.amounts import unbroken

OTHER = "unlisted-choice"
"""Value of a select that activates its text field; KubeSpawner's."""


@dataclass(frozen=True)
class Option:
    """A select on a card."""

    field: str
    """The name of the form field."""
    label: str
    choices: Sequence[tuple[str, str]]
    """Value and text."""
    selected: str
    other: Mapping[str, Any] | None = None
    """KubeSpawner's unlisted_choice, if it is enabled."""
    text: str = ""
    """The text that the user wrote instead of a listed choice."""


@dataclass(frozen=True)
class Card:
    """The data of one profile for the HTML template."""

    profile: Profile
    checked: bool
    choosable: bool
    """False: the profile can never start here."""
    units: int
    """Width of the share in the bar, in percent; 0 without a GPU."""
    borrowed: int
    """Units of the share that a spawn now would borrow."""
    guaranteed: str
    maximum: str
    idle_actions: Sequence[str]
    takes_idle_share: bool
    oversubscribes: bool
    machine: str
    models: str
    neighbours: str
    """The rules for other sessions on its GPUs; empty: none."""
    priority: str
    """Its place in the queue; empty: that of most templates."""
    now: Availability | None
    """None for a profile without a template, because its requirements are unknown."""
    options: Sequence[Option]
    layer: str
    """The sharing layer of the GPU; empty: our own."""
    quota: str
    """The state of the user's only quota for a spawn now; empty: the user has several quotas or none."""
    advice: str = ""
    """Which share would have suited the user's work with this template better; empty: this one suits, or unknown."""


class Form:
    """Renderer of the cards. ``paths`` are an admin's folders; their templates take precedence over ours."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._environment = _environment(tuple(paths))

    def render(
        self,
        offered: Sequence[Profile],
        chosen: Mapping[str, Any],
        availability_now: AvailabilityNow | UnknownNow | None,
        unavailable: str = spawn_form.AGENT_SILENT,
        enforces_resources: bool = True,
        quotas: Callable[[Template], Sequence[QuotaChoice]] = lambda template: (),
        advice: Mapping[str, ShareAdvice] = {},
    ) -> str:
        """Return the HTML inside the hub's form element. ``chosen``: the user options to preselect.

        ``unavailable``: why the state of the GPUs is unknown, as a clause. ``enforces_resources``: whether the spawner
        enforces a template's CPU and memory limits; otherwise the cards do not show them. ``quotas``: function that
        returns the accounts that the user can charge for a server of a template. ``advice``: advice on the user's
        shares by template, shown if a card has the advised share.
        """
        now = {profile.slug: _now(profile.template, availability_now) for profile in offered}
        choosable = [profile for profile in offered if not _never(now[profile.slug])]
        default = default_of(offered)
        slug = chosen.get("profile")
        if not isinstance(slug, str) or slug not in {profile.slug for profile in choosable}:
            preselected = default if default in choosable else next(iter(choosable), None)
            slug = preselected.slug if preselected is not None else None
        cards = [_card(profile, slug, chosen, now[profile.slug], enforces_resources, quotas) for profile in offered]
        shares = {_share(card) for card in cards if card.choosable}
        cards = [
            replace(card, advice=known.text)
            if (known := advice.get(card.profile.slug))
            and Share(known.units) == _share(card)
            and Share(known.advised_units) in shares
            else card
            for card in cards
        ]
        asks_gpu = any(card.units for card in cards)
        return self._environment.get_template("form.html").render(
            cards=cards, unavailable=unavailable if asks_gpu and availability_now is None else ""
        )

    @staticmethod
    def read(form_data: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the chosen card's user options from the submitted fields, under KubeSpawner's names."""
        slug = _first(form_data.get("profile"))
        if not slug:
            return {}
        prefix = f"profile-option-{slug}--"
        fields = {
            name.removeprefix(prefix): _first(value) for name, value in form_data.items() if name.startswith(prefix)
        }
        return {"profile": slug, **without_idle_fields(fields)}


def without_idle_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of our form without inactive text fields.

    A text field is submitted even when it is hidden; it counts only if "other" is selected.
    """
    return {
        name: value
        for name, value in options.items()
        if value != OTHER and (not name.endswith(UNLISTED) or options.get(name.removesuffix(UNLISTED), OTHER) == OTHER)
    }


@lru_cache
def _environment(paths: tuple[str, ...]) -> Environment:
    folders = [*paths, str(Path(__file__).parent / "pages" / "form")]
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tight"] = unbroken
    return environment


def _card(
    profile: Profile,
    chosen: str | None,
    options: Mapping[str, Any],
    now: Availability | None,
    enforces_resources: bool,
    quotas: Callable[[Template], Sequence[QuotaChoice]],
) -> Card:
    checked = profile.slug == chosen
    template = profile.template
    gpu = template.gpu if template is not None else None
    whole = [gpu_type.memory_bytes for gpu_type in now.gpus if gpu_type.mig is None] if now is not None else []
    memory = min(whole, default=None)
    borrowed = now.borrowed if now is not None else 0
    name = (now.layer if now is not None else None) or (gpu.layer if gpu is not None else None) or LayerName.NATIVE
    layer = LAYERS[name] if name is not LayerName.NATIVE else None
    reach = (layer or LAYERS[LayerName.NATIVE]).reach
    options_here = options if checked else {}
    accounts = quotas(template) if template is not None and QUOTA_OPTION not in profile.options else ()
    return Card(
        profile=profile,
        checked=checked,
        choosable=not _never(now),
        units=gpu.share.units if gpu is not None else 0,
        borrowed=borrowed,
        guaranteed=spawn_form.guaranteed(gpu, memory, borrowed) if gpu is not None and layer is None else "",
        maximum=spawn_form.maximum(gpu, memory) if gpu is not None and layer is None else "",
        idle_actions=spawn_form.idle_actions(template, reach) if template is not None else (),
        takes_idle_share=template is not None and spawn_form.takes_idle_share(template, reach),
        oversubscribes=gpu is not None and gpu.memory.oversubscribe and (layer is None or layer.oversubscribes),
        machine=spawn_form.machine(template.resources) if template is not None and enforces_resources else "",
        models=spawn_form.gpu_models(gpu.share, models_of(now.gpus)) if gpu is not None and now is not None else "",
        neighbours=spawn_form.neighbours(template) if template is not None else "",
        priority=spawn_form.priority(template) if template is not None else "",
        now=now,
        options=[
            *([_quota_option(profile, accounts, options_here)] if len(accounts) > 1 else []),
            *(_option(profile, name, option, options_here) for name, option in profile.options.items()),
        ],
        layer=spawn_form.terms(layer, now.profile if now is not None else None) if layer is not None else "",
        quota=quota_now(accounts) if len(accounts) == 1 else "",
    )


def _share(card: Card) -> Share | None:
    return card.profile.template.share if card.profile.template is not None else None


def quota_now(accounts: Sequence[QuotaChoice]) -> str:
    """Return the state of the user's quota for a spawn now; with several quotas, the state of the default quota."""
    if not accounts:
        return ""
    return _quota_text(accounts[0], named=len(accounts) > 1)


def _quota_text(choice: QuotaChoice, named: bool) -> str:
    """Return the state of a quota and its budgets for a spawn now. ``named``: with the quota's name."""
    admission = choice.admission
    quota = quota_texts.on_card(admission) if admission is not None else ""
    if named:
        quota = quota_texts.choice(choice.account, admission)
    return "; ".join(text for text in (quota, quota_texts.budget_on_card(choice.budgets)) if text)


def _never(now: Availability | None) -> bool:
    """Return whether a spawn of this card can never start here; the card is then shown but cannot be chosen."""
    return now is not None and now.kind == "never"


def _now(template: Template | None, availability_now: AvailabilityNow | UnknownNow | None) -> Availability | None:
    if template is None:
        return None
    if template.gpu is None:
        return NO_GPU_NEEDED
    return availability_now.availability(template) if availability_now is not None else UNKNOWN


def _quota_option(profile: Profile, accounts: Sequence[QuotaChoice], chosen: Mapping[str, Any]) -> Option:
    names = [account.account.name for account in accounts]
    requested = chosen.get(QUOTA_OPTION)
    return Option(
        field=f"profile-option-{profile.slug}--{QUOTA_OPTION}",
        label=quota_texts.LABEL,
        choices=[(account.account.name, _quota_text(account, named=True)) for account in accounts],
        selected=requested if isinstance(requested, str) and requested in names else names[0],
    )


def _option(profile: Profile, name: str, option: Mapping[str, Any], chosen: Mapping[str, Any]) -> Option:
    choices = option.get("choices") or {}
    unlisted = option.get("unlisted_choice") or {}
    other = unlisted if unlisted.get("enabled") else None
    text = chosen.get(name + UNLISTED)
    default = next((key for key, choice in choices.items() if choice.get("default")), next(iter(choices), OTHER))
    requested = chosen.get(name)
    selected = requested if isinstance(requested, str) and requested in choices else default
    if other is not None and isinstance(text, str) and text:
        selected = OTHER
    return Option(
        field=f"profile-option-{profile.slug}--{name}",
        label=_text(option.get("display_name") or name),
        choices=[(key, _text(choice.get("display_name") or key)) for key, choice in choices.items()],
        selected=str(selected),
        other=other,
        text=text if isinstance(text, str) else "",
    )


def _text(value: Any) -> str:
    """Return the value as text. Text that is marked as HTML stays marked."""
    return value if isinstance(value, str) else str(value)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value
