"""ValidatingAdmissionPolicies, evaluated as an API server does: in CEL, by the library that Google maintains in C++.

What is missing: parameters, audit annotations, warnings, and the selectors of objects and namespaces. A policy that
uses one of them is refused when it is created, rather than evaluated without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from .access import User
from .errors import ApiError, Causes, invalid
from .kinds import POLICIES, POLICY_BINDINGS, Kind
from .store import Store

_CODES = {"Invalid": 422, "Forbidden": 403, "Unauthorized": 401, "RequestEntityTooLarge": 413}
_KNOWN = {"failurePolicy", "matchConstraints", "matchConditions", "variables", "validations"}
_NAMES = ("request", "object", "oldObject", "variables")

Item = dict[str, Any]


@dataclass(frozen=True)
class Write:
    """A request that changes something, as policies see it."""

    user: User
    operation: str
    """CREATE, UPDATE or DELETE."""
    kind: Kind
    namespace: str
    name: str
    subresource: str = ""


class _Failed(Exception):
    """An expression has no value."""


def check_policy(item: Item) -> None:
    """That this stand-in can evaluate the policy. Raises ApiError 422."""
    spec = item.get("spec") or {}
    causes: Causes = [(f"spec.{key}", "Unsupported value: the stand-in has not got it") for key in spec.keys() - _KNOWN]
    for where, expressions in (
        ("matchConditions", spec.get("matchConditions") or []),
        ("variables", spec.get("variables") or []),
        ("validations", spec.get("validations") or []),
    ):
        for index, part in enumerate(expressions):
            try:
                _compiled(part["expression"])
            except Exception as error:
                causes.append((f"spec.{where}[{index}].expression", f"Invalid value: compilation failed: {error}"))
    if causes:
        raise invalid("ValidatingAdmissionPolicy", item["metadata"]["name"], causes, POLICIES.group)


def admit(store: Store, write: Write, before: Item | None, after: Item | None) -> None:
    """Raises ApiError where a policy denies the write."""
    for binding in store.items(POLICY_BINDINGS):
        spec = binding.item["spec"]
        policy = store.get(POLICIES, ("", spec["policyName"]))
        if policy is None or "Deny" not in spec["validationActions"]:
            continue
        if (denial := _denial(policy.item["spec"], write, before, after)) is None:
            continue
        message, reason = denial
        names = f"ValidatingAdmissionPolicy '{spec['policyName']}' with binding '{binding.key[1]}'"
        what = f'{write.kind.plural} "{write.name}" is forbidden'
        raise ApiError(_CODES[reason], reason, f"{what}: {names} denied request: {message}")


def _denial(policy: Item, write: Write, before: Item | None, after: Item | None) -> tuple[str, str] | None:
    """(message, reason), or None where the policy admits the write or is not about it."""
    if not any(_is_about(rule, write) for rule in policy["matchConstraints"]["resourceRules"]):
        return None
    fails = policy.get("failurePolicy", "Fail") == "Fail"
    values: Item = {"request": _request(write), "object": after, "oldObject": before, "variables": {}}
    try:
        if not all(value_of(part["expression"], values) for part in policy.get("matchConditions") or []):
            return None
    except _Failed as error:
        return (str(error), "Invalid") if fails else None
    expressions = {part["name"]: part["expression"] for part in policy.get("variables") or []}
    for part in policy["validations"]:
        try:
            if value_of(part["expression"], values, expressions) is not True:
                said = part.get("message") or f"failed expression: {part['expression']}"
                return said, part.get("reason", "Invalid")
        except _Failed as error:
            if fails:
                return str(error), part.get("reason", "Invalid")
    return None


def _is_about(rule: Item, write: Write) -> bool:
    resource = write.kind.plural + (f"/{write.subresource}" if write.subresource else "")
    every = f"{write.kind.plural}/*" if write.subresource else ""
    return (
        (write.kind.group in rule["apiGroups"] or "*" in rule["apiGroups"])
        and (write.kind.version in rule["apiVersions"] or "*" in rule["apiVersions"])
        and (write.operation in rule["operations"] or "*" in rule["operations"])
        and any(one in (resource, every) for one in rule["resources"])
    )


def _request(write: Write) -> Item:
    # fields that are empty are left out, as in the JSON of an AdmissionRequest
    user: Item = {"username": write.user.name, "groups": sorted(write.user.groups)}
    if write.user.extra:
        user["extra"] = {key: list(values) for key, values in write.user.extra.items()}
    request = {"operation": write.operation, "userInfo": user, "name": write.name, "namespace": write.namespace}
    if write.subresource:
        request["subResource"] = write.subresource
    return request


def value_of(expression: str, values: Item, variables: Mapping[str, str] | None = None) -> Any:
    """The value of an expression; the variables that it names are evaluated first, as those are that are used."""
    variables = variables or {}
    known = {
        name: value_of(text, values, {other: variables[other] for other in variables if other != name})
        for name, text in variables.items()
        if f"variables.{name}" in expression
    }
    result = _compiled(expression).eval(data={**values, "variables": known})
    if result.type() == cel.Type.ERROR:
        raise _Failed(f"expression '{expression}' resulted in error: {result.value()}")
    return result.plain_value()


@cache
def _environment() -> Any:
    extensions = [ext_optional.ExtOptional(), ext_strings.ExtStrings()]
    return cel.NewEnv(variables=dict.fromkeys(_NAMES, cel.Type.DYN), extensions=extensions)


@cache
def _compiled(expression: str) -> Any:
    return _environment().compile(expression)
