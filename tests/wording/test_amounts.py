"""Amounts as people read them."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpushare_spawner
from gpushare_spawner.wording import amounts

GIB, MIB = 2**30, 2**20


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that sets the time zone of this process, until the end of the test."""

    def set_zone(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("units", "gpus", "said"),
    [
        (0, 1, "0 GPU"),
        (1, 1, "0.01 GPU"),
        (25, 1, "0.25 GPU"),
        (100, 1, "1 GPU"),
        (100, 2, "2 GPUs"),
        (75, 2, "2 × 0.75 GPU"),
        (50, 2, "2 × 0.50 GPU"),
        (0, 2, "0 GPU"),
    ],
)
def test_a_share_is_said_in_gpus(units: int, gpus: int, said: str) -> None:
    assert amounts.gpu_share(units, gpus) == said


def test_a_share_with_fewer_units_on_the_last_gpu_is_said_with_them() -> None:
    said = [amounts.gpu_share(units, 2, 50) for units in (100, 70, 50, 10, 0)]
    assert said == ["1.50 GPU", "0.70 + 0.50 GPU", "2 × 0.50 GPU", "2 × 0.10 GPU", "0 GPU"]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 GiB"),
        (1, "1 MiB"),
        (256 * MIB, "256 MiB"),
        (GIB - MIB, "1023 MiB"),
        (GIB, "1 GiB"),
        (int(3.14 * GIB), "3.1 GiB"),
        (16 * GIB, "16 GiB"),
        (GIB - 1, "1 GiB"),
        (int(79.6 * GIB), "79.6 GiB"),
        (int(251.7 * GIB), "252 GiB"),
        (1000 * GIB, "1000 GiB"),
        (1536 * GIB, "1.5 TiB"),
        (-1, "0 GiB"),
    ],
)
def test_memory_has_the_unit_that_is_easiest_to_read(size: int, said: str) -> None:
    assert amounts.memory(size) == said


def test_a_part_of_a_total_names_its_unit_once_where_both_have_the_same() -> None:
    assert amounts.memory_of(3 * GIB, 16 * GIB) == "3 of 16 GiB"
    assert amounts.memory_of(256 * MIB, 16 * GIB) == "256 MiB of 16 GiB"
    assert amounts.memory_of(0, 16 * GIB) == "0 of 16 GiB"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-0.4, "0 s"),
        (-90, "0 s"),
        (0, "0 s"),
        (0.25, "0.25 s"),
        (59, "59 s"),
        (59.7, "1 min"),
        (60, "1 min"),
        (75, "1 min 15 s"),
        (900, "15 min"),
        (3600, "1 h"),
        (4000, "1 h 6 min"),
        (86400, "24 h"),
    ],
)
def test_a_duration_has_at_most_two_units_and_is_never_negative(seconds: float, said: str) -> None:
    assert amounts.duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (299, "4 min 59 s"),
        (301, "5 min"),
        (359.9, "5 min"),
        (3599, "59 min"),
        (4000, "1 h 6 min"),
    ],
)
def test_an_elapsed_time_has_no_seconds_from_five_minutes_on(seconds: float, said: str) -> None:
    assert amounts.elapsed(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 ms"), (0.0337, "34 ms"), (0.9996, "1.0 s"), (1.74, "1.7 s"), (59.96, "1 min"), (75, "1 min 15 s")],
)
def test_a_latency_shows_milliseconds(seconds: float, said: str) -> None:
    assert amounts.latency(seconds) == said


NOON = 1_699_012_800.0  # 2023-11-03 12:00 UTC


