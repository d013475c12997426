"""All actions of people on sessions, composed. The dashboard's API and the asks of notebook servers call nothing else.

Each method returns an `Outcome`, or raises `ActionRefused` with a sentence and a code. Each is idempotent, and what
changed something is in the log of actions and in the history, with its actor.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from gpushare_spawner.idle import KeepRule, KeepsLeft
from gpushare_spawner.model.controls import Controls, MessageCause
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.admin import AdminActions
from gpushare_spawner.service.actions.controls import ControlsOfSessions
from gpushare_spawner.service.actions.drains import DrainActions
from gpushare_spawner.service.actions.keeps import KeepActions, Wanted
from gpushare_spawner.service.actions.outcome import Actor, Asked, Outcome, Target
from gpushare_spawner.service.actions.restart import RestartActions
from gpushare_spawner.service.actions.restart_journal import NoJournal, RestartJournal
from gpushare_spawner.service.actions.servers import ServerActions
from gpushare_spawner.service.actions.share import ShareActions
from gpushare_spawner.service.actions.spawns import SpawnActions
from gpushare_spawner.service.actions.tiers import TierActions
from gpushare_spawner.service.history.events import Action
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import Agent


async def _unknown() -> None:
    """Nothing is known of pending spawns."""


class SessionActions:
    """Acts on one session, for its user or for an admin."""

    def __init__(
        self,
        agents: Iterable[Agent],
        hub: Hub,
        templates: Callable[[], Mapping[str, Template]],
        keep_rule: Callable[[Idle | None], KeepRule] = lambda idle: KeepRule(),
        record: Callable[[Action], None] = lambda action: None,
        clock: Callable[[], float] = time.time,
        quotas: Callable[[], Quotas | None] = lambda: None,
        pending: Callable[[], Awaitable[Sequence[HubServer] | None]] = _unknown,
        journal: RestartJournal | None = None,
        nodes_are_added: bool = False,
    ) -> None:
        """``agents`` is iterated over anew each time; ``keep_rule`` returns a template's limits of keeps, None: it is
        gone; ``record`` enters an action in the history; ``clock`` gives seconds since the epoch; ``quotas`` returns
        those in force; ``pending`` the servers that the hub is starting, None: unknown; ``journal`` stores the restarts
        that are under way; ``nodes_are_added``: nodes that come later may take what no node of now can."""
        log = ActionLog(record, clock)
        controls = ControlsOfSessions(agents, clock)
        self._keeps = KeepActions(controls, templates, keep_rule, log)
        self._admin = AdminActions(controls, log)
        self._tiers = TierActions(templates, log, clock)
        self._servers = ServerActions(hub, log)
        self._restarts = RestartActions(
            agents, hub, templates, quotas, log, journal or NoJournal(), clock, nodes_are_added
        )
        self.spawns = SpawnActions(hub, log)
        """Actions on spawns that wait."""
        self._shares = ShareActions(agents, hub, templates, quotas, pending, log)
        self.drains = DrainActions(log, clock)
        """Cordon and drain of GPUs and nodes."""

    def keeps_left(self, session: SessionReport, controls: Mapping[str, Controls], now: float) -> KeepsLeft:
        """Return what a session's user has left of keeps, with the limits. ``controls``: in force for all sessions of
        the user, by their ids."""
        return self._keeps.left(session, controls, now)

    async def ask_keeps_left(self, one: Target, actor: Actor) -> Outcome:
        """Answer how many keeps the session's user has left. Changes nothing."""
        return await self._keeps.ask_left(one, actor)

    async def keep(
        self,
        one: Target,
        actor: Actor,
        *,
        seconds: float | None = None,
        until: float | None = None,
        asked: Asked | None = None,
    ) -> Outcome:
        """Keep the share against idle actions for some seconds, or until an instant (seconds since the epoch)."""
        return await self._keeps.keep(one, actor, Wanted(seconds, until), asked)

    async def end_keep(self, one: Target, actor: Actor, asked: Asked | None = None) -> Outcome:
        """End the keep of a share."""
        return await self._keeps.end_keep(one, actor, asked)

    async def settle(self, one: Target) -> bool:
        """Remove a keep or an exemption that is over. Returns whether there was one."""
        return await self._keeps.settle(one)

    async def release(self, one: Target, actor: Actor, asked: Asked | None = None) -> Outcome:
        """Release the share of an idle session; the next GPU work restores it."""
        return await self._tiers.release(one, actor, asked)

    async def tier(self, one: Target, tier: Tier, actor: Actor) -> Outcome:
        """Change the tier to active, downgraded or released. For admins."""
        return await self._tiers.tier(one, tier, actor)

    async def share(self, one: Target, actor: Actor, fraction: float) -> Outcome:
        """Change the share to a fraction of its GPU, like 0.5. Kernels keep running."""
        return await self._shares.share(one, actor, fraction)

    async def other_shares(self, one: Target, actor: Actor) -> tuple[int, ...]:
        """Return the shares in units that the user can change to by templates, the smallest first. Changes nothing."""
        return await self._shares.others(one, actor)

    async def stop(self, one: Target, actor: Actor) -> Outcome:
        """Stop the server."""
        return await self._servers.stop(one, actor)

    async def restart(self, one: Target, template: str, actor: Actor) -> Outcome:
        """Stop the server, and start it with a template."""
        return await self._restarts.restart(one, actor, template)

    async def finish_restarts(self) -> None:
        """Finish the restarts that a service which was killed had begun."""
        await self._restarts.finish()

    async def exempt(self, one: Target, actor: Actor, until: float | None = None, reason: str = "") -> Outcome:
        """Exempt the session from idle actions until an instant (seconds since the epoch); None: forever.

        For admins.
        """
        return await self._admin.exempt(one, actor, until, reason)

    async def end_exemption(self, one: Target, actor: Actor) -> Outcome:
        """End the exemption. For admins."""
        return await self._admin.end_exemption(one, actor)

    async def message(self, one: Target, actor: Actor, text: str, cause: MessageCause = MessageCause.ADMIN) -> Outcome:
        """Show the session's user a message instead of the one of this cause. For admins."""
        return await self._admin.message(one, actor, text, cause)

    async def withdraw_messages(self, one: Target, actor: Actor, *causes: MessageCause) -> Outcome:
        """Withdraw the messages of these causes. For admins."""
        return await self._admin.withdraw_messages(one, actor, *causes)
