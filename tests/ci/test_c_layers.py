"""The check of the C library's layers notices each kind of violation."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
LAYERS = ("low", "high")


def write(folder: Path, **sources: str) -> Path:
    """Sources by their names, `__` for the slash; each begins with what keeps the compiler quiet."""
    for name, text in sources.items():
        path = folder / (name.replace("__", "/") + ".c")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def test_calls_downward_and_within_a_layer_are_no_violation(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        low__clock="int clock_now(void) { return 1; }",
        high__lease="int clock_now(void); int lease_end(void) { return clock_now(); }",
        high__leases="int lease_end(void); int lease_all(void) { return lease_end(); }",
        init="int lease_all(void); int init_all(void) { return lease_all(); }",
    )
    assert c_layers.problems(folder, LAYERS) == []


def test_a_symbol_of_a_higher_layer_is_reported_with_both_sources(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        low__clock="int lease_end(void); int clock_now(void) { return lease_end(); }",
        high__lease="int init_count; int lease_end(void) { return 1; }",
        init="int init_all(void) { return 1; }",
    )
    assert c_layers.problems(folder, LAYERS, ("init_count",)) == [
        "low/clock.c uses lease_end of high/lease.c, which is in a higher layer"
    ]


def test_the_top_folder_is_above_all_layers(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        high__lease="extern int init_count; int lease_end(void) { return init_count; }",
        init="int init_count = 1;",
    )
    assert c_layers.problems(folder, LAYERS) == ["high/lease.c uses init_count of init.c, which is in a higher layer"]


def test_a_circle_over_three_sources_of_one_layer_is_reported_once(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        low__a="int b(void); int a(void) { return b(); }",
        low__b="int c(void); int b(void) { return c(); }",
        low__c="int a(void); int c(void) { return a(); }",
        high__d="int a(void); int d(void) { return a(); }",
    )
    assert c_layers.problems(folder, LAYERS) == [
        "these sources depend on each other in a circle: low/a.c, low/b.c, low/c.c"
    ]


def test_an_include_of_a_higher_layers_header_is_reported(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(tmp_path, low__clock='#include "high/lease.h"\nint clock_now(void) { return LEASES; }')
    (folder / "high").mkdir()
    (folder / "high" / "lease.h").write_text("#define LEASES 1\n")
    assert c_layers.problems(folder, LAYERS) == ["low/clock.c includes high/lease.h, which is in a higher layer"]


def test_a_use_by_an_inline_function_counts_for_the_source_that_includes_it(
    c_layers: ModuleType, tmp_path: Path
) -> None:
    folder = write(
        tmp_path,
        low__clock='#include "low/clock.h"\nint clock_now(void) { return clock_lease(); }',
        high__lease="int lease_end(void) { return 1; }",
    )
    (folder / "low" / "clock.h").write_text(
        "int lease_end(void);\nstatic inline int clock_lease(void) { return lease_end(); }\n"
    )
    assert c_layers.problems(folder, LAYERS) == [
        "low/clock.c uses lease_end of high/lease.c, which is in a higher layer"
    ]


def test_a_global_symbol_must_begin_with_the_name_of_its_file_or_its_singular(
    c_layers: ModuleType, tmp_path: Path
) -> None:
    folder = write(
        tmp_path, low__lanes="int lanes_all, lane_first, wrapped_cuInit; static int own; int tell(void) { return own; }"
    )
    assert c_layers.problems(folder, LAYERS, ("wrapped_",)) == [
        "low/lanes.c defines tell; its name must begin with lane"
    ]


def test_a_folder_that_is_no_layer_is_an_error(c_layers: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"other/clock\.c: other is no layer; the layers are low, high"):
        c_layers.problems(write(tmp_path, other__clock="int clock_now;"), LAYERS)


def test_listed_exceptions_of_an_older_library_are_no_violation(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path, low__a="int b(void); int a(void) { return b(); }", high__b="int a(void); int b(void) { return a(); }"
    )
    circle = ("high/b.c", "low/a.c")
    assert c_layers.new_problems(folder, LAYERS, {"b": "why"}, [circle]) == []
    assert c_layers.new_problems(folder, LAYERS, {}, []) == [
        "low/a.c uses b of high/b.c, which is in a higher layer",
        "these sources depend on each other in a circle: high/b.c, low/a.c",
    ]


def test_a_listed_exception_that_is_gone_is_reported(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(tmp_path, low__a="int a(void) { return 1; }", high__b="int a(void); int b(void) { return a(); }")
    assert c_layers.new_problems(folder, LAYERS, {"b": "why"}, [("high/b.c", "low/a.c")]) == [
        "b is not used by a lower layer: remove it from the list",
        "this circle is gone: remove it from the list: high/b.c, low/a.c",
    ]


def test_a_call_of_libc_where_none_may_be_is_reported(c_layers: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        dlsym="#include <string.h>\nint low_a(void); int dlsym_(char *n) { return strcmp(n, n + 1) + low_a(); }",
        low__a="extern int _r_debug; int low_a(void) { return _r_debug; }",
    )
    assert c_layers.foreign_symbols(folder, LAYERS, ("dlsym.c", "low/a.c"), {"_r_debug"}) == [
        "dlsym.c calls strcmp, which sanitizers replace before they are ready"
    ]
    assert c_layers.foreign_symbols(folder, LAYERS, ("gone.c",), ()) == [
        "gone.c is missing: it is listed as one that calls nothing of libc"
    ]


def test_a_variable_that_a_forked_child_neither_resets_nor_may_keep_is_reported(
    c_layers: ModuleType, tmp_path: Path
) -> None:
    registration = '__asm__(".section forks\\nreset_in_child_b: .long 0\\n.text");'
    macro = f"#define RESET_IN_CHILD(function) {registration}"
    folder = write(
        tmp_path,
        low__a="int a(void) { static int calls; return ++calls; }",
        low__b=f"{macro}\nstatic int *list, *other;\nint b(void) {{ return list == other; }}\n"
        "RESET_IN_CHILD(b_reset)\nvoid b_reset(void) { list = 0; }",
        low__c="static const int c_table[] = {1, 2}; int c(int i) { return c_table[i]; }",
        high__d="__thread int d_value = 1;",
        high__e="int e_value; int e_other;",
    )
    kept = {"high/e.c": {"e_value": "why", "e_gone": "why"}, "gone.c": {"x": "why"}}
    advice = "name it in the function that RESET_IN_CHILD registers, or list it in KEPT_IN_CHILD"
    assert sorted(c_layers.state_problems(folder, LAYERS, kept)) == [
        "gone.c is listed in KEPT_IN_CHILD, and is no source",
        f"high/d.c: a forked child keeps d_value: {advice}",
        f"high/e.c: a forked child keeps e_other: {advice}",
        "high/e.c: e_gone is listed in KEPT_IN_CHILD, and is reset or no variable: remove it from the list",
        f"low/a.c: a forked child keeps calls: {advice}",
        f"low/b.c: a forked child keeps other: {advice}",
    ]
