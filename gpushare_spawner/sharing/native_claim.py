"""Native sharing in a cluster whose agents are DRA drivers: the pod names a claim of units, which the agent prepares.

No container names the claim: Kubernetes then resizes the container's CPU and memory in place, and nothing is put into
the container by the node. So what a device plugin's answer would bring is written into the pod here.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from gpushare_spawner.model.kubernetes import (
    CLAIMS_API,
    DEVICE_CLASS,
    POD_CLAIM,
    claim_folder,
    claim_spec,
    labels,
    pinned,
)
from gpushare_spawner.model.memory_engine import engine_environment
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.report import ClaimsReport, GpuReport, MountReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import PodSpec, SharingLayer, Tenant
from gpushare_spawner.sharing.native_pod import granted_session
from gpushare_spawner.sharing.native_process import merged
from gpushare_spawner.sharing.pod_changes import PodChange, notebook_container

_VOLUME = "gpushare"


class NativeClaimLayer(SharingLayer[PodSpec]):
    """A share of GPUs whose node's agent is a DRA driver.

    ``gpus``: the node's, those of the placement among them. ``claims``: what the node's report says of claims.
    ``namespace`` and ``claim``: where the claim is made, and its name. ``since``: when the share was granted, in
    seconds since the epoch.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self,
        tenant: Tenant,
        template: Template,
        placement: Placement,
        gpus: Iterable[GpuReport],
        claims: ClaimsReport,
        *,
        namespace: str,
        claim: str,
        since: float,
    ) -> None:
        """Raises ValueError for a template without a GPU, and for a GPU that is not known."""
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        indices = {uuid: gpu.index for uuid, gpu in self._gpus.items()}
        self.session = granted_session(tenant, template, placement, indices, since)
        """Return the content of the pod's annotations."""
        self._node = placement.node
        self._claims = claims
        self._namespace = namespace
        self._claim = claim

    def render(self, form: PodSpec) -> PodSpec:
        """Return the pod with the share: annotations and label, its claim, its node, and in the notebook's container
        the environment and files of the session. Raises ValueError for a pod without containers."""
        folder = posixpath.join(self._claims.folder, claim_folder(self._namespace, self._claim))
        mounts = [MountReport(host_path=folder, container_path=folder), *self._claims.mounts]
        variables = self._variables(notebook_container(form.get("spec") or {}), folder)
        named = {f"{_VOLUME}-{number}": mount for number, mount in enumerate(mounts)}
        pod = PodChange(
            annotations=self.session.annotations(),
            labels=labels(),
            variables=variables,
            volumes={name: {"hostPath": {"path": mount.host_path}} for name, mount in named.items()},
            mounts=[
                {"name": name, "mountPath": mount.container_path, "readOnly": mount.read_only}
                for name, mount in named.items()
            ],
        ).apply(form)
        spec = pod["spec"]
        claim = {"name": POD_CLAIM, "resourceClaimName": self._claim}
        return {
            **pod,
            "spec": {
                **spec,
                "affinity": pinned(spec.get("affinity"), self._node),
                "resourceClaims": [*(spec.get("resourceClaims") or []), claim],
            },
        }

    def claim(self, pod_name: str, pod_uid: str) -> dict[str, Any]:
        """Return the claim of the pod, which goes with it."""
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid, "controller": True}
        memory = {uuid: self._gpus[uuid].memory_bytes for uuid in self.session.gpus}
        return {
            "apiVersion": CLAIMS_API.removeprefix("/apis/"),
            "kind": "ResourceClaim",
            "metadata": {"name": self._claim, "labels": labels(), "ownerReferences": [owner]},
            "spec": claim_spec(DEVICE_CLASS, self.session.share_units, memory),
        }

    def _variables(self, notebook: Mapping[str, Any], folder: str) -> dict[str, str]:
        uuids = ",".join(self.session.gpus)
        additions = {
            **engine_environment(self.session.engine),
            **self._claims.environment,
            "GPUSHARE_SOCKET": posixpath.join(folder, self._claims.socket),
            "CUDA_VISIBLE_DEVICES": uuids,
        }
        if not all(self._gpus[uuid].simulated for uuid in self.session.gpus):
            additions["NVIDIA_VISIBLE_DEVICES"] = uuids
        there = {one["name"]: one["value"] for one in notebook.get("env") or [] if "value" in one}
        return {name: value for name, value in merged(there, additions).items() if name in additions}