@pytest.mark.parametrize(
    ("at", "said", "local"),
    [
        (NOON + 2 * 3600, "2023-11-03 14:00 UTC", "15:00"),
        (NOON + 11 * 3600 - 60, "2023-11-03 22:59 UTC", "23:59"),
        (NOON + 11 * 3600, "2023-11-03 23:00 UTC", "00:00 on 4 Nov"),
        (NOON - 13 * 3600, "2023-11-02 23:00 UTC", "00:00"),
        (NOON + 30 * 24 * 3600, "2023-12-03 12:00 UTC", "13:00 on 3 Dec"),
    ],
)
def test_an_instant_for_all_time_zones_is_shown_in_local_time(
    at: float, said: str, local: str, in_zone: Callable[[str], None]
) -> None:
    in_zone("Europe/Berlin")
    assert amounts.utc(at) == said
    for written in (said, said.replace(" ", "\u00a0")):
        assert amounts.localised(f"At {written}, not 2023-13-41 14:00 UTC.", NOON) == (
            f"At {local}, not 2023-13-41 14:00 UTC."
        )


@pytest.mark.parametrize(
    ("seconds", "said"), [(20, "12:00:20"), (119.9, "12:01:59"), (120, "12:02"), (-1, "11:59:59"), (-120, "11:58")]
)
def test_near_instant_has_its_seconds(seconds: float, said: str, in_zone: Callable[[str], None]) -> None:
    in_zone("UTC")
    assert amounts.near_clock(NOON + seconds, NOON) == said


@pytest.mark.parametrize(("zone", "said"), [("UTC-9", "03:00 on 4 Nov"), ("UTC+9", "09:00")])
def test_the_day_is_that_of_the_readers_time_zone(zone: str, said: str, in_zone: Callable[[str], None]) -> None:
    in_zone(zone)
    assert amounts.clock(NOON + 6 * 3600, NOON) == said


def test_no_line_breaks_between_a_number_and_its_unit() -> None:
    assert amounts.unbroken("in 1 h 5 min of 0.25 GPU") == "in 1\u00a0h\u00a05\u00a0min of 0.25\u00a0GPU"
    assert amounts.unbroken("for 3 min 27 s") == "for 3\u00a0min\u00a027\u00a0s"
    assert amounts.unbroken("34 ms, 3 s, 95 %, 256 MiB") == "34\u00a0ms, 3\u00a0s, 95\u00a0%, 256\u00a0MiB"
    assert amounts.unbroken("3 sessions of 2 users") == "3 sessions of 2 users"


def test_a_number_goes_with_its_noun() -> None:
    assert (amounts.plural(1, "session"), amounts.plural(2, "session")) == ("1 session", "2 sessions")
    assert amounts.plural(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("hours", "said"),
    [(0, "0"), (0.004, "< 0.01"), (0.03, "0.03"), (1.5, "1.50"), (12.34, "12.3"), (99.97, "100"), (1234.5, "1,234")],
)
def test_gpu_hours_show_small_amounts_too(hours: float, said: str) -> None:
    assert amounts.gpu_hours(hours) == said


LOCAL_CLOCKS = {"clock", "near_clock"}
"""Functions that write an instant as this machine's local time, without a zone."""


def local_times_in(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that take such a function from the wording."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpushare_spawner.wording"):
            modules |= {name.asname or name.name for name in node.names}
            if LOCAL_CLOCKS & {name.name for name in node.names}:
                yield node.lineno
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        if named and node.attr in LOCAL_CLOCKS:  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["service", "spawner"])
def test_no_text_for_a_browser_or_a_mail_has_the_local_time_of_the_hubs_machine(part: str) -> None:
    folder = Path(gpushare_spawner.__file__).parent / part
    files = [path for path in folder.rglob("*.py") if "node_modules" not in path.parts]
    assert files
    found = [
        f"{path.relative_to(folder)}:{line}" for path in files for line in local_times_in(ast.parse(path.read_text()))
    ]
    assert found == [], "use utc(): pages show it in the reader's zone"


@pytest.mark.parametrize(
    "text",
    [
        "from gpushare_spawner.wording.amounts import clock as clock_time",
        "from gpushare_spawner.wording.amounts import near_clock",
        "from gpushare_spawner.wording import amounts\namounts.clock(1, 2)",
    ],
)
def test_each_way_to_take_a_local_time_is_seen(text: str) -> None:
    assert list(local_times_in(ast.parse(text)))
