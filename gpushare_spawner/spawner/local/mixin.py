"""Mixin that adds GPU shares to a spawner of processes.

`ProcessAttempt` is the state of one spawn of a process: its session with this machine's agent. `GPUShareMixin` adapts
the spawner. Sessions are opened in ``reservations``; code shared with pods is in `spawner.base`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from inspect import isawaitable
from typing import Any

import traitlets
from jupyterhub.utils import maybe_future
from traitlets import List, Unicode, Union

from gpushare_spawner.clients.agent import AgentClient, default_control_socket
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.sharing.native import process_environment
from gpushare_spawner.spawner.attempt import SpawnAttempt, SpawnPhase
from gpushare_spawner.spawner.base import GPUShareBase, applied_when_placed
from gpushare_spawner.spawner.form import Form
from gpushare_spawner.spawner.hub import SpawnRefused, refusals_reported
from gpushare_spawner.spawner.local.reservations import AgentReservations, OpenedShare, this_machine
from gpushare_spawner.spawner.options import Choice, Overrides, Profile, ProfileError, profiles
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.wording import spawn_failures as words
from gpushare_spawner.wording import spawn_form as layer_words
from gpushare_spawner.wording.spawn_form import AGENT_SILENT

CHECK_EVERY = 20.0
"""Seconds between two checks whether the agent still has a running server's session."""


