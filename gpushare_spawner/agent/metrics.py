"""The report as Prometheus metrics, over HTTP."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application, RequestHandler

from gpushare_spawner.agent.log_once import LogOnce
from gpushare_spawner.agent.rate_limit import Budget
from gpushare_spawner.agent.sockets.descriptors import Acceptor
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
CONNECTIONS_PER_SECOND = 100
MAX_HEADER_BYTES = 8192
REQUEST_WITHIN = 5.0
"""Seconds that a peer has to send its request."""
ANSWER_WITHIN = 30.0
"""Seconds after which a connection is closed, whatever it does."""
MADE_EVERY = 1.0
"""Seconds for which metrics are answered with again."""


class ReportCollector(Collector):
    """Makes metrics of the newest report with each scrape."""

    def __init__(self, report: Callable[[], Report], names: bool) -> None:
        """`names`: with sessions, and so with the names of users and templates."""
        self._report = report
        self._names = names

    def describe(self) -> Iterable[Metric]:
        # without it the registry would ask for a report while it is being set up
        return ()

    def collect(self) -> Iterable[Metric]:
        """Everything that is worth a graph; bytes, seconds and share units of 1 %."""
        report = self._report()
        gpu = ("gpu", "model")
        capacity = GaugeMetricFamily(
            "gpushare_gpu_capacity_units", "Units of 1 % that the agent may guarantee", labels=gpu
        )
        total = GaugeMetricFamily("gpushare_gpu_memory_bytes", "Memory of the GPU", labels=gpu)
        used = GaugeMetricFamily("gpushare_gpu_memory_used_bytes", "Memory in use on the GPU", labels=gpu)
        healthy = GaugeMetricFamily("gpushare_gpu_healthy", "1 while the GPU is healthy", labels=gpu)
        waiting = GaugeMetricFamily(
            "gpushare_gpu_waiting_sessions", "Sessions with GPU work that wait for a lease", labels=gpu
        )
        sessions = GaugeMetricFamily("gpushare_gpu_sessions", "Sessions with a share of the GPU", labels=gpu)
        for one in report.gpus:
            label = (one.uuid, one.model)
            capacity.add_metric(label, one.capacity_units)
            total.add_metric(label, one.memory_bytes)
            used.add_metric(label, one.memory_used_bytes)
            healthy.add_metric(label, one.healthy)
            waiting.add_metric(label, one.waiting)
            sessions.add_metric(label, sum(one.uuid in session.gpus for session in report.sessions))
        gpus = [capacity, total, used, healthy, waiting, sessions]
        if not self._names:
            return gpus
        of = ("session", "user", "template")
        effective = GaugeMetricFamily(
            "gpushare_session_effective_units", "Units that the tier leaves the session", labels=of
        )
        guaranteed = GaugeMetricFamily(
            "gpushare_session_guaranteed_units", "Units that are guaranteed to the session now", labels=of
        )
        memory = GaugeMetricFamily(
            "gpushare_session_memory_bytes",
            "GPU memory that the session has allocated, on the GPU or paged out",
            labels=of,
        )
        resident = GaugeMetricFamily(
            "gpushare_session_resident_bytes", "GPU memory of the session that is on the GPU", labels=of
        )
        seconds = GaugeMetricFamily(
            "gpushare_session_gpu_seconds",
            "Time with a burst of the session on its GPUs, since it was opened",
            labels=of,
        )
        busy = GaugeMetricFamily(
            "gpushare_session_busy", "1 while the session has GPU work that runs or waits", labels=of
        )
        bypassing = GaugeMetricFamily(
            "gpushare_session_bypassing_processes", "Processes that use the GPU without the library", labels=of
        )
        entitled = CounterMetricFamily(
            "gpushare_session_entitled_seconds",
            "GPU time that the session was entitled to while others competed",
            labels=of,
        )
        delivered = CounterMetricFamily(
            "gpushare_session_delivered_seconds", "GPU time that the session received while others competed", labels=of
        )
        waits = CounterMetricFamily("gpushare_session_waits", "Waits of the session's GPU work for a lease", labels=of)
        wait = GaugeMetricFamily(
            "gpushare_session_wait_seconds",
            "Length of the session's waits for a lease, by quantile",
            labels=(*of, "quantile"),
        )
        hits = CounterMetricFamily(
            "gpushare_session_memory_limit_hits", "Allocations of device memory that a limit refused", labels=of
        )
        host = GaugeMetricFamily(
            "gpushare_node_host_memory_bytes",
            "Host memory for paged-out GPU memory: budget, needed at most, paged out now",
            labels=("kind",),
        )
        if report.host_memory is not None:
            for kind in ("budget", "needed", "paged_out"):
                host.add_metric((kind,), getattr(report.host_memory, f"{kind}_bytes"))
        for session in report.sessions:
            label3 = (session.id, session.user, session.template)
            effective.add_metric(label3, session.effective_units)
            guaranteed.add_metric(label3, session.guaranteed_units)
            memory.add_metric(label3, session.memory_bytes)
            resident.add_metric(label3, session.resident_bytes)
            seconds.add_metric(label3, session.gpu_seconds)
            busy.add_metric(label3, session.gpu_busy)
            bypassing.add_metric(label3, len(session.bypassing_pids))
            entitled.add_metric(label3, session.delivered.entitled_seconds)
            delivered.add_metric(label3, session.delivered.delivered_seconds)
            waits.add_metric(label3, session.delivered.waits)
            hits.add_metric(label3, session.memory_limit_hits.count)
            wait.add_metric((*label3, "0.5"), session.delivered.wait_p50_seconds)
            wait.add_metric((*label3, "0.95"), session.delivered.wait_p95_seconds)
        return [
            *gpus,
            effective,
            guaranteed,
            memory,
            resident,
            seconds,
            busy,
            bypassing,
            entitled,
            delivered,
            waits,
            wait,
            hits,
            host,
        ]


class MetricsServer:
    """Answers ``GET /metrics``: metrics of GPUs for every request, metrics of sessions, with names, for requests with
    the token.

    Every local user can connect to an address of this machine, and every pod to one of a node. So connections, the time
    that each may take and what it may send are bounded, and the metrics are computed once a second at most.
    """

    def __init__(self, listener: socket.socket, report: Callable[[], Report], token_file: Path | None) -> None:
        """`listener` listens already. Without a token file nobody gets names. Raises OSError or ValueError."""
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._token_file = token_file
        self._made: dict[bool, tuple[float, bytes]] = {}
        if token_file is not None:
            _token(token_file)
        self._server = HTTPServer(
            metrics_application(self),
            no_keep_alive=True,
            max_header_size=MAX_HEADER_BYTES,
            max_body_size=1,
            max_buffer_size=64 * 1024,
            idle_connection_timeout=REQUEST_WITHIN,
            body_timeout=REQUEST_WITHIN,
        )
        self._streams: set[IOStream] = set()
        self._connects = Budget(self._loop.time, CONNECTIONS_PER_SECOND, MAX_CONNECTIONS, debt=1)
        trouble = LogOnce(
            log, "no connection for metrics can be accepted", "connections for metrics are accepted again", lasts=10.0
        )
        self._acceptor = Acceptor(listener, self._accepted, trouble)

    def close(self) -> None:
        """Stop."""
        self._acceptor.close()
        for stream in list(self._streams):
            stream.close()

    def knows_token(self, authorization: str) -> bool:
        """Whether a request's Authorization header is ``Bearer`` and the token."""
        if self._token_file is None:
            return False
        try:
            expected = f"Bearer {_token(self._token_file)}"
        except (OSError, ValueError) as error:
            log.error("cannot read the token for metrics: %s", error)
            return False
        return hmac.compare_digest(authorization.encode(), expected.encode())

    def text(self, names: bool) -> bytes:
        """The metrics in Prometheus' text format, at most a second old."""
        now = self._loop.time()
        if names not in self._made or now >= self._made[names][0] + MADE_EVERY:
            registry = CollectorRegistry()
            registry.register(ReportCollector(self._report, names))
            self._made[names] = now, generate_latest(registry)
        return self._made[names][1]

    def _accepted(self, connection: socket.socket) -> None:
        if not self._connects.spend():
            self._acceptor.pause(self._connects.wait())
        self._streams = {stream for stream in self._streams if not stream.closed()}
        if len(self._streams) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        stream = IOStream(connection, max_buffer_size=64 * 1024)
        self._streams.add(stream)
        self._loop.call_later(ANSWER_WITHIN, stream.close)
        self._server.handle_stream(stream, ("", 0))


def metrics_application(metrics: MetricsServer) -> Application:
    """What answers requests for metrics."""
    return Application([("/metrics", MetricsPage, {"metrics": metrics})], log_function=_silent)


class MetricsPage(RequestHandler):
    """The agent's metrics in Prometheus' text format, on `--metrics-port`.

    Without an `Authorization` header the metrics of GPUs. With `Authorization: Bearer TOKEN` and the token of
    `--metrics-token-file` also those of sessions and host memory. 401 for another token.
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


def _silent(handler: RequestHandler) -> None:
    """Requests are not logged: any client could fill the log."""


def _token(path: Path) -> str:
    """Raises OSError or ValueError."""
    with open(path, "rb") as file:
        token = file.read(MAX_HEADER_BYTES).decode("ascii", errors="replace").strip()
    if not token:
        raise ValueError(f"{path} is empty; write a token into it")
    return token


def serve_metrics(
    port: int, report: Callable[[], Report], address: str = "127.0.0.1", token_file: Path | None = None
) -> Callable[[], None]:
    """Serve them on a port of an address of this machine; returns what stops it.

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
