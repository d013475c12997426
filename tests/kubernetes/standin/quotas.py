"""ResourceQuota and LimitRange: what the API server refuses of pods' CPU and memory, also at a resize.

As measured on Kubernetes 1.36.2. What it does not know: scopes, ratios, ranges of whole pods, other objects' counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from .errors import ApiError, forbidden
from .kinds import LIMIT_RANGES, PODS, RESOURCE_QUOTAS
from .quantities import canonical, quantity
from .resize import RESIZABLE
from .scheduler import requests
from .store import Store


def fill_in(store: Store, pod: dict[str, Any]) -> None:
    """The defaults of the namespace's LimitRanges, into a new pod."""
    for limit in _container_limits(store, pod):
        for container in pod["spec"]["containers"]:
            resources = container.setdefault("resources", {})
            for side, defaults in (("limits", "default"), ("requests", "defaultRequest")):
                for name, amount in (limit.get(defaults) or {}).items():
                    resources.setdefault(side, {}).setdefault(name, amount)


def check(store: Store, pod: dict[str, Any]) -> None:
    """A new pod, or one that is resized. Raises ApiError 403."""
    for limit in _container_limits(store, pod):
        for container in pod["spec"]["containers"]:
            _check_range(pod, container.get("resources") or {}, limit)
    for stored in store.items(RESOURCE_QUOTAS, pod["metadata"]["namespace"]):
        _check_quota(store, pod, stored.item)


def _container_limits(store: Store, pod: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for stored in store.items(LIMIT_RANGES, pod["metadata"]["namespace"]):
        yield from (limit for limit in stored.item["spec"]["limits"] if limit["type"] == "Container")


def _check_range(pod: dict[str, Any], resources: dict[str, Any], limit: dict[str, Any]) -> None:
    for name in RESIZABLE:
        least, most = (limit.get("min") or {}).get(name), (limit.get("max") or {}).get(name)
        asked, bound = (resources.get("requests") or {}).get(name), (resources.get("limits") or {}).get(name)
        if least is not None and quantity(asked or 0) < quantity(least):
            word = f"request is {asked}" if asked is not None else "no request is specified"
            raise _forbidden(pod, f"minimum {name} usage per Container is {least}, but {word}")
        if most is not None and (bound is None or quantity(bound) > quantity(most)):
            word = f"limit is {bound}" if bound is not None else "no limit is specified"
            raise _forbidden(pod, f"maximum {name} usage per Container is {most}, but {word}")


def _check_quota(store: Store, pod: dict[str, Any], quota: dict[str, Any]) -> None:
    hard = (quota.get("spec") or {}).get("hard") or {}
    wanted, has = _charged(pod), dict.fromkeys(hard, Decimal(0))
    mine = has
    for stored in store.items(PODS, pod["metadata"]["namespace"]):
        if (stored.item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        if stored.item["metadata"].get("uid") == pod["metadata"].get("uid"):
            mine = _charged(stored.item)
        has = {name: amount + _charged(stored.item).get(name, Decimal(0)) for name, amount in has.items()}
    over = []
    for name, most in sorted(hard.items()):
        more = wanted.get(name, Decimal(0)) - mine.get(name, Decimal(0))
        if more > 0 and has[name] + more > quantity(most):
            over.append((name, more, has[name], most))
    if over:
        asked, used, limited = (
            ",".join(f"{line[0]}={canonical(str(line[column]))}" for line in over) for column in (1, 2, 3)
        )
        why = f"exceeded quota: {quota['metadata']['name']}, requested: {asked}, used: {used}, limited: {limited}"
        raise _forbidden(pod, why)


def _charged(pod: dict[str, Any]) -> dict[str, Decimal]:
    """What a pod takes of a quota, by the quota's names. A resize counts as the scheduler counts it."""
    asked = requests(pod)
    found = {"pods": asked["pods"]}
    for name in RESIZABLE:
        amount = asked.get(name, Decimal(0))
        found |= {name: amount, f"requests.{name}": amount}
        limits = [
            ((each.get("resources") or {}).get("limits") or {}).get(name, 0) for each in pod["spec"]["containers"]
        ]
        found[f"limits.{name}"] = sum((quantity(limit) for limit in limits), Decimal(0))
    return found


def _forbidden(pod: dict[str, Any], why: str) -> ApiError:
    return forbidden(f'pods "{pod["metadata"]["name"]}" is forbidden: {why}')
