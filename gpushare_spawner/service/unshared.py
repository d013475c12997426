"""Servers that hold no GPU share, and users without servers: only the hub knows anything of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpushare_spawner.idle import overdue
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.hub import HubServer, HubUser
from gpushare_spawner.service.look import HubView
from gpushare_spawner.service.settings import CullerSettings


@dataclass(frozen=True)
class Verdict:
    """Why a server is to be stopped, or why it is left alone where somebody might expect otherwise. Empty: it just goes on."""

    stop_because: str = ""
    left_because: str = ""


def judge(
    server: HubServer, templates: Mapping[str, Template], settings: CullerSettings, now: float, agents_answered: bool
) -> Verdict:
    """A server that no agent's report names. ``agents_answered``: no report is missing, so that it surely has no share."""
    if not server.settled or not settings.may_stop(server.name):
        return Verdict()
    if server.profile is None:
        if not agents_answered:
            return Verdict()
        timeout = settings.timeout
    else:
        template = templates.get(server.profile)
        if template is None:
            return Verdict(left_because=f"its template {server.profile!r} no longer exists; it is left as it is")
        if template.gpu is not None:
            # Without a report nobody knows whether its GPU works: a silent training must not be taken for idleness.
            return Verdict(left_because="no agent knows its GPU share; it is left as it is")
        timeout = template.idle.stop_after or 0.0
    reason = overdue(server.last_activity, server.started, now, timeout, settings.max_age)
    return Verdict(stop_because=reason or "")


def users_to_delete(hub: HubView, settings: CullerSettings, now: float) -> Iterator[tuple[HubUser, str]]:
    """Users without servers who are idle for long enough, with the reason.

    Where admins are to be kept, so is everybody of whom the hub does not say whether he is one.
    """
    for user in hub.users:
        if user.servers or (not settings.cull_admin_users and user.admin is not False):
            continue
        reason = overdue(user.last_activity, user.created, now, settings.timeout, settings.max_age)
        if reason:
            yield user, reason
