"""Native sharing, rendered for processes on one machine, pods with a device plugin, and pods with DRA claims.

On one machine the agent's answer contains the processes' environment. With the device plugin, a pod's annotations
describe its allocation, and its limits reserve it on the node. With DRA, the pod names a claim of units that the agent
prepares. No container names the claim, so that Kubernetes can resize the container's CPU and memory in place; but then
the node adds nothing to the container. So this module writes the content of a device plugin's answer into the pod.

The agent's part is in agent/sessions and agent/kubernetes.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels
from gpushare_spawner.model.kubernetes.container_requests import notebook_container
from gpushare_spawner.model.kubernetes.objects import (
    CLAIMS_API,
    DEVICE_CLASS,
    POD_CLAIM,
    claim_folder,
    claim_spec,
    resource_limits,
)
from gpushare_spawner.model.layers import FRAMEWORK_DEFAULTS, LayerName, Placement, engine_environment
from gpushare_spawner.model.report import ClaimsReport, GpuReport, MountReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import PodChange, PodSpec, Tenant


@dataclass(frozen=True)
class NativePodLayer:
    """A share of GPUs on a node with an agent's device plugin."""

    session: SessionAnnotations
    """The content of the pod's annotations, see `granted_session`."""
    node: str
    unit_size: int = 1
    """The number of units of 1 % that one device of the agent's plugin represents."""

    def render(self, pod: PodSpec) -> PodSpec:
        """Return the pod with the share: annotations and labels, limits of the notebook's container, and its node.

        The agent's device plugin adds the rest when the kubelet allocates the devices. Raises ValueError for a pod
        without containers.
        """
        session = self.session
        variables = engine_environment(session.engine)
        if len(session.gpus) > 1:
            # each GPU is a separate resource, and the kubelet keeps only the first plugin's answer for a variable
            uuids = ",".join(session.gpus)
            variables |= {"NVIDIA_VISIBLE_DEVICES": uuids, "CUDA_VISIBLE_DEVICES": uuids}
        return PodChange(
            annotations=session.annotations(),
            labels=labels(),
            limits=resource_limits(session.share, session.gpu_indices, self.unit_size),
            variables=variables,
            node=self.node,
        ).apply(pod)


def granted_session(
    tenant: Tenant, template: Template, placement: Placement, gpu_indices: Mapping[str, int], since: float
) -> SessionAnnotations:
    """Return the content of the pod's annotations.

    ``gpu_indices``: each GPU's index on its node, by UUID. ``since``: time of the grant, in seconds since the epoch.
    Raises ValueError for a template without a GPU, and for a GPU without an index.
    """
    if template.gpu is None:
        raise ValueError(f"template {template.name} asks for no GPU: there is nothing to grant")
    unknown = [gpu for gpu in placement.gpus if gpu not in gpu_indices]
    if unknown:
        raise ValueError(f"the index of {', '.join(unknown)} on {placement.node} is unknown")
    units = template.gpu.share.units
    return SessionAnnotations(
        session=tenant.session,
        template=template.name,
        quota=tenant.quota,
        user_units=tenant.user_units,
        share_units=units,
        last_units=template.gpu.share.last_units,
        gpus=placement.gpus,
        gpu_indices=tuple(gpu_indices[gpu] for gpu in placement.gpus),
        tier_since=since,
        effective_units=units,
        borrowed_units=placement.borrowed,
        time_limit_units=template.gpu.time.limit,
        memory_limit=template.gpu.memory.limit,
        oversubscribe=template.gpu.memory.oversubscribe,
        engine=template.gpu.memory.engine,
        neighbours=template.neighbours,
    )


