"""The private names of KubeSpawner that this package uses, each with the reason. Nothing else here uses one.

Those that `GPUShareSpawner` overrides are in `OVERRIDDEN`, those that it calls are methods of `KubeSpawnerPrivate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OVERRIDDEN: Mapping[str, str] = {
    "_start": "the only place where a pod that its node did not admit can be tried on another node",
    "_start_reflector": "a reflector whose first list failed, or that has given up, is dead for ever: it is restarted",
    "_make_create_pod_request": "an API server that fails for a moment is asked again, as one that is slow is",
    "_make_delete_pod_request": "the same, when a pod is deleted",
    "_options_form_default": "by its value an admin's own options_form is recognised",
    "_validate_user_options": "KubeSpawner matches a user's text with `re` in the event loop: it is checked before",
    "_options_from_form": "the hub shows the form again after a refusal, with what was submitted",
}


class KubeSpawnerPrivate:
    """Private methods of one KubeSpawner. ``inherited``: `super` of our class, for the methods that it overrides."""

    def __init__(self, spawner: Any, inherited: Any) -> None:
        self._spawner = spawner
        self._inherited = inherited

    # -- watches --

    def reflector_key(self, kind: str) -> tuple[Any, ...]:
        """Return the key of a shared reflector: there is no public way to find the one of the spawner's namespace."""
        key: tuple[Any, ...] = self._spawner._get_reflector_key(kind)
        return key

    async def start_reflector(self, kind: str, reflector_class: Any, replace: bool, **settings: Any) -> Any:
        """Start and share a reflector as KubeSpawner does: its settings and its failures are handled there."""
        return await self._inherited._start_reflector(kind, reflector_class, replace, **settings)

    async def watch_pods(self) -> None:
        """See to it that pods are watched: `poll` and `stop` would do it too, and more."""
        await self._spawner._start_watching_pods()

    def default_namespace(self) -> str:
        """Return the hub's own namespace, which ``namespace`` does not tell where each user has one."""
        return str(self._spawner._namespace_default())

    # -- settings and profiles --

    def expanded(self, text: str) -> str:
        """Return a setting with ``{username}`` and the like filled in, as it will stand in the pod."""
        return str(self._spawner._expand_all(text))

    def sorted_values(self, setting: Any) -> list[Any]:
        """Return the values of a setting that may be a list or a dict, in the order in which the pod has them."""
        return list(self._spawner._sorted_dict_values(setting))

    def complete_profiles(self, entries: Any) -> list[dict[str, Any]]:
        """Return a ``profile_list`` with slugs and defaults filled in, so that both forms name the same things."""
        complete: list[dict[str, Any]] = self._spawner._get_initialized_profile_list(
            self._spawner._sorted_dict_values(entries)
        )
        return complete

    def profile_of(self, slug: str, profiles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the profile of a slug, after a check of the user's options. Raises ValueError for wrong ones.

        KubeSpawner checks in `start` only, which is too late for a clear answer.
        """
        known = list(profiles)
        self._spawner._validate_user_options(known)
        found: Mapping[str, Any] = self._spawner._get_profile(slug, known)
        return found

    def rendered_form(self, entries: Sequence[Mapping[str, Any]]) -> str:
        """Return an admin's replacement of KubeSpawner's form, with our entries in it."""
        return str(self._spawner._render_options_form(entries))

    # -- a spawn --

    async def start_pod(self) -> Any:
        """Start the server as KubeSpawner does: volumes, pod, and a wait until it runs. Return its address."""
        return await self._inherited._start()

    def forget_last_start(self) -> None:
        """Make `progress` wait for the spawn to come: to it a finished one means that it is over."""
        self._spawner._start_future = None

    @property
    def was_started(self) -> bool:
        """Whether ``start`` was called since `forget_last_start`."""
        return self._spawner._start_future is not None
