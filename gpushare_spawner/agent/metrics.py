"""The report as Prometheus metrics, over HTTP."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tornado.web import Application, RequestHandler

from gpushare_spawner.clocks import Budget
from gpushare_spawner.http_server import BoundedHTTPServer
from gpushare_spawner.metrics import GPU, HOST_MEMORY, NODE, families, session_families
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
CONNECTIONS_PER_SECOND = 100
MAX_HEADER_BYTES = 8192
REQUEST_WITHIN = 5.0
"""Seconds within which a peer must send its request."""
MADE_EVERY = 1.0
"""Seconds for which computed metrics are reused."""


class ReportCollector(Collector):
    """Metrics computed from the newest report at each scrape."""

    def __init__(self, report: Callable[[], Report], names: bool) -> None:
        """Store the source of reports.

        `names`: whether to include session metrics, which contain the names of users and templates.
        """
        self._report = report
        self._names = names

    def describe(self) -> Iterable[Metric]:
        # without this method, the registry would request a report during its setup
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the report, in bytes, seconds and share units of 1 %."""
        report = self._report()
        gpu = ("gpu", "uuid", "model")
        gpus = [((str(gpu.index), gpu.uuid, gpu.model), gpu) for gpu in report.gpus]
        yield from families(GPU, gpu, gpus)
        sessions = GaugeMetricFamily("gpushare_gpu_sessions", "Sessions with a share of the GPU", labels=gpu)
        for key, labelled in gpus:
            sessions.add_metric(key, sum(labelled.uuid in session.gpus for session in report.sessions))
        yield sessions
        yield from families(NODE, (), [((), report)])
        if self._names:
            yield from families(HOST_MEMORY, (), [((), report.host_memory)] if report.host_memory is not None else [])
            yield from session_families(
                ("session", "user", "template"),
                [((session.id, session.user, session.template), session) for session in report.sessions],
            )


class MetricsServer:
    """HTTP server of the metrics.

    ``GET /metrics`` returns GPU metrics to every client, and session metrics, which include names, only to clients with
    the token. Every local user can connect to an address of this machine, and every pod to an address of a node.
    Therefore connections, their duration and their input are limited, and the metrics are computed at most once per
    second.
    """

    def __init__(self, listener: socket.socket, report: Callable[[], Report], token_file: Path | None) -> None:
        """Serve on a listening socket. Without a token file, no client gets names. Raises OSError or ValueError."""
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._token_file = token_file
        self._made: dict[bool, tuple[float, bytes]] = {}
        if token_file is not None:
            _token(token_file)
        self._server = BoundedHTTPServer(
            metrics_application(self),
            most_connections=MAX_CONNECTIONS,
            title="the metrics",
            log=log,
            connects=Budget(self._loop.time, CONNECTIONS_PER_SECOND, MAX_CONNECTIONS, debt=1),
            no_keep_alive=True,
            max_header_size=MAX_HEADER_BYTES,
            max_body_size=1,
            max_buffer_size=64 * 1024,
            idle_connection_timeout=REQUEST_WITHIN,
            body_timeout=REQUEST_WITHIN,
        )
        self._server.add_sockets([listener])

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    def knows_token(self, authorization: str) -> bool:
        """Return whether a request's Authorization header is ``Bearer`` followed by the token."""
        if self._token_file is None:
            return False
        try:
            expected = f"Bearer {_token(self._token_file)}"
        except (OSError, ValueError) as error:
            log.error("cannot read the token for metrics: %s", error)
            return False
        return hmac.compare_digest(authorization.encode(), expected.encode())

    def text(self, names: bool) -> bytes:
        """Return the metrics in Prometheus' text format, at most a second old."""
        now = self._loop.time()
        if names not in self._made or now >= self._made[names][0] + MADE_EVERY:
            registry = CollectorRegistry()
            registry.register(ReportCollector(self._report, names))
            self._made[names] = now, generate_latest(registry)
        return self._made[names][1]


def metrics_application(metrics: MetricsServer) -> Application:
    """Return the application that answers requests for metrics."""
    # requests are not logged: any client could fill the log
    return Application([("/metrics", MetricsPage, {"metrics": metrics})], log_function=lambda handler: None)


class MetricsPage(RequestHandler):
    """The agent's metrics in Prometheus' text format, on `--metrics-port`.

    Without an `Authorization` header, the response contains the metrics of GPUs. With `Authorization: Bearer TOKEN` and
    the token in `--metrics-token-file`, it also contains the metrics of sessions and host memory. Any other token gets
    401.
    """

    metrics: MetricsServer

    def initialize(self, metrics: MetricsServer) -> None:
        self.metrics = metrics

    def get(self) -> None:
        authorization = self.request.headers.get("Authorization")
        names = authorization is not None and self.metrics.knows_token(authorization)
        if authorization is not None and not names:
            self.set_status(401)
            self.set_header("WWW-Authenticate", "Bearer")
            self.finish("wrong token\n")
            return
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(self.metrics.text(names))


def _token(path: Path) -> str:
    """Return the token in a file. Raises OSError or ValueError."""
    with open(path, "rb") as file:
        token = file.read(MAX_HEADER_BYTES).decode("ascii", errors="replace").strip()
    if not token:
        raise ValueError(f"{path} is empty; write a token into it")
    return token


def serve_metrics(
    port: int, report: Callable[[], Report], address: str = "127.0.0.1", token_file: Path | None = None
) -> Callable[[], None]:
    """Serve the metrics on an address and port of this machine. Returns the function that stops the server.

    Raises OSError, or ValueError for a token file without a token.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
        return MetricsServer(listener, report, token_file).close
    except BaseException:
        listener.close()
        raise
