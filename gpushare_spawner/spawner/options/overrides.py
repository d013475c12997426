"""kubespawner_override on any spawner: set traits for one spawn, and put them back afterwards."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jupyterhub.spawner import Spawner
from jupyterhub.utils import recursive_update
from traitlets import TraitError

from gpushare_spawner.spawner.options.profiles import Profile, resource_override
from gpushare_spawner.spawner.options.validation import Choice
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import options as words


class Overrides:
    """The traits of one spawner that a spawn has changed, with what they were before."""

    def __init__(self, spawner: Spawner, also: Collection[str] = ()) -> None:
        """``also``: names of plain attributes that may be set like traits."""
        self._spawner = spawner
        self.also = also
        self._before: dict[str, Any] = {}

    def apply_choice(self, choice: Choice) -> None:
        """Set the traits that a choice asks for: the template's resources, its overrides, those of the options.

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
        """Set traits; dicts are merged into what is there, callables are called with the spawner, as KubeSpawner does.

        Raises SpawnRefused, naming the setting, for a trait that the spawner does not have and for a wrong value.
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
        """Return what these traits would be if this profile had been chosen; nothing is set.

        None where only a spawn can tell: a value is a function, or a choice on the profile's card sets one of them.
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
        """Put back what the traits were before the first `apply`."""
        for name, value in self._before.items():
            setattr(self._spawner, name, value)
        self._before.clear()

    def _wrong(self, template: str, why: str) -> SpawnRefused:
        # the admin's mistake, not the person's: say so, and put it into the hub's log
        self._spawner.log.error("The template %s: %s", template, why)
        return SpawnRefused(words.cannot_apply(template, why), reason="bad-template", status=500)


def _merged(current: Any, value: Any) -> Any:
    """Return the value that a trait gets: a dict is merged into the one that is there."""
    if not isinstance(value, Mapping) or not isinstance(current, dict):
        return value
    merged = copy.deepcopy(current)
    recursive_update(merged, copy.deepcopy(dict(value)))
    return merged


def _overrides_of(option: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that the choices of an option ask for."""
    for choice in (*(option.get("choices") or {}).values(), option.get("unlisted_choice") or {}):
        yield choice.get("kubespawner_override") or {}
