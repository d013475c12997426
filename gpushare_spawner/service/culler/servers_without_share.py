"""Servers that hold no GPU share, and users without servers: only the hub knows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpushare_spawner.idle import overdue
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.culler.decisions import HubView
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.wording import idle_actions


@dataclass(frozen=True)
class Verdict:
    """Why a server is to be stopped, or is left alone against expectation. Both empty: it just goes on."""

    stop_because: str = ""
    left_because: str = ""


def judge(
    server: HubServer, templates: Mapping[str, Template], settings: CullerSettings, now: float, agents_answered: bool
) -> Verdict:
    """A server that no agent's report names.

    ``agents_answered``: no report is missing. Where one is, a server that may have a share after all is left alone:
    nobody knows whether its GPU works, and a silent training must not be taken for idleness.
    """
    if not server.settled or not settings.may_stop(server.name):
        return Verdict()
    template = templates.get(server.profile) if server.profile is not None else None
    if template is None:
        if not agents_answered:
            return Verdict()
        timeout = settings.timeout
    elif template.gpu is not None:
        return Verdict(left_because="no agent knows its GPU share; it is left as it is")
    else:
        timeout = template.idle.stop_after or 0.0
    found = overdue(server.last_activity, server.started, now, timeout, settings.max_age)
    return Verdict(stop_because=idle_actions.overdue(found) if found is not None else "")


def users_to_delete(hub: HubView, settings: CullerSettings, now: float) -> Iterator[tuple[HubUser, str]]:
    """Users without servers who are idle for long enough, with the reason.

    Where admins are kept, so is every user of whom the hub does not say whether they are an admin.
    """
    for user in hub.users:
        if user.servers or (not settings.cull_admin_users and user.admin is not False):
            continue
        found = overdue(user.last_activity, user.created, now, settings.timeout, settings.max_age)
        if found is not None:
            yield user, idle_actions.overdue(found)
