"""Our own layer on one machine: the agent opens a session, and the server's environment leads its processes to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.frameworks import choose_frameworks_defaults
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Environment, SharingLayer, Tenant


class NativeLayer(SharingLayer[Environment]):
    """Sessions of the agent on this machine."""

    name: ClassVar[str] = "native"

    def __init__(self, agent: AgentClient, confirm_within: float = 600.0) -> None:
        """`confirm_within`: seconds after which the agent drops a session whose server was not started."""
        self._agent = agent
        self._confirm_within = confirm_within

    async def grant(self, tenant: Tenant, template: Template, placement: Placement, form: Environment) -> Environment:
        request = open_request(tenant, template, placement, self._confirm_within)
        opened = await self._agent.open(request)
        return shared_environment(form, opened.environment)

    async def started(self, tenant: Tenant, pid: int | None) -> None:
        if pid is not None:
            await self._agent.confirm(tenant.session, pid)

    async def withdraw(self, tenant: Tenant) -> None:
        await self._agent.close(tenant.session)


def open_request(
    tenant: Tenant, template: Template, placement: Placement, confirm_within: float = 600.0
) -> OpenRequest:
    """What the agent is asked for. Raises ValueError for a template without a GPU."""
    if template.gpu is None:
        raise ValueError(f"template {template.name} asks for no GPU: there is nothing to open")
    return OpenRequest(
        id=tenant.session,
        user=tenant.user,
        server=tenant.server,
        uid=tenant.uid,
        template=template.name,
        gpus=placement.gpus,
        share_units=template.gpu.share.units,
        borrowed_units=placement.borrowed,
        memory_limit=template.gpu.memory.limit,
        oversubscribe=template.gpu.memory.oversubscribe,
        confirm_within=confirm_within,
    )


def shared_environment(environment: Mapping[str, str], additions: Mapping[str, str]) -> Environment:
    """The environment of a server with a share: the agent's variables, and those that keep frameworks from reserving
    the GPU's memory in advance, unless the environment sets them."""
    result = merged(environment, additions)
    choose_frameworks_defaults(result)
    return result


def merged(environment: Mapping[str, str], additions: Mapping[str, str]) -> Environment:
    """A server's environment with what the agent asks for.

    LD_PRELOAD is appended: a library that the admin preloads keeps its place before ours. LD_LIBRARY_PATH is prepended:
    the driver that the agent sees is the one that the server gets. Entries that are there already are not repeated.
    """
    result = dict(environment)
    for name, value in additions.items():
        if name == "LD_PRELOAD":
            # ld.so takes spaces and colons
            present = result.get(name, "").replace(":", " ").split()
            result[name] = " ".join([*(entry for entry in present if entry != value), value])
        elif name == "LD_LIBRARY_PATH":
            folders = [entry for entry in result.get(name, "").split(":") if entry and entry != value]
            result[name] = ":".join([value, *folders])
        else:
            result[name] = value
    return result
