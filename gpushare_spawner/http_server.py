"""An HTTP server that peers cannot block with an incomplete request, an unread response or a large body.

The agent uses it for metrics, and the service for its pages and API. In addition to tornado's time limits it has a
bound on connections, a reserve of descriptors, and a response to a body that is too large.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

from tornado.http1connection import HTTP1Connection, HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream, SSLIOStream
from tornado.netutil import ssl_wrap_socket

from gpushare_spawner.clocks import Budget
from gpushare_spawner.descriptors import Acceptor, is_reserved
from gpushare_spawner.log_once import LogOnce


class BoundedHTTPServer(HTTPServer):
    """Serves an application on a bounded number of connections.

    If all are in use, the server closes the oldest connection without a complete request, or else a connection to a
    peer that does not read the response. A complete request always gets a response.
    """

    def initialize(  # type: ignore[override]  # tornado's own options follow
        self,
        application: HTTPServerConnectionDelegate,
        *,
        most_connections: int,
        title: str,
        log: logging.Logger,
        connects: Budget | None = None,
        most_body_bytes: int = sys.maxsize,
        too_large: bytes = b"",
        **options: Any,
    ) -> None:
        """Set up the server. `title`: name of the application in `log`.

        `connects`: limit on the rate of accepted connections; None: no limit. A request with a body of more than
        `most_body_bytes` gets a 413 response with the JSON `too_large`. By default tornado's limit applies, and its 400
        without a body.
        """
        if too_large:
            options["max_body_size"] = sys.maxsize  # tornado would answer 400 without a reason
        super().initialize(application, **options)
        self._most_connections, self._connects = most_connections, connects
        self._crowded = LogOnce(
            log,
            f"Too many connections to {title}: closing the oldest without a complete request",
            f"The number of connections to {title} is normal again",
            lasts=60.0,
        )
        self._trouble = LogOnce(
            log, f"No connection to {title} can be accepted", f"Connections to {title} are accepted again", lasts=60.0
        )
        self._most_body_bytes, self._too_large = most_body_bytes, too_large
        self._acceptors: list[Acceptor] = []
        # both are ordered by age, oldest first
        self._waiting: dict[IOStream, None] = {}
        self._answered: dict[IOStream, None] = {}

    def add_sockets(self, sockets: Iterable[socket.socket]) -> None:
        """Accept connections of listening sockets."""
        self._acceptors += [Acceptor(listener, self._accepted, self._trouble) for listener in sockets]

    def stop(self) -> None:
        """Stop listening. Open connections continue."""
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors = []

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self.stop()
        for stream in (*self._waiting, *self._answered):
            stream.close()

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """Record a connection's new request. Tornado calls this method when it starts reading the request."""
        connection = cast(HTTP1Connection, request_conn)
        stream = connection.stream
        self._forget(stream)
        self._waiting[stream] = None
        request = super().start_request(server_conn, request_conn)
        return _Request(request, connection, self._arrived, self._most_body_bytes, self._too_large)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection. Tornado calls this method when the connection has ended."""
        super().on_close(server_conn)
        self._forget(cast(HTTP1ServerConnection, server_conn).stream)

    def _arrived(self, stream: IOStream) -> None:
        if self._waiting.pop(stream, 0) is None:
            self._answered[stream] = None

    def _accepted(self, connection: socket.socket) -> None:
        if self._connects is not None and not self._connects.spend():
            for acceptor in self._acceptors:
                acceptor.pause(self._connects.wait())
        in_use = len(self._waiting) + len(self._answered)
        if in_use < self._most_connections and not is_reserved(connection.fileno()):
            self._crowded.resolved()
        else:
            self._crowded.about(f"{in_use} are open")
            if not self._make_room():
                connection.close()
                return
            # move it to the lowest free descriptor, to keep connections' descriptors below the reserve
            with connection as high:
                connection = high.dup()
        connection.setblocking(False)
        try:
            address = connection.getpeername()
            stream = self._stream(connection)
        except OSError:  # the peer has disconnected
            connection.close()
            return
        self._waiting[stream] = None
        self.handle_stream(stream, address)

    def _make_room(self) -> bool:
        stream = next(iter(self._waiting), None) or next(
            (candidate for candidate in self._answered if candidate.writing()), None
        )
        if stream is None:
            return False
        self._forget(stream)
        stream.close()
        return True

    def _forget(self, stream: IOStream) -> None:
        self._waiting.pop(stream, None)
        self._answered.pop(stream, None)

    def _stream(self, connection: socket.socket) -> IOStream:
        sizes = {"max_buffer_size": self.max_buffer_size, "read_chunk_size": self.read_chunk_size}
        if self.ssl_options is None:
            return IOStream(connection, **sizes)
        secured = ssl_wrap_socket(connection, self.ssl_options, server_side=True, do_handshake_on_connect=False)
        return SSLIOStream(secured, ssl_options=self.ssl_options, **sizes)


class _Request(HTTPMessageDelegate):
    """Reports when a request is complete, and responds with 413 as soon as its body is too large.

    The kernel resets a connection that is closed with unread data, and the peer, or the hub's proxy, loses the
    response. Therefore the rest of the body is read and discarded, until tornado's time limit for bodies at the latest.
    """

    def __init__(
        self,
        request: HTTPMessageDelegate,
        connection: HTTP1Connection,
        arrived: Callable[[IOStream], None],
        most: int,
        answer: bytes,
    ) -> None:
        self._request, self._arrived = request, arrived
        self._connection, self._stream = connection, connection.stream  # tornado detaches the stream at the end
        self._most, self._answer = most, answer
        self._bytes = 0
        self._method = ""
        self._refused = False
        self._finished = False

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        received = self._request.headers_received(start_line, headers)
        self._method = cast(RequestStartLine, start_line).method
        length = headers.get("Content-Length", "").split(",")[0].strip()
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._most):
            # with Expect, the peer sends no body
            comes = "Expect" not in headers and len(length) <= 18
            self._refuse(closes=not comes)
            if not comes:
                self._finish_answer()
        return received

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        if self._refused:
            return None
        self._bytes += len(chunk)
        if self._bytes <= self._most:
            return self._request.data_received(chunk)
        self._refuse()
        return None

    def finish(self) -> None:
        self._arrived(self._stream)
        if self._refused:
            self._finish_answer()
        else:
            self._request.finish()

    def on_connection_close(self) -> None:
        if not self._refused:
            self._request.on_connection_close()

    def _refuse(self, closes: bool = False) -> None:
        self._refused = True
        self._request.on_connection_close()  # the application forgets the request
        headers = HTTPHeaders(
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(self._answer)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
            }
        )
        if closes:
            headers["Connection"] = "close"
        line = ResponseStartLine("HTTP/1.1", 413, "Content Too Large")
        self._connection.write_headers(line, headers, self._answer if self._method != "HEAD" else None)

    def _finish_answer(self) -> None:
        if not self._finished:
            self._finished = True
            self._connection.finish()
