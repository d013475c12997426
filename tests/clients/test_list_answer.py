"""A list of the API server, read object by object."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.clients.api import ListAnswer

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


@settings(max_examples=40)
@given(
    items=st.lists(st.dictionaries(st.text(max_size=9), values, max_size=3), max_size=5),
    others=st.dictionaries(st.text(max_size=9), values, max_size=3),
    last=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
)
def test_items_and_version_are_what_the_whole_answer_has(
    items: list[dict[str, Any]], others: dict[str, Any], last: bool, indent: int | None
) -> None:
    metadata = {"metadata": {"resourceVersion": "7", "selfLink": ""}}
    whole = {**others, **({"items": items} | metadata if last else metadata | {"items": items})}
    answer = ListAnswer(json.dumps(whole, indent=indent))
    assert list(answer.items()) == items
    assert answer.version == "7"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ValueError),
        ("[]", ValueError),
        ('{"items": [{"a": 1}', ValueError),
        ('{"items": [1, 2], "metadata": {"resourceVersion": "7"}', ValueError),
        ('{"items" [1]}', ValueError),
        ('{"items": []}', KeyError),
        ('{"metadata": {}, "items": []}', KeyError),
    ],
)
def test_an_answer_that_is_no_list_is_an_error(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(ListAnswer(text).items())


def test_items_that_nobody_keeps_take_no_memory() -> None:
    pod = {"metadata": {"name": "p"}, "spec": {"env": [{"name": f"V{number}", "value": "x"} for number in range(50)]}}
    text = json.dumps({"metadata": {"resourceVersion": "7"}, "items": [pod] * 2000})
    peaks = []
    for read in (lambda: [item["metadata"]["name"] for item in ListAnswer(text).items()], lambda: json.loads(text)):
        tracemalloc.start()
        try:
            read()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[0] < peaks[1] / 20, peaks
