"""Native sharing in a cluster: a pod's annotations describe its allocation, its limits reserve it on the node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gpushare_spawner.model.kubernetes import PodSession, labels, pinned, resource_limits
from gpushare_spawner.model.memory_engine import engine_environment
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import PodSpec, SharingLayer, Tenant
from gpushare_spawner.sharing.pod_changes import PodChange


class NativePodLayer(SharingLayer[PodSpec]):
    """A share of GPUs whose nodes have an agent with a device plugin.

    ``gpu_indices``: the index on its node of each GPU, by UUID. ``unit_size``: units of 1 % that one device of the
    agent's plugin stands for. ``since``: when the share was granted, in seconds since the epoch.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self,
        tenant: Tenant,
        template: Template,
        placement: Placement,
        gpu_indices: Mapping[str, int],
        *,
        unit_size: int = 1,
        since: float,
    ) -> None:
        """Raises ValueError for a template without a GPU, and for a GPU whose index is not known."""
        self.session = granted_session(tenant, template, placement, gpu_indices, since)
        """Return the content of the pod's annotations."""
        self._node = placement.node
        self._unit_size = unit_size

    def render(self, form: PodSpec) -> PodSpec:
        """Return the pod with the share: annotations and label, limits of the notebook's container alone, and its node.

        The agent's device plugin adds the rest when the kubelet asks it. Raises ValueError for a pod without
        containers.
        """
        session = self.session
        variables = engine_environment(session.engine)
        if len(session.gpus) > 1:
            # each GPU is a separate resource, and the kubelet keeps only the first plugin's answer for a variable
            uuids = ",".join(session.gpus)
            variables |= {"NVIDIA_VISIBLE_DEVICES": uuids, "CUDA_VISIBLE_DEVICES": uuids}
        pod = PodChange(
            annotations=session.annotations(),
            labels=labels(),
            limits=resource_limits(session.share_units, session.gpu_indices, self._unit_size),
            variables=variables,
        ).apply(form)
        spec = pod["spec"]
        return {**pod, "spec": {**spec, "affinity": pinned(spec.get("affinity"), self._node)}}


def granted_session(
    tenant: Tenant, template: Template, placement: Placement, gpu_indices: Mapping[str, int], since: float
) -> PodSession:
    """Return what the pod's annotations say. Raises ValueError for a template without a GPU, and for a GPU that is not
    among those whose indices are known."""
    if template.gpu is None:
        raise ValueError(f"template {template.name} asks for no GPU: there is nothing to grant")
    unknown = [gpu for gpu in placement.gpus if gpu not in gpu_indices]
    if unknown:
        raise ValueError(f"the index of {', '.join(unknown)} on {placement.node} is not known")
    units = template.gpu.share.units
    return PodSession(
        session=tenant.session,
        template=template.name,
        quota=tenant.quota,
        user_units=tenant.user_units,
        share_units=units,
        gpus=placement.gpus,
        gpu_indices=tuple(gpu_indices[gpu] for gpu in placement.gpus),
        tier_since=since,
        effective_units=units,
        borrowed_units=placement.borrowed,
        memory_limit=template.gpu.memory.limit,
        oversubscribe=template.gpu.memory.oversubscribe,
        engine=template.gpu.memory.engine,
    )
