"""A session of another sharing layer in its pod's metadata."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.kubernetes.annotations import (
    SESSION_LABEL,
    AnnotationProblem,
    SessionAnnotations,
    gpu_names,
    is_layer_session,
    is_session,
    pod_session,
)
from gpushare_spawner.model.layers import LayerName


def a_session(layer: LayerName, units: int = 25, count: int = 1, quota: str = "") -> SessionAnnotations:
    return SessionAnnotations(
        session="ada/lab",
        template="quarter",
        share_units=units,
        gpus=gpu_names(layer, "ada/lab", count),
        gpu_indices=tuple(range(count)),
        tier_since=12.5,
        effective_units=units,
        quota=quota,
        layer=layer,
    )


OTHERS = [name for name in LayerName if name is not LayerName.NATIVE]


@given(st.sampled_from(OTHERS), st.integers(1, 100), st.integers(1, 64), st.sampled_from(["", "group:ml"]))
def test_what_is_written_is_read(layer: LayerName, units: int, count: int, quota: str) -> None:
    session = a_session(layer, 100 if count > 1 else units, count, quota)
    assert pod_session(session.annotations(), session.labels()) == session
    assert session.share.count == count


def test_agents_leave_such_a_pod_alone() -> None:
    session = a_session(LayerName.KAI)
    assert SESSION_LABEL not in session.labels()
    assert is_layer_session(session.labels())
    assert not is_session(session.labels())
    assert "gpushare-spawner.io/gpu" not in session.annotations()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpushare-spawner.io/gpu-count": "0"}, "write a whole number from 1 to 64"),
        ({"gpushare-spawner.io/gpu-count": "many"}, "write a whole number from 1 to 64"),
        ({"gpushare-spawner.io/share": "101"}, "write units of 1 %"),
    ],
)
def test_a_wrong_annotation_is_named(changes: dict[str, str], said: str) -> None:
    session = a_session(LayerName.KAI)
    with pytest.raises(AnnotationProblem, match=said):
        pod_session({**session.annotations(), **changes}, session.labels())


@pytest.mark.parametrize("layer", ["", "native", "moon"])
def test_a_label_without_another_layer_is_named(layer: str) -> None:
    session = a_session(LayerName.KAI)
    with pytest.raises(AnnotationProblem, match=f"layer is '{layer}': write one of time-slicing, mps, mig"):
        pod_session(session.annotations(), {next(iter(session.labels())): layer})
