"""What a request's path, method and query ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from .access import Ask
from .errors import bad_request, no_resource
from .kinds import Kind, find_kind
from .names import quoted
from .selectors import selected_name

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True)
class Target:
    """What a path stands for."""

    kind: Kind
    namespace: str
    name: str
    subresource: str


REVIEWS = Kind("selfsubjectaccessreviews", "SelfSubjectAccessReview", "authorization.k8s.io", namespaced=False)


def target_of(path: str) -> Target | None:
    """Raises ApiError 404 for a path of the API that stands for nothing; None for one outside of it."""
    steps = path.strip("/").split("/")
    if steps == ["api", "v1"]:
        return None
    if steps[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", steps[2:]
    elif steps[0] == "apis" and len(steps) > 3:
        group, version, rest = steps[1], steps[2], steps[3:]
    else:
        return None
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3:
        raise no_resource()
    plural, name, subresource = (*rest, "", "")[:3]
    kind = REVIEWS if (group, plural) == (REVIEWS.group, REVIEWS.plural) else find_kind(group, version, plural)
    if kind is None or (namespace and not kind.namespaced) or (name and kind.namespaced and not namespace):
        raise no_resource()
    return Target(kind, namespace, name, subresource)


def whole_number(query: Mapping[str, str], name: str) -> int:
    """Of a query, 0 where it is not there. Raises ApiError 400."""
    try:
        return int(query.get(name) or 0)
    except ValueError:
        raise bad_request(f"strconv.ParseInt: parsing {quoted(query[name])}: invalid syntax") from None


def ask_of(request: web.Request, target: Target | None, user: str = "") -> Ask:
    if target is None:
        return Ask(request.method.lower(), path=request.path, user=user)
    name = target.name
    if request.method == "GET":
        verb = "get" if name else "list"
        if not name and request.query.get("watch") in ("true", "True", "1"):
            verb = "watch"
    elif request.method == "DELETE":
        verb = "delete" if name else "deletecollection"
    else:
        verb = _VERBS.get(request.method, request.method.lower())
    if verb in ("list", "watch", "deletecollection"):
        name = selected_name(request.query.get("fieldSelector", "")) or ""
    resource = target.kind.plural + (f"/{target.subresource}" if target.subresource else "")
    return Ask(verb, target.kind.group, resource, target.namespace, name, user=user)
