"""What all sharing spawners have in common: templates, options, the line, and what a person is told meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import traitlets
from jupyterhub.spawner import Spawner
from jupyterhub.utils import maybe_future
from traitlets import Float, Integer, List, Unicode
from traitlets.utils.importstring import import_item

from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Strategy
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.form.form import Form
from gpushare_spawner.spawner.options.overrides import Overrides
from gpushare_spawner.spawner.options.profiles import Profile, resource_override
from gpushare_spawner.spawner.options.validation import Choice, choose
from gpushare_spawner.spawner.progress import Story
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket, Wish
from gpushare_spawner.spawner.queue.waiting_room import WaitingRoom
from gpushare_spawner.spawner.refusal import StartRefused, forget_failure
from gpushare_spawner.templates.folder import TemplateFolder

_submitted: ContextVar[dict[str, Any] | None] = ContextVar("_submitted", default=None)
"""What the request at hand submitted. After an error the hub renders the form again with the default server's spawner,
which knows nothing of the options of a named one."""


class _NoLoop:
    """Stands for the event loop where none runs."""


_NO_LOOP = _NoLoop()

_without_hub: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
"""What spawners share that belong to no hub (scripts, tests of spawners), by their event loop."""

_Shared = TypeVar("_Shared")


class GPUShareBase(Spawner):
    """Offers compute templates and gives each server its share; where the GPUs are is for subclasses to say."""

    where = "this machine"
    """The GPUs' place, for people."""
    away = "the GPU agent of this machine does not answer"
    """Why nothing is known of them, as half a sentence."""

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
        Seconds that the form waits to learn what is free now. Without an answer it is shown all the same, and says that
        availability is not known.
        """,
    ).tag(config=True)

    form_template_paths = List(
        Unicode(),
        help="""
        Folders with Jinja templates of yours that replace those of the form: ``form.html``, ``card.html`` and
        ``style.css``.
        """,
    ).tag(config=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overrides = Overrides(self)
        self._story = Story()
        self._profile: Profile | None = None
        self._profile_slug = ""
        self._placing: asyncio.Task[Any] | None = None
        self._starting = False
        self._hidden_gpus = False

    # -- what the place of the GPUs must say --

    @property
    @abstractmethod
    def reservations(self) -> WaitingRoom[Any]:
        """The shares in flight and the line, one for all spawners of the hub that look at the same GPUs."""

    @abstractmethod
    async def offered(self) -> list[Profile]:
        """All profiles, allowed to this user or not."""

    def _tenant(self) -> Tenant:
        """Whose server it is. Raises StartRefused."""
        return Tenant(self.user.name, self.name)

    def _reserved(self, reservation: Any) -> None:
        """A place was found."""

    def _let_go(self) -> None:
        """Give the share back, and forget what was chosen."""
        self._overrides.undo()
        self._profile, self._profile_slug = None, ""
        self._hidden_gpus = False
        if self._placing is None:
            self._story.end()
            self._story = Story()

    # -- what is offered --

    @property
    def template_folder(self) -> TemplateFolder:
        """The folder of compute templates, one for all spawners of the hub."""
        return self._shared(("templates", self.templates_dir), lambda: TemplateFolder(self.templates_dir, self.log))

    def _shared(self, key: tuple[str, ...], make: Callable[[], _Shared]) -> _Shared:
        # in the hub's settings and not in a module: it lives as long as the hub, and two hubs in one process stay apart
        settings = getattr(self.user, "settings", None)
        if isinstance(settings, dict):
            store: dict[tuple[str, ...], Any] = settings.setdefault("gpushare", {})
        else:
            store = _without_hub.setdefault(_running_loop(), {})
        if key not in store:
            store[key] = make()
        found: _Shared = store[key]
        return found

    def _line_settings(self) -> dict[str, Any]:
        """Settings of the waiting room."""
        return {
            "strategy": self._strategy(),
            "queue_length": self.queue_length,
            "overtakes": self.queue_overtakes,
            "look_every": self.queue_poll_interval,
        }

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
        groups = getattr(self.user, "groups", None)
        # a spawner outside of a hub has a user without groups
        return frozenset(group.name for group in groups) if isinstance(groups, Iterable) else frozenset()

    def _templates(self) -> list[Template]:
        return list(self.template_folder.load().templates)

    def _running(self) -> Counter[str]:
        """The user's other servers that run or are starting, by profile."""
        servers = getattr(self.user, "spawners", None)
        if not hasattr(servers, "values") or not isinstance(servers, Iterable):
            return Counter()
        others = (spawner for spawner in servers.values() if spawner is not self and spawner.active)
        return Counter(
            other._profile_slug for other in others if isinstance(other, GPUShareBase) and other._profile_slug
        )

    # -- the form --

    def _read_form(self, form_data: dict[str, Any]) -> dict[str, Any]:
        options = Form.read(form_data)
        self._remember_submitted(options)
        return options

    def _remember_submitted(self, options: dict[str, Any]) -> None:
        """For the form that the hub shows again if the start is refused."""
        _submitted.set(options)

    def _chosen_before(self) -> dict[str, Any]:
        """What the form should show as chosen."""
        chosen = _submitted.get()
        if chosen is None:
            chosen = self.user_options if isinstance(self.user_options, dict) else {}
        return chosen

    async def _outlook(self) -> Any:
        """What a start would meet now; None where that cannot be known in time."""
        rooms = self.reservations
        try:
            return await asyncio.wait_for(rooms.outlook(max_age=0.5), self.form_timeout)
        except (*rooms.unreachable, TimeoutError) as error:
            self.log.warning("The form is shown without availability: %s", error or "no answer in time")
            return None

    async def show_form(self) -> str:
        """The form's HTML, for this user and what is free now."""
        offered = [profile for profile in await self.offered() if profile.allows(self.user.name, self.group_names)]
        form = Form(self.form_template_paths)
        return form.render(offered, self._chosen_before(), await self._outlook(), self.away)

    # -- a start --

    async def run_pre_spawn_hook(self) -> None:
        """Run the admin's hook, check the options, and get the share; a start that finds no room waits here.

        The hub's ``start_timeout`` runs only from `start` on. Raises StartRefused, and then nothing is reserved.
        """
        self._placing = asyncio.current_task()
        try:
            with self._released_on_failure():
                await maybe_future(super().run_pre_spawn_hook())
                choice = await self._choose()
                self._take(choice)
                await self._place(choice.profile.template, self.queue_timeout, self._story)
        finally:
            self._placing = None
            self._story.end()

    @contextlib.contextmanager
    def _released_on_failure(self) -> Iterator[None]:
        """A part of a start; if it fails or is called off, nothing stays reserved."""
        try:
            with self._refusals_told():
                yield
        except BaseException:
            self._let_go()
            raise

    @contextlib.contextmanager
    def _refusals_told(self) -> Iterator[None]:
        """A part of a start; a refusal goes to the log, and does not count as a failure of the hub."""
        try:
            yield
        except StartRefused as error:
            self.log.warning("Not starting %s: %s", self._log_name, error.jupyterhub_message)
            if self.handler is not None:
                forget_failure(self.handler.settings)
            raise

    async def _choose(self) -> Choice:
        offered = await self.offered()
        # no await between counting the user's servers and noting this one: two starts at once must see each other
        return self._chosen(offered, self.user_options)

    def _chosen(self, offered: list[Profile], options: Any) -> Choice:
        """Check the options, and note what they stand for."""
        others = set(self.other_options)
        if isinstance(self.apply_user_options, dict):
            others.update(self.apply_user_options)
        choice = choose(
            options,
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

    async def _place(self, template: Template | None, patience: float, story: Story) -> None:
        """Get the share, after a wait of at most ``patience`` seconds if need be; the story is told of it."""
        self._hidden_gpus = template is not None and template.gpu is None
        if template is None or template.gpu is None:
            return
        wish = self._wish(template)
        telling: list[asyncio.Task[None]] = []

        def joined(ticket: Ticket) -> None:
            telling.append(asyncio.ensure_future(story.follow(ticket)))

        try:
            reservation = await self.reservations.reserve(wish, patience, joined)
        finally:
            for task in telling:
                task.cancel()
        self._reserved(reservation)
        story.tell(self._placed(reservation), progress=30)
        self.log.info("%s: %s on %s", self._log_name, wish.share, self._gpus_of(reservation))

    def _wish(self, template: Template) -> Wish:
        return Wish(self._tenant(), template)

    def _gpus_of(self, reservation: Reservation) -> str:
        return " and ".join(f"GPU {gpu.index} ({gpu.model})" for gpu in reservation.gpus)

    def _placed(self, reservation: Reservation) -> str:
        told = f"Placed on {self._gpus_of(reservation)}"
        if not reservation.placement.borrowed:
            return f"{told}."
        return (
            f"{told}; {reservation.placement.borrowed} % of it is lent by idle neighbours and goes back to them first."
        )

    def start(self) -> Any:
        """As the spawner does; the share was found before."""
        return super().start()

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """The place in the line and the GPU, then what the spawner itself has to say."""
        async for event in self._story.events():
            yield event
        async for event in super().progress():
            yield event

    # -- a running server --

    async def poll(self) -> int | None:
        """As the spawner says. While a server is being placed it counts as running."""
        if self._placing is not None:
            return None
        status: int | None = await maybe_future(super().poll())
        return status

    async def stop(self, now: bool = False) -> None:
        """Stop the server. A start that still waits for its share is called off."""
        if self._placing is not None:
            # no process yet; what spawners do to pid 0 would hit the hub's own process group
            self._placing.cancel()
            return
        await super().stop(now)

    def clear_state(self) -> None:
        """Forget the server: its share goes back, and traits that its template set are put back."""
        self._let_go()
        super().clear_state()

    def _share_state(self) -> dict[str, Any]:
        """What a hub that is restarted needs to know of the share, beside the template."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """The spawner's state, with the template and the share."""
        state: dict[str, Any] = super().get_state()
        if self._profile_slug:
            state["gpushare"] = {"template": self._profile_slug, **self._share_state()}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """What a hub that was restarted knows of a running server."""
        super().load_state(state)
        kept = state.get("gpushare")
        if isinstance(kept, dict):
            self._profile_slug = str(kept.get("template") or "")


def _running_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _NO_LOOP


def applied_when_placed(spawner: Any, user_options: dict[str, Any]) -> None:
    """Nothing for the hub's own hook to do: options are checked and applied after the admin's pre_spawn_hook."""
