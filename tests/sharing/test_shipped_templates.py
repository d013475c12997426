"""Each template that we ship, with each layer: refused as it is, and rendered without what the layer cannot keep."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import ClusterDevice, ClusterFacts, ClusterNode, ClusterSlice, LayerRequest, Tenant
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from tests.sharing.requests import GIB, POD, node, notebook

FILES = sorted((Path(__file__).parents[2] / "templates").glob("*.yaml"))
FOREIGN = sorted(set(LayerName) - {LayerName.NATIVE})
LABELS = {"nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/mig.strategy": "mixed", "nvidia.com/gpu.count": "4"}
REGISTERED = '[{"id": "GPU-0", "count": 10, "devmem": 81920, "devcore": 100, "type": "NVIDIA-A100", "health": true}]'
PROFILES = {"1g.10gb": 9728, "2g.20gb": 19968, "4g.40gb": 40192}


def replicas(strategy: str, count: int) -> ClusterNode:
    labels = {"nvidia.com/gpu.sharing-strategy": strategy, "nvidia.com/gpu.replicas": str(count)}
    return node(f"{strategy}-{count}", labels=labels, allocatable={"nvidia.com/gpu.shared": count})


def cluster() -> ClusterFacts:
    """Nodes that have each layer at a time, for shares of each size."""
    whole = ClusterNode(
        "a",
        {**node().labels, **LABELS},
        {"hami.io/node-nvidia-register": REGISTERED},
        {
            "nvidia.com/gpu": 4, "cnvrg.io/metagpu": 400, "nvshare.com/gpu": 10,
            **{f"nvidia.com/mig-{name}": 1 for name in PROFILES},
        },
    )  # fmt: skip
    shared = [replicas(strategy, count) for strategy in ("time-slicing", "mps") for count in (2, 4, 10)]
    attributes = {"type": "mig", "parentUUID": "GPU-0"}
    devices = (
        ClusterDevice("gpu-0", {"type": "gpu", "uuid": "GPU-0"}, {"memory": 80 * GIB}),
        *(
            ClusterDevice(f"mig-{place}", {**attributes, "profile": name}, {"memory": mib * 2**20})
            for place, (name, mib) in enumerate(PROFILES.items())
        ),
    )
    return ClusterFacts((whole, *shared), slices=(ClusterSlice("gpu.nvidia.com", "a", "a", devices),))


def fields(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def adapted(file: Path) -> Template:
    """The template without what no other layer keeps."""
    found = fields(file)
    gpu = found.get("gpu") or {}
    gpu.pop("memory", None)
    found["idle"] = {"stop_after": found["idle"]["stop_after"]}
    return Template.model_validate(found)


@pytest.mark.parametrize("layer", FOREIGN)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_template_as_it_is_says_what_the_layer_cannot_keep(file: Path, layer: LayerName) -> None:
    template = Template.model_validate(fields(file))
    broken = {one.field for one in template.broken_promises(layer)}
    if template.gpu is None:
        assert broken == set()
        return
    expected = {"idle.release_after"}
    expected |= {"idle.downgrade_after"} if template.idle.downgrade_after is not None else set()
    expected |= set() if LAYERS[layer].oversubscribes else {"gpu.memory.oversubscribe"}
    assert broken - {"gpu.memory.limit"} == expected


@pytest.mark.parametrize("layer", FOREIGN)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_template_without_these_promises_is_rendered_and_placed(file: Path, layer: LayerName) -> None:
    template = adapted(file)
    assert template.broken_promises(layer) == ()
    functions = POD_LAYERS[layer]
    request = LayerRequest(Tenant("ada"), template, LayersFile().options_of(layer), cluster())
    if template.gpu is None:
        with pytest.raises(ValueError, match="asks for no GPU"):
            functions.render(POD, request)
        return
    before = copy.deepcopy(POD)
    pod = functions.render(POD, request)
    assert before == POD, "what is given is not changed"
    assert pod != POD
    # what was there stays
    assert POD["metadata"]["annotations"].items() <= pod["metadata"]["annotations"].items()
    assert POD["metadata"]["labels"].items() <= pod["metadata"]["labels"].items()
    assert notebook(pod)["resources"]["limits"]["memory"] == "4Gi"
    assert notebook(pod)["env"] == notebook(POD)["env"]
    assert pod["spec"]["containers"][0] == POD["spec"]["containers"][0]
    # and rendering again changes nothing: a pod is made twice where the first is refused
    assert functions.render(POD, request) == pod
    capacity = functions.free(request)
    assert 0 < capacity.servers <= capacity.at_most
    assert capacity.limited_by == ""
    assert functions.free(LayerRequest(request.tenant, template, request.options, ClusterFacts(
        tuple(ClusterNode(one.name, one.labels, one.annotations, one.allocatable, True) for one in cluster().nodes),
        slices=cluster().slices,
    ))).servers == 0  # fmt: skip


@pytest.mark.parametrize("layer", FOREIGN)
def test_pod_without_containers_is_an_error(layer: LayerName) -> None:
    template = adapted(next(file for file in FILES if "quarter" in file.stem))
    request = LayerRequest(Tenant("ada"), template, LayersFile().options_of(layer), cluster())
    with pytest.raises(ValueError, match="no container"):
        POD_LAYERS[layer].render({"metadata": {}, "spec": {"containers": []}}, request)


def test_all_foreign_layers_have_functions() -> None:
    assert list(POD_LAYERS) == [layer for layer in LAYERS if layer is not LayerName.NATIVE]
