"""The state of one spawn, from the admin's hook to the end of its server. A new spawn has a new one; nothing is reset.

Does not place or start anything: see `placing`, and the spawners in ``local`` and ``kubernetes``.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.options.overrides import Overrides
from gpushare_spawner.spawner.options.profiles import Profile
from gpushare_spawner.spawner.options.validation import Choice
from gpushare_spawner.spawner.progress import SpawnProgress
from gpushare_spawner.spawner.queue.queue import Reservation

Reserved = TypeVar("Reserved", bound=Reservation)


class SpawnPhase(Enum):
    """How far a spawn is."""

    NEW = "new"
    """Nothing was asked for yet."""
    PLACING = "placing"
    """The hook runs, options are checked, and the share is waited for. There is no server to poll or to stop."""
    READY = "ready"
    """Options are checked and applied, the share is reserved; the spawner's ``start`` comes next."""
    STARTING = "starting"
    """The spawner's ``start`` runs."""
    STARTED = "started"
    """The server was started, perhaps by a hub that has ended since."""
    ENDED = "ended"
    """The spawn failed or was called off, or its server is gone; nothing is reserved."""


class SpawnAttempt(ABC, Generic[Reserved]):
    """One spawn of one server."""

    def __init__(self, overrides: Overrides) -> None:
        self.phase = SpawnPhase.NEW
        self.overrides = overrides
        """The traits that the choice has set."""
        self.profile: Profile | None = None
        """What was chosen; None before that, and for a server that an earlier hub process started."""
        self.template_name = ""
        """The template's name, which outlives the hub process; empty for a profile of the admin's own."""
        self.quota = ""
        """The account that the share is charged to; empty: there are no quotas."""
        self.user_units: int | None = None
        """What the user's sessions in that quota have at most together on one GPU; None: no bound."""
        self.alternatives: tuple[Template, ...] = ()
        """The other templates that the user may start."""
        self.reservation: Reserved | None = None
        self.progress = SpawnProgress()
        """What the user is told until the share is reserved."""
        self._waiting: asyncio.Task[Any] | None = None
        self.hub_task: asyncio.Future[Any] | None = None
        """The hub's task of this spawn; None: a script starts the spawner without a hub."""

    @abstractmethod
    def give_back(self) -> None:
        """Give the share back, if there is one. Idempotent."""

    @property
    def cancelled(self) -> bool:
        """Whether the hub has cancelled its task of this spawn, in any phase: a user or an admin asked for that."""
        return self.hub_task is not None and self.hub_task.cancelled()

    @property
    def settled(self) -> bool:
        """Whether the options of this spawn were checked and applied, and its start is not over."""
        return self.phase in (SpawnPhase.READY, SpawnPhase.STARTING)

    @property
    def hides_gpus(self) -> bool:
        """Whether the server must not see a GPU: its template has none."""
        return self.profile is not None and self.profile.template is not None and self.profile.template.gpu is None

    def chose(self, choice: Choice) -> None:
        """Note what was chosen. Only templates are remembered with the server's state."""
        self.profile = choice.profile
        self.alternatives = choice.alternatives
        self.quota, self.user_units = choice.quota, choice.user_units
        self.template_name = choice.profile.slug if choice.profile.template is not None else ""

    def apply(self, choice: Choice) -> None:
        """Note what was chosen, and set the traits that it asks for. Raises SpawnRefused, see `Overrides.apply`."""
        self.overrides.undo()
        self.chose(choice)
        self.overrides.apply_choice(choice)

    def settle(self, choice: Choice) -> None:
        """Do what `placing` is for where nobody calls it: a script starts a spawner without a hub."""
        self.apply(choice)
        self.phase = SpawnPhase.READY

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Mark the part of a spawn in which its share is waited for; a failure ends the attempt, see `cancel`."""
        self.phase = SpawnPhase.PLACING
        self._waiting = asyncio.current_task()
        try:
            with self.cancelled_on_failure():
                yield
            self.phase = SpawnPhase.READY
        finally:
            self._waiting = None
            self.progress.end()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Mark the spawner's ``start``."""
        self.phase = SpawnPhase.STARTING
        try:
            yield
        except BaseException:
            self.phase = SpawnPhase.ENDED
            raise
        self.phase = SpawnPhase.STARTED

    @contextlib.contextmanager
    def cancelled_on_failure(self) -> Iterator[None]:
        """End the attempt where this part of a spawn fails or is called off, see `cancel`."""
        try:
            yield
        except BaseException:
            self.phase = SpawnPhase.ENDED
            self.cancel()
            raise

    def call_off(self) -> bool:
        """Stop waiting for a share; return whether there was such a wait."""
        if self._waiting is None:
            return False
        self._waiting.cancel()
        return True

    def cancel(self) -> None:
        """Give the share back, put the traits back, and forget what was chosen. Idempotent.

        A wait for a share is not ended by this: `call_off` does that, and the attempt ends with it.
        """
        self.give_back()
        self.overrides.undo()
        self.profile, self.template_name, self.quota, self.alternatives = None, "", "", ()
        self.user_units = None
        if self.phase is not SpawnPhase.PLACING:
            self.phase = SpawnPhase.ENDED
            self.progress.end()

    def state(self) -> dict[str, Any]:
        """Return what a hub that is restarted needs to know; empty where no template was chosen."""
        return {"template": self.template_name} if self.template_name else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` of an earlier hub process said of a server that runs."""
        self.template_name = str(state.get("template") or "")
        self.phase = SpawnPhase.STARTED
