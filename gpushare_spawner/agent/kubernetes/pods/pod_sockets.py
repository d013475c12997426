"""The sockets of a session that is a pod: one for each grant, the devices of one GPU that one container was given.
Where GPUs are given by claims, one for the whole claim.

The kubelet asks for each grant by itself, and does not say for whom: a folder is made for every such
grant, and mounted into the container. Later, when it is known which pod holds the devices, the session's socket is made
in each of its grants' folders. The mount is of the folder as it was then, so that what lies below it can be made anew
by a later agent, and the folder itself never. devices/grant_folders.py makes and removes the folders.
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
    """Makes the sockets of sessions that are pods; a session without a pod gets that of a process."""

    def __init__(self, folder: StateFolder) -> None:
        self._pods = folder.pods
        self._processes = ProcessEndpoints(folder)

    def listen(self, record: SessionRecord, listener: Listener) -> SessionEndpoint:
        """Make the sockets. Raises OSError, OverflowError or PathTooLong."""
        if record.pod is None:
            return self._processes.listen(record, listener)
        return PodSockets(self._pods, owners.folder_names(record.pod), listener)


class PodSockets:
    """Listens in the folders of all of a session's grants; to the session they are one."""

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
        """Where the first of them listens."""
        return self._sockets[0].path

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections; the folders stay."""
        for socket in self._sockets:
            socket.close(code)

    def remove(self) -> None:
        """Take the folders away."""
        for folder in self._folders:
            owners.remove(folder)
