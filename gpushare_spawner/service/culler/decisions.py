"""Decides on each session's tier from reports, the hub's list, templates and the culler's settings.

The settings come from the command line of `gpushare service`. The hub's list is read in the background, so a hub that
hangs does not delay downgrades and releases. Decisions are carried out in `actions`. The policy itself is in
`idle.policy`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_spawner.idle.policy import Decision, UnitsNeeded, decide
from gpushare_spawner.idle.use import DryRun, Observation, RecentUse, use_rule
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.layers import LAYERS, IdleReach
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import IdleCause
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.service.actions.context import Counters
from gpushare_spawner.service.culler.pressure import NO_PRESSURE, Pressure
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer, HubUser
from gpushare_spawner.service.hub.watch import BackgroundRequest
from gpushare_spawner.service.reports import Agent, KnownReport, NodeSnapshot
from gpushare_spawner.service.templates import SessionTemplates


@dataclass(frozen=True)
class CullerSettings:
    """Settings of the culler. Times are in seconds; 0: never.

    Names and meanings are those of jupyterhub-idle-culler, where it has the option.
    """

    timeout: float = 0.0
    """Idle time after which servers without a template, and users, are removed."""
    max_age: float = 0.0
    """Maximum age of all servers (and users), busy or not."""
    cull_every: float = 10.0
    cull_users: bool = False
    cull_admin_users: bool = True
    remove_named_servers: bool = False
    dry_run: bool = False
    """Whether idle actions are decided, logged and shown, but not carried out."""


OLD = 60.0
"""Seconds. If a report is older than this, all GPU work counts as use. Our choice: a node's clock can differ by a few
seconds."""


@dataclass
class CullerState:
    """The culler's records in addition to the reports. A new service starts with an empty one."""

    dry_run: DryRun = field(default_factory=DryRun)
    """The state that sessions in a dry run would have."""
    use: RecentUse = field(default_factory=RecentUse)
    """GPU work that counted as use."""
    pressure: Pressure = NO_PRESSURE
    """Units that waiting spawns needed in the last round."""


@dataclass(frozen=True)
class SessionDecision:
    """A session, its observation, and the decision on it."""

    agent: Agent
    report: KnownReport
    """The report of the session's node."""
    session: SessionReport
    server: HubServer | None
    template: Template | None
    decision: Decision
    decided_at: float
    """Seconds since the epoch."""
    observation: Observation
    """The basis of the decision; in a dry run, with the tier and notice that the session would have."""
    dry_run: bool = False
    """Whether the decision is not carried out."""
    reclaimed: UnitsNeeded | None = None
    """The session's units that waiting spawns in quota need, or all if its budget is used up."""

    @property
    def used_up(self) -> bool:
        """Whether a budget of the session is used up."""
        return self.reclaimed is not None and self.reclaimed.cause is IdleCause.BUDGET

    @property
    def to_background(self) -> bool:
        """Whether the session works in the background. An older agent gives it the lowest weight instead."""
        return self.used_up and self.report.supports_budgets

    @property
    def node(self) -> str:
        return self.report.node

    @property
    def kept_by_short_work(self) -> bool:
        """Whether GPU work that is too short to count as use would have kept the share."""
        work, after = self.observation.short_work, self.template.idle.first_after if self.template is not None else None
        if work is None or after is None:
            return False
        return work.would_keep(after, self.decided_at - self.observation.gpu_idle_since)

    @property
    def name(self) -> str:
        """Name for logs: the user, and the server if it has a name."""
        return self.session.user + (f"/{self.session.server}" if self.session.server else "")


def servers_of(users: Iterable[HubUser]) -> dict[tuple[str, str], HubServer]:
    """Return the users' servers by user and server name."""
    return {(server.user, server.name): server for user in users for server in user.servers}


def decide_sessions(
    snapshots: Sequence[NodeSnapshot],
    users: Sequence[HubUser] | None,
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
    state: CullerState | None = None,
) -> list[SessionDecision]:
    """Decide on all sessions of all agents that answered. ``users``: the hub's list; None if it did not answer."""
    servers, state = servers_of(users or ()), state or CullerState()
    return [
        decide_session(
            node.agent,
            node.report,
            session,
            servers.get((session.user, session.server)),
            templates,
            now,
            settings,
            state,
        )
        for node in snapshots
        if node.report is not None
        for session in node.report.sessions
    ]


