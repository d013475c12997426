"""What a person may choose: compute templates beside KubeSpawner's profile_list, on one form."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

from jupyterhub.utils import maybe_future
from traitlets import default

from gpushare_spawner.spawner.form.form import OTHER, Form
from gpushare_spawner.spawner.kubernetes.profile_list import as_entry, cards, default_card, marked_default
from gpushare_spawner.spawner.kubernetes.watches import WatchingSpawner
from gpushare_spawner.spawner.options.profiles import UNLISTED, Profile


class OfferingSpawner(WatchingSpawner):
    """Cards of templates and of profiles; KubeSpawner's own form, or an admin's, where there are no templates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kubespawners_form: Any = None

    async def offered(self) -> list[Profile]:
        """The templates' cards, then those of KubeSpawner's ``profile_list``."""
        return self._cards(await self._own_profiles())

    async def _own_profiles(self) -> list[dict[str, Any]]:
        """KubeSpawner's profile_list, whatever form it has."""
        return (await self._own_profiles_and_default())[0]

    async def _own_profiles_and_default(self) -> tuple[list[dict[str, Any]], str | None]:
        entries = self.profile_list
        if callable(entries):
            entries = await maybe_future(entries(self))
        own: list[dict[str, Any]] = self._get_initialized_profile_list(self._sorted_dict_values(entries or []))
        return own, marked_default(entries, own)

    def _cards(self, own: list[dict[str, Any]]) -> list[Profile]:
        offered, clashes = cards(self._templates(), own)
        for name in clashes:
            self._shared(("clash", name), functools.partial(self._tell_clash, name))
        return offered

    def _tell_clash(self, name: str) -> bool:
        self.log.error("The template %r is not offered: profile_list has a profile with that slug", name)
        return True

    @default("options_form")
    def _options_form_default(self) -> Any:
        self._kubespawners_form = super()._options_form_default()
        return self._kubespawners_form

    async def get_options_form(self) -> Any:
        """KubeSpawner's form, or an admin's ``options_form``; with templates, one that shows all there is."""
        if not self._templates() or self._has_own_options_form():
            return await super().get_options_form()
        return await self.show_form()

    def _has_own_options_form(self) -> bool:
        """Whether the admin has set ``options_form``."""
        form = self.options_form
        return form is not self._kubespawners_form and form != self._kubespawners_form

    async def show_form(self) -> str:
        """The form's HTML, for this user and what is free now."""
        own, own_default = await self._own_profiles_and_default()
        offered = [card for card in self._cards(own) if card.allows(self.user.name, self.group_names)]
        outlook = await self._outlook() if any(card.template and card.template.gpu for card in offered) else None
        standard = default_card(offered, own_default)
        if not self._has_own_form():
            chosen = self._chosen_before()
            if standard is not None and chosen.get("profile") not in [card.slug for card in offered]:
                chosen = {"profile": standard.slug}
            return Form(self.form_template_paths).render(offered, chosen, outlook, self.away)
        by_slug = {entry["slug"]: entry for entry in own}
        entries = [
            as_entry(card, outlook.availability(card.template) if outlook is not None else None)
            if card.template is not None
            else by_slug[card.slug]
            for card in offered
        ]
        for entry in entries:
            entry["default"] = standard is not None and entry["slug"] == standard.slug
        return str(self._render_options_form(entries))

    def _has_own_form(self) -> bool:
        """Whether the admin has replaced KubeSpawner's form by another."""
        return self.profile_form_template != "" or any(
            os.path.exists(os.path.join(path, "form.html")) for path in self.additional_profile_form_template_paths
        )

    async def _outlook(self) -> Any:
        try:
            await asyncio.wait_for(self._watch(), self.form_timeout)
        except TimeoutError:
            self.log.warning("The form is shown without availability: pods are not watched in time")
            return None
        return await super()._outlook()

    def _options_from_form(self, formdata: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = super()._options_from_form(formdata)
        if not self._templates():
            return options
        if not self._has_own_options_form() and not self._has_own_form():
            options = _without_idle_fields(options)
        self._remember_submitted(options)
        return options


def _without_idle_fields(options: dict[str, Any]) -> dict[str, Any]:
    """What our form means, which works without JavaScript: its text fields are there even beside a listed choice."""
    meant = {}
    for name, value in options.items():
        listed = options.get(name.removesuffix(UNLISTED), OTHER) if name.endswith(UNLISTED) else OTHER
        if listed == OTHER and value != OTHER:
            meant[name] = value
    return meant
