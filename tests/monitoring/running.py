"""A Prometheus that scrapes the service's exposition, and what it answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from gpushare_spawner.service.web.metrics import CONTENT_TYPE, exposition
from gpushare_spawner.shipped import shipped
from tests.monitoring.states import counters, report, trouble
from tests.ports import free_port

SCRAPES = 4
"""Rates need two."""
WITHIN = 60.0
"""Seconds for start and scrapes, on a busy machine."""


def found_program(name: str) -> str | None:
    """Return the path of one of Prometheus' programs: in the folder $GPUSHARE_PROMETHEUS, or on the PATH."""
    return shutil.which(name, path=os.environ.get("GPUSHARE_PROMETHEUS") or None)


class _Service(BaseHTTPRequestHandler):
    """The service in trouble; counters grow with each scrape."""

    scrapes = 0

    def do_GET(self) -> None:
        type(self).scrapes += 1
        seen = self.scrapes
        body = exposition(*trouble(counters(10 * seen), report(1000.0 + 10 * seen)))
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


class Prometheus:
    """Its HTTP API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer. Raises urllib.error.URLError; AssertionError with Prometheus' own words."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    raise  # it is starting
                raise AssertionError(f"{query}: {error.read().decode()}") from None

    def values(self, query: str) -> list[float]:
        """Return the values of an instant query, without those that are not numbers."""
        found = [float(one["value"][1]) for one in self.ask("query", query=query)["result"]]
        return [value for value in found if math.isfinite(value)]


@contextlib.contextmanager
def service_in_trouble() -> Iterator[str]:
    """Serve the exposition of a service in trouble; yields its address."""
    service = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{service.server_port}"
    finally:
        service.shutdown()
        service.server_close()


@contextlib.contextmanager
def running_prometheus(program: str, folder: Path, target: str, **scrape: Any) -> Iterator[Prometheus]:
    """Run one with our alert rules until it has scraped an address SCRAPES times. ``scrape``: more of its settings."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(shipped("monitoring/alerts.yaml"))],
        "scrape_configs": [{"job_name": "gpushare", "static_configs": [{"targets": [target]}], **scrape}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            found = Prometheus(address)
            _wait(found, process, folder / "log")
            yield found
        finally:
            process.kill()
            process.wait()


def _wait(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        # connections are refused at first, then answered with 503
        with contextlib.suppress(OSError):
            evaluated = all(
                rule["health"] == "ok" for group in prometheus.ask("rules")["groups"] for rule in group["rules"]
            )
            if evaluated and max(prometheus.values("sum_over_time(up[1m])"), default=0) >= SCRAPES:
                return
        time.sleep(0.2)
    raise AssertionError(f"Prometheus has not scraped {SCRAPES} times within {WITHIN:g} s: {log.read_text()}")
