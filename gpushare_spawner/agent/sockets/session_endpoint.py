"""What a session listens on: an interface, so that the registry of sessions knows neither processes nor pods."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gpushare_spawner.agent.sockets.connection import Listener
from gpushare_spawner.agent.sockets.session_socket import SessionSocket
from gpushare_spawner.agent.state.session_folder import SessionFolder
from gpushare_spawner.agent.state.session_record import SessionRecord
from gpushare_spawner.agent.state.session_records import short_name
from gpushare_spawner.agent.state.state_folder import StateFolder


class SessionEndpoint(Protocol):
    """One or more listening sockets of one session."""

    @property
    def path(self) -> Path:
        """Where it listens; with several sockets the first of them."""

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections with this error code of the protocol; the folders stay."""

    def remove(self) -> None:
        """Remove the folders. Raises OSError."""


class SessionEndpoints(Protocol):
    """Makes the endpoint of each session: `ProcessEndpoints`, or `kubernetes.pods.pod_sockets.PodEndpoints`."""

    def listen(self, record: SessionRecord, listener: Listener) -> SessionEndpoint:
        """Make the endpoint. Raises OSError, OverflowError (a uid that no user can have) or PathTooLong."""


class ProcessEndpoints:
    """Makes one socket for each session, in a folder of its own in the state folder."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder

    def listen(self, record: SessionRecord, listener: Listener) -> SessionEndpoint:
        """Make the socket. Raises OSError, OverflowError or PathTooLong."""
        folder = SessionFolder(self._folder.sockets, short_name(record.request.id), self._folder.discarded)
        return SessionSocket(folder, record.request.uid, listener)
