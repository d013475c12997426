"""Who asks (bearer tokens) and what they may (RBAC)."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError, forbidden
from .kinds import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, ROLES
from .store import Store

MASTERS = "system:masters"
NODE_NAME = "authentication.kubernetes.io/node-name"
"""What a token that is bound to a node, or to a pod of it, says of its user."""


@dataclass(frozen=True)
class User:
    name: str
    groups: frozenset[str] = frozenset()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Ask:
    """What a request wants to do."""

    verb: str
    group: str = ""
    resource: str = ""
    """With its subresource, as in pods/status."""
    namespace: str = ""
    name: str = ""
    path: str = ""
    """Of a request that is for no resource, like /version."""
    user: str = ""
    """Who asks."""


class Access:
    """Knows the tokens, and reads the roles and bindings that are in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[str, User] = {}

    def add_user(self, name: str, *groups: str, token: str | None = None, node: str = "") -> str:
        """A bearer token for a user of any name; `node`: the name of the node that it is bound to."""
        token = token or secrets.token_urlsafe(24)
        extra = {NODE_NAME: (node,)} if node else {}
        self._users[token] = User(name, frozenset({*groups, "system:authenticated"}), extra)
        return token

    def add_service_account_token(self, namespace: str, name: str, node: str = "") -> str:
        """Like a real one a JSON web token, that says whose it is."""
        user = f"system:serviceaccount:{namespace}:{name}"
        claims = base64.urlsafe_b64encode(json.dumps({"sub": user}).encode()).decode().rstrip("=")
        token = f"e30.{claims}.{secrets.token_urlsafe(24)}"
        return self.add_user(
            user, "system:serviceaccounts", f"system:serviceaccounts:{namespace}", token=token, node=node
        )

    def user(self, authorization: str | None) -> User:
        """Raises ApiError 401."""
        scheme, _, token = (authorization or "").partition(" ")
        user = self._users.get(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def check(self, user: User, ask: Ask) -> None:
        """Raises ApiError 403."""
        if self.allows(user, ask):
            return
        if ask.path:
            raise forbidden(f'forbidden: User "{user.name}" cannot {ask.verb} path "{ask.path}"')
        name = f' "{ask.name}"' if ask.name else ""
        scope = f' in the namespace "{ask.namespace}"' if ask.namespace else " at the cluster scope"
        resource = ask.resource.partition("/")[0] + (f".{ask.group}" if ask.group else "")
        raise forbidden(
            f'{resource}{name} is forbidden: User "{user.name}" cannot {ask.verb} resource "{ask.resource}" '
            f'in API group "{ask.group}"{scope}'
        )

    def allows(self, user: User, ask: Ask) -> bool:
        if MASTERS in user.groups:
            return True
        if ask.path in ("/version", "/healthz", "/readyz", "/livez", "/api/v1", "/api/v1/"):
            return True
        if ask.group == "authorization.k8s.io" and ask.resource.startswith("selfsubject"):
            return True
        return any(_rule_allows(rule, ask) for rule in self._rules(user, ask.namespace))

    def _rules(self, user: User, namespace: str) -> Iterator[dict[str, Any]]:
        for binding in self._store.items(CLUSTER_ROLE_BINDINGS):
            if _binds(binding.item, user, ""):
                yield from self._role_rules(binding.item["roleRef"], "")
        if not namespace:
            return
        for binding in self._store.items(ROLE_BINDINGS, namespace):
            if _binds(binding.item, user, namespace):
                yield from self._role_rules(binding.item["roleRef"], namespace)

    def _role_rules(self, reference: dict[str, Any], namespace: str) -> Iterator[dict[str, Any]]:
        if reference.get("kind") == "ClusterRole":
            role = self._store.get(CLUSTER_ROLES, ("", reference["name"]))
        else:
            role = self._store.get(ROLES, (namespace, reference["name"]))
        if role is not None:
            yield from role.item.get("rules") or []


def _binds(binding: dict[str, Any], user: User, namespace: str) -> bool:
    for subject in binding.get("subjects") or []:
        kind, name = subject.get("kind"), subject.get("name")
        if kind == "ServiceAccount":
            if user.name == f"system:serviceaccount:{subject.get('namespace') or namespace}:{name}":
                return True
        elif (kind == "User" and name == user.name) or (kind == "Group" and name in user.groups):
            return True
    return False


def _rule_allows(rule: dict[str, Any], ask: Ask) -> bool:
    def has(field: str, value: str) -> bool:
        values = rule.get(field) or []
        return "*" in values or value in values

    if not has("verbs", ask.verb):
        return False
    if ask.path:
        return any(
            path == ask.path or (path.endswith("*") and ask.path.startswith(path[:-1]))
            for path in rule.get("nonResourceURLs") or []
        )
    subresource = ask.resource.partition("/")[2]
    resources = rule.get("resources") or []
    if not (has("resources", ask.resource) or (subresource and f"*/{subresource}" in resources)):
        return False
    names = rule.get("resourceNames") or []
    return has("apiGroups", ask.group) and (not names or ask.name in names)
