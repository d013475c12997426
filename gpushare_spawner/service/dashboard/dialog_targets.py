"""What the dashboard's dialogs act on: the address of a session, a GPU, a node or a spawn in the REST API, and which of
the dialog's forms are for this caller now. Pure. The service checks each request again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpushare_spawner.idle import KeepRule, KeepsLeft
from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.layers import LAYERS, IdleReach
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.api import answers
from gpushare_spawner.service.web.caller import Caller
from gpushare_spawner.wording import dashboard as words
from gpushare_spawner.wording.amounts import gpu_share
from gpushare_spawner.wording.controls.session_controls import keeps_left

Target = Mapping[str, Any]
"""For JSON. `address`: below the API's prefix. `may`: names of forms. `show`: texts. `choices`: of lists, as pairs of
a value and its text. `chosen`: what lists show first."""

SESSION, NODE, GPU, SPAWN = "sessions/{id}", "nodes/{node}", "nodes/{node}/gpus/{uuid}", "queue/{user}/{server}"
"""Addresses in the REST API."""
FORMS = {
    "keep": ("POST", "/keep"),
    "end-keep": ("DELETE", "/keep"),
    "release": ("POST", "/release"),
    "share": ("PUT", "/share"),
    "restart": ("POST", "/restart"),
    "stop": ("POST", "/stop"),
    "message": ("POST", "/message"),
    "withdraw-message": ("DELETE", "/message"),
    "exempt": ("PUT", "/exemption"),
    "end-exempt": ("DELETE", "/exemption"),
    "tier": ("PUT", "/tier"),
    "cordon": ("PUT", "/cordon"),
    "end-cordon": ("DELETE", "/cordon"),
    "drain": ("PUT", "/drain"),
    "end-drain": ("DELETE", "/drain"),
    "requeue": ("POST", "/requeue"),
    "cancel": ("DELETE", ""),
}
"""The forms of `web/pages/parts/dialogs.html`: the request of each, below the target's address."""


@dataclass(frozen=True)
class DialogTargets:
    """The targets for one caller. ``offered``: methods and addresses of the API's operations."""

    caller: Caller
    now: float
    """Seconds since the epoch."""
    offered: Collection[tuple[str, str]]

    def _target(self, kind: str, address: str, may: Sequence[str], show: Mapping[str, str]) -> dict[str, Any]:
        known = [form for form in may if (FORMS[form][0], kind + FORMS[form][1]) in self.offered]
        return {"address": address, "may": known, "show": show}

    def session(self, one: answers.Session) -> Target:
        """Return a session that the caller may act on."""
        limits, all_sessions, reach = one.keep_limits, self.caller.acts_on_all, LAYERS[one.layer].reach
        may_keep = min(limits.longest_seconds, limits.per_day, limits.at_once) > 0
        # what a drain tells ends with the drain
        withdrawable = [message.text for message in one.messages if message.cause is not MessageCause.DRAIN]
        forms = {
            "keep": all_sessions or may_keep,
            "end-keep": one.keep is not None,
            "release": IdleReach.RELEASE in reach and one.tier is not Tier.RELEASED,
            "share": IdleReach.RESIZE in reach and bool(one.share_choices),
            "restart": True,
            "stop": True,
            "message": all_sessions,
            "withdraw-message": all_sessions and bool(withdrawable),
            "exempt": all_sessions,
            "end-exempt": all_sessions and one.exemption is not None,
            "tier": all_sessions and not reach.isdisjoint((IdleReach.RELEASE, IdleReach.DOWNGRADE)),
        }
        show = {
            "name": words.server_name(one.user, one.server),
            "terms": words.session_terms(one.display_name, one.share_units, one.gpu_count),
            "kept": words.kept(one.keep.until - self.now, one.keep.by) if one.keep else "",
            "keep_terms": ""
            if all_sessions
            else keeps_left(
                KeepsLeft(
                    limits.left,
                    KeepRule(limits.longest_seconds, limits.per_day, limits.at_once),
                    limits.again_at,
                ),
                self.now,
            ),
            "message": " ".join(withdrawable),
            "exempt": self._exempt(one.exemption) if one.exemption else "",
        }
        target = self._target(
            SESSION, f"sessions/{quote(one.id, safe='')}", [form for form in forms if forms[form]], show
        )
        return target | {
            "choices": {"tiers": self._tiers(one), "shares": _shares(one)},
            "chosen": {"templates": one.template, "shares": _larger_share(one)},
        }

    def _exempt(self, exemption: answers.ExemptionAnswer) -> str:
        until = exemption.until
        return words.exempt(until - self.now if until is not None else None, exemption.by, exemption.reason)

    def _tiers(self, one: answers.Session) -> Sequence[tuple[str, str]]:
        return [
            (tier.value, tier.value) for tier in (Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED) if tier is not one.tier
        ]

    def node(self, node: answers.Node) -> Target:
        """Return a node."""
        show = {"name": words.node_name(node.name)}
        return self._target(NODE, f"nodes/{quote(node.name, safe='')}", _of_place(node.cordon), show)

    def gpu(self, node: answers.Node, gpu: answers.Gpu) -> Target:
        """Return a GPU of a node."""
        address = f"nodes/{quote(node.name, safe='')}/gpus/{quote(gpu.uuid, safe='')}"
        return self._target(GPU, address, _of_place(gpu.cordon), {"name": words.gpu_name(gpu.index, node.name)})

    def spawn(self, one: answers.Spawn) -> Target:
        """Return a spawn that the caller may act on."""
        show = {"name": words.server_name(one.user, one.server), "terms": one.display_name}
        forms = ("requeue", "cancel") if self.caller.acts_on_all else ("cancel",)
        return self._target(SPAWN, one.address, forms, show)


def choices_of_sessions(caller: Caller, templates: Iterable[Template]) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return what lists of the sessions' dialogs offer: values with their texts. The same for all sessions that a
    caller may act on: what the caller may use, or for those who act on all sessions everything."""
    allowed = [one for one in templates if caller.acts_on_all or one.access.allows(caller.name, caller.groups)]
    return {"templates": sorted(((one.name, one.display_name) for one in allowed), key=lambda one: one[1])}


def _of_place(cordon: answers.Cordon | None) -> Sequence[str]:
    if cordon is None:
        return ("cordon", "drain")
    return ("end-drain",) if cordon.drain else ("end-cordon", "drain")


def _larger_share(one: answers.Session) -> str:
    """Return the value of the next larger share that is free, which most who change theirs want; empty: none is."""
    larger = (units for units in one.share_choices if one.share_units < units <= one.largest_share_units)
    return next((f"{units / UNITS_PER_GPU:g}" for units in larger), "")


def _shares(one: answers.Session) -> Sequence[tuple[str, str]]:
    return [
        (
            f"{units / UNITS_PER_GPU:g}",
            gpu_share(units) if units <= one.largest_share_units else words.not_free(gpu_share(units)),
        )
        for units in one.share_choices
    ]
