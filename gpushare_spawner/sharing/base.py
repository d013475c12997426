"""A sharing layer: makes a template and a placement real for one notebook server.

What a server is started from differs: a process has an environment, a pod has a spec. A layer takes the form as it is
without a GPU and returns it with the share. One module for each layer; native.py is ours, for processes on the agent's
machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.session_id import session_id
from gpushare_spawner.model.template import Template

Environment: TypeAlias = dict[str, str]
"""What a process is started with."""
PodSpec: TypeAlias = dict[str, Any]
"""A pod's manifest, as plain data."""

Form = TypeVar("Form", Environment, PodSpec)


@dataclass(frozen=True)
class Tenant:
    """Whose notebook server it is."""

    user: str
    server: str = ""
    """The server's name; the default server has none."""
    uid: int = 0
    """The user that the server's processes run as; layers that start no processes themselves do not look at it."""

    @property
    def session(self) -> str:
        """The session's id."""
        return session_id(self.user, self.server)


class SharingLayer(ABC, Generic[Form]):
    """How a kind of machine shares GPUs."""

    name: ClassVar[str]
    """As admins write it."""

    @abstractmethod
    async def grant(self, tenant: Tenant, template: Template, placement: Placement, form: Form) -> Form:
        """The form with the share in it; the one given is not changed. Granting the same again is no error.

        Raises model.control.ControlRefused where the share cannot be had (any more), and
        model.control.AgentUnreachable.
        """

    @abstractmethod
    async def started(self, tenant: Tenant, pid: int | None) -> None:
        """The server runs; `pid` where it is a process on the GPU's machine. Raises as `grant`."""

    @abstractmethod
    async def withdraw(self, tenant: Tenant) -> None:
        """The server is gone; a share that is not there is no error. Raises AgentUnreachable."""
