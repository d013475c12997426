"""A sharing layer: renders a share that was granted into what a notebook server is started from.

What a server is started from differs: a process has an environment, a pod has a manifest. A layer takes the form as it
is without a GPU and returns it with the share. It only renders: it asks no agent and no API server. One module for each
layer; native_process.py and native_pod.py are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from gpushare_spawner.model.session_id import session_id

Environment: TypeAlias = dict[str, str]
"""What a process is started with."""
PodSpec: TypeAlias = dict[str, Any]
"""A pod's manifest, as plain data."""

Form = TypeVar("Form", Environment, PodSpec)


@dataclass(frozen=True)
class Tenant:
    """The user of the notebook server."""

    user: str
    server: str = ""
    """The server's name; the default server has none."""
    uid: int = 0
    """The user id of the server's processes; not used in a cluster."""
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there are no quotas."""
    user_units: int | None = None
    """What the user's sessions in that quota have at most together on one GPU, in units of 1 %; None: no bound."""

    @property
    def session(self) -> str:
        """The session's id."""
        return session_id(self.user, self.server)


class SharingLayer(Protocol[Form]):
    """One granted share of a kind of GPU sharing."""

    name: ClassVar[str]
    """The kind, as admins write it."""

    def render(self, form: Form) -> Form:
        """Return the form with the share in it; the one given is not changed."""
