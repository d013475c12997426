"""The three kinds of patches: JSON patch (RFC 6902), merge patch (RFC 7386) and Kubernetes' strategic merge patch.

Each takes a document and a patch and returns a new document; the document given may be changed on the way.
"""

from __future__ import annotations

import copy
from typing import Any

from .errors import ApiError, bad_request

# how lists are merged in a strategic merge patch: the field that tells their items apart; from the API's reference
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "conditions": "type",
    "addresses": "type",
    "taints": "key",
    "hostAliases": "ip",
    "podIPs": "ip",
    "ownerReferences": "uid",
    "secrets": "name",
}
_PORTS = {"Service": "port"}
_PRIMITIVE_LISTS = {"finalizers"}


def json_patch(document: Any, operations: Any) -> Any:
    """Apply operations in turn. Raises ApiError: 400 for what is no patch, 422 where the document does not fit."""
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    for operation in operations:
        if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
            raise bad_request(f"not an operation of a JSON patch: {operation!r}")
        try:
            document = _operate(document, operation)
        except (KeyError, IndexError, ValueError, TypeError):
            raise _does_not_apply() from None
    return document


def _does_not_apply() -> ApiError:
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request")


def merge_patch(document: Any, patch: Any) -> Any:
    """None removes a field; an object is merged; anything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def strategic_merge_patch(document: Any, patch: Any, kind: str) -> Any:
    """As a merge patch, but lists whose items have a key are merged by it."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    if patch.get("$patch") == "delete":
        return {}
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            result[field] = [entry for entry in result.get(field, []) if entry not in value]
        elif name.startswith(("$setElementOrder/", "$retainKeys")):
            continue
        elif value is None:
            result.pop(name, None)
        elif isinstance(value, list):
            result[name] = _merge_lists(result.get(name) or [], value, name, kind)
        else:
            result[name] = strategic_merge_patch(result.get(name), value, kind)
    return result


def _merge_lists(old: list[Any], new: list[Any], name: str, kind: str) -> list[Any]:
    if name in _PRIMITIVE_LISTS:
        return old + [entry for entry in new if entry not in old]
    key = _PORTS.get(kind, "containerPort") if name == "ports" else MERGE_KEYS.get(name)
    if key is None or any(isinstance(item, dict) and item.get("$patch") == "replace" for item in new):
        return [item for item in copy.deepcopy(new) if not (isinstance(item, dict) and "$patch" in item)]
    merged = {item.get(key): item for item in old}
    for item in new:
        if not isinstance(item, dict) or key not in item:
            raise bad_request(f"map: {item!r} does not contain declared merge key: {key}")
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic_merge_patch(merged.get(item[key]), item, kind)
    return list(merged.values())


def _operate(document: Any, operation: dict[str, Any]) -> Any:
    op, path = operation.get("op"), _steps(operation["path"])
    if op in ("add", "replace", "test") and "value" not in operation:
        raise bad_request(f"a JSON patch's {op} has a value")
    if op == "add":
        return _add(document, path, copy.deepcopy(operation["value"]))
    if op == "remove":
        return _remove(document, path)
    if op == "replace":
        _look(document, path)
        return operation["value"] if not path else _add(_remove(document, path), path, operation["value"])
    if op == "test":
        found = _look(document, path)
        if found != operation["value"]:
            raise _does_not_apply()
        return document
    if op in ("move", "copy"):
        source = _steps(operation["from"])
        value = copy.deepcopy(_look(document, source))
        return _add(_remove(document, source) if op == "move" else document, path, value)
    raise _does_not_apply()


def _steps(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise bad_request(f"a JSON patch's path starts with '/': {path!r}")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _look(document: Any, path: list[str]) -> Any:
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document


def _add(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent = _look(document, path[:-1])
    if isinstance(parent, list):
        position = len(parent) if path[-1] == "-" else int(path[-1])
        if not 0 <= position <= len(parent):
            raise IndexError(path[-1])
        parent.insert(position, value)
    elif isinstance(parent, dict):
        parent[path[-1]] = value
    else:
        raise KeyError(path[-1])
    return document


def _remove(document: Any, path: list[str]) -> Any:
    parent = _look(document, path[:-1])
    if isinstance(parent, list):
        del parent[int(path[-1])]
    else:
        del parent[path[-1]]
    return document
