"""What a container's process sees: its environment, its arguments, and paths that mounts would have put in place.

Pods here are processes on one file system and one network. So a path inside a mount becomes the path that is mounted,
and all addresses (0.0.0.0) become the pod's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ALL_ADDRESSES = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])|\[::\]")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


class MissingReference(Exception):
    """A Secret or ConfigMap that the container names is not there."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) in a value or argument; $$ is a dollar; an unknown name stays."""

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(replace, text)


def field(pod: dict[str, Any], path: str) -> str:
    """A downward API field, like metadata.name or metadata.labels['app']."""
    found = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if found:
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    value: Any = pod
    for step in path.split("."):
        value = (value or {}).get(step)
    return "" if value is None else str(value)


def container_environment(
    pod: dict[str, Any],
    container: dict[str, Any],
    secrets: Mapping[str, Mapping[str, str]],
    config_maps: Mapping[str, Mapping[str, str]],
) -> dict[str, str]:
    """The container's own variables. Raises MissingReference."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        for kind, known in (("secretRef", secrets), ("configMapRef", config_maps)):
            if kind in source:
                data = _data(known, source[kind])
                variables |= {source.get("prefix", "") + name: value for name, value in data.items()}
    for entry in container.get("env") or []:
        name, source = entry["name"], entry.get("valueFrom") or {}
        if "fieldRef" in source:
            variables[name] = field(pod, source["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in source:
            side, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            amounts = (container.get("resources") or {}).get(side) or {}
            variables[name] = str(amounts.get(resource, ""))
        elif "secretKeyRef" in source or "configMapKeyRef" in source:
            kind = "secretKeyRef" if "secretKeyRef" in source else "configMapKeyRef"
            reference = source[kind]
            data = _data(secrets if kind == "secretKeyRef" else config_maps, reference)
            if reference["key"] in data:
                variables[name] = data[reference["key"]]
            elif not reference.get("optional"):
                raise MissingReference(f"couldn't find key {reference['key']} in {reference['name']}")
        else:
            variables[name] = expand(entry.get("value") or "", variables)
    return variables


def in_place(text: str, mounts: Mapping[str, str], address: str) -> str:
    """A value or argument with the paths and addresses that hold for a process on this machine."""
    for inside in sorted(mounts, key=len, reverse=True):
        pattern = rf"(?<![\w./-]){re.escape(inside.rstrip('/'))}(?=[/:,;\"'\s]|$)"
        text = re.sub(pattern, lambda _, inside=inside: mounts[inside].rstrip("/"), text)  # type: ignore[misc]
    return ALL_ADDRESSES.sub(address, text)


def _data(known: Mapping[str, Mapping[str, str]], reference: dict[str, Any]) -> Mapping[str, str]:
    data = known.get(reference["name"])
    if data is None:
        if reference.get("optional"):
            return {}
        raise MissingReference(f'"{reference["name"]}" not found')
    return data
