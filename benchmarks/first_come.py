"""A first-come-first-served scheduler with a time quantum, as nvshare's: the policy that the thesis measured.

The token goes to who asked first; when its quantum is over the holder is told to give way at its next kernel's end,
and queues up again behind the others. No weights, no prefetch: the pages come by faults.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time

from benchmarks.oversubscription_job import GIVE_WAY, GO, RELEASED, WANT


class FirstCome:
    """Serves any number of clients from a thread of its own, until it is closed."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._selector = selectors.DefaultSelector()
        self._queue: list[socket.socket] = []
        self._holder: socket.socket | None = None
        self._over = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def connect(self) -> socket.socket:
        """A client's end; call before `start`."""
        ours, theirs = socket.socketpair()
        self._selector.register(ours, selectors.EVENT_READ)
        return theirs

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _serve(self) -> None:
        while not self._closed:
            timeout = min(0.1, max(0.0, self._over - time.monotonic()))
            for key, _ in self._selector.select(timeout):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    messages = connection.recv(16)
                except OSError:
                    messages = b""
                if not messages:
                    self._selector.unregister(connection)
                    connection.close()
                    self._forget(connection)
                for message in messages:
                    if bytes([message]) == WANT:
                        self._queue.append(connection)
                    elif bytes([message]) == RELEASED:
                        self._forget(connection)
            if self._holder is not None and time.monotonic() >= self._over:
                self._holder.send(GIVE_WAY)
                self._over = float("inf")
            if self._holder is None and self._queue:
                self._holder = self._queue.pop(0)
                self._over = time.monotonic() + self._quantum
                self._holder.send(GO)

    def _forget(self, connection: socket.socket) -> None:
        self._queue = [other for other in self._queue if other is not connection]
        if self._holder is connection:
            self._holder, self._over = None, float("inf")
