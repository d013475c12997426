"""Native sharing on one machine: the request to the agent, and the environment that connects processes to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gpushare_spawner.model.frameworks import choose_frameworks_defaults
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.protocol.control import OpenRequest
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Environment, SharingLayer, Tenant


class NativeProcessLayer(SharingLayer[Environment]):
    """A session of the agent on this machine. ``additions``: the environment from the agent's answer."""

    name: ClassVar[str] = "native"

    def __init__(self, additions: Mapping[str, str]) -> None:
        self._additions = additions

    def render(self, form: Environment) -> Environment:
        """Return a server's environment with the agent's variables.

        Those are added that keep frameworks from reserving the GPU's memory in advance, unless the environment sets
        them.
        """
        result = merged(form, self._additions)
        choose_frameworks_defaults(result)
        return result


def open_request(
    tenant: Tenant, template: Template, placement: Placement, confirm_within: float = 600.0
) -> OpenRequest:
    """Return the request to the agent. Raises ValueError for a template without a GPU."""
    if template.gpu is None:
        raise ValueError(f"template {template.name} asks for no GPU: there is nothing to open")
    layer, memory = template.gpu.layer or placement.layer, template.gpu.memory
    native = layer is LayerName.NATIVE
    # other layers give a session its guarantee, and no more; a MIG instance is all its own
    own = "100%" if layer is LayerName.MIG else memory.guarantee or f"{template.gpu.share.units}%"
    return OpenRequest(
        id=tenant.session,
        user=tenant.user,
        server=tenant.server,
        uid=tenant.uid,
        template=template.name,
        quota=tenant.quota,
        user_units=tenant.user_units,
        gpus=placement.gpus,
        share_units=template.gpu.share.units,
        borrowed_units=placement.borrowed,
        memory_limit=memory.limit if native else own,
        oversubscribe=memory.oversubscribe and native,
        engine=memory.engine,
        layer=layer,
        confirm_within=confirm_within,
    )


def merged(environment: Mapping[str, str], additions: Mapping[str, str]) -> Environment:
    """Return a server's environment with the agent's variables.

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
