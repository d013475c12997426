"""The idle actions of a session: its template's, with what the admin's policy says for all templates. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gpushare_spawner.model.idle_policy import IdlePolicy, IdleTimes
from gpushare_spawner.model.share import Share, units_from_fraction
from gpushare_spawner.model.template import Idle, KeepLimits, Template

FIELDS = tuple(IdleTimes.model_fields)
_AFTER = ("downgrade_after", "release_after", "stop_after")


def effective_idle(template: Template, policy: IdlePolicy, groups: Collection[str] | None = ()) -> Idle:
    """Return the idle actions of a session of this template whose user is in these groups.

    What the template does not give comes from the policy's defaults; what the first of the user's groups in the policy
    gives counts instead of both; limits bound the result. ``groups`` None: they are not known; then the most generous
    of all that they can be.
    """
    own = _given(policy.defaults) | _given(template.idle)
    if groups is None:
        values = _most_generous([own, *(_over(own, _given(one)) for one in policy.groups.values())])
    else:
        group = group_of(policy, groups)
        values = _over(own, _given(policy.groups[group])) if group is not None else own
    values["keep"] = _bounded_keep(values.get("keep"), policy.limits.keep)
    for name, share_needed in (("release_after", True), ("stop_after", False)):
        limit = getattr(policy.limits, name)
        if limit is not None and (template.gpu is not None or not share_needed):
            values[name] = _earlier(values.get(name), limit)
    if policy.limits.warn_before is not None:
        values["warn_before"] = min(_notice(values), policy.limits.warn_before)
    return template.idle.model_copy(update=_consistent(template, values))


def group_of(policy: IdlePolicy, groups: Collection[str]) -> str | None:
    """Return the group whose entry counts for a user in these groups: the first of the policy; None: none does."""
    return next((name for name in policy.groups if name in groups), None)


def _given(times: Idle | IdleTimes) -> dict[str, Any]:
    """Return the fields that were written; a keep as its own written fields."""
    found = {name: getattr(times, name) for name in FIELDS if name in times.model_fields_set}
    for name in ("warn_before", "when", "min_use", "keep"):
        if name in found and found[name] is None:
            del found[name]  # only of times does it mean something: never
    return found


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with others above them."""
    merged = {**below, **above}
    if "keep" in below and "keep" in above:
        written = above["keep"].model_dump(include=above["keep"].model_fields_set)
        merged["keep"] = below["keep"].model_copy(update=written)
    return merged


def _most_generous(choices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, of each field, what takes least from a session."""
    every = list(choices)
    values = dict(every[0])
    for name in _AFTER:
        times = [one[name] for one in every if one.get(name) is not None]
        values[name] = max(times) if len(times) == len(every) else None
    values["warn_before"] = max(map(_notice, every))
    values["downgrade_to"] = max((one["downgrade_to"] for one in every if one.get("downgrade_to")), default=None)
    values["min_use"] = min((one["min_use"] for one in every if "min_use" in one), default=None)
    values["when"] = "pressure" if any(one.get("when") == "pressure" for one in every) else values.get("when")
    return values


def _notice(values: Mapping[str, Any]) -> float:
    given: float | None = values.get("warn_before")
    return Idle().warn_before if given is None else given


def _earlier(time: float | None, limit: float) -> float:
    return limit if time is None else min(time, limit)


def _bounded_keep(keep: KeepLimits | None, limit: KeepLimits | None) -> KeepLimits | None:
    """Return a template's limits of keeps within the policy's. What is not given comes from the service's options."""
    if keep is None or limit is None:
        return keep
    bounds = limit.model_dump(exclude_none=True)
    given = keep.model_dump(exclude_none=True)
    return keep.model_copy(update={name: min(value, bounds.get(name, value)) for name, value in given.items()})


def _consistent(template: Template, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out idle actions that cannot be: of a share that is not there, or that come after a deeper one."""
    share = template.share
    values = {name: value for name, value in values.items() if value is not None or name in (*_AFTER, "downgrade_to")}
    release, stop = values.get("release_after"), values.get("stop_after")
    if share is None or (release is not None and stop is not None and release >= stop):
        values["release_after"] = release = None
    deeper = min((time for time in (release, stop) if time is not None), default=None)
    if not _downgrades(share, values, deeper):
        values["downgrade_after"] = values["downgrade_to"] = None
    if release is None:
        values["release_resources"] = None
    return values


def _downgrades(share: Share | None, values: Mapping[str, Any], deeper: float | None) -> bool:
    after, smaller = values.get("downgrade_after"), values.get("downgrade_to")
    if share is None or after is None or smaller is None or units_from_fraction(smaller) >= share.units:
        return False
    return deeper is None or after < deeper
