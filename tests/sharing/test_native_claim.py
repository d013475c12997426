"""Our own layer where pods get GPUs by claims: a template and a placement become a pod and its claim."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import labels, pod_session
from gpushare_spawner.model.kubernetes.container_requests import notebook_container
from gpushare_spawner.model.kubernetes.objects import claim_folder, node_of
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import ClaimsReport, GpuReport, MountReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.sharing.native import NativeClaimLayer, granted_session

QUARTER = Template.model_validate({"name": "quarter", "display_name": "Q", "gpu": {"fraction": 0.25}})
TWO = Template.model_validate({"name": "two", "display_name": "2", "gpu": {"count": 2}})
CPU = Template.model_validate({"name": "cpu", "display_name": "C"})
LIBRARY = MountReport(host_path="/var/lib/gpushare/lib/libgpushare.so", container_path="/gpushare.so")
CLAIMS = ClaimsReport(
    folder="/var/lib/gpushare/pods", socket="s/gpu", environment={"LD_PRELOAD": "/gpushare.so"}, mounts=(LIBRARY,)
)
POD: dict[str, Any] = {
    "metadata": {"annotations": {"theirs": "kept"}},
    "spec": {
        "containers": [
            {"name": "sidecar"},
            {
                "name": "notebook",
                "env": [{"name": "MINE", "value": "1"}, {"name": "LD_PRELOAD", "value": "theirs.so"}],
                "volumeMounts": [{"name": "home", "mountPath": "/home"}],
            },
        ],
        "volumes": [{"name": "home", "emptyDir": {}}],
    },
}


def gpus(simulated: bool = False) -> list[GpuReport]:
    return [
        GpuReport(index=2 * number, uuid=uuid, model="A100", memory_bytes=40 * 2**30, simulated=simulated)
        for number, uuid in enumerate(("GPU-a", "GPU-b"))
    ]


def layer(
    template: Template = QUARTER, names: tuple[str, ...] = ("GPU-a",), simulated: bool = False
) -> NativeClaimLayer:
    placement = Placement("node-1", names, borrowed=5)
    there = gpus(simulated)
    indices = {gpu.uuid: gpu.index for gpu in there}
    session = granted_session(Tenant("ada"), template, placement, indices, 1000.0)
    return NativeClaimLayer(session, "node-1", there, CLAIMS, "jhub", "jupyter-ada-1")


def test_the_pod_names_the_claim_and_no_container_does() -> None:
    before = deepcopy(POD)
    pod = layer().render(POD)
    assert before == POD
    session = pod_session(pod["metadata"]["annotations"])
    assert (session.session, session.share_units, session.borrowed_units, session.gpu_indices) == ("ada", 25, 5, (0,))
    assert pod["metadata"]["annotations"]["theirs"] == "kept"
    assert pod["metadata"]["labels"] == labels()
    assert node_of(pod["spec"]) == "node-1"
    assert pod["spec"]["resourceClaims"] == [{"name": "gpushare", "resourceClaimName": "jupyter-ada-1"}]
    sidecar, notebook = pod["spec"]["containers"]
    assert sidecar == {"name": "sidecar"}
    assert "claims" not in notebook["resources"]
    assert not notebook["resources"]["limits"]


def test_the_container_gets_what_a_device_plugin_would_have_brought() -> None:
    pod = layer().render(POD)
    folder = f"/var/lib/gpushare/pods/{claim_folder('jhub', 'jupyter-ada-1')}"
    notebook = notebook_container(pod["spec"])
    env = {one["name"]: one["value"] for one in notebook["env"]}
    assert env == {
        "MINE": "1",
        "LD_PRELOAD": "theirs.so /gpushare.so",
        "GPUSHARE_SOCKET": f"{folder}/s/gpu",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "NVIDIA_VISIBLE_DEVICES": "GPU-a",
    }
    home, own, library = notebook["volumeMounts"]
    assert home == {"name": "home", "mountPath": "/home"}
    assert own == {"name": "gpushare-0", "mountPath": folder, "readOnly": True}
    assert library == {"name": "gpushare-1", "mountPath": "/gpushare.so", "readOnly": True}
    assert pod["spec"]["volumes"][1:] == [
        {"name": "gpushare-0", "hostPath": {"path": folder}},
        {"name": "gpushare-1", "hostPath": {"path": LIBRARY.host_path}},
    ]


def test_simulated_gpus_are_none_of_nvidias_runtime() -> None:
    notebook = notebook_container(layer(simulated=True).render(POD)["spec"])
    assert "NVIDIA_VISIBLE_DEVICES" not in {one["name"] for one in notebook["env"]}


def test_the_claim_asks_for_units_and_their_part_of_the_memory_of_each_gpu() -> None:
    claim = layer(TWO, ("GPU-b", "GPU-a")).manifest("jupyter-ada", "uid-1")
    assert claim["metadata"]["name"] == "jupyter-ada-1"
    (owner,) = claim["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("Pod", "jupyter-ada", "uid-1", True)
    requests = claim["spec"]["devices"]["requests"]
    assert [one["name"] for one in requests] == ["gpu-0", "gpu-1"]
    assert [one["exactly"]["capacity"]["requests"] for one in requests] == [{"units": "100", "memory": "40960Mi"}] * 2
    (quarter,) = layer().manifest("jupyter-ada", "uid-1")["spec"]["devices"]["requests"]
    assert quarter["exactly"]["capacity"]["requests"] == {"units": "25", "memory": "10240Mi"}
    ((selector,),) = [one["exactly"]["selectors"] for one in [quarter]]
    assert selector["cel"]["expression"] == (
        'device.driver == "gpushare-spawner.io" && device.attributes["gpushare-spawner.io"].uuid == "GPU-a"'
    )


@pytest.mark.parametrize(("template", "names"), [(CPU, ("GPU-a",)), (QUARTER, ("GPU-c",))])
def test_what_cannot_be_granted_is_refused(template: Template, names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"asks for no GPU|the index of GPU-c"):
        layer(template, names)
