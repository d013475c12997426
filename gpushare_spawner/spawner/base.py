"""The base of all sharing spawners: their settings, and the objects that the spawners of one hub share.

The common steps of a spawn are here (`_prepare`, `_reserve_share`). The other steps are in `local.mixin` and
`kubernetes.spawner`, and the state of a spawn is in `attempt`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import traitlets
from jupyterhub.utils import maybe_future
from pydantic import ValidationError
from traitlets import Float, Integer, List, Unicode
from traitlets.config import LoggingConfigurable
from traitlets.utils.importstring import import_item

from gpushare_spawner.idle.policy import effective_idle
from gpushare_spawner.model.controls import STATE_KEY, taken_out
from gpushare_spawner.model.part import faults
from gpushare_spawner.model.template import PlacementPin, Template
from gpushare_spawner.placement.strategy import Strategy, check_strategy
from gpushare_spawner.quota.accounts import Account, QuotaAccounts
from gpushare_spawner.quota.order import Admission
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner import hub
from gpushare_spawner.spawner.attempt import SpawnAttempt, SpawnPhase, SpawnProgress
from gpushare_spawner.spawner.form import Form
from gpushare_spawner.spawner.hub import SpawnRefused, refusals_reported
from gpushare_spawner.spawner.options import PLACEMENT_OPTION, Choice, Profile, chargeable, choose, pinned
from gpushare_spawner.spawner.queue.availability import AvailabilityNow
from gpushare_spawner.spawner.queue.queue import Ticket
from gpushare_spawner.spawner.queue.quotas import WRITTEN_BUDGETS, QuotaChoice, ServerWithoutGpu
from gpushare_spawner.spawner.queue.reservations import Reservations
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.templates.folder import PLACEMENT_FILE, Policy, PolicyFolder, default_folder
from gpushare_spawner.wording import spawn_failures
from gpushare_spawner.wording import spawn_form as form_words
from gpushare_spawner.wording.amounts import LOCAL_TIME_SCRIPT

TEMPLATES_MAX_AGE = 10.0
"""Maximum age in seconds of templates and quotas that a pass over the queue reuses."""
QUOTAS_MAX_AGE = 1.0
"""Maximum age in seconds of quotas that a form or a choice reuses; one form needs them for each card."""

FORM_SECONDS = 1.0
"""Seconds that the form waits for the free capacity; after that it shows free capacity as unknown. Our value: an agent
answers within milliseconds, and a user should not wait for a form.
"""
DECIDED_WITHIN = 1.0
"""Seconds that a request for a server waits for the first decision. An admin's hook, or a cluster that does not answer,
can take longer.
"""

_submitted: ContextVar[dict[str, Any] | None] = ContextVar("_submitted", default=None)
"""The options that the current request submitted. After an error the hub renders the form again with the default
server's spawner, which does not have the options of a named server.
"""

_Shared = TypeVar("_Shared")


# This is a mixin for a spawner class, not a Spawner: the hub requires each Spawner subclass to define start, stop and
# poll.
_Part: Any = LoggingConfigurable


class GPUShareBase(_Part):  # type: ignore[misc]
    """Settings and common behaviour of all sharing spawners."""

    _attempt: SpawnAttempt[Any]
    """The current spawn, or the spawn of the running server."""

    user_options: dict[str, Any]
    """JupyterHub's: the user's choice."""

    _spawn_future: asyncio.Future[Any] | None
    """JupyterHub's: the current spawn, or the last spawn if it failed; the hub's pages show its error."""

    unavailable: str
    """Why the state of the GPUs is unknown, as a clause."""

    enforces_resources = True
    """Whether the spawner enforces a template's CPU and memory limits. If not, cards do not show the limits, and
    placement does not count them.
    """

    @property
    def local_time_script(self) -> str:
        """Script for `pages/hub/spawn_pending.html` that shows times in the user's time zone."""
        return Path(LOCAL_TIME_SCRIPT).read_text()

    templates_dir = Unicode(
        help="""
        Folder of compute templates: one YAML file for each, see the templates reference.

        Files are read again when they change; the hub needs no restart. A file with a mistake does not affect the
        others: the hub's log and ``gpushare templates check`` report the mistake, its location and the correction.

        Default: ``$GPUSHARE_TEMPLATES``, else ``/etc/gpushare/templates``.
        """
    ).tag(config=True)

    @traitlets.default("templates_dir")
    def _default_templates_dir(self) -> str:
        return str(default_folder())

    queue_length = Integer(
        50,
        min=0,
        help="""
        Maximum number of spawns that wait for free GPU capacity. Further spawns are refused immediately, with a
        message. Spawns that wait for GPUs of different sharing layers are counted separately.

        0: no spawn waits. Queued spawns count against ``JupyterHub.concurrent_spawn_limit`` (100 by default): leave
        some for spawns that do not wait.
        """,
    ).tag(config=True)

    queue_timeout = Float(
        600.0,
        min=0,
        help="""
        Maximum time in seconds that a spawn waits for free GPU capacity. After that the spawn fails with a message, and
        nothing stays reserved.

        The wait is not part of ``Spawner.start_timeout``.
        """,
    ).tag(config=True)

    quota_usage_file = Unicode(
        "gpushare-quota-usage.json",
        help="""
        File in which the hub stores the recent use over quota of each user and group, and how long each template's
        sessions lasted, so that both survive a restart. A relative path starts at the hub's working directory; empty:
        nothing is stored.

        It names users and groups, and only its owner can read it.
        """,
    ).tag(config=True)

    placement_strategy = traitlets.Any(
        "gpushare_spawner.placement.strategy.StrandingAwareFgd",
        help="""
        How nodes and GPUs are chosen: a class, an instance, or the import path of a class with the method
        ``choose(request, capacity)`` of ``gpushare_spawner.placement.strategy.Strategy``.

        The default minimizes waste: after each placement, as little capacity as possible is left that the templates
        cannot use, weighted by how often each template was spawned recently. ``BestFit`` in the same module takes the
        fullest GPU on which the share fits, ``Spread`` the emptiest GPU.
        """,
    ).tag(config=True)

    other_options = List(
        Unicode(),
        help="""
        Names of user options that belong to your own hooks (``pre_spawn_hook``, ``apply_user_options``).

        Any other option that is neither ``profile`` nor one of the chosen profile's ``profile_options`` is refused: a
        misspelled option must not silently start a different server.
        """,
    ).tag(config=True)

    form_template_paths = List(
        Unicode(),
        help="""
        Folders with your own Jinja templates, which replace the form's ``form.html``, ``card.html`` and ``style.css``.
        """,
    ).tag(config=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attempt = self._new_attempt()
        self._responding = False
        self._decided = asyncio.Event()
        """Set after the first decision on the current spawn: its options are valid, and it has a place or waits for
        one. A refused spawn ends instead.
        """
        self._stop_note = ""
        """Why the server was stopped, if its user did not stop it; empty after the next start."""

    # -- implemented by each kind of spawner --

    @property
    @abstractmethod
    def reservations(self) -> Reservations[Any]:
        """The reservations and the queue, shared by all spawners of the hub that use the same GPUs."""

    @abstractmethod
    async def offered(self) -> list[Profile]:
        """Return all profiles, allowed to this user or not."""

    @abstractmethod
    def _new_attempt(self) -> SpawnAttempt[Any]:
        """Return the state of a new spawn."""

    @abstractmethod
    async def _choose(self) -> Choice:
        """Return the choice that ``user_options`` describe. Raises SpawnRefused."""

    @abstractmethod
    def _ineligible(self) -> Callable[[Template], Callable[[], frozenset[str]]]:
        """Return a function that returns, for a template, a function that returns the nodes that cannot run it.

        Regardless of free capacity. Templates with the same conditions share the second function.
        """

    @abstractmethod
    async def _get_ready(self, choice: Choice) -> None:
        """Set the traits of the choice and reserve its share. Raises SpawnRefused.

        Sets `_decided` once the first pass over the queue has decided on the share.
        """

    # -- shared by the spawners of a hub --

    @property
    def policy_folder(self) -> PolicyFolder:
        """The folder of compute templates and related files, shared by all spawners of the hub."""
        return self._shared(("templates", self.templates_dir), lambda: PolicyFolder(self.templates_dir, self.log))

    def templates_of_user(self, max_age: float = 0.0) -> tuple[Template, ...]:
        """Return the templates in force, with the idle actions and the placement that apply to the server's user.

        ``max_age``: maximum age in seconds of templates that are returned without reading the files again.
        """
        policy, groups, pins = self.policy_folder.load(max_age), self.group_names, self._pins()
        templates = policy.templates
        if policy.idle is not None:
            templates = tuple(
                template.model_copy(update={"idle": effective_idle(template, policy.idle, groups)})
                for template in templates
            )
        # a template that contradicts a pin stays: it is refused with the reason
        return tuple(_pinned_if_possible(template, pins) for template in templates) if pins else templates

    def _pins(self) -> list[tuple[str, PlacementPin]]:
        """Return the admin's pins for the server's user, each with its origin."""
        pins = self.policy_folder.load(max_age=QUOTAS_MAX_AGE).placement
        mine = pins.of_user(self.user.name, self.group_names) if pins is not None else ()
        return [(f"{PLACEMENT_FILE} ({field})", pin) for field, pin in mine]

    def _shared(self, key: tuple[str, ...], make: Callable[[], _Shared]) -> _Shared:
        return hub.shared(self.user, key, make)

    def _hub_runs(self, user: str, server: str) -> bool:
        """Return whether the server runs, starts or stops, according to the hub."""
        return hub.hub_runs(self.user, user, server)

    def _queue_settings(self) -> dict[str, Any]:
        """Return the settings of `reservations`."""
        return {
            "strategy": self._strategy(),
            "queue_length": self.queue_length,
            "policy": self._policy_in_force(),
            "without_gpu": self._without_gpu,
            "quota_usage_file": Path(self.quota_usage_file).absolute() if self.quota_usage_file else None,
        }

    def _policy_in_force(self) -> Callable[[], Policy]:
        """Return a function that returns the policy in force. The function does not reference the spawner."""
        # Every pass over the queue calls this function.
        return functools.partial(self.policy_folder.load, TEMPLATES_MAX_AGE)

    def _strategy(self) -> Strategy:
        strategy = self.placement_strategy
        if isinstance(strategy, str):
            strategy = import_item(strategy)
        made: Strategy = strategy() if isinstance(strategy, type) else strategy
        check_strategy(made)
        return made

    # -- the user --

    @property
    def group_names(self) -> frozenset[str]:
        """The hub groups of the server's user."""
        groups = getattr(self.user, "groups", None)
        # outside a hub, a user has no groups
        return frozenset(group.name for group in groups) if isinstance(groups, Iterable) else frozenset()

    def _allowed(self, profiles: Iterable[Profile]) -> list[Profile]:
        return [profile for profile in profiles if profile.allows(self.user.name, self.group_names)]

    def _accounts(self) -> tuple[Account, ...]:
        """Return the accounts to which the user may charge a server, the default first; empty without quotas."""
        quotas = self.policy_folder.load(max_age=QUOTAS_MAX_AGE).quotas
        return QuotaAccounts(quotas).of_user(self.user.name, self.group_names) if quotas is not None else ()

    def _quota_choices(self) -> Callable[[Template], list[QuotaChoice]]:
        """Return a function that returns the accounts that a server of a template can be charged to.

        Each account has its admission if it can be determined.
        """
        accounts = self._accounts()
        tenants = {account.key: Tenant(self.user.name, self.name, quota=account.key) for account in accounts}
        return lambda template: [
            QuotaChoice(
                account, self._admission(tenants[account.key], template), WRITTEN_BUDGETS.of(account, self.user.name)
            )
            for account in chargeable(accounts, template)
        ]

    def _admission(self, tenant: Tenant, template: Template) -> Admission | None:
        """Return the quota's decision on a server now; None if it is unknown or if placement failed."""
        try:
            return self.reservations.quotas.admission(tenant, template)
        except Exception as error:
            self.reservations.placement_failed(error)
            return None

    def _running(self) -> Counter[str]:
        """Return the number of the user's other servers that run or start, by template."""
        servers = getattr(self.user, "spawners", None)
        # outside a hub, a user has no servers
        spawners: Iterable[Any] = servers.values() if isinstance(servers, Mapping) else ()
        others = (spawner for spawner in spawners if spawner is not self and spawner.active)
        names = (other._attempt.template_name for other in others if isinstance(other, GPUShareBase))
        return Counter(name for name in names if name)

    # -- the form --

    def _remember_submitted(self, options: dict[str, Any]) -> None:
        """Save the options for the form that the hub shows again after a refusal."""
        _submitted.set(options)

    def _chosen_before(self) -> dict[str, Any]:
        """Return the options that the form preselects."""
        chosen = _submitted.get()
        if chosen is None:
            chosen = self.user_options if isinstance(self.user_options, dict) else {}
        return chosen

    def _rendered_form(self, cards: Sequence[Profile], chosen: Mapping[str, Any], availability_now: Any) -> str:
        """Return our form's HTML, below the reason why the server was stopped. See `Form.render`."""
        form = Form(self.form_template_paths)
        return self._below_stop_note(
            form.render(
                cards,
                chosen,
                availability_now,
                self.unavailable,
                self.enforces_resources,
                self._quota_choices(),
                self._service_advice.known(self.user.name) if self._service_advice is not None else {},
            )
        )

    def _below_stop_note(self, form: str) -> str:
        """Return the form's HTML, below the reason why the server was stopped."""
        if not self._stop_note:
            return form
        return f'<p class="gpushare-stopped alert alert-info" role="status">{escape(self._stop_note)}</p>\n{form}'

    @property
    def _service_advice(self) -> hub.ServiceAdvice | None:
        settings = getattr(self.user, "settings", None)
        if not isinstance(settings, Mapping):
            return None
        return self._shared(("advice",), lambda: hub.ServiceAdvice.of(settings, self.log))

    async def _availability_now(self) -> Any:
        """Return the availability of templates now; None if it cannot be determined in time."""
        advice = self._service_advice
        if advice is not None:
            advice.request(self.user.name)
        try:
            return await self._availability_in_time()
        finally:
            if advice is not None:
                await advice.first(self.user.name)

    async def _availability_in_time(self) -> Any:
        reservations = self.reservations
        unknown: tuple[type[Exception], ...] = (TimeoutError, *reservations.unreachable)
        account = next(iter(self._accounts()), None)
        tenant = Tenant(self.user.name, self.name, quota=account.key if account is not None else "")
        ineligible = self._ineligible()
        asking = reservations.availability_now(0.5, lambda template: ineligible(template)(), tenant)
        try:
            now = await asyncio.wait_for(asking, FORM_SECONDS)
        except unknown as error:
            self.log.warning("The form is shown without free capacity: %s", str(error) or "no answer in time")
            return None
        return self._under_pins(now) if isinstance(now, AvailabilityNow) else now

    def _under_pins(self, now: AvailabilityNow) -> AvailabilityNow:
        """Return the availability without the templates that contradict a pin. Log pins to GPUs that do not exist."""
        pins, refused, snapshot = self._pins(), {}, now.check.snapshot
        for origin, pin in pins:
            if pin.gpu is not None and pin.gpu not in snapshot.gpus and snapshot.gpus and not snapshot.awaited:
                text = "%s asks for GPU %s, and no agent reports it"
                self._log_once(("unknown-gpu", pin.gpu), text, origin, pin.gpu)
        for template in self.policy_folder.load(max_age=QUOTAS_MAX_AGE).templates if pins else ():
            try:
                pinned(template, pins)
            except SpawnRefused as error:
                refused[template.name] = error.jupyterhub_message
        return replace(now, refused=refused)

    def _log_once(self, about: tuple[str, ...], text: str, *values: object) -> None:
        """Log an error that one of the hub's spawners meets first."""
        self._shared(about, lambda: self.log.error(text, *values))

    # -- a spawn --

    async def _prepare(self, hook: Callable[[], Any]) -> None:
        """Run the admin's hook, check the options and reserve the share; a spawn without a place waits here.

        Raises SpawnRefused; then nothing is reserved.
        """
        if self._attempt.phase is not SpawnPhase.NEW:
            # A script uses this spawner without a hub. A hub clears the state before each spawn.
            self._forget_attempt()
        attempt = self._attempt
        attempt.hub_task = self._spawn_future
        with refusals_reported(self), attempt.placing():
            note = self._remove_note()
            if note:
                attempt.progress.add(note, progress=0)
            await maybe_future(hook())
            choice = await self._accepted_choice()
            attempt.record_choice(choice)
            attempt.progress.add_template(choice.profile.slug, choice.profile.title)
            if choice.profile.template is None or choice.profile.template.gpu is None:
                self._decided.set()
            await self._get_ready(choice)
        self._stop_note = ""

    def _remove_note(self) -> str:
        """Remove the service's note from the options. Return its text on the previous spawn; empty without a note.

        Raises SpawnRefused if no server should be started. After a cancelled spawn the hub's page shows the text as the
        reason. After a stopped server no spawn has failed, and the text stays in the state.
        """
        extracted = taken_out(self.user_options)
        if extracted is None:
            return ""
        self.user_options, note = extracted
        if note.cancelled or note.stopped:
            # the user's original options: the hub's API shows them with the default template's name
            self.user_options = self._accepted_options.get((self.user.name, self.name), self.user_options)
        if self.orm_spawner is not None:
            self.orm_spawner.user_options = self.user_options
            # commit now: each request to the hub begins with a rollback
            self.user.db.commit()
        if note.stopped:
            self._stop_note = note.text
            if self._spawn_future is not None:
                self._spawn_future.add_done_callback(self._forget_spawn)
            log_message = "no server is started; the hub's pages now show why the server was stopped"
            raise SpawnRefused(note.text, reason="stopped", status=409, log_message=log_message)
        if note.cancelled:
            raise SpawnRefused(note.text, reason="cancelled", status=409)
        return note.text

    def _forget_spawn(self, spawn: asyncio.Future[Any]) -> None:
        """Make the hub's pages show that the server is not running, instead of an error from its last spawn."""
        if self._spawn_future is spawn:
            self._spawn_future = None

    @property
    def _accepted_options(self) -> dict[tuple[str, str], Any]:
        """The most recently accepted options, by user and server."""
        return self._shared(("accepted-options",), dict)

    async def _accepted_choice(self) -> Choice:
        """Return the choice that the options describe. Raises SpawnRefused.

        The hub saves options before they are checked, and reuses them for a spawn without options. This method replaces
        refused options in the hub's record by the most recently accepted options.
        """
        server = (self.user.name, self.name)
        try:
            choice = await self._choose()
        except SpawnRefused:
            if self.orm_spawner is not None:
                self.orm_spawner.user_options = self._accepted_options.get(server, {})
            raise
        if self._names_place(self.user_options, choice.profile):
            # the pin is for one spawn: the user's next spawn without options reuses these
            options = self.user_options
            self.user_options = {name: options[name] for name in options if name != PLACEMENT_OPTION}
            if self.orm_spawner is not None:
                self.orm_spawner.user_options = self.user_options
                self.user.db.commit()
        self._accepted_options[server] = self.user_options
        if choice.profile.template is not None:
            self._show_template(choice.profile.slug)
        return choice

    def _show_template(self, name: str) -> None:
        """Add the template's name to the options that the hub's API shows; a spawn without options has none.

        The hub's database keeps the user's original options, so the next spawn without options uses the default again.
        """
        if name and not self.user_options.get("profile"):
            self.user_options = {**self.user_options, "profile": name}

    def _chosen(self, offered: Sequence[Profile], options: Any) -> Choice:
        """Check options against the offered profiles. Raises SpawnRefused.

        Callers must not await between this method and `SpawnAttempt.record_choice`, so that two simultaneous spawns see
        each other.
        """
        choice = choose(
            options,
            offered,
            user=self.user.name,
            groups=self.group_names,
            running=self._running(),
            others=frozenset({*self._hook_options, PLACEMENT_OPTION}),
            accounts=self._accounts(),
        )
        pins = self._pins()
        if self._names_place(options, choice.profile):
            pins.append((f"the option {PLACEMENT_OPTION}", self._pin_of_admin(options[PLACEMENT_OPTION])))
        return choice.under(pins)

    @property
    def _hook_options(self) -> set[str]:
        """The names of the user options that belong to the admin's own hooks."""
        applied = self.apply_user_options
        return {*self.other_options, *(applied if isinstance(applied, dict) else ())}

    def _names_place(self, options: Any, profile: Profile) -> bool:
        """Return whether the options have our `PLACEMENT_OPTION`, and not that of a hook or a card."""
        if not isinstance(options, Mapping) or PLACEMENT_OPTION not in options or profile.template is None:
            return False
        return PLACEMENT_OPTION not in {*self._hook_options, *profile.options}

    def _pin_of_admin(self, value: Any) -> PlacementPin:
        """Return the pin in an option of the current request. Raises SpawnRefused unless an admin has sent it."""
        # the scopes of the request: the token of an admin's own server, for example, does not have this one
        if self.handler is None or not self.handler.has_scope("admin:servers"):
            raise SpawnRefused(form_words.ONLY_ADMINS_PIN, reason="not-allowed", status=403)
        try:
            return PlacementPin.model_validate(value)
        except ValidationError as error:
            raise SpawnRefused(form_words.wrong_pin(faults(error, "it")[0]), reason="bad-options") from None

    @property
    def _waiting_for_response(self) -> bool:
        """JupyterHub's: whether `poll` can return more than "starting" for a pending spawn.

        A request for a server waits `slow_spawn_timeout` seconds, which zero-to-jupyterhub sets to 0. The answer is
        then 202 unless this is true (jupyterhub/handlers/base.py, spawn_single_user). So it is true until the first
        decision, and the answer to an immediately refused spawn contains the reason.
        """
        return self._responding or self._is_undecided

    @_waiting_for_response.setter
    def _waiting_for_response(self, value: bool) -> None:
        self._responding = value

    @property
    def ready(self) -> bool:
        """JupyterHub's: whether the server can be used. False for a cancelled spawn.

        The hub cancels the task of a spawn, and stops the server a second later (apihandlers/users.py,
        UserServerAPIHandler.delete). In between, nothing is pending and the server's row still exists, so the hub would
        treat the server as ready, and its pages would redirect to each other.
        """
        ready: bool = super().ready
        return ready and not self._attempt.cancelled

    @property
    def _is_undecided(self) -> bool:
        spawning: bool = self._spawn_pending and self._spawn_future is not None
        return spawning and not self._decided.is_set()

    async def _refused_at_once(self) -> bool:
        """Wait for the first decision on the current spawn. Return whether the spawn has failed."""
        spawn = self._spawn_future
        if spawn is None:
            return False
        decided = asyncio.ensure_future(self._decided.wait())
        await asyncio.wait({spawn, decided}, timeout=DECIDED_WITHIN, return_when=asyncio.FIRST_COMPLETED)
        decided.cancel()
        return spawn.done() and not spawn.cancelled() and spawn.exception() is not None

    async def _reserve_share(
        self, request: SpawnRequest, alternatives: Iterable[Template], patience: float, progress: SpawnProgress
    ) -> Any:
        """Return a reservation, waiting at most ``patience`` seconds. ``progress`` reports position and place.

        ``alternatives``: the other templates that the user may start; ``progress`` reports which of them would start
        now. Sets `_decided` after the first decision: the spawn has a place, or the first pass over the queue left it
        waiting. Raises SpawnRefused. After an error or a cancelled wait nothing stays reserved.
        """
        following: list[asyncio.Task[None]] = []
        ends_at = time.time() + patience

        def joined(ticket: Ticket) -> None:
            ineligible = self._ineligible()
            ticket.alternatives = tuple(
                SpawnRequest(request.tenant, template, ineligible=ineligible(template)) for template in alternatives
            )
            following.append(asyncio.ensure_future(progress.follow(ticket, ends_at)))
            following.append(asyncio.ensure_future(self._decide_when_considered(ticket)))

        try:
            reserved = await self.reservations.reserve(request, patience, joined)
        finally:
            for task in following:
                task.cancel()
        self._decided.set()
        try:
            self.log.info("%s: %s %s", self._log_name, request.share, progress.add_placement(reserved))
        except BaseException:
            self.reservations.give_back(reserved)
            raise
        return reserved

    async def _admit_without_gpu(self, choice: Choice, template: Template) -> None:
        """Charge a server without a GPU to its account. Raises SpawnRefused for an exceeded limit."""
        if choice.quota:
            tenant = Tenant(self.user.name, self.name, quota=choice.quota)
            await self.reservations.admit_without_gpu(tenant, template)
        self._charge(ServerWithoutGpu(self.user.name, choice.quota, template.name, time.time()))

    def _charge(self, server: ServerWithoutGpu) -> None:
        self._attempt.charge(self._without_gpu, Tenant(self.user.name, self.name).session, server)

    @property
    def _without_gpu(self) -> dict[str, ServerWithoutGpu]:
        """The hub's servers without a GPU by session id, also before `reservations` can be created."""
        return self._shared(("without-gpu",), dict)

    async def _decide_when_considered(self, ticket: Ticket) -> None:
        await ticket.considered.wait()
        # a pass also sets the event when it refuses or places the spawn; then the wait ends anyway
        if not ticket.result.done():
            self._decided.set()

    def _forget_attempt(self) -> None:
        self._attempt.cancel()
        if self._attempt.phase is not SpawnPhase.PLACING:
            self._attempt = self._new_attempt()

    # -- the state of a server --

    def clear_state(self) -> None:
        """Clear the server's state: release its share and restore the traits that its template set.

        A cancelled spawn keeps its reason, as a failed spawn does, because the hub does not record the cancellation.
        """
        cancelled = self._stop_pending and self._attempt.cancelled
        self._forget_attempt()
        self._decided.clear()
        super().clear_state()
        if cancelled and self._spawn_future is None:
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(SpawnRefused(spawn_failures.CANCELLED, reason="cancelled", status=409))
            failed.exception()  # asyncio logs an exception that is never retrieved
            self._spawn_future = failed

    def get_state(self) -> dict[str, Any]:
        """Return the spawner's state, with the template and the share, or with the reason for a stop."""
        state: dict[str, Any] = super().get_state()
        ours = self._attempt.state()
        stopped = {STATE_KEY: self._stop_note} if self._stop_note else {}
        return {**state, **({"gpushare": ours} if ours else {}), **stopped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of a running or stopped server after a restart of the hub."""
        super().load_state(state)
        self._stop_note = str(state.get(STATE_KEY) or "")
        kept = state.get("gpushare")
        if isinstance(kept, dict):
            try:
                self._attempt.restore(kept)
            except ValueError as error:
                self.log.error("The hub's database has no valid GPU session for %s: %s", self._log_name, error)
            self._show_template(self._attempt.template_name)
            if self._attempt.template_name:
                since = kept.get("since")
                opened_at = float(since) if isinstance(since, (int, float)) else 0.0
                quota = str(kept.get("quota") or "")
                self._charge(ServerWithoutGpu(self.user.name, quota, self._attempt.template_name, opened_at))


def _pinned_if_possible(template: Template, pins: Sequence[tuple[str, PlacementPin]]) -> Template:
    try:
        return pinned(template, pins)
    except SpawnRefused:
        return template


def applied_when_placed(spawner: Any, user_options: dict[str, Any]) -> None:
    """Replace the hub's own hook and do nothing: options are checked and applied after the admin's pre_spawn_hook."""
