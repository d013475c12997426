"""Addresses for pods: 127.x.y.z, so that each can listen on the same port without a network of its own."""

from __future__ import annotations

import itertools
import os
import socket


class PodAddresses:
    """A block of loopback addresses that no other test run on this machine has."""

    def __init__(self) -> None:
        first = os.getpid()
        for attempt in range(1, 250):
            block = 1 + (first + attempt) % 250
            # an abstract name: it belongs to the network namespace, as the addresses do, and ends with the process
            self._claim = socket.socket(socket.AF_UNIX)
            try:
                self._claim.bind(f"\0gpushare-tests-127.{block}")
            except OSError:
                self._claim.close()
            else:
                break
        else:
            raise OSError("every block of loopback addresses is taken by another test run")
        self._block = block
        self._numbers = itertools.count(256 + 1)

    def next(self) -> str:
        """An address that was not given before."""
        number = next(self._numbers)
        return f"127.{self._block}.{number // 254}.{1 + number % 254}"

    def close(self) -> None:
        self._claim.close()
