"""The check that this cluster can allocate GPU shares through claims, made before the agent becomes a DRA driver."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.claims.slices import (
    SLICES,
    FieldsLost,
    OfferedGpu,
    check_stored,
    fields_lost,
    lost,
    resource_slice,
)
from gpushare_spawner.background import pauses
from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.model.kubernetes.objects import CLAIMS_API, DEVICE_CLASS, DRIVER
from gpushare_spawner.model.share import UNITS_PER_GPU

log = logging.getLogger(__name__)

PAUSE = 5.0
"""Seconds between attempts while the API server does not answer."""


PATIENCE = 20.0
"""Seconds for which attempts are made. Our choice: a restarting agent must not keep its sessions waiting for long."""


ELSE = "use --kubernetes device-plugin, the default, where this cannot be changed"


_PROBED = Gpu(0, "GPU-probe", "probe", 2**30)


_NAME = "gpushare-probe"


def socket_paths(kubelet_dir: Path) -> tuple[Path, Path]:
    """Return the paths of the DRA driver's own socket and of its registration socket."""
    return kubelet_dir / "plugins" / DRIVER / "dra.sock", kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"


class ClaimsUnavailable(Exception):
    """Error for a cluster without GPU shares through claims. The message contains the reason and a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(f"--kubernetes dra: {message}")


def check_kubelet_folder(kubelet_dir: Path) -> None:
    """Raise ClaimsUnavailable if the kubelet's folder for plugins does not exist."""
    for folder in (kubelet_dir / "plugins_registry", kubelet_dir / "plugins"):
        if not folder.is_dir():
            raise ClaimsUnavailable(
                f"{folder} does not exist. It is the kubelet's folder for plugins: mount it into the "
                f"agent's container, or {ELSE}"
            )


async def probe(api: ClusterApi, node: str, namespace: str) -> bool:
    """Check the cluster, retrying for `PATIENCE` seconds while the API server does not answer.

    Return whether the API server stores device taints; False also if it does not answer, because the check is repeated
    before the slice is created. `namespace`: the namespace of sessions' claims; empty: any. Raises ClaimsUnavailable.
    """
    logged = False
    for pause in pauses(PAUSE, PAUSE, PATIENCE):
        try:
            return await ask(api, node, namespace)
        except ApiFailure as failure:
            if 400 <= failure.status < 500 and failure.status not in (408, 429):
                raise ClaimsUnavailable(f"{failure}; {ELSE}") from None
            if not logged:
                log.warning("cannot determine whether this cluster has claims of GPU shares; retrying: %s", failure)
            logged = True
        await asyncio.sleep(pause)
    log.warning("starting without these checks; slices from which the API server drops fields will not be written")
    return False


async def ask(api: ClusterApi, node: str, namespace: str) -> bool:
    """Check once, like `probe`. Raises ClaimsUnavailable, and ApiFailure if the API server does not answer."""
    try:
        await api.list(SLICES, fieldSelector=f"spec.nodeName={node}")
    except ApiFailure as failure:
        if failure.status == 404:
            raise ClaimsUnavailable(
                f"the API server has no resource.k8s.io/v1 (Kubernetes 1.34 and later have it); {ELSE}"
            ) from None
        raise _without_right(failure, "list resourceslices") from None
    taints = await _stores_taints(api, node)
    where = f"{CLAIMS_API}/namespaces/{namespace or 'default'}/resourceclaims/{_NAME}"
    await _may_read(api, where, "get resourceclaims", missing="")
    await _may_read(
        api, f"{CLAIMS_API}/deviceclasses/{DEVICE_CLASS}", "get deviceclasses",
        missing=f"there is no DeviceClass {DEVICE_CLASS}; the chart creates it with kubelet: dra",
    )  # fmt: skip
    return taints


async def _stores_taints(api: ClusterApi, node: str) -> bool:
    """Return whether the API server stores device taints. The requests are dry runs, which create nothing."""
    untainted = resource_slice(node, [OfferedGpu(_PROBED, UNITS_PER_GPU)], 1, 1, taints=True)
    untainted["metadata"]["name"] = _NAME
    try:
        await check_stored(api, untainted)
        tainted = resource_slice(node, [OfferedGpu(_PROBED, UNITS_PER_GPU, "probe")], 1, 1, taints=True)
        tainted["metadata"]["name"] = _NAME
        answer = await api.create(SLICES, tainted, dryRun="All")
    except FieldsLost as error:
        raise ClaimsUnavailable(f"{error}; {ELSE}") from None
    except ApiFailure as failure:
        raise _without_right(failure, "create resourceslices") from None
    if list(lost(tainted["spec"], answer.get("spec"))):
        log.info(
            "%s; GPUs that must not get new sessions are omitted from the slice instead", fields_lost(tainted, answer)
        )
        return False
    return True


async def _may_read(api: ClusterApi, path: str, right: str, missing: str) -> None:
    """Raise ClaimsUnavailable if the object cannot be read or, with `missing`, does not exist."""
    try:
        await api.get(path)
    except ApiFailure as failure:
        if failure.status != 404:
            raise _without_right(failure, right) from None
        if missing:
            raise ClaimsUnavailable(missing) from None


def _without_right(failure: ApiFailure, right: str) -> ApiFailure | ClaimsUnavailable:
    if failure.status not in (401, 403):
        return failure
    return ClaimsUnavailable(
        f"the agent's service account may not {right}; the chart gives it the rights with kubelet: dra: {failure}"
    )
