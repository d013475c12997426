"""Our own layer in a cluster: a template and a placement become annotations, limits and a node."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from gpushare_spawner.agent.kubernetes.pods.pod_watch import open_request
from gpushare_spawner.model.kubernetes.annotations import labels, pod_session
from gpushare_spawner.model.kubernetes.container_requests import notebook_container
from gpushare_spawner.model.kubernetes.objects import node_of
from gpushare_spawner.model.layers import MemoryEngine, Placement
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.sharing.native import NativePodLayer, granted_session

QUARTER = Template.model_validate({"name": "quarter", "display_name": "Q", "gpu": {"fraction": 0.25}})
TWO = Template.model_validate({"name": "two", "display_name": "2", "gpu": {"count": 2}})
POD: dict[str, Any] = {
    "metadata": {"annotations": {"theirs": "kept"}},
    "spec": {"containers": [{"name": "sidecar"}, {"name": "notebook", "env": [{"name": "MINE", "value": "1"}]}]},
}


def layer(template: Template = QUARTER, gpus: tuple[str, ...] = ("GPU-a",), unit_size: int = 1) -> NativePodLayer:
    placement = Placement("node-1", gpus, borrowed=5)
    indices = {"GPU-a": 0, "GPU-b": 2}
    return NativePodLayer(granted_session(Tenant("ada"), template, placement, indices, 1000.0), "node-1", unit_size)


def test_the_pod_says_what_it_holds_and_the_one_given_stays_as_it_is() -> None:
    before = deepcopy(POD)
    pod = layer().render(POD)
    assert before == POD
    session = pod_session(pod["metadata"]["annotations"])
    assert session == layer().session
    assert (session.session, session.share_units, session.borrowed_units, session.tier_since) == ("ada", 25, 5, 1000.0)
    assert pod["metadata"]["annotations"]["theirs"] == "kept"
    assert pod["metadata"]["labels"] == labels()
    assert node_of(pod["spec"]) == "node-1"
    sidecar, notebook = pod["spec"]["containers"]
    assert sidecar == {"name": "sidecar"}
    assert notebook["resources"]["limits"] == {"gpushare-spawner.io/gpu-0": "25"}
    # of one GPU the device plugin tells the container
    assert notebook["env"] == [{"name": "MINE", "value": "1"}]


def test_units_are_rounded_up_to_whole_devices() -> None:
    notebook = notebook_container(layer(unit_size=10).render(POD)["spec"])
    assert notebook["resources"]["limits"] == {"gpushare-spawner.io/gpu-0": "3"}


def test_engine_suspend_stands_in_annotations_and_environment() -> None:
    suspended = Template.model_validate(
        {"name": "s", "display_name": "S", "gpu": {"fraction": 0.25, "memory": {"engine": "suspend"}}}
    )
    pod = layer(suspended).render(POD)
    assert pod_session(pod["metadata"]["annotations"]).engine is MemoryEngine.SUSPEND
    assert notebook_container(pod["spec"])["env"][1:] == [{"name": "GPUSHARE_ENGINE", "value": "suspend"}]


def test_limit_of_gpu_time_stands_in_annotations() -> None:
    gpu = {"fraction": 0.25, "time": {"limit": "40%"}}
    pod = layer(Template.model_validate({"name": "e", "display_name": "E", "gpu": gpu})).render(POD)
    assert pod["metadata"]["annotations"]["gpushare-spawner.io/time-limit"] == "40"
    annotated = pod_session(pod["metadata"]["annotations"])
    assert open_request(annotated, ("GPU-a",)).time_limit_units == 40


def test_several_gpus_are_named_in_the_environment() -> None:
    notebook = notebook_container(layer(TWO, ("GPU-b", "GPU-a")).render(POD)["spec"])
    assert notebook["resources"]["limits"] == {"gpushare-spawner.io/gpu-2": "100", "gpushare-spawner.io/gpu-0": "100"}
    added = {variable["name"]: variable["value"] for variable in notebook["env"]}
    assert added["NVIDIA_VISIBLE_DEVICES"] == added["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert added["MINE"] == "1"


def test_what_cannot_be_rendered_is_an_error() -> None:
    with pytest.raises(ValueError, match="asks for no GPU"):
        layer(Template(name="cpu", display_name="CPU"))
    with pytest.raises(ValueError, match="the index of GPU-z on node-1 is unknown"):
        layer(gpus=("GPU-z",))
    with pytest.raises(ValueError, match="the pod has no container"):
        layer().render({})


def test_the_account_that_the_share_is_charged_to_stands_in_the_annotations() -> None:
    placement = Placement("node-1", ("GPU-a",))
    tenant = Tenant("ada", quota="group:optics", user_units=50)
    charged = NativePodLayer(granted_session(tenant, QUARTER, placement, {"GPU-a": 0}, 1000.0), "node-1")
    annotations = charged.render(POD)["metadata"]["annotations"]
    assert annotations["gpushare-spawner.io/quota"] == "group:optics"
    assert (pod_session(annotations).quota, pod_session(annotations).user_units) == ("group:optics", 50)
    assert "gpushare-spawner.io/quota" not in layer().render(POD)["metadata"]["annotations"]
