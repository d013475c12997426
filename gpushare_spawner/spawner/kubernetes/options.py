"""A start's first step: what was chosen is checked and applied, a template or a profile of profile_list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from traitlets import default

from gpushare_spawner.spawner.base import GPUShareBase, applied_when_placed
from gpushare_spawner.spawner.kubernetes.form import OfferingSpawner
from gpushare_spawner.spawner.kubernetes.profile_list import check_choices, default_card
from gpushare_spawner.spawner.options.validation import Choice
from gpushare_spawner.spawner.refusal import StartRefused


class ChoosingSpawner(OfferingSpawner):
    """Checks options before anything is started, whoever sent them: the form, the API, or code without a hub."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overrides.also = ("pvc_name", "pod_name", "dns_name", "secret_name")
        self._settled = False
        """The options of this start were checked and applied."""

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[..., None] | None:
        # where there are templates, the hub need not say that nobody takes care of the options
        return applied_when_placed if self._templates() else None

    def run_pre_spawn_hook(self) -> Any:
        """Run the admin's hook; with templates, check the options and get the share too, after a wait if need be.

        The hub's ``start_timeout`` runs only from `start` on. Raises StartRefused, and then nothing is reserved.
        """
        if not self._templates():
            return super(GPUShareBase, self).run_pre_spawn_hook()
        # of an earlier start: to progress() it would mean that this one is over
        self._start_future = None
        return super().run_pre_spawn_hook()

    async def _choose(self) -> Choice:
        own, own_default = await self._own_profiles_and_default()
        offered = self._cards(own)
        options = self.user_options if self.user_options is not None else {}
        slug = options.get("profile") if isinstance(options, Mapping) else None
        if isinstance(options, Mapping) and not slug:
            allowed = [card for card in offered if card.allows(self.user.name, self.group_names)]
            standard = default_card(allowed, own_default)
            slug = standard.slug if standard is not None else None
            options = {**options, "profile": slug}
        card = next((card for card in offered if card.template is None and card.slug == slug), None)
        if card is None:
            choice = self._chosen(offered, options)
        else:
            self._check_own(own, card.slug)
            # only templates are counted, and remembered with the server's state
            self._profile, self._profile_slug = card, ""
            choice = Choice(card)
        self._settled = True
        return choice

    def _check_own(self, own: list[dict[str, Any]], slug: str) -> None:
        """Check the choices of a KubeSpawner profile before anything is started, so that the answer is a clear one."""
        try:
            self._validate_user_options(own)
        except ValueError as error:
            raise StartRefused(str(error), reason="bad-options") from None
        check_choices(self._get_profile(slug, own), self.user_options or {})

    def _take(self, choice: Choice) -> None:
        # KubeSpawner applies its own profiles itself, when it starts
        if choice.profile.template is not None:
            super()._take(choice)

    async def load_user_options(self) -> None:
        """Apply what was chosen: a template if its name was, else as KubeSpawner does."""
        if self._settled and self._profile is not None:
            if self._profile.template is None:
                await super().load_user_options()
            return
        own = await self._profiles_beside_template()
        if own is None:
            await super().load_user_options()
        else:
            self._overrides.undo()
            self._take(self._chosen(self._cards(own), self.user_options))

    async def _settle_without_hub(self) -> None:
        """What a hub does before it starts a server; options that name no template are left to KubeSpawner."""
        own = await self._profiles_beside_template()
        if own is not None:
            self._overrides.undo()
            self._take(self._chosen(self._cards(own), self.user_options))
            self._settled = True

    async def _profiles_beside_template(self) -> list[dict[str, Any]] | None:
        """KubeSpawner's profiles where the options name a template, and no profile of that name; else None."""
        slug = self.user_options.get("profile") if isinstance(self.user_options, dict) else None
        if not slug or not any(template.name == slug for template in self._templates()):
            return None
        own = await self._own_profiles()
        return None if any(entry["slug"] == slug for entry in own) else own

    def _let_go(self) -> None:
        self._settled = False
        super()._let_go()
