"""The alert rules: Prometheus accepts them, each fires when it should, and the guide says what to do about each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from gpushare_spawner.shipped import shipped

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "guides" / "monitor.md"


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(shipped("monitoring/alerts.yaml").read_text())["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", shipped("monitoring/alerts.yaml"))


def test_each_alert_fires_when_it_should_and_not_before(promtool: str, tmp_path: Path) -> None:
    # promtool compares all annotations of an alert; the tests repeat the summaries only
    tested = groups()
    for rule in (rule for group in tested for rule in group["rules"]):
        rule["annotations"] = {"summary": rule["annotations"]["summary"]}
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": tested}))
    (tmp_path / "alert_tests.yaml").write_text((HERE / "alert_tests.yaml").read_text())
    run(promtool, "test", "rules", tmp_path / "alert_tests.yaml")


def test_there_is_a_test_of_each_alert_that_fires_and_of_one_that_does_not() -> None:
    tests = [
        (one["alertname"], bool(one["exp_alerts"]))
        for group in yaml.safe_load((HERE / "alert_tests.yaml").read_text())["tests"]
        for one in group["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in rules()}
    assert {(name, fires) for name in names for fires in (True, False)} == set(tests)


def test_each_alert_says_what_it_means_and_links_to_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)$", GUIDE.read_text(), flags=re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules()]
    for rule in rules():
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}, rule["alert"]
        assert notes["runbook_url"].endswith(f"/docs/guides/monitor.md#{rule['alert'].lower()}")
        assert rule["labels"]["severity"] in ("warning", "critical")
