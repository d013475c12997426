"""The bounds of a report: what a node may say at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gpushare_spawner.model.report import (
    DeliveredReport,
    GpuReport,
    HostMemoryReport,
    HostUseReport,
    Report,
    SessionReport,
)

SESSION = SessionReport(
    id="ann", user="ann", template="quarter", gpus=("GPU-0",), share_units=25, tier_since=1.0, effective_units=25,
    guaranteed_units=25, opened_at=1.0,
)  # fmt: skip
GPUS = tuple(GpuReport(index=index, uuid=f"GPU-{index}", model="A100", memory_bytes=2**30) for index in range(2))
HONEST = Report(node="n", published_at=1.0, gpus=GPUS, sessions=(SESSION,)).model_dump(mode="json")


def refused(report: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as problem:
        Report.model_validate_json(json.dumps(report))
    first = problem.value.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def test_an_honest_report_is_read() -> None:
    assert Report.model_validate_json(json.dumps(HONEST)).gpus == GPUS


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("gpus", "capacity_units", 1_000_000),
        ("gpus", "capacity_units", 1001),
        ("gpus", "memory_bytes", 2**63),
        ("gpus", "index", 10**6),
        ("gpus", "model", "x" * 1000),
        ("gpus", "power_watts", float("inf")),
        ("gpus", "temperature_celsius", float("nan")),
        ("gpus", "utilisation", float("nan")),
        ("sessions", "gpu_seconds", float("inf")),
        ("sessions", "gpu_seconds", float("nan")),
        ("sessions", "memory_bytes", 2**70),
        ("sessions", "kernels", 2**64),
        ("sessions", "last_gpu_activity", float("inf")),
        ("sessions", "share_units", 101),
    ],
)
def test_a_figure_beyond_its_bounds_is_refused_by_name(part: str, name: str, value: Any) -> None:
    lie = HONEST | {part: [HONEST[part][0] | {name: value}, *HONEST[part][1:]]}
    assert refused(lie).startswith(f"{part}.0.{name}: ")


@pytest.mark.parametrize("name", ["index", "uuid"])
def test_two_gpus_of_a_report_differ(name: str) -> None:
    first, second = HONEST["gpus"]
    assert f"two GPUs have the {'UUID' if name == 'uuid' else 'index'} {first[name]}" in refused(
        HONEST | {"gpus": [first, second | {name: first[name]}]}
    )


@pytest.mark.parametrize("model", [GpuReport, SessionReport, DeliveredReport, HostMemoryReport, HostUseReport])
def test_every_number_of_a_report_has_an_upper_bound(model: Any) -> None:
    """One without a bound would be added up for people who are not on that node."""
    properties = {name: _schemas(schema) for name, schema in model.model_json_schema()["properties"].items()}
    unbounded = [
        name
        for name, schemas in properties.items()
        for schema in schemas
        if schema.get("type") in ("integer", "number") and "maximum" not in schema
    ]
    assert unbounded in ([], ["pid"]), "a pid is shown to nobody"


def _schemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return list(schema.get("anyOf", [schema]))
