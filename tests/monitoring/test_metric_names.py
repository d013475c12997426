"""Prometheus' linter finds nothing in the metrics of service and agent."""

from __future__ import annotations

import subprocess

from prometheus_client import CollectorRegistry, generate_latest

from gpushare_spawner.agent.metrics import ReportCollector
from gpushare_spawner.service.web.metrics import exposition
from tests.monitoring.states import report, trouble


def complaints(promtool: str, text: bytes) -> str:
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False, timeout=30)
    return (done.stdout + done.stderr).decode() or (f"exit status {done.returncode}" if done.returncode else "")


def test_metrics_of_the_service_keep_the_naming_rules(promtool: str) -> None:
    assert complaints(promtool, exposition(*trouble())) == ""


def test_metrics_of_an_agent_keep_the_naming_rules(promtool: str) -> None:
    registry = CollectorRegistry()
    registry.register(ReportCollector(report, names=True))
    assert complaints(promtool, generate_latest(registry)) == ""
