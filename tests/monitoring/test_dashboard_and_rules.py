"""Each query of the Grafana dashboard and of the alert rules returns data in a real Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from gpushare_spawner.shipped import shipped
from tests.monitoring.conftest import program
from tests.monitoring.running import Prometheus, running_prometheus, service_in_trouble

GRAFANAS = {"$__rate_interval": "1m", "$__range_s": "60", "$__range": "1m", "$node": ".*"}
"""What Grafana puts in place of its variables."""


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    found, folder = program("prometheus"), tmp_path_factory.mktemp("prometheus")
    with service_in_trouble() as address, running_prometheus(found, folder, address) as prometheus:
        yield prometheus


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shipped("monitoring/grafana-dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def filled(query: str) -> str:
    for variable, value in GRAFANAS.items():
        query = query.replace(variable, value)
    assert "$" not in query
    return query


def test_each_query_of_the_dashboard_returns_data(scraping: Prometheus) -> None:
    assert len(queries()) > 25
    assert [query for query in queries() if not scraping.values(filled(query))] == []


def test_the_dashboards_list_of_nodes_has_the_nodes(scraping: Prometheus) -> None:
    (asked,) = (one["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", asked).groups()  # type: ignore[union-attr]
    assert scraping.ask(f"label/{label}/values", **{"match[]": metric}) == ["workstation"]


def test_each_alert_is_raised_by_its_trouble(scraping: Prometheus) -> None:
    rules = [
        rule
        for group in yaml.safe_load(shipped("monitoring/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    silent = [rule["alert"] for rule in rules if not scraping.values(rule["expr"])]
    assert silent == ["GPUShareNoMetrics"]  # there are metrics
    raised = scraping.ask("alerts")["alerts"]
    assert {alert["labels"]["alertname"] for alert in raised} >= {"GPUShareAgentUnavailable", "GPUShareBypassing"}
    # Prometheus writes its errors into the text
    assert [text for alert in raised for text in alert["annotations"].values() if "<" in text or "{{" in text] == []


def test_the_dashboard_has_no_field_that_grafana_does_not_know() -> None:
    register_default_plugins()
    read = json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder))
    assert _lost(dashboard(), read) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    register_default_plugins()
    wrong = dashboard()
    wrong["panels"][1]["options"]["colourMode"] = "value"
    read = json.loads(json.dumps(Dashboard.from_json(wrong), cls=JSONEncoder))
    assert _lost(wrong, read) == ["/panels/1/options/colourMode"]


def test_panels_have_titles_ids_of_their_own_and_do_not_overlap() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert all(panel["title"] for panel in every)
    cells = [
        (x, y)
        for panel in every
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_panels_that_name_users_say_so() -> None:
    naming = [panel for panel in panels() if re.search(r"\{\{(user|account)\}\}", json.dumps(panel["targets"]))]
    assert len(naming) > 3
    assert [panel["title"] for panel in naming if "names" not in panel.get("description", "")] == []


def _lost(given: Any, read: Any, path: str = "") -> list[str]:
    """The paths of what Grafana's classes did not keep, or changed."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            lost
            for name, value in given.items()
            for lost in (_lost(value, read[name], f"{path}/{name}") if name in read else [f"{path}/{name}"])
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [lost for at, one in enumerate(given) for lost in _lost(one, read[at], f"{path}/{at}")]
    return [] if given == read else [path]
