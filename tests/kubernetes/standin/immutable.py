"""What cannot be changed any more once an object is there."""

from __future__ import annotations

import json
from typing import Any

from .errors import Causes, bad_request, invalid
from .kinds import PODS, Kind
from .names import quoted


def check_identity(kind: Kind, name: str, before: dict[str, Any], changed: dict[str, Any]) -> None:
    """That a change is for this object. Raises ApiError: 400 for other names, 422 for another uid."""
    old, new = before["metadata"], changed["metadata"]
    for field, what in (("name", "URL"), ("namespace", "request")):
        if new.get(field) not in (None, "", old.get(field)):
            said = f"the {field} of the object ({new[field]}) does not match the {field} on the {what}"
            raise bad_request(f"{said} ({old.get(field)})")
    causes: Causes = []
    for field in ("uid", "deletionTimestamp"):
        if new.get(field) not in (None, "", old.get(field)):
            causes.append((f"metadata.{field}", f"Invalid value: {quoted(new[field])}: field is immutable"))
    if causes:
        raise invalid(kind.kind, name, causes, kind.group)


def check_update(kind: Kind, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises ApiError 422."""
    causes: Causes = []
    metadata = before["metadata"]
    added = set(after["metadata"].get("finalizers") or []) - set(metadata.get("finalizers") or [])
    if added and metadata.get("deletionTimestamp"):
        why = f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}"
        causes.append(("metadata.finalizers", f"Forbidden: {why}"))
    if kind is PODS:
        _check_pod(before["spec"], after["spec"], causes)
    elif kind.plural in ("configmaps", "secrets"):
        if kind.plural == "secrets" and before.get("type") != after.get("type"):
            causes.append(("type", f"Invalid value: {quoted(after.get('type', ''))}: field is immutable"))
        if before.get("immutable"):
            for field in ("data", "binaryData", "immutable"):
                if before.get(field) != after.get(field):
                    causes.append((field, "Forbidden: field is immutable when `immutable` is set"))
    elif kind.plural == "persistentvolumeclaims":
        _check_claim(before, after, causes)
    elif kind.plural.endswith("rolebindings") and before.get("roleRef") != after.get("roleRef"):
        said = f"Invalid value: {quoted(json.dumps(after.get('roleRef')))}: cannot change roleRef"
        causes.append(("roleRef", said))
    if causes:
        raise invalid(kind.kind, after["metadata"]["name"], causes, kind.group)


def _check_pod(before: dict[str, Any], after: dict[str, Any], causes: Causes) -> None:
    """Almost nothing of a pod's spec can be changed."""
    old, new = before.get("activeDeadlineSeconds"), after.get("activeDeadlineSeconds")
    if old is not None and (new is None or new > old):
        why = (
            "must be less than or equal to previous value" if new else "must not update from a positive integer to nil"
        )
        causes.append(("spec.activeDeadlineSeconds", f"Invalid value: {json.dumps(new)}: {why}"))
    kept = [_without_seconds(toleration) for toleration in after.get("tolerations") or []]
    if any(_without_seconds(toleration) not in kept for toleration in before.get("tolerations") or []):
        why = "existing toleration can not be modified except its tolerationSeconds"
        causes.append(("spec.tolerations", f"Forbidden: {why}"))
    if _fixed(before) != _fixed(after):
        allowed = (
            "`spec.containers[*].image`, `spec.initContainers[*].image`, `spec.activeDeadlineSeconds` or "
            "`spec.tolerations` (only additions to existing tolerations)"
        )
        causes.append(("spec", f"Forbidden: pod updates may not change fields other than {allowed}"))


def _check_claim(before: dict[str, Any], after: dict[str, Any], causes: Causes) -> None:
    bound = (before.get("status") or {}).get("phase") == "Bound"
    fixed = [{**item["spec"], "resources": {}} if bound else item["spec"] for item in (before, after)]
    if not before["spec"].get("volumeName"):
        # binding writes the volume's name
        fixed = [{**spec, "volumeName": ""} for spec in fixed]
    if fixed[0] != fixed[1]:
        why = "spec is immutable after creation except resources.requests for bound claims"
        causes.append(("spec", f"Forbidden: {why}"))


def _fixed(spec: dict[str, Any]) -> dict[str, Any]:
    fixed = {name: value for name, value in spec.items() if name not in ("activeDeadlineSeconds", "tolerations")}
    for containers in ("containers", "initContainers"):
        if containers in fixed:
            fixed[containers] = [{**container, "image": ""} for container in fixed[containers]]
    return fixed


def _without_seconds(toleration: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in toleration.items() if name != "tolerationSeconds"}
