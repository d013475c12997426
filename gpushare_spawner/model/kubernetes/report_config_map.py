"""The ConfigMap in which the agent of a node publishes its report."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpushare_spawner.model.cordon import Cordon
from gpushare_spawner.model.kubernetes.prefix import PREFIX
from gpushare_spawner.model.report import Report

REPORT_COMPONENT_LABEL = "app.kubernetes.io/component"
REPORT_COMPONENT = "gpushare-report"
REPORT_SELECTOR = f"{REPORT_COMPONENT_LABEL}={REPORT_COMPONENT}"
"""Label selector: the reports' ConfigMaps, in the hub's namespace."""
REPORT_KEY = "report.json"
"""The key of a report's ConfigMap that holds `model.report.Report` as JSON."""
PUBLISHED_AT = PREFIX + "published-at"
"""Annotation of a report's ConfigMap: seconds since the epoch (UTC)."""
REPORT_REFRESH_SECONDS = 60.0
"""An agent publishes at least this often, even if nothing has changed."""
REPORT_STALE_SECONDS = 120.0
"""An older report is stale: nothing is placed on its node."""

CORDON = PREFIX + "cordon"
"""Annotation of a report's ConfigMap: `model.cordon.Cordon` of the node as JSON, written by the service. That of a GPU
has a dash and its UUID behind this name."""

_MAX_NAME = 253  # an object's name is a DNS subdomain (RFC 1123)
_DIGEST = 8


def report_name(node: str) -> str:
    """The name of a node's report ConfigMap.

    Node names are valid object names already; one that is too long or is not is made so, with a digest that keeps two
    such nodes apart.
    """
    name = f"{REPORT_COMPONENT}-{node}"
    valid = re.sub(r"[^a-z0-9.-]+", "-", name.lower())
    # no label of a DNS name may be empty, or start or end with '-'
    valid = re.sub(r"-*\.[.-]*", ".", valid).strip(".-")
    if valid == name and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:_DIGEST]
    return f"{valid[: _MAX_NAME - _DIGEST - 1].rstrip('.-')}-{digest}"


def cordon_name(gpu: str) -> str:
    """Return the name of the annotation with the cordon of a GPU (UUID), or of the node (empty)."""
    return f"{CORDON}-{gpu}" if gpu else CORDON


def cordon_annotations(cordons: Iterable[Cordon]) -> dict[str, str]:
    """Return these cordons as annotations."""
    return {cordon_name(one.gpu): one.model_dump_json(exclude_defaults=True) for one in cordons}


def cordons_of(annotations: Mapping[str, str] | None) -> tuple[Cordon, ...]:
    """Return the cordons that the annotations of a report's ConfigMap say. Raises pydantic.ValidationError."""
    return tuple(
        Cordon.model_validate_json(text)
        for name, text in sorted((annotations or {}).items())
        if name == CORDON or name.startswith(f"{CORDON}-")
    )


def read_report(config_map: Mapping[str, Any]) -> Report:
    """Return the report of a ConfigMap, with the cordons of its annotations. Raises pydantic.ValidationError.

    The annotations count: what the agent itself reports of cordons can be older.
    """
    report = Report.model_validate_json((config_map.get("data") or {}).get(REPORT_KEY) or "")
    return report.with_cordons(cordons_of(config_map["metadata"].get("annotations")))


def misplaced_report(config_map: str, report: Report) -> str | None:
    """Return why a report is not to be believed, as a sentence, or None: it is in its own node's ConfigMap.

    `config_map` is the ConfigMap's name. The API server lets each agent write its own node's ConfigMap only, whatever
    stands in it: the name, not the content, says whose report it is.
    """
    expected = report_name(report.node)
    if config_map == expected:
        return None
    return f"the ConfigMap {config_map} has a report of node {report.node}, whose ConfigMap is {expected}"


def written_report(report: Report) -> str:
    """A report as its ConfigMap has it, for `Report.model_validate_json`.

    What is as it is by default is left out: a ConfigMap may have 1 MiB, and every hub is sent every report.
    """
    said = report.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"version": report.version, **said}, separators=(",", ":"), ensure_ascii=False)
