"""All actions of people on sessions: the one entry for the dashboard's API and the asks of notebook servers.

Each method returns an `ActionOutcome`, or raises `ActionRefused` with a sentence and a code. Each is idempotent. An
action with an effect is in the log of actions and in the history, with its actor. The parts: `keeps`, `share`,
`restart`, `drains`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from gpushare_spawner.idle.keep import KeepRule, KeepsLeft
from gpushare_spawner.model.controls import Controls, MessageCause
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier, UseRule, units_from_fraction
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.service.actions.drains import DrainActions
from gpushare_spawner.service.actions.keeps import AdminActions, KeepActions, KeepLength
from gpushare_spawner.service.actions.outcome import (
    ActionLog,
    ActionOutcome,
    ActionRefused,
    Actor,
    ControlsOfSessions,
    ReceivedAsk,
    Target,
    harmless,
)
from gpushare_spawner.service.actions.restart import (
    NoJournal,
    RestartActions,
    RestartJournal,
    ServerActions,
    SpawnActions,
)
from gpushare_spawner.service.actions.share import Notify, ShareActions, TierActions, no_notification
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import Agent
from gpushare_spawner.wording import actions as words


async def _unknown() -> None:
    """Return None: pending spawns are unknown."""


def _explains(target: Target, actor: Actor, why: str | None) -> bool:
    return why is not None and actor.name != target.session.user


class _NotifiedBefore:
    """The end of a server, with a message to its user right before: afterwards no JupyterLab shows it."""

    def __init__(self, admin: AdminActions, target: Target, actor: Actor, text: str, enabled: bool) -> None:
        self._admin, self._target, self._actor, self._text, self._enabled = admin, target, actor, text, enabled
        self._notified = False

    async def notify(self) -> None:
        """Notify the session's user."""
        if self._enabled:
            self._notified = await self._admin.explain(self._target, self._actor, self._text)

    async def run(self, action: Awaitable[ActionOutcome]) -> ActionOutcome:
        """Return the outcome of the action; withdraw the message if it fails."""
        try:
            return await action
        except ActionRefused:
            if self._notified:
                with contextlib.suppress(ActionRefused):
                    await self._admin.withdraw_messages(self._target, self._actor, MessageCause.ACTION)
            raise


