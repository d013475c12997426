"""What makes a spawner a sharing one."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any, TypeVar

import traitlets
from jupyterhub.spawner import Spawner
from jupyterhub.utils import maybe_future
from pydantic import ValidationError
from traitlets import Float, Integer, List, Unicode, Union
from traitlets.utils.importstring import import_item

from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Strategy
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.sharing.control_client import AgentClient, default_control_socket
from gpushare_spawner.sharing.native import merged
from gpushare_spawner.sharing.template_folder import TemplateFolder
from gpushare_spawner.spawner.form import Form
from gpushare_spawner.spawner.overrides import Overrides
from gpushare_spawner.spawner.profiles import Profile, ProfileError, profiles, resource_override
from gpushare_spawner.spawner.progress import Story
from gpushare_spawner.spawner.queue import Reservation, Ticket, Wish
from gpushare_spawner.spawner.refusal import StartRefused, forget_failure
from gpushare_spawner.spawner.reservations import Reservations
from gpushare_spawner.spawner.validation import Choice, choose

_LOOK_AFTER = 20.0
"""Seconds between two looks whether the agent still has a running server's session."""
_FRESH_ENOUGH = 5.0
"""Age in seconds up to which one report serves several servers."""

_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not take one because the machine has one. (CUDA C++ Programming Guide,
environment variables: GPUs from the first invalid index on are invisible.)"""

_submitted: ContextVar[dict[str, Any] | None] = ContextVar("_submitted", default=None)
"""What the request at hand submitted. After an error the hub renders the form again with the default server's spawner,
which knows nothing of the options of a named one."""

_Shared = TypeVar("_Shared")


class GPUShareMixin(Spawner):
    """Gives each server the share of a GPU that its compute template says.

    Put it before a spawner that starts processes::

        class MySpawner(GPUShareMixin, SomeSpawner): ...

    A spawner whose servers do not run as the hub's idea of a local user overrides `share_uid`, one without a ``pid``
    overrides `share_pid`.
    """

    templates_dir = Unicode(
        help="""
        Folder of compute templates: one YAML file for each, see the templates reference.

        Files are read again when they change; the hub needs no restart. A file with a mistake takes no other down, and
        the hub's log says which, where and what would be right; ``gpushare templates check`` says the same.

        Default: ``$GPUSHARE_TEMPLATES``, else ``/etc/gpushare/templates``.
        """,
    ).tag(config=True)

    @traitlets.default("templates_dir")
    def _default_templates_dir(self) -> str:
        return os.environ.get("GPUSHARE_TEMPLATES") or "/etc/gpushare/templates"

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

    queue_length = Integer(
        50,
        min=0,
        help="""
        How many starts may wait for room on a GPU. The next one is refused at once, with a sentence that says so.

        0: nobody waits. Waiting starts count against ``JupyterHub.concurrent_spawn_limit`` (100 by default): leave room
        there for those that do not wait.
        """,
    ).tag(config=True)

    queue_timeout = Float(
        600.0,
        min=0,
        help="""
        Seconds that a start waits for room on a GPU at most. Then it ends with a clear message and holds nothing.

        The wait is not part of ``Spawner.start_timeout``.
        """,
    ).tag(config=True)

    queue_overtakes = Integer(
        20,
        min=0,
        help="""
        How often a waiting start may be passed by later ones that fit where it does not.

        The line is first come, first served among those that fit: while somebody waits for a whole GPU, a quarter that
        fits now goes ahead. After so many times nobody gets a GPU that the waiting one could use before it has started.
        0 makes the line strict.
        """,
    ).tag(config=True)

    queue_poll_interval = Float(
        1.5,
        min=0.05,
        help="Seconds between two looks at the GPUs while somebody waits. While nobody waits the agent is not asked.",
    ).tag(config=True)

    placement_strategy = traitlets.Any(
        "gpushare_spawner.placement.BestFit",
        help="""
        How GPUs are chosen: a class, an instance, or the import path of a class with the method
        ``choose(room, share, models)`` of ``gpushare_spawner.placement.Strategy``.

        The default fills the fullest GPU that still has room, so that whole ones stay whole.
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

    other_options = List(
        Unicode(),
        help="""
        Names of user options that belong to your own hooks (``pre_spawn_hook``, ``apply_user_options``).

        Any other option that is neither ``profile`` nor one of the chosen profile's ``profile_options`` is refused: a
        misspelt one must not silently start something else.
        """,
    ).tag(config=True)

    form_timeout = Float(
        1.0,
        min=0.05,
        help="""
        Seconds that the form waits for the agent, to show what is free now. Without an answer it is shown all the same,
        and says that availability is not known.
        """,
    ).tag(config=True)

    form_template_paths = List(
        Unicode(),
        help="""
        Folders with Jinja templates of yours that replace those of the form: ``form.html``, ``card.html`` and
        ``style.css``.
        """,
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._overrides = Overrides(self)
        self._story = Story()
        self._profile: Profile | None = None
        self._profile_slug = ""
        self._reservation: Reservation | None = None
        self._session: OpenRequest | None = None
        self._placing: asyncio.Task[Any] | None = None
        self._starting = False
        self._hidden_gpus = False
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
    def template_folder(self) -> TemplateFolder:
        """The folder of compute templates, one for all spawners of the hub."""
        return self._shared(("templates", self.templates_dir), lambda: TemplateFolder(self.templates_dir, self.log))

    @property
    def reservations(self) -> Reservations:
        """The shares in flight and the line, one for all spawners of the hub that use the same agent."""
        return self._shared(("agent", self.agent_socket), self._new_reservations)

    def _new_reservations(self) -> Reservations:
        made = Reservations(
            AgentClient(self.agent_socket, self.agent_timeout),
            self.log,
            strategy=self._strategy(),
            queue_length=self.queue_length,
            overtakes=self.queue_overtakes,
            look_every=self.queue_poll_interval,
            agent_patience=self.agent_patience,
        )
        made.sweep_soon(self._hub_runs)
        return made

    def _shared(self, key: tuple[str, str], make: Callable[[], _Shared]) -> _Shared:
        # in the hub's settings and not in a module: it lives as long as the hub, and two hubs in one process stay apart
        store: dict[tuple[str, str], Any] = self.user.settings.setdefault("gpushare", {})
        if key not in store:
            store[key] = make()
        found: _Shared = store[key]
        return found

    def _strategy(self) -> Strategy:
        strategy = self.placement_strategy
        if isinstance(strategy, str):
            strategy = import_item(strategy)
        made: Strategy = strategy() if isinstance(strategy, type) else strategy
        return made

    def _hub_runs(self, user: str, server: str) -> bool:
        """Whether the hub knows this server to run, or to be starting or stopping."""
        known = self.user.settings["users"].get(user)
        if known is None:
            return False
        if server in known.spawners and known.spawners[server].active:
            return True
        stored = known.orm_spawners.get(server)
        return stored is not None and stored.server is not None

    @property
    def group_names(self) -> frozenset[str]:
        """The hub groups of the server's user."""
        return frozenset(group.name for group in self.user.groups)

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

    def _templates(self) -> list[Template]:
        return list(self.template_folder.load().templates)

    def _running(self) -> Counter[str]:
        """The user's other servers that run or are starting, by profile."""
        others = (spawner for spawner in self.user.spawners.values() if spawner is not self and spawner.active)
        return Counter(
            other._profile_slug for other in others if isinstance(other, GPUShareMixin) and other._profile_slug
        )

    # -- the form --

    @traitlets.default("options_form")
    def _default_options_form(self) -> Callable[[Any], Any]:
        return _show_form

    @traitlets.default("options_from_form")
    def _default_options_from_form(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self._read_form

    @traitlets.default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[..., None]:
        return _applied_when_placed

    def _read_form(self, form_data: dict[str, Any]) -> dict[str, Any]:
        options = Form.read(form_data)
        _submitted.set(options)
        return options

    async def show_form(self) -> str:
        """The form's HTML, for this user and what is free now."""
        offered = [profile for profile in await self.offered() if profile.allows(self.user.name, self.group_names)]
        report = None
        try:
            report = await asyncio.wait_for(self.reservations.report(max_age=0.5), self.form_timeout)
        except (AgentUnreachable, ControlRefused, TimeoutError) as error:
            self.log.warning("The form is shown without availability: %s", error or "the GPU agent is slow")
        chosen = _submitted.get()
        if chosen is None:
            chosen = self.user_options if isinstance(self.user_options, dict) else {}
        form = Form(self.form_template_paths)
        return form.render(offered, chosen, self.reservations, report)

    # -- a start --

    async def run_pre_spawn_hook(self) -> None:
        """Run the admin's hook, check the options, and get the share; a start that finds no room waits here.

        The hub's ``start_timeout`` runs only from `start` on. Raises StartRefused, and then nothing is reserved.
        """
        self._placing = asyncio.current_task()
        try:
            await maybe_future(super().run_pre_spawn_hook())
            choice = await self._choose()
            self._take(choice)
            await self._place(choice.profile.template)
        except StartRefused as error:
            self._let_go()
            self.log.warning("Not starting %s: %s", self._log_name, error.jupyterhub_message)
            self._forget_failure()
            raise
        except BaseException:
            self._let_go()
            raise
        finally:
            self._placing = None
            self._story.end()

    def _forget_failure(self) -> None:
        if self.handler is not None:
            forget_failure(self.handler.settings)

    async def _choose(self) -> Choice:
        offered = await self.offered()
        others = set(self.other_options)
        if isinstance(self.apply_user_options, dict):
            others.update(self.apply_user_options)
        # no await between counting the user's servers and noting this one: two starts at once must see each other
        choice = choose(
            self.user_options,
            offered,
            user=self.user.name,
            groups=self.group_names,
            running=self._running(),
            others=frozenset(others),
        )
        self._profile, self._profile_slug = choice.profile, choice.profile.slug
        return choice

    def _take(self, choice: Choice) -> None:
        """Set the traits that the choice asks for."""
        profile = choice.profile
        where = f"The template {profile.slug!r}"
        resources = resource_override(profile.template)
        if "image" in resources and not self.has_trait("image"):
            self.log.debug("%s names an image; %s runs no containers", where, type(self).__name__)
            del resources["image"]
        for settings in (resources, profile.override, *choice.overrides):
            self._overrides.apply(settings, where)

    async def _place(self, template: Template | None) -> None:
        """Get the share, after a wait if need be."""
        self._hidden_gpus = template is not None and template.gpu is None
        if template is None or template.gpu is None:
            return
        wish = Wish(Tenant(self.user.name, self.name, self._uid()), template)
        telling: list[asyncio.Task[None]] = []

        def joined(ticket: Ticket) -> None:
            telling.append(asyncio.ensure_future(self._story.follow(ticket)))

        try:
            self._reservation = await self.reservations.reserve(wish, self.queue_timeout, joined)
        finally:
            for task in telling:
                task.cancel()
        self._session = self._reservation.request
        self._story.tell(_placed(self._reservation), progress=30)
        self.log.info(
            "%s: %s on %s", self._log_name, wish.share, ", ".join(f"GPU {gpu.index}" for gpu in self._reservation.gpus)
        )

    def _uid(self) -> int:
        try:
            return self.share_uid()
        except KeyError:
            raise StartRefused(
                f"There is no user {self.user.name!r} on this machine. Ask the admin.", reason="no-user", status=403
            ) from None

    def get_env(self) -> dict[str, str]:
        """The spawner's environment, and the share in it."""
        environment: dict[str, str] = super().get_env()
        if self._reservation is not None:
            return merged(environment, self._reservation.environment)
        return {**environment, **_WITHOUT_GPU} if self._hidden_gpus else environment

    async def start(self) -> Any:
        """Start the server and tell the agent its pid. If that fails, or is cancelled, the share goes back."""
        self._starting = True
        try:
            address = await maybe_future(super().start())
            if self._session is not None:
                await self._confirm(self._session)
            return address
        except StartRefused:
            self._let_go()
            self._forget_failure()
            raise
        except BaseException:
            self._let_go()
            raise
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

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """The place in the line and the GPU, then what the spawner itself has to say."""
        async for event in self._story.events():
            yield event
        async for event in super().progress():
            yield event

    # -- a running server --

    async def poll(self) -> int | None:
        """As the spawner says. While a server is being placed it counts as running; a running one keeps its session."""
        if self._placing is not None:
            return None
        status: int | None = await maybe_future(super().poll())
        if status is None and self._session is not None and not (self._starting or self._stop_pending):
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
        if self._placing is not None:
            # no process yet; what spawners do to pid 0 would hit the hub's own process group
            self._placing.cancel()
            return
        session = self._session
        try:
            await super().stop(now)
        finally:
            self._session = None
            if session is not None:
                await self.reservations.close(session.id)

    def clear_state(self) -> None:
        """Forget the server: its share goes back, and traits that its template set are put back."""
        self._let_go()
        super().clear_state()

    def _let_go(self) -> None:
        session, self._session, self._reservation = self._session, None, None
        if session is not None:
            self.reservations.release(session.id)
        self._overrides.undo()
        self._profile, self._profile_slug = None, ""
        self._hidden_gpus = False
        self._looked_after = 0.0
        if self._placing is None:
            self._story.end()
            self._story = Story()

    def get_state(self) -> dict[str, Any]:
        """The spawner's state, with the template and the session."""
        state: dict[str, Any] = super().get_state()
        if self._profile_slug:
            session = self._session.model_dump(mode="json") if self._session is not None else None
            state["gpushare"] = {"template": self._profile_slug, "session": session}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """What a hub that was restarted knows of a running server. The agent's report is the truth; see `poll`."""
        super().load_state(state)
        kept = state.get("gpushare")
        if not isinstance(kept, dict):
            return
        self._profile_slug = str(kept.get("template") or "")
        if kept.get("session") is not None:
            try:
                self._session = OpenRequest.model_validate(kept["session"])
            except ValidationError as error:
                self.log.error("The hub's database has no valid GPU session for %s: %s", self._log_name, error)


def _show_form(spawner: GPUShareMixin) -> Any:
    return spawner.show_form()


def _applied_when_placed(spawner: GPUShareMixin, user_options: dict[str, Any]) -> None:
    """Nothing for the hub's own hook to do: options are checked and applied after the admin's pre_spawn_hook."""


def _placed(reservation: Reservation) -> str:
    request = reservation.request
    where = " and ".join(f"GPU {gpu.index} ({gpu.model})" for gpu in reservation.gpus)
    if not request.borrowed_units:
        return f"Placed on {where}."
    return (
        f"Placed on {where}; {request.borrowed_units} % of it is lent by idle neighbours and goes back to them first."
    )