class ProcessAttempt(SpawnAttempt[OpenedShare]):
    """One spawn of a process. ``release`` closes the session with a given id in the background."""

    def __init__(self, overrides: Overrides, release: Callable[[str], None]) -> None:
        super().__init__(overrides)
        self.session: OpenRequest | None = None
        """The session that was requested from the agent; set from the server's reservation until its end."""
        self._release = release
        self._checked_at: float | None = None

    def reserved(self, reservation: OpenedShare) -> None:
        """Record the reserved share."""
        self.reservation, self.session = reservation, reservation.opened_with

    def give_back(self) -> None:
        session, self.session, self.reservation = self.session, None, None
        if session is not None:
            self._release(session.id)

    def check_due(self, now: float) -> bool:
        """Return whether the session should be checked with the agent now; ``now``: seconds on a monotonic clock."""
        if self._checked_at is not None and now - self._checked_at < CHECK_EVERY:
            return False
        self._checked_at = now
        return True

    def state(self) -> dict[str, Any]:
        ours = super().state()
        if ours:
            ours["session"] = self.session.model_dump(mode="json") if self.session is not None else None
        return ours

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved `state`. Raises ValueError (pydantic's) for an invalid session.

        The agent's report takes precedence, see `GPUShareMixin.poll`.
        """
        super().restore(state)
        if state.get("session") is not None:
            self.session = OpenRequest.model_validate(state["session"])


_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""Environment that hides the machine's GPUs from a server without a GPU in its template. (CUDA C++ Programming Guide,
environment variables: GPUs from the first invalid index on are invisible.)
"""


class GPUShareMixin(GPUShareBase):
    """Mixin that gives each server the GPU share of its compute template.

    Put it before a spawner that starts processes::

        class MySpawner(GPUShareMixin, SomeSpawner): ...

    If servers do not run under the uid of the local user of the same name, override `share_uid`; for a spawner without
    a ``pid``, override `share_pid`.
    """

    unavailable = AGENT_SILENT
    """Why the state of the GPUs is unknown, as a clause."""

    agent_socket = Unicode(
        help="""
        Control socket of this machine's ``gpushare agent``. The hub must run as the agent's user, or as root.

        Default: ``$GPUSHARE_CONTROL``, else ``/run/gpushare/control.sock``.
        """
    ).tag(config=True)

    @traitlets.default("agent_socket")
    def _default_agent_socket(self) -> str:
        return str(default_control_socket())

    profile_list = Union(
        [List(trait=traitlets.Dict()), traitlets.Any()],
        default_value=[],
        help="""
        Profiles in addition to the compute templates, in KubeSpawner's conventions: a list of dicts, a dict of them by
        slug, or a callable (it may be async) that takes the spawner and returns either.

        Each has ``display_name`` and may have ``slug``, ``description``, ``default``, ``kubespawner_override``
        (settings of this spawner) and ``profile_options``. They hold no GPU share; for a share, write a template.
        Descriptions are plain text.

        Example::

            c.GPUShareMixin.profile_list = [
                {"display_name": "Short job", "kubespawner_override": {"default_url": "/lab/tree/short.ipynb"}},
            ]
        """,
    ).tag(config=True)

    _attempt: ProcessAttempt

    def _new_attempt(self) -> ProcessAttempt:
        return ProcessAttempt(Overrides(self), lambda session: self.reservations.release(session))

    # -- implemented for the platform of a server --

    def share_uid(self) -> int:
        """Return the uid of the server; only that user may connect to the session's socket."""
        import pwd

        return pwd.getpwnam(self.user.name).pw_uid

    async def share_pid(self) -> int:
        """Return the running server's pid on the agent's machine; the agent ends the session when this process ends."""
        return int(getattr(self, "pid", 0))

    # -- profiles --

    @property
    def reservations(self) -> AgentReservations:
        """The shares in flight and the queue; one object for all spawners of the hub that use the same agent."""
        return self._shared(("agent", self.agent_socket), self._new_reservations)

    def _new_reservations(self) -> AgentReservations:
        made = AgentReservations(
            AgentClient(self.agent_socket),
            self.log,
            machine=this_machine() if self.enforces_resources else None,
            **self._queue_settings(),
        )
        made.sweep_soon(self._hub_runs)
        return made

    async def offered(self) -> list[Profile]:
        """Return all profiles, allowed to this user or not.

        A mistake in ``profile_list`` is logged, and the list is not offered.
        """
        templates = self.templates_of_user()
        entries = self.profile_list
        try:
            if callable(entries):
                entries = entries(self)
                if isawaitable(entries):
                    entries = await entries
            return profiles(templates, entries or [])
        except ProfileError as error:
            self.log.error("%s", error)
        except Exception:
            self.log.exception("profile_list failed; only the templates are offered")
        return profiles(templates, [])

    # -- the form --

    @traitlets.default("options_form")
    def _default_options_form(self) -> Callable[[Any], Any]:
        return lambda spawner: spawner.show_form()

    @traitlets.default("options_from_form")
    def _default_options_from_form(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self._read_form

    @traitlets.default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[..., None]:
        return applied_when_placed

    async def show_form(self) -> str:
        """Return the form's HTML, for this user and the current free capacity."""
        cards = self._allowed(await self.offered())
        return self._rendered_form(cards, self._chosen_before(), await self._availability_now())

    def _read_form(self, form_data: dict[str, Any]) -> dict[str, Any]:
        options = Form.read(form_data)
        self._remember_submitted(options)
        return options

    # -- a spawn --

    async def run_pre_spawn_hook(self) -> None:
        """Run the admin's hook, check the options, and reserve the share; a spawn without a place waits here.

        The hub's ``start_timeout`` begins with `start`. Raises SpawnRefused; then nothing is reserved.
        """
        await self._prepare(super().run_pre_spawn_hook)

    async def _choose(self) -> Choice:
        return self._chosen(await self.offered(), self.user_options)

    async def _get_ready(self, choice: Choice) -> None:
        attempt, template = self._attempt, choice.profile.template
        attempt.overrides.apply_choice(choice)
        if template is None:
            return
        if template.gpu is None:
            await self._admit_without_gpu(choice, template)
            return
        cannot = layer_words.not_on_one_machine(template)
        if cannot:
            raise SpawnRefused(cannot, reason="bad-template", status=500)
        tenant = Tenant(self.user.name, self.name, self._uid(), choice.quota, choice.user_units)
        request = SpawnRequest(tenant, template)
        attempt.reserved(await self._reserve_share(request, choice.alternatives, self.queue_timeout, attempt.progress))

    def _ineligible(self) -> Callable[[Template], Callable[[], frozenset[str]]]:
        # the machine has one node, and it accepts every server
        return lambda template: frozenset

    def _uid(self) -> int:
        try:
            return self.share_uid()
        except KeyError:
            raise SpawnRefused(words.no_such_user(self.user.name), reason="no-user", status=403) from None

    def get_env(self) -> dict[str, str]:
        """Return the spawner's environment, including the share."""
        environment: dict[str, str] = super().get_env()
        if self._attempt.reservation is not None:
            return process_environment(environment, self._attempt.reservation.environment)
        return {**environment, **_WITHOUT_GPU} if self._attempt.hides_gpus else environment

    async def start(self) -> Any:
        """Start the server and send its pid to the agent. After a failure or a cancellation the share is released."""
        attempt = self._attempt
        with refusals_reported(self), attempt.cancelled_on_failure(), attempt.starting():
            address = await maybe_future(super().start())
            if attempt.session is not None:
                await self.reservations.confirm(attempt.session, await self.share_pid())
        return address

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the position in the queue and the GPU, then the spawner's own events."""
        async for event in self._attempt.progress.events():
            yield event
        async for event in super().progress():
            yield event

    # -- a running server --

    async def poll(self) -> int | None:
        """Return the spawner's status.

        A server that is being placed counts as running; a running server keeps its session.
        """
        if self._is_undecided:
            return 1 if await self._refused_at_once() else None
        attempt = self._attempt
        if attempt.phase is SpawnPhase.PLACING:
            return None
        status: int | None = await maybe_future(super().poll())
        session = attempt.session
        runs = status is None and attempt.phase is SpawnPhase.STARTED and not self._stop_pending
        if runs and session is not None and attempt.check_due(time.monotonic()):
            # the agent or this hub may have been restarted
            self.reservations.adopt_soon(
                session, self.share_pid, lambda: attempt.session is session and not self._stop_pending
            )
        return status

    async def stop(self, now: bool = False) -> None:
        """Stop the server, then close its session. A spawn that still waits for its share is cancelled."""
        attempt = self._attempt
        if attempt.call_off():
            # There is no process yet; signals to pid 0 would reach the hub's own process group.
            return
        try:
            await super().stop(now)
        finally:
            session, attempt.session = attempt.session, None
            if session is not None:
                await self.reservations.close(session.id)
