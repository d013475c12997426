"""KubeSpawner's private names that this package uses, each with its reason. Other modules use none.

`OVERRIDDEN` lists the names that `GPUShareSpawner` overrides; `KubeSpawnerPrivate` has a method for each name that it
calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OVERRIDDEN: Mapping[str, str] = {
    "_start": "the only place where a pod that its node did not admit can be tried on another node",
    "_start_reflector": "a reflector with a failed first list, or that has given up, never recovers: it is restarted",
    "_make_create_pod_request": "a failure of the API server that can pass is retried, as a slow answer is",
    "_make_delete_pod_request": "the same, when a pod is deleted",
    "_options_form_default": "by its value an admin's own options_form is recognised",
    "_validate_user_options": "KubeSpawner matches a user's text with `re` in the event loop: it is checked before",
    "_options_from_form": "the hub shows the form again after a refusal, with the submitted options",
}


@dataclass(frozen=True)
class KubeSpawnerPrivate:
    """Private methods of one KubeSpawner."""

    spawner: Any
    inherited: Any
    """``super()`` of our class, for the methods that it overrides."""

    # -- watches --

    def reflector_key(self, kind: str) -> tuple[Any, ...]:
        """Return the key of a shared reflector; there is no public way to get the key for the spawner's namespace."""
        key: tuple[Any, ...] = self.spawner._get_reflector_key(kind)
        return key

    async def start_reflector(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> Any:
        """Start and share a reflector as KubeSpawner does, including its handling of settings and failures."""
        return await self.inherited._start_reflector(kind, reflector_class, replace, **settings)

    async def watch_pods(self) -> None:
        """Make sure that pods are watched; `poll` and `stop` do this too, but do more."""
        await self.spawner._start_watching_pods()

    def default_namespace(self) -> str:
        """Return the hub's own namespace; ``namespace`` differs from it if each user has a namespace."""
        return str(self.spawner._namespace_default())

    # -- settings and profiles --

    def expanded(self, text: str) -> str:
        """Return a setting with ``{username}`` and similar fields filled in, as the pod will have it."""
        return str(self.spawner._expand_all(text))

    def sorted_values(self, setting: Any) -> list[Any]:
        """Return the values of a setting that may be a list or a dict, in the pod's order."""
        return list(self.spawner._sorted_dict_values(setting))

    def complete_profiles(self, entries: Any) -> list[dict[str, Any]]:
        """Return a ``profile_list`` with slugs and defaults filled in, so that both forms use the same names."""
        complete: list[dict[str, Any]] = self.spawner._get_initialized_profile_list(
            self.spawner._sorted_dict_values(entries)
        )
        return complete

    def profile_of(self, slug: str, profiles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the profile with a slug, after checking the user's options. Raises ValueError for invalid options.

        KubeSpawner checks only in `start`, which is too late for a clear error.
        """
        entries = list(profiles)
        self.spawner._validate_user_options(entries)
        profile: Mapping[str, Any] = self.spawner._get_profile(slug, entries)
        return profile

    def rendered_form(self, entries: Sequence[Mapping[str, Any]]) -> str:
        """Return an admin's replacement for KubeSpawner's form, with our entries."""
        return str(self.spawner._render_options_form(entries))

    # -- a spawn --

    async def start_pod(self) -> Any:
        """Start the server as KubeSpawner does (volumes, pod, wait until it runs). Return its address."""
        return await self.inherited._start()

    def forget_last_start(self) -> None:
        """Make `progress` wait for the next spawn; it treats a finished spawn as the end of all events."""
        self.spawner._start_future = None

    @property
    def was_started(self) -> bool:
        """Whether ``start`` was called since `forget_last_start`."""
        return self.spawner._start_future is not None
