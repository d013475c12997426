"""Servers without a GPU share, and users without servers: which of them are idle, by the hub's list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpushare_spawner.idle import overdue
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.culler.decisions import HubSnapshot
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.session_templates import SessionTemplates
from gpushare_spawner.wording import idle_decisions


@dataclass(frozen=True)
class Verdict:
    """Why a server is stopped, or why an idle server is not. Both empty: the server is in use."""

    stop_because: str = ""
    left_because: str = ""


def judge(
    server: HubServer, templates: Mapping[str, Template], settings: CullerSettings, now: float, agents_answered: bool
) -> Verdict:
    """Judge a server that no agent's report names.

    ``agents_answered``: no report is missing. Where one is missing, a server that can have a share is not stopped:
    its GPU work is unknown, and a training run without output must not count as idle.
    """
    if not server.settled or not settings.may_stop(server.name):
        return Verdict()
    each = SessionTemplates.of(templates)
    if each.quiet_until(Tier.STOPPED, now) > now:
        return Verdict()
    template = each.of_user(server.profile, server.user)
    if template is None:
        if not agents_answered:
            return Verdict()
        timeout = settings.timeout
    elif template.gpu is not None:
        return Verdict(left_because="not stopped: its template has a GPU share, and no agent reports the session")
    else:
        timeout = template.idle.stop_after or 0.0
    found = overdue(server.last_activity, server.started, now, timeout, settings.max_age)
    return Verdict(stop_because=idle_decisions.overdue(found) if found is not None else "")


def users_to_delete(hub: HubSnapshot, settings: CullerSettings, now: float) -> Iterator[tuple[HubUser, str]]:
    """Yield the idle users without servers, with the reason.

    Without ``cull_admin_users`` a user is kept unless the hub says that the user is no admin.
    """
    for user in hub.users:
        if user.servers or (not settings.cull_admin_users and user.admin is not False):
            continue
        found = overdue(user.last_activity, user.created, now, settings.timeout, settings.max_age)
        if found is not None:
            yield user, idle_decisions.overdue(found)