def within_reach(idle: Idle, reach: Collection[IdleReach]) -> Idle:
    """Return the idle actions that the session's sharing layer can carry out. A server can always be stopped."""
    left_out: dict[str, None] = {}
    if IdleReach.DOWNGRADE not in reach:
        left_out |= {"downgrade_after": None, "downgrade_to": None}
    if IdleReach.RELEASE not in reach:
        left_out |= {"release_after": None, "release_resources": None}
    return idle.model_copy(update=left_out) if left_out else idle


def add_use(use: RecentUse, snapshots: Sequence[NodeSnapshot], templates: Mapping[str, Template], now: float) -> None:
    """Add the GPU work in new reports. While a report is old, the use of its sessions is unknown."""
    present, each = set(), SessionTemplates.of(templates)
    for snapshot in snapshots:
        report = snapshot.report
        if report is None or now - report.published_at > OLD:
            continue
        for session in report.sessions:
            template = each.of_user(session.template, session.user)
            if template is not None:
                rule = use_rule(template.idle)
                use.update(session.id, Observation.of(session), report.published_at, rule)
                present.add(session.id)
    use.retain(present)


def decide_session(
    agent: Agent,
    report: KnownReport,
    session: SessionReport,
    server: HubServer | None,
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
    state: CullerState,
) -> SessionDecision:
    """Decide on one session, excluding stops that the settings forbid."""
    each = SessionTemplates.of(templates)
    template = each.of_user(session.template, session.user)
    idle = template.idle if template is not None else None
    if idle is not None:
        idle = within_reach(idle, LAYERS[session.layer].reach)
    observation = Observation.of(session, server.seen if server is not None else None)
    observation = state.use.observe(session.id, observation)
    dry = settings.dry_run or (idle is not None and idle.dry_run)
    if dry:
        observation = state.dry_run.observe(session.id, observation)
    only_if_needed = idle is not None and idle.when == "pressure"
    reclaimed = state.pressure.reclaimed.get(session.id)
    units_left = state.pressure.needed.get(session.id) if only_if_needed else None
    decision = decide(idle, observation, now, settings.max_age, reclaimed, only_if_needed, each.quiet_until, units_left)
    return SessionDecision(
        agent, report, session, server, template, decision, now, observation, dry_run=dry, reclaimed=reclaimed
    )


log = logging.getLogger("gpushare.service")


class HubWatch:
    """The hub's list, at most ``max_age`` seconds old while the hub answers."""

    def __init__(self, hub: Hub, max_age: float, all_users: bool, counters: Counters) -> None:
        self.users: Sequence[HubUser] | None = None
        """The users in the hub's last answer; None if there is no answer yet, or a failure since."""
        self._hub = hub
        self._max_age = max_age
        self._all_users = all_users
        self._counters = counters
        self._requested_at = float("-inf")
        self._request = BackgroundRequest(self._ask)
        self._trouble = LogOnce(
            log,
            "No server is stopped until the hub lists its servers again",
            "The hub lists its servers again",
            each_reason=True,
        )

    def outdated(self) -> None:
        """Mark the list as outdated after a server was stopped, so that the next `refresh` requests it again."""
        self._requested_at = float("-inf")

    def clock_was_set(self, by: float) -> None:
        """Adjust the instants in the hub's last answer by a step of the clock."""
        if self.users is not None:
            self.users = [user.with_instants(lambda instant: instant + by) for user in self.users]

    async def refresh(self, patience: float) -> None:
        """Request the list if it is old, and wait ``patience`` seconds. A later answer is used in the next round."""
        await self._request.refresh(time.monotonic() - self._requested_at >= self._max_age, patience)

    def close(self) -> None:
        """Cancel a running request."""
        self._request.close()

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            users = await self._hub.users(with_ready_servers=not self._all_users)
        except HubFailed as error:
            self._trouble.about(error)
            self.users = None
            self._counters.failures["hub"] += 1
        else:
            self._trouble.resolved()
            self.users, self._requested_at = users, began
