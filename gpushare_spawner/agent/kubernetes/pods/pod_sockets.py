"""Sockets of a session that is a pod: one for each grant, or one for its claim.

A grant is the devices of one GPU that the kubelet gave to one container. The kubelet requests each grant separately and
does not name the pod, so each grant gets a folder that is mounted into the container. When the pod is known, the
session's socket is made in the folder of each grant. The mount keeps the folder of that time: a later agent can replace
the content, but never the folder. devices/owners.py makes and removes the folders.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.sockets.connection import Listener
from gpushare_spawner.agent.sockets.session_socket import ProcessEndpoints, SessionEndpoint, SessionSocket, Traffic
from gpushare_spawner.agent.state.folder import SessionFolder, StateFolder
from gpushare_spawner.agent.state.records import SessionRecord


class PodEndpoints:
    """Makes the sockets of sessions that are pods; a session without a pod gets the socket of a process."""

    def __init__(self, folder: StateFolder) -> None:
        self._pods = folder.pods
        self._processes = ProcessEndpoints(folder)

    def listen(self, record: SessionRecord, listener: Listener) -> SessionEndpoint:
        """Make the sockets. Raises OSError, OverflowError or PathTooLong."""
        if record.pod is None:
            return self._processes.listen(record, listener)
        return PodSockets(self._pods, owners.folder_names(record.pod), listener)


class PodSockets:
    """Listens in the folders of all grants of a session; the session sees one endpoint."""

    def __init__(self, parent: Path, names: Iterable[str], listener: Listener) -> None:
        """`names`: of the folders. Raises OSError or PathTooLong where a socket cannot be made."""
        self._folders = [parent / name for name in names]
        self._sockets: list[SessionSocket] = []
        traffic = Traffic()
        try:
            for folder in self._folders:
                owners.make(folder)
                self._sockets.append(
                    SessionSocket(
                        SessionFolder(folder, owners.BELOW, owners.discarded(folder)),
                        None,
                        listener,
                        traffic,
                    )
                )
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """The path of the first socket."""
        return self._sockets[0].path

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections; the folders stay."""
        for socket in self._sockets:
            socket.close(code)

    def remove(self) -> None:
        """Remove the folders."""
        for folder in self._folders:
            owners.remove(folder)