class SessionActions:
    """Actions on one session, for its user or for an admin."""

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
        use_rule: Callable[[Idle], UseRule] = lambda idle: UseRule(),
    ) -> None:
        """Compose the actions.

        ``agents`` is iterated over anew each time; ``keep_rule`` returns a template's limits of keeps, for None those
        of a template that is gone; ``use_rule`` how much GPU work counts as use of its shares; ``record`` enters an
        action in the history; ``clock`` gives seconds since the epoch; ``quotas`` returns the quotas in force;
        ``pending`` the servers that the hub is starting, None: unknown; ``journal`` stores running restarts;
        ``nodes_are_added``: later nodes can take shares that no present node can.
        """
        log = ActionLog(record, clock)
        controls = ControlsOfSessions(agents, clock)
        self._keeps = KeepActions(controls, templates, keep_rule, log)
        self._admin = AdminActions(controls, log)
        self._templates = templates
        self._tiers = TierActions(templates, use_rule, log, clock)
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
        """Return the keeps that a session's user has left, with the limits.

        ``controls``: in force for all sessions of the user, by their ids.
        """
        return self._keeps.left(session, controls, now)

    async def ask_keeps_left(self, target: Target, actor: Actor) -> ActionOutcome:
        """Return how many keeps the session's user has left, as a sentence. Changes nothing."""
        return await self._keeps.ask_left(target, actor)

    async def keep(
        self,
        target: Target,
        actor: Actor,
        *,
        seconds: float | None = None,
        until: float | None = None,
        received: ReceivedAsk | None = None,
    ) -> ActionOutcome:
        """Keep the share against idle actions for some seconds, or until an instant (seconds since the epoch)."""
        return await self._keeps.keep(target, actor, KeepLength(seconds, until), received)

    async def end_keep(self, target: Target, actor: Actor, received: ReceivedAsk | None = None) -> ActionOutcome:
        """End the keep of a share."""
        return await self._keeps.end_keep(target, actor, received)

    async def settle(self, target: Target) -> bool:
        """Remove an expired keep or exemption. Returns whether there was any."""
        return await self._keeps.settle(target)

    async def release(
        self, target: Target, actor: Actor, received: ReceivedAsk | None = None, why: str | None = None
    ) -> ActionOutcome:
        """Release the share of an idle session; GPU work that lasts restores it.

        ``why``, here and below: an admin's comment on the action for the session's user; can be empty. None if the user
        needs no message of the action.
        """
        comment = harmless(why or "")
        notify = self._notify(target, actor, why, words.released_by(actor.name, comment))
        return await self._tiers.release(target, actor, received, comment, notify)

    async def tier(self, target: Target, tier: Tier, actor: Actor, why: str | None = None) -> ActionOutcome:
        """Change the tier to active, downgraded or released. For admins."""
        comment = harmless(why or "")
        notify = self._notify(target, actor, why, words.tier_set_by(tier, actor.name, comment))
        return await self._tiers.tier(target, tier, actor, comment, notify)

    async def share(self, target: Target, actor: Actor, fraction: float, why: str | None = None) -> ActionOutcome:
        """Change the share to a fraction of its GPU, like 0.5. Kernels keep running."""
        comment, before = harmless(why or ""), target.session.share_units
        outcome = await self._shares.share(target, actor, fraction, comment)
        units = units_from_fraction(fraction)
        return await self._explained(target, actor, why, outcome, words.changed_by(actor.name, before, units, comment))

    async def other_shares(self, target: Target, actor: Actor) -> tuple[int, ...]:
        """Return the shares in units that the user can change to by templates, the smallest first. Changes nothing."""
        return await self._shares.others(target, actor)

    async def stop(self, target: Target, actor: Actor, why: str | None = None) -> ActionOutcome:
        """Stop the server."""
        comment = harmless(why or "")
        end = _NotifiedBefore(
            self._admin, target, actor, words.stopped_by(actor.name, comment), _explains(target, actor, why)
        )
        return await end.run(self._servers.stop(target, actor, comment, end.notify))

    async def restart(self, target: Target, template: str, actor: Actor, why: str | None = None) -> ActionOutcome:
        """Stop the server, and start it with a template."""
        comment, match = harmless(why or ""), self._templates().get(template)
        title = match.display_name if match is not None else template
        text = words.restarted_by(actor.name, title, comment)
        end = _NotifiedBefore(self._admin, target, actor, text, _explains(target, actor, why))
        return await end.run(self._restarts.restart(target, actor, template, comment, end.notify))

    async def _explained(
        self, target: Target, actor: Actor, why: str | None, outcome: ActionOutcome, text: str
    ) -> ActionOutcome:
        """Show the session's user the action of another person."""
        if not outcome.changed or await self._notify(target, actor, why, text)():
            return outcome
        return ActionOutcome(True, f"{outcome.text} {words.NOT_NOTIFIED}")

    def _notify(self, target: Target, actor: Actor, why: str | None, text: str) -> Notify:
        """Return the function that shows the session's user the action of another person."""
        return partial(self._admin.explain, target, actor, text) if _explains(target, actor, why) else no_notification

    async def finish_restarts(self) -> None:
        """Finish the restarts that a killed service had begun."""
        await self._restarts.finish()

    async def exempt(self, target: Target, actor: Actor, until: float | None = None, reason: str = "") -> ActionOutcome:
        """Exempt the session from idle actions until an instant (seconds since the epoch); None: forever.

        For admins.
        """
        return await self._admin.exempt(target, actor, until, reason)

    async def end_exemption(self, target: Target, actor: Actor) -> ActionOutcome:
        """End the exemption. For admins."""
        return await self._admin.end_exemption(target, actor)

    async def message(
        self, target: Target, actor: Actor, text: str, cause: MessageCause = MessageCause.ADMIN
    ) -> ActionOutcome:
        """Show the session's user a message; it replaces the message of this cause. For admins."""
        return await self._admin.message(target, actor, text, cause)

    async def withdraw_messages(self, target: Target, actor: Actor, *causes: MessageCause) -> ActionOutcome:
        """Withdraw the messages of these causes. For admins."""
        return await self._admin.withdraw_messages(target, actor, *causes)
