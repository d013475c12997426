import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quantity import (
    parse_bytes,
    parse_cores,
    parse_percent_or_bytes,
    parse_seconds,
    resolve_bytes,
)

GI = 2**30


@pytest.mark.parametrize(
    ("written", "amount"),
    [("4Gi", 4 * GI), ("512Mi", 2**29), ("16G", 16 * 10**9), (1024, 1024), ("1.5Gi", 3 * 2**29), ("4GiB", 4 * GI)],
)
def test_bytes(written: int | str, amount: int) -> None:
    assert parse_bytes(written) == amount


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("15m", 900), ("1h30m", 5400), (90, 90), ("90", 90), ("2d", 172800), ("250ms", 0.25), (0.5, 0.5)],
)
def test_durations(written: float | str, seconds: float) -> None:
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize(("written", "cores"), [("500m", 0.5), (4, 4), ("0.5", 0.5)])
def test_cores(written: int | str, cores: float) -> None:
    assert parse_cores(written) == cores


@pytest.mark.parametrize("parse", [parse_bytes, parse_seconds, parse_cores, parse_percent_or_bytes])
@pytest.mark.parametrize(
    "wrong", ["", "x", "-1", -1, None, True, float("nan"), float("inf"), "4 Gi Gi", "1h-3m", [], "1e9999"]
)
def test_nonsense_is_refused_with_an_example(parse: Callable[[Any], float], wrong: object) -> None:
    with pytest.raises(ValueError, match=r"write"):
        parse(wrong)


@given(st.text(max_size=20))
def test_no_text_makes_a_parser_fail_otherwise(text: str) -> None:
    for parse in (parse_bytes, parse_seconds, parse_cores, parse_percent_or_bytes):
        with contextlib.suppress(ValueError):
            assert parse(text) is not None


def test_part_of_a_gpu() -> None:
    assert resolve_bytes("25%", 16 * GI) == 4 * GI
    assert resolve_bytes("12Gi", 16 * GI) == 12 * GI
    with pytest.raises(ValueError, match="percentage"):
        resolve_bytes("0%", 16 * GI)
