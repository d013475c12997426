"""A node's report has a ConfigMap with a valid name of its own."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as some

from gpushare_spawner.model.kubernetes.objects import misplaced_report, report_name
from gpushare_spawner.model.report import Report


def test_a_report_is_misplaced_unless_it_is_in_its_own_nodes_configmap() -> None:
    report = Report(node="a", published_at=1.0, gpus=())
    assert misplaced_report("gpushare-report-a", report) is None
    assert misplaced_report("gpushare-report-b", report) == (
        "the ConfigMap gpushare-report-b has a report of node a, whose ConfigMap is gpushare-report-a"
    )


def test_two_long_node_names_make_two_report_names() -> None:
    assert report_name("node-1.example.org") == "gpushare-report-node-1.example.org"
    long = "n" * 250
    assert report_name(long) != report_name(long + "m")


@given(some.text(min_size=1, max_size=300))
def test_every_node_name_makes_a_valid_report_name(node: str) -> None:
    name = report_name(node)
    assert len(name) <= 253
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", name)
