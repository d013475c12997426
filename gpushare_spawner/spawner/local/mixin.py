"""What makes a spawner of processes a sharing one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import traitlets
from jupyterhub.utils import maybe_future
from pydantic import ValidationError
from traitlets import Float, List, Unicode, Union

from gpushare_spawner.clients.agent import AgentClient, default_control_socket
from gpushare_spawner.model.control import ControlRefused, OpenRequest
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.sharing.native import shared_environment
from gpushare_spawner.spawner.base import GPUShareBase, applied_when_placed
from gpushare_spawner.spawner.local.reservations import OpenedShare, Reservations
from gpushare_spawner.spawner.options.profiles import Profile, ProfileError, profiles
from gpushare_spawner.spawner.refusal import StartRefused

_LOOK_AFTER = 20.0
"""Seconds between two looks whether the agent still has a running server's session."""
_FRESH_ENOUGH = 5.0
"""Age in seconds up to which one report serves several servers."""

_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not take one because the machine has one. (CUDA C++ Programming Guide,
environment variables: GPUs from the first invalid index on are invisible.)"""


class GPUShareMixin(GPUShareBase):
    """Gives each server the share of a GPU that its compute template says.

    Put it before a spawner that starts processes::

        class MySpawner(GPUShareMixin, SomeSpawner): ...

    A spawner whose servers do not run as the hub's idea of a local user overrides `share_uid`, one without a ``pid``
    overrides `share_pid`.
    """

    agent_socket = Unicode(
        help="""
        Control socket of this machine's ``gpushare agent``. The hub must run as the agent's user, or as root.

        Default: ``$GPUSHARE_CONTROL``, else ``/run/gpushare/control.sock``.
        """,
    ).tag(config=True)

    @traitlets.default("agent_socket")
    def _default_agent_socket(self) -> str:
        return str(default_control_socket())

    agent_timeout = Float(5.0, min=0.1, help="Seconds to wait for an answer of the agent.").tag(config=True)

    agent_patience = Float(
        20.0,
        min=0,
        help="""
        Seconds that a start waits for an agent that does not answer at all, before it is refused.

        Restarting the agent takes a second or two; nobody should see it. Templates without a GPU never wait for it.
        """,
    ).tag(config=True)

    profile_list = Union(
        [List(trait=traitlets.Dict()), traitlets.Any()],
        default_value=[],
        help="""
        Further profiles beside the compute templates, in KubeSpawner's conventions: a list of dicts, a dict of them by
        slug, or a callable (it may be async) that takes the spawner and returns either.

        Each has ``display_name`` and may have ``slug``, ``description``, ``default``, ``kubespawner_override``
        (settings of this spawner) and ``profile_options``. They hold no GPU share; for that write a template.
        Descriptions are plain text.

        Example::

            c.GPUShareMixin.profile_list = [
                {"display_name": "Short job", "kubespawner_override": {"default_url": "/lab/tree/short.ipynb"}},
            ]
        """,
    ).tag(config=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reservation: OpenedShare | None = None
        self._session: OpenRequest | None = None
        self._looked_after = 0.0

    # -- what the place of a server must say --

    def share_uid(self) -> int:
        """The uid that the server will run as: only that user may connect to the session's socket."""
        import pwd

        return pwd.getpwnam(self.user.name).pw_uid

    async def share_pid(self) -> int:
        """The pid of the running server, on the agent's machine; the agent ends the session with it."""
        return int(getattr(self, "pid", 0))

    # -- what is offered --

    @property
    def reservations(self) -> Reservations:
        """The shares in flight and the line, one for all spawners of the hub that use the same agent."""
        return self._shared(("agent", self.agent_socket), self._new_reservations)

    def _new_reservations(self) -> Reservations:
        made = Reservations(
            AgentClient(self.agent_socket, self.agent_timeout),
            self.log,
            agent_patience=self.agent_patience,
            **self._line_settings(),
        )
        made.sweep_soon(self._hub_runs)
        return made

    async def offered(self) -> list[Profile]:
        """All profiles, allowed to this user or not. A mistake in ``profile_list`` is logged and hides that list."""
        templates = self._templates()
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
        return _show_form

    @traitlets.default("options_from_form")
    def _default_options_from_form(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self._read_form

    @traitlets.default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[..., None]:
        return applied_when_placed

    # -- a start --

    def _tenant(self) -> Tenant:
        return Tenant(self.user.name, self.name, self._uid())

    def _uid(self) -> int:
        try:
            return self.share_uid()
        except KeyError:
            raise StartRefused(
                f"There is no user {self.user.name!r} on this machine. Ask the admin.", reason="no-user", status=403
            ) from None

    def _reserved(self, reservation: OpenedShare) -> None:
        self._reservation, self._session = reservation, reservation.request

    def get_env(self) -> dict[str, str]:
        """The spawner's environment, and the share in it."""
        environment: dict[str, str] = super().get_env()
        if self._reservation is not None:
            return shared_environment(environment, self._reservation.environment)
        return {**environment, **_WITHOUT_GPU} if self._hidden_gpus else environment

    async def start(self) -> Any:
        """Start the server and tell the agent its pid. If that fails, or is cancelled, the share goes back."""
        self._starting = True
        try:
            with self._released_on_failure():
                address = await maybe_future(super().start())
                if self._session is not None:
                    await self._confirm(self._session)
            return address
        finally:
            self._starting = False

    async def _confirm(self, session: OpenRequest) -> None:
        pid = await self.share_pid()
        if pid < 1:
            raise StartRefused("The server ended while it started; its log says why.", reason="exited", status=500)
        try:
            await self.reservations.confirm(session, pid)
        except ControlRefused as error:
            raise StartRefused(
                f"The GPU agent does not accept the server's process: {error.message}",
                reason="agent-refused",
                status=502,
            ) from None

    # -- a running server --

    async def poll(self) -> int | None:
        """As the spawner says. While a server is being placed it counts as running; a running one keeps its session."""
        status = await super().poll()
        if status is None and self._session is not None and not (self._placing or self._starting or self._stop_pending):
            self._look_after(self._session)
        return status

    def _look_after(self, session: OpenRequest) -> None:
        """See to it, now and then, that the agent still has the session: it, or this hub, may have been restarted."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_after >= _LOOK_AFTER or not self._looked_after:
            self._looked_after = now
            self.reservations.adopt_soon(
                session, self.share_pid, lambda: self._session is session and not self._stop_pending
            )

    async def stop(self, now: bool = False) -> None:
        """Stop the server, then close its session. A start that still waits for its share is called off."""
        session = self._session if self._placing is None else None
        try:
            await super().stop(now)
        finally:
            if session is not None:
                self._session = None
                await self.reservations.close(session.id)

    def _let_go(self) -> None:
        session, self._session, self._reservation = self._session, None, None
        if session is not None:
            self.reservations.release(session.id)
        self._looked_after = 0.0
        super()._let_go()

    def _share_state(self) -> dict[str, Any]:
        return {"session": self._session.model_dump(mode="json") if self._session is not None else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """What a hub that was restarted knows of a running server. The agent's report is the truth; see `poll`."""
        super().load_state(state)
        kept = state.get("gpushare")
        if isinstance(kept, dict) and kept.get("session") is not None:
            try:
                self._session = OpenRequest.model_validate(kept["session"])
            except ValidationError as error:
                self.log.error("The hub's database has no valid GPU session for %s: %s", self._log_name, error)


def _show_form(spawner: GPUShareMixin) -> Any:
    return spawner.show_form()