def process_environment(environment: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment with the agent's variables. ``additions``: the variables from the agent's answer.

    Variables that keep frameworks from reserving the GPU's memory in advance are added unless the environment sets
    them.
    """
    return {**FRAMEWORK_DEFAULTS, **merged(environment, additions)}


def open_request(
    tenant: Tenant, template: Template, placement: Placement, confirm_within: float = 600.0
) -> OpenRequest:
    """Return the request to the agent for a session. Raises ValueError for a template without a GPU."""
    if template.gpu is None:
        raise ValueError(f"template {template.name} asks for no GPU: there is nothing to open")
    layer, memory = template.gpu.layer or placement.layer, template.gpu.memory
    native = layer is LayerName.NATIVE
    # other layers give a session only its guarantee; a MIG instance belongs to one session
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
        last_units=template.gpu.share.last_units,
        borrowed_units=placement.borrowed,
        time_limit_units=template.gpu.time.limit if native else UNITS_PER_GPU,
        memory_limit=memory.limit if native else own,
        oversubscribe=memory.oversubscribe and native,
        engine=memory.engine,
        layer=layer,
        neighbours=template.neighbours,
        confirm_within=confirm_within,
    )


def merged(environment: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment with the agent's variables.

    LD_PRELOAD is appended, so that an admin's preloaded library precedes ours. LD_LIBRARY_PATH is prepended, so that
    the server uses the same driver as the agent. Existing entries are not repeated.
    """
    result = dict(environment)
    for name, value in additions.items():
        if name == "LD_PRELOAD":
            # ld.so accepts spaces and colons as separators
            present = result.get(name, "").replace(":", " ").split()
            result[name] = " ".join([*(entry for entry in present if entry != value), value])
        elif name == "LD_LIBRARY_PATH":
            folders = [entry for entry in result.get(name, "").split(":") if entry and entry != value]
            result[name] = ":".join([value, *folders])
        else:
            result[name] = value
    return result


_VOLUME = "gpushare"


@dataclass(frozen=True)
class NativeClaimLayer:
    """A share of GPUs on a node with an agent that is a DRA driver."""

    session: SessionAnnotations
    """The content of the pod's annotations, see `granted_session`."""
    node: str
    gpus: Sequence[GpuReport]
    """All GPUs of the node."""
    claims: ClaimsReport
    """The claims part of the node's report."""
    namespace: str
    """The claim's namespace."""
    claim: str
    """The claim's name."""

    def render(self, pod: PodSpec) -> PodSpec:
        """Return the pod with the share: annotations and labels, its claim and its node.

        The notebook's container gets the environment and files of the session. Raises ValueError for a pod without
        containers.
        """
        folder = posixpath.join(self.claims.folder, claim_folder(self.namespace, self.claim))
        mounts = [MountReport(host_path=folder, container_path=folder), *self.claims.mounts]
        variables = self._variables(notebook_container(pod.get("spec") or {}), folder)
        named = {f"{_VOLUME}-{number}": mount for number, mount in enumerate(mounts)}
        return PodChange(
            annotations=self.session.annotations(),
            labels=labels(),
            variables=variables,
            node=self.node,
            claims={POD_CLAIM: self.claim},
            volumes={name: {"hostPath": {"path": mount.host_path}} for name, mount in named.items()},
            mounts=[
                {"name": name, "mountPath": mount.container_path, "readOnly": mount.read_only}
                for name, mount in named.items()
            ],
        ).apply(pod)

    def manifest(self, pod_name: str, pod_uid: str) -> dict[str, Any]:
        """Return the claim of the pod, which is deleted with the pod."""
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid, "controller": True}
        memory = {gpu.uuid: gpu.memory_bytes for gpu in self._granted()}
        return {
            "apiVersion": CLAIMS_API.removeprefix("/apis/"),
            "kind": "ResourceClaim",
            "metadata": {"name": self.claim, "labels": labels(), "ownerReferences": [owner]},
            "spec": claim_spec(DEVICE_CLASS, self.session.share, memory),
        }

    def _granted(self) -> list[GpuReport]:
        by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        return [by_uuid[uuid] for uuid in self.session.gpus]

    def _variables(self, notebook: Mapping[str, Any], folder: str) -> dict[str, str]:
        uuids = ",".join(self.session.gpus)
        additions = {
            **engine_environment(self.session.engine),
            **self.claims.environment,
            "GPUSHARE_SOCKET": posixpath.join(folder, self.claims.socket),
            "CUDA_VISIBLE_DEVICES": uuids,
        }
        if not all(gpu.simulated for gpu in self._granted()):
            additions["NVIDIA_VISIBLE_DEVICES"] = uuids
        there = {variable["name"]: variable["value"] for variable in notebook.get("env") or [] if "value" in variable}
        return {name: value for name, value in merged(there, additions).items() if name in additions}
