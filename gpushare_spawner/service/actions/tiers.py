"""Changes of a session's tier by its user or by an admin: release now, and any tier. Idle actions: the culler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpushare_spawner.idle import Observation
from gpushare_spawner.model.protocol.control import TierRequest
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.model.tier import Tier, UseRule
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.outcome import (
    ActionRefused,
    Actor,
    Asked,
    Outcome,
    RefusalCode,
    Target,
    check_admin,
    check_own,
    current,
    refusals,
)
from gpushare_spawner.service.session_templates import SessionTemplates
from gpushare_spawner.wording.controls import session_controls as words

YIELD_SECONDS = 600.0
"""Seconds for which the agent keeps units for spawns in quota without a further request of the service: as long as it
waits for the server of a session that was opened (`OpenRequest.confirm_within`). A service that runs ends this sooner,
or asks again in time."""


class TierActions:
    """Each method raises ActionRefused."""

    def __init__(
        self,
        templates: Callable[[], Mapping[str, Template]],
        use_rule: Callable[[Idle], UseRule],
        log: ActionLog,
        clock: Callable[[], float],
    ) -> None:
        self._templates = templates
        self._use_rule = use_rule
        self._log = log
        self._clock = clock

    async def release(self, one: Target, actor: Actor, asked: Asked | None = None, why: str = "") -> Outcome:
        """Release the share of an idle session. ``asked``: what this follows; GPU work since then prevents it.
        ``why``: what the actor says of it."""
        check_own(one, actor)
        session = await current(one)
        if session.tier is Tier.RELEASED:
            return Outcome(False, words.RELEASED_ALREADY)
        if asked is not None and (session.last_gpu_activity or 0.0) > asked.ask.at:
            raise ActionRefused(words.WORKED_MEANWHILE, RefusalCode.BUSY)
        done = await self._move(one, session, Tier.RELEASED, 0, words.released_by(actor.name))
        reason = words.released_by(actor.name, why)
        self._log.session(session, one.node, Tier.RELEASED, actor.name, units=0, reason=reason)
        return Outcome(True, words.RELEASED if done else words.TIER_UNDER_WAY)

    async def tier(self, one: Target, tier: Tier, actor: Actor, why: str = "") -> Outcome:
        """Change the tier of a session to active, downgraded or released, by an admin's decision.

        GPU work that lasts restores the share, and a session that is made active counts as idle from now on.
        """
        check_admin(actor)
        session = await current(one)
        units = self._units(session, tier)
        if (session.tier, session.effective_units) == (tier, units):
            return Outcome(False, words.tier_already(tier))
        done = await self._move(one, session, tier, units, words.tier_set_by(tier, actor.name))
        reason = words.tier_set_by(tier, actor.name, why)
        self._log.session(session, one.node, tier, actor.name, units=units, reason=reason)
        return Outcome(True, words.tier_set(tier, units) if done else words.TIER_UNDER_WAY)

    def _units(self, session: SessionReport, tier: Tier) -> int:
        if tier is Tier.STOPPED:
            raise ActionRefused(words.STOP_IS_NO_TIER, RefusalCode.BAD_REQUEST)
        if tier is not Tier.DOWNGRADED:
            return session.share_units if tier is Tier.ACTIVE else 0
        template = self._template(session)
        units = template.idle.units(tier, session.share) if template is not None else 0
        if not 0 < units < session.share_units:
            raise ActionRefused(words.no_downgrade(session.template), RefusalCode.BAD_REQUEST)
        return units

    def _template(self, session: SessionReport) -> Template | None:
        return SessionTemplates.of(self._templates()).of_user(session.template, session.user)

    async def _move(self, one: Target, session: SessionReport, tier: Tier, units: int, reason: str) -> bool:
        """Have the agent change the tier, and return whether it has done so; False: it has not said so in time.

        Units are taken only from a session that is idle, as work restores them.
        """
        taken = units < session.effective_units
        if taken and (session.gpu_busy or session.waiting):
            raise ActionRefused(words.GPU_BUSY, RefusalCode.BUSY)
        yields = session.yields and tier is not Tier.ACTIVE
        template = self._template(session)
        rule = self._use_rule(template.idle) if template is not None and tier is not Tier.ACTIVE else UseRule()
        request = TierRequest(
            id=session.id,
            tier=tier,
            effective_units=units,
            reason=reason,
            if_idle_since=max(0.0, Observation.of(session).gpu_quiet_since) if taken else None,
            use=rule if rule.min_use > 0 else None,
            yields_until=self._clock() + YIELD_SECONDS if yields else None,
        )
        with refusals():
            await one.agent.tier(request)
            return await one.agent.carried_out(request)
