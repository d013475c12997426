"""The chart of the agent, rendered: every object makes sense, and wrong values are refused with their path."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpushare_simgpu
import helm_python
import jsonschema
import pytest
import yaml

from gpushare_spawner import cli
from gpushare_spawner.agent import probe
from gpushare_spawner.cli import subcommand_parser
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.kubernetes.objects import resource_name
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.templates.parser import TEMPLATE as TEMPLATE_FILE
from gpushare_spawner.templates.parser import parse
from tests.kubernetes.agent_account import POLICY_KINDS
from tests.kubernetes.charts import AGENT_CHART, ROOT, VALUES, load, merged, notes, objects, one, render
from tests.kubernetes.observing_agent import OBSERVER_RULES
from tests.kubernetes.standin.quantities import quantity
from tests.present import present

CLUSTER_WIDE = {*POLICY_KINDS, "ClusterRole", "ClusterRoleBinding"}
CLAIM: dict[str, Any] = {}
OWN = {"gpus": {"from": "own"}}
AUTOSCALING = load(VALUES / "autoscaling-agent.yaml")
EVERYTHING: dict[str, Any] = {
    "image": {"tag": "1.2.3", "pullSecrets": ["registry"]},
    "gpus": {"count": 4, "overcommit": 1.5, "unitSize": 5},
    "node": {
        "cdi": "nvidia.com/gpu",
        "hostPID": False,
        "seLinuxOptions": {"type": "spc_t"},
        "kubeletDir": "/var/lib/k0s/kubelet",
        "hostDir": "/srv/gpushare",
    },
    "extraArgs": ["--exclusive"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "metrics": {
        "tokenSecret": {"name": "agents-metrics"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "serviceAccount": {"annotations": {"e": "f"}},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}], "apiServerPorts": [16443]},
    "templates": {"quarter": {"display_name": "0.25: GPU", "gpu": {"fraction": 0.25}}, "gone": None},
    "warmNodes": {"replicas": 3},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["gpu"]}]}]
            }
        }
    },
}
OBSERVING = load(VALUES / "observing-agent.yaml")
KIND = ROOT / "tests" / "kubernetes" / "kind"
SIMULATED = load(VALUES / "simulated-gpus.yaml")
ON_KIND = merged(SIMULATED, load(KIND / "agent.yaml"))
ALL = {"claim": CLAIM, "own": OWN, "autoscaling": AUTOSCALING, "simulated": SIMULATED, "everything": EVERYTHING}


def container(items: list[dict[str, Any]]) -> dict[str, Any]:
    (agent,) = one(items, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = agent
    return found


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_every_object_is_named_labelled_and_in_the_releases_namespace(values: dict[str, Any]) -> None:
    items = render(values)
    assert len({(item["kind"], item["metadata"]["name"]) for item in items}) == len(items)
    for item in items:
        assert item["apiVersion"]
        assert item["metadata"].get("namespace", "jhub") == "jhub"
        assert ("namespace" in item["metadata"]) is (item["kind"] not in CLUSTER_WIDE)
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "gpushare"


def test_the_chart_passes_helms_lint_as_strictly_as_a_release_asks_it() -> None:
    found = helm_python.lint(AGENT_CHART, strict=True, namespace="default")
    assert found["errors"] == []
    # 1 is information: the chart has no icon
    assert {message["severity"] for message in found["messages"]} <= {1}


def test_no_object_reaches_beyond_the_namespace_but_the_policies_and_the_right_to_read_capacity() -> None:
    kinds = {item["kind"] for values in ALL.values() for item in render(values)} - CLUSTER_WIDE
    assert kinds == {
        "DaemonSet", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "ConfigMap", "Service", "ServiceMonitor",
        "Deployment", "Job",
    }  # fmt: skip


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_rights_are_exactly_these(values: dict[str, Any]) -> None:
    items = render(values)
    daemon = one(items, "DaemonSet")
    name = daemon["metadata"]["name"]
    assert one(items, "Role", name)["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "patch"]},
    ]
    assert one(items, "Role", f"{name}-hub")["rules"] == [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods/resize"], "verbs": ["patch"]},
    ]
    account = daemon["spec"]["template"]["spec"]["serviceAccountName"]
    assert one(items, "ServiceAccount")["metadata"]["name"] == account
    for role, subject in ((name, account), (f"{name}-hub", "hub")):
        binding = one(items, "RoleBinding", role)
        assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": subject, "namespace": "jhub"}]


def test_an_agent_that_observes_gives_out_no_gpu_and_writes_to_no_pod() -> None:
    items = render({"observe": True})
    agent, pod = container(items), one(items, "DaemonSet")["spec"]["template"]["spec"]
    assert subcommand_parser("agent").parse_args(agent["args"][1:]).kubernetes == "observe"
    assert subcommand_parser("agent").parse_args(container(render(CLAIM))["args"][1:]).kubernetes == "device-plugin"
    assert one(items, "Role", "gpushare")["rules"][0] == {
        "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]
    }  # fmt: skip
    assert sorted(one(items, "Role", "gpushare")["rules"], key=str) == sorted(OBSERVER_RULES, key=str)
    assert "nvidia.com/gpu" not in agent["resources"]["limits"], "it takes no GPU from the layer"
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in agent["env"]
    assert {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"} in agent["env"]
    assert (pod["runtimeClassName"], pod["hostPID"]) == ("nvidia", True)
    assert one(items, "DaemonSet")["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    assert "observe servers of other sharing layers" in notes({"observe": True})
    assert "share GPUs of" not in notes({"observe": True})


def test_the_notes_warn_of_a_layer_whose_rights_the_hub_lacks() -> None:
    card = {"display_name": "a", "gpu": {"fraction": 0.25, "layer": "dra"}}
    values: dict[str, Any] = {
        "templates": {"a": card, "b": {"display_name": "b"}, "c": None},
        "layers": {"rules": [{"layer": "kai"}, {"layer": "hami"}]},
    }
    said = notes(values)
    assert [layer for layer in ("kai", "dra", "hami") if f"name {layer}, and hub.layers does not" in said] == [
        "kai",
        "dra",
    ]
    assert "WARNING" not in notes({**values, "hub": {"layers": ["kai", "dra"]}})


def test_a_second_release_for_nodes_of_another_layer_makes_no_object_of_the_first() -> None:
    first, second = render(OWN), render(OBSERVING, name="gpushare-observers")
    named = [{(item["kind"], item["metadata"]["name"]) for item in items} for items in (first, second)]
    assert not named[0] & named[1]
    assert one(second, "DaemonSet")["spec"]["template"]["spec"]["nodeSelector"]["pool"] == "teaching"
    assert not any(item["metadata"]["name"].endswith("-hub") for item in second)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kubelet": "dra"}, "kubelet has to be device-plugin"),
        ({"suspend": {"enabled": True}}, "suspend.enabled has to be false"),
        ({"userNamespaces": True}, "hub.createRole has to be false"),
    ],
)
def test_what_an_agent_that_observes_cannot_do_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        render({"observe": True, **values})


def test_an_agent_that_observes_reads_pods_in_the_users_namespaces() -> None:
    values = {"observe": True, "userNamespaces": True, "hub": {"createRole": False}}
    role = one(render(values), "ClusterRole", "jhub-gpushare")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    named = {item["metadata"]["name"] for item in render({**values, "userNamespaceNames": ["a"]})}
    assert "jhub-gpushare-sessions" not in named


def test_user_namespaces_take_a_cluster_role_with_nothing_but_pods() -> None:
    items = render({"userNamespaces": True})
    assert "--all-namespaces" in container(items)["args"]
    assert "--all-namespaces" not in container(render(CLAIM))["args"]
    role, binding = one(items, "ClusterRole", "jhub-gpushare"), one(items, "ClusterRoleBinding", "jhub-gpushare")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}]
    assert binding["roleRef"]["name"] == "jhub-gpushare"
    assert [subject["name"] for subject in binding["subjects"]] == ["gpushare", "hub"]
    resize = {"apiGroups": [""], "resources": ["pods/resize"], "verbs": ["patch"]}
    for name, verbs in (("gpushare", ["create", "patch"]), ("gpushare-hub", ["list", "watch", "patch"])):
        assert one(items, "Role", name)["rules"] == [{"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs}]
    assert one(items, "ClusterRole", "jhub-gpushare-hub-requests")["rules"] == [resize]
    subjects = one(items, "ClusterRoleBinding", "jhub-gpushare-hub-requests")["subjects"]
    assert [subject["name"] for subject in subjects] == ["hub"]


def test_pods_of_named_user_namespaces_are_patched_and_resized_there_alone() -> None:
    items = render({"userNamespaces": True, "userNamespaceNames": ["user-ann", "user-bob"]})
    everywhere = [item for item in items if item["kind"] == "ClusterRoleBinding"]
    bound = {binding["roleRef"]["name"] for binding in everywhere}
    assert bound == {"jhub-gpushare", "jhub-gpushare-hub-capacity"}
    for name in bound:
        assert {verb for rule in one(items, "ClusterRole", name)["rules"] for verb in rule["verbs"]} == {
            "list",
            "watch",
        }
    named = [
        (item["metadata"]["namespace"], item["roleRef"]["name"], [subject["name"] for subject in item["subjects"]])
        for item in items
        if item["kind"] == "RoleBinding" and item["roleRef"]["kind"] == "ClusterRole"
    ]
    assert sorted(named) == [
        (namespace, role, subjects)
        for namespace in ("user-ann", "user-bob")
        for role, subjects in (("jhub-gpushare-hub-requests", ["hub"]), ("jhub-gpushare-sessions", ["gpushare", "hub"]))
    ]
    patch = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    assert one(items, "ClusterRole", "jhub-gpushare-sessions")["rules"] == [patch]
    assert one(items, "ClusterRole", "jhub-gpushare-hub-requests")["rules"] == [{**patch, "resources": ["pods/resize"]}]
    assert all(item["metadata"].get("namespace") in (None, "jhub", "user-ann", "user-bob") for item in items)


@pytest.mark.parametrize(("off", "left"), [("rbac", ["hub"]), ("hub", ["gpushare"])])
def test_a_cluster_role_is_bound_only_to_those_whose_rights_the_chart_makes(off: str, left: list[str]) -> None:
    key = {"rbac": {"create": False}, "hub": {"createRole": False}}[off]
    binding = one(render({"userNamespaces": True, off: key}), "ClusterRoleBinding", "jhub-gpushare")
    assert [subject["name"] for subject in binding["subjects"]] == left
    neither = render({"userNamespaces": True, "rbac": {"create": False}, "hub": {"createRole": False}})
    assert not {"Role", "ClusterRole", "ClusterRoleBinding"} & {item["kind"] for item in neither}


def test_the_hub_alone_reads_nodes_and_pods_of_the_cluster() -> None:
    items = render({"hub": {"serviceAccountName": "my-hub"}})
    role, binding = one(items, "ClusterRole"), one(items, "ClusterRoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}]
    assert role["metadata"]["name"] == binding["metadata"]["name"] == "jhub-gpushare-hub-capacity"
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "jhub-gpushare-hub-capacity",
    }  # fmt: skip
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "my-hub", "namespace": "jhub"}]


def test_the_hub_reads_what_other_layers_publish_only_where_they_are_named() -> None:
    items = render({"hub": {"layers": ["mig", "kai", "dra"]}})
    everywhere = {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}
    queues = {"apiGroups": ["scheduling.run.ai"], "resources": ["queues"], "verbs": ["list", "watch"]}
    devices = {
        "apiGroups": ["resource.k8s.io"], "resources": ["resourceslices", "resourceclaims"], "verbs": ["list", "watch"],
    }  # fmt: skip
    assert one(items, "ClusterRole", "jhub-gpushare-hub-capacity")["rules"] == [everywhere, queues, devices]
    made = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaimtemplates"], "verbs": ["get", "create"]}
    assert made in one(items, "Role", "gpushare-hub")["rules"]
    for layers in ([], ["mig", "hami"]):
        items = render({"hub": {"layers": layers}})
        assert one(items, "ClusterRole")["rules"] == [everywhere]
        assert made not in one(items, "Role", "gpushare-hub")["rules"]
    with pytest.raises(Exception, match="/hub/layers/0"):
        render({"hub": {"layers": ["magic"]}})


@pytest.mark.parametrize("hub", [{"readCapacity": False}, {"createRole": False}])
def test_without_it_no_right_reaches_beyond_the_namespace(hub: dict[str, bool]) -> None:
    assert not {"ClusterRole", "ClusterRoleBinding"} & {item["kind"] for item in render({"hub": hub})}


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_every_mount_has_its_volume_and_host_folders_keep_their_paths(values: dict[str, Any]) -> None:
    pod = one(render(values), "DaemonSet")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    for name, volume in volumes.items():
        if "hostPath" in volume:
            assert volume["hostPath"]["path"] == mounts[name]["mountPath"]
    options = dict(arg.split("=", 1) for arg in pod["containers"][0]["args"] if "=" in arg)
    paths = {mount["mountPath"] for mount in mounts.values()}
    assert {
        options["--host-dir"],
        options["--device-plugins-dir"],
        options["--kubelet-dir"] + "/pod-resources",
    } <= paths
    writable = {name for name, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {"sessions", "device-plugins", "tmp"}


def test_folders_of_another_distribution() -> None:
    items = render(EVERYTHING)
    paths = {mount["mountPath"] for mount in container(items)["volumeMounts"]}
    # the kubelet's --root-dir does not move where it listens for device plugins
    assert {"/srv/gpushare", "/var/lib/kubelet/device-plugins", "/var/lib/k0s/kubelet/pod-resources"} <= paths


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_agent_may_do_as_little_as_works(values: dict[str, Any]) -> None:
    items = render(values)
    pod = one(items, "DaemonSet")["spec"]["template"]["spec"]
    security = dict(container(items)["securityContext"])
    assert security.pop("seLinuxOptions", None) == values.get("node", {}).get("seLinuxOptions")
    assert security == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert not pod.get("hostNetwork")
    assert not pod.get("hostIPC")
    assert container(items)["resources"]["limits"]["memory"] == "150Mi"


def test_right_to_suspend_processes_is_off_by_default_and_needs_the_hosts_pids() -> None:
    agent = container(render({}))
    assert "add" not in agent["securityContext"]["capabilities"]
    suspending = container(render({"suspend": {"enabled": True}}))
    assert suspending["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    environment = {one["name"]: one.get("value") for one in suspending["env"]}
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert quantity(suspending["resources"]["limits"]["memory"]) > quantity(agent["resources"]["limits"]["memory"])
    chosen = container(render({"suspend": {"enabled": True}, "resources": {"limits": {"memory": "3Gi"}}}))
    assert chosen["resources"]["limits"]["memory"] == "3Gi"
    with pytest.raises(Exception, match=r"node\.hostPID has to be true"):
        render({"suspend": {"enabled": True}, "node": {"hostPID": False}})


def test_right_to_stop_processes_is_off_by_default_and_needs_the_hosts_pids() -> None:
    stopping = container(render({"enforcer": {"enabled": True}}))
    assert stopping["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["KILL"]}
    both = container(render({"enforcer": {"enabled": True}, "suspend": {"enabled": True}}))
    assert both["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE", "KILL"]
    for values in ({"node": {"hostPID": False}}, {"observe": True}):
        with pytest.raises(Exception, match=r"has to be (true|false)"):
            render({"enforcer": {"enabled": True}, **values})


def test_gpus_are_claimed_from_nvidias_plugin() -> None:
    items = render(EVERYTHING)
    assert container(items)["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "NVIDIA_VISIBLE_DEVICES" not in {variable["name"] for variable in container(items)["env"]}
    assert one(items, "DaemonSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_or_the_node_is_owned() -> None:
    items = render(OWN)
    assert "nvidia.com/gpu" not in container(items)["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container(items)["env"]
    daemon = one(items, "DaemonSet")
    assert daemon["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert daemon["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_agent_takes_these_options(values: dict[str, Any]) -> None:
    command, *arguments = container(render(values))["args"]
    assert command == "agent"
    parser = subcommand_parser("agent")
    options = parser.parse_args(arguments)
    assert options.kubernetes == ("observe" if values.get("observe") else values.get("kubelet", "device-plugin"))
    assert options.overcommit == values.get("gpus", {}).get("overcommit", 1.0)


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_selectors_meet_labels_and_ports_meet_ports(values: dict[str, Any]) -> None:
    items = render(values)
    daemon = one(items, "DaemonSet")
    labels = daemon["spec"]["template"]["metadata"]["labels"].items()
    policy = one(items, "NetworkPolicy")["spec"]
    for selector in (daemon["spec"]["selector"]["matchLabels"], policy["podSelector"]["matchLabels"]):
        assert selector.items() <= labels
    ports = {port["name"]: port["containerPort"] for port in container(items)["ports"]}
    named = values.get("networkPolicy", {}).get("metricsFrom")
    # nobody, unless somebody is named: notebooks are in the same namespace
    expected = [{"from": named, "ports": [{"port": ports["metrics"], "protocol": "TCP"}]}] if named else []
    assert policy["ingress"] == expected
    assert "Ingress" in policy["policyTypes"]
    assert f"--metrics-port={ports['metrics']}" in container(items)["args"]


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_probes_ask_on_the_socket_that_users_cannot_reach(values: dict[str, Any]) -> None:
    agent = container(render(values))
    host_dir = values.get("node", {}).get("hostDir", "/var/lib/gpushare")
    for name in ("readinessProbe", "livenessProbe"):
        assert "httpGet" not in agent[name]
        python, *arguments = agent[name]["exec"]["command"]
        assert (python, arguments) == ("python", ["-m", probe.__name__, f"{host_dir}/control.sock"])
        assert agent[name]["timeoutSeconds"] > probe.ANSWER_WITHIN


def test_names_of_users_are_in_the_metrics_for_those_with_the_token_only() -> None:
    """Without a Secret the agent has no token, and tells nobody."""
    assert not [one for one in container(render(CLAIM))["args"] if "token" in one]
    values = merged(EVERYTHING, {"metrics": {"tokenSecret": {"name": "agents", "key": "prometheus"}}})
    items = render(values)
    (mount,) = [one for one in container(items)["volumeMounts"] if one["name"] == "metrics-token"]
    assert f"--metrics-token-file={mount['mountPath']}/token" in container(items)["args"]
    assert mount["readOnly"]
    pod = one(items, "DaemonSet")["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "metrics-token"]
    assert volume["secret"] == {
        "secretName": "agents", "defaultMode": 0o400, "items": [{"key": "prometheus", "path": "token"}],
    }  # fmt: skip
    (endpoint,) = one(items, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "agents", "key": "prometheus"}}


def test_a_service_monitor_where_it_is_wanted() -> None:
    assert not [item for item in render(CLAIM) if item["kind"] in ("Service", "ServiceMonitor")]
    items = render(EVERYTHING)
    service, monitor = one(items, "Service"), one(items, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    labels = one(items, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_templates_become_files_that_the_hub_can_read() -> None:
    shipped = {path.stem: load(path) for path in sorted((ROOT / "templates").glob("*.yaml"))}
    config_map = one(render({"templates": shipped}), "ConfigMap", "gpushare-templates")
    assert set(config_map["data"]) == {f"{name}.yaml" for name in shipped}
    for name, text in config_map["data"].items():
        original = parse(TEMPLATE_FILE, (ROOT / "templates" / name).read_text(), name).content
        assert original is not None
        assert parse(TEMPLATE_FILE, text, name).content == original
    data = one(render(EVERYTHING), "ConfigMap", "gpushare-templates")["data"]
    assert yaml.safe_load(data["quarter.yaml"])["name"] == "quarter"
    assert set(data) == {"quarter.yaml"}


TEMPLATE = {"quarter": {"display_name": "Quarter", "gpu": {"fraction": 0.25}}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "1 template, 1 quota, no problems."),
        ({"templates": {"quarter": {"display_name": "Q", "gpu": {"fraction": 0.255}}}}, "gpu.fraction"),
        ({"templates": {"quarter": {"display_name": "Q", "gpu": {"models": ["T4"]}}}}, "give fraction"),
        ({"quotas": {"users": {"ada": {"guarantee": 2, "maximum": 1}}}}, ": users.ada: the maximum"),
        ({"layers": {"rules": [{"layer": "mig", "options": {"kai": {}}}]}}, "options of kai have no effect"),
        ({"idlePolicy": {"defaults": {"release_after": "5h", "stop_after": "1h"}}}, "idle.yaml:"),
    ],
)
def test_before_an_upgrade_a_job_checks_the_templates_as_the_hub_would(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = render({"templates": TEMPLATE, "quotas": {"users": {"ada": {"guarantee": 1}}}} | changes)
    job, files = one(items, "Job"), one(items, "ConfigMap", "gpushare-templates-check")
    assert files["data"] == one(items, "ConfigMap", "gpushare-templates")["data"]
    for item in (job, files):
        assert item["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]["spec"]
    (checks,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = checks["volumeMounts"]
    assert (mount["name"], volume["configMap"]["name"]) == (volume["name"], files["metadata"]["name"])
    for name, text in files["data"].items():
        (tmp_path / name).write_text(text)
    args = [str(tmp_path) if argument == mount["mountPath"] else argument for argument in checks["args"]]
    assert cli.main(args) == bool(changes)
    assert said in capsys.readouterr().out


def test_there_is_no_job_without_templates() -> None:
    for templates in ({"gone": None}, {}):
        items = render({"templates": templates, "quotas": {"users": {"ada": {"guarantee": 1}}}})
        assert not [item for item in items if item["kind"] == "Job"]


def test_quotas_are_one_more_file_for_the_hub() -> None:
    quotas = {
        "groups": {"a": {"guarantee": 2.5, "teams": {"t": {"guarantee": 1, "per_user": {"weight": 0.57}}}}, "b": {}},
        "users": {"ada": {"maximum": 0.29}},
        "half_life": "12h",
        "reclaim": {"stop_after": "30m"},
    }
    data = one(render({"templates": TEMPLATE, "quotas": quotas}), "ConfigMap", "gpushare-templates")["data"]
    assert set(data) == {"quarter.yaml", "quotas.yaml"}
    assert Quotas.model_validate(yaml.safe_load(data["quotas.yaml"])) == Quotas.model_validate(quotas)


def test_quotas_need_templates_and_no_template_has_their_name() -> None:
    with pytest.raises(Exception, match="quotas: needs templates"):
        render({"quotas": {"groups": {"a": {}}}})
    with pytest.raises(Exception, match=r"templates\.quotas: the name is reserved"):
        render({"templates": {"quotas": TEMPLATE["quarter"]}})


def test_warm_nodes_are_one_pod_each() -> None:
    items = render(AUTOSCALING)
    spec = one(items, "Deployment")["spec"]
    assert spec["replicas"] == 2
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == one(items, "DaemonSet")["spec"]["template"]["spec"]["nodeSelector"]
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod = one(render(EVERYTHING), "Deployment")["spec"]["template"]["spec"]
    assert pod["affinity"]["nodeAffinity"] == EVERYTHING["affinity"]["nodeAffinity"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_what_is_set_for_the_pods_is_in_them() -> None:
    items = render(EVERYTHING)
    template = one(items, "DaemonSet")["spec"]["template"]
    pod = template["spec"]
    assert template["metadata"]["annotations"] == {"a": "b"}
    assert template["metadata"]["labels"]["c"] == "d"
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["affinity"] == EVERYTHING["affinity"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert {"name": "A", "value": "b"} in container(items)["env"]
    assert container(items)["args"][-1] == "--exclusive"
    assert one(items, "ServiceAccount")["metadata"]["annotations"] == {"e": "f"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # a pod of this class would take GPUs from pods that run
        (CLAIM, None),
        (OWN, "system-node-critical"),
        ({**OWN, "priorityClassName": ""}, None),
        ({"priorityClassName": "gpus"}, "gpus"),
    ],
)
def test_an_agent_that_claims_gpus_preempts_nobody_and_one_that_owns_them_is_not_evicted(
    values: dict[str, Any], expected: str | None
) -> None:
    pod = one(render(values), "DaemonSet")["spec"]["template"]["spec"]
    assert pod.get("priorityClassName") == expected


def test_the_agent_weighs_at_least_half_as_much_as_a_notebook_when_every_core_is_busy() -> None:
    """The kernel divides a busy node's time by CPU requests; docs/guides/kubernetes-nodes.md has what was measured."""
    requested = quantity(container(render(CLAIM))["resources"]["requests"]["cpu"])
    guaranteed = sorted(load(path)["resources"]["cpu"]["guarantee"] for path in (ROOT / "templates").glob("*.yaml"))
    assert requested >= guaranteed[len(guaranteed) // 2] / 2


def test_an_image_is_named_by_tag_or_digest() -> None:
    version = load(AGENT_CHART / "Chart.yaml")["appVersion"]
    name = load(AGENT_CHART / "values.yaml")["image"]["name"]
    digest = "sha256:" + "0" * 64
    assert container(render(CLAIM))["image"] == f"{name}:{version}"
    assert container(render(EVERYTHING))["image"] == f"{name}:1.2.3"
    assert container(render({"image": {"tag": "1.2.3", "digest": digest}}))["image"] == f"{name}@{digest}"


def test_nothing_is_made_that_is_not_wanted() -> None:
    off = {
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False, "admissionPolicy": "never"},
        "hub": {"createRole": False},
        "networkPolicy": {"enabled": False},
    }
    (daemon,) = render(off)
    assert daemon["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_long_names_stay_valid() -> None:
    for item in render(CLAIM, name="a" * 53):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", item["metadata"]["name"])
        # a ClusterRole's name, with the namespace in it, is no label and no DNS name
        assert len(item["metadata"]["name"]) <= (253 if item["kind"] in CLUSTER_WIDE else 63)


@pytest.mark.parametrize(
    ("values", "where", "why"),
    [
        ({"gpus": {"overcommit": 20}}, "/gpus/overcommit", "maximum"),
        ({"gpus": {"from": "steal"}}, "/gpus/from", "claim"),
        ({"gpus": {"count": 0}}, "/gpus/count", "minimum"),
        ({"gpus": {"fraction": 1}}, "/gpus", "fraction"),
        ({"gpu": {}}, "", "gpu"),
        ({"image": {"name": "agent:latest"}}, "/image/name", "pattern"),
        ({"node": {"hostDir": "var/lib"}}, "/node/hostDir", "pattern"),
        ({"node": {"hostDir": "/" + "x" * 100}}, "/node/hostDir", "maxLength"),
        ({"node": {"preload": "magic"}}, "/node/preload", "env"),
        ({"metrics": {"port": "9410"}}, "/metrics/port", "integer"),
        ({"resources": {"limits": {"memory": "150 MB"}}}, "/resources/limits/memory", "pattern"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "/resources/limits", "nvidia.com/gpu"),
        ({"tolerations": [{"key": "a", "operator": "exists"}]}, "/tolerations/0/operator", "Exists"),
        ({"templates": {"My Template": {}}}, "/templates", "My Template"),
        ({"templates": {"q": {"display_name": "Q", "gpu": {"fraction": 65}}}}, "/templates/q/gpu/fraction", "maximum"),
        ({"templates": {"q": {"display_name": "Q", "idle": {"stop": 1}}}}, "/templates/q/idle", "stop"),
        ({"templates": {"q": {}}}, "/templates/q", "display_name"),
        ({"gpus": {"unitSize": 3}}, "/gpus/unitSize", "must be one of 1, 2, 4"),
        ({"image": {"digest": "sha256:abc"}}, "/image/digest", "pattern"),
        ({"node": {"seLinuxOptions": {"kind": "spc_t"}}}, "/node/seLinuxOptions", "kind"),
        ({"extraEnv": [{"name": "A", "vale": "b"}]}, "/extraEnv/0", "vale"),
        ({"affinity": {"node": {}}}, "/affinity", "node"),
        ({"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts", "minItems"),
        ({"nodeSelector": {"a": True}}, "/nodeSelector/a", "string"),
        ({"rbac": {"admissionPolicy": "on"}}, "/rbac/admissionPolicy", "always"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(values: dict[str, Any], where: str, why: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render(values)
    assert f"at '{where}" in str(refused.value)
    assert why in str(refused.value)


def _value_paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for name, value in values.items():
        paths.append((*above, name))
        if isinstance(value, dict):
            paths += _value_paths(value, (*above, name))
    return paths


def _rendered(chart: Any, values: dict[str, Any]) -> dict[str, str] | None:
    """Return the chart's manifests, or None where the chart refuses the values."""
    try:
        manifests: dict[str, str] = chart.render(values, name="gpushare", namespace="jhub")
    except helm_python.HelmValuesError:
        return None
    return manifests


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the chart, whose values.yaml a test replaces."""
    return Path(shutil.copytree(AGENT_CHART, tmp_path_factory.mktemp("reused") / AGENT_CHART.name))


@pytest.fixture(scope="module")
def chart() -> Any:
    return helm_python.Chart.load(AGENT_CHART)


@pytest.mark.parametrize("path", _value_paths(load(AGENT_CHART / "values.yaml")), ids="/".join)
def test_null_that_installs_is_kept_by_an_upgrade_that_reuses_values(
    path: tuple[str, ...], reused: Path, chart: Any
) -> None:
    # helm's --reuse-values takes the installed release's defaults, without what null removed there, as the chart's
    # defaults, and the release's own values, null included, as the given ones
    installed: dict[str, Any] = load(AGENT_CHART / "values.yaml")
    given: dict[str, Any] | None = None
    for name in reversed(path):
        given = {name: given}
    assert given is not None
    section = installed
    for name in path[:-1]:
        section = section[name]
    del section[path[-1]]
    (reused / "values.yaml").write_text(json.dumps(installed))
    assert _rendered(helm_python.Chart.load(reused), given) == _rendered(chart, given)


def test_simulated_gpus_upgrade_to_claims_with_reused_values(reused: Path) -> None:
    simulated = load(VALUES / "simulated-gpus.yaml")
    installed = merged(load(AGENT_CHART / "values.yaml"), simulated)
    installed["nodeSelector"] = {}
    (reused / "values.yaml").write_text(json.dumps(installed))
    upgraded = _rendered(helm_python.Chart.load(reused), merged(simulated, {"kubelet": "dra"}))
    assert upgraded is not None
    agent = one(objects(upgraded), "DaemonSet")["spec"]["template"]["spec"]
    assert "--kubernetes=dra" in agent["containers"][0]["args"]
    assert "nodeSelector" not in agent


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({}, "at '/templates/q': missing property"),
        ({"display_name": "Q", "gpu": 1}, "at '/templates/q/gpu': got number, want object"),
        ({"display_name": "Q", "gpu": {"fraction": "half"}}, "at '/templates/q/gpu/fraction': got string, want"),
        ({"display_name": "Q", "idle": {"keep": True}}, "at '/templates/q/idle/keep': got boolean, want object"),
        ("quarter", "at '/templates/q': got string, want object"),
    ],
)
def test_a_wrong_template_is_refused_for_what_is_wrong_and_not_for_not_being_null(template: Any, said: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render({"templates": {"q": template}})
    assert said in str(refused.value)
    assert not re.search(r"want null$", str(refused.value), re.MULTILINE)


def test_no_schema_offers_null_as_a_branch_of_its_own() -> None:
    assert '"anyOf"' not in (AGENT_CHART / "values.schema.json").read_text()


def _described(schema: dict[str, Any], path: str = "") -> list[str]:
    missing = []
    for name, value in schema.get("properties", {}).items():
        if "description" not in value:
            missing.append(f"{path}/{name}")
        if value.get("type") == "object" and "properties" in value:
            assert value.get("additionalProperties") is False, f"{path}/{name}"
            missing += _described(value, f"{path}/{name}")
    return missing


def test_every_value_is_described_and_no_other_is_taken() -> None:
    schema = json.loads((AGENT_CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    assert _described(schema) == []
    assert set(load(AGENT_CHART / "values.yaml")) == set(schema["properties"]) - {"global"}


def test_a_unit_size_divides_a_gpu() -> None:
    schema = (AGENT_CHART / "values.schema.json").read_text()
    allowed = json.loads(schema)["properties"]["gpus"]["properties"]["unitSize"]["enum"]
    assert allowed == [size for size in range(1, UNITS_PER_GPU + 1) if UNITS_PER_GPU % size == 0]


def test_notes_say_what_to_do_next() -> None:
    said = notes(CLAIM)
    assert "kubectl -n jhub rollout status daemonset/gpushare" in said
    assert "pod-security.kubernetes.io/enforce=privileged" in said
    assert "until you delete them" in said
    assert "{{" not in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hub": {"createRole": False}}, "The hub needs more rights"),
        ({"hub": {"readCapacity": False}}, "does not know how much CPU and memory nodes have free"),
        ({"rbac": {"create": False}}, "service account gpushare needs"),
        ({"rbac": {"admissionPolicy": "never"}}, "an agent's token can change every pod"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "networkPolicy.metricsFrom"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "need a token"),
        ({"templates": None}, "create configmap gpushare-templates"),
    ],
)
def test_notes_say_what_is_missing(values: dict[str, Any], said: str) -> None:
    assert said in notes(values)
    assert said not in notes(EVERYTHING)


def test_agent_with_simulated_gpus_needs_nothing_of_nvidias_and_no_host_pids() -> None:
    items = render(SIMULATED)
    pod = one(items, "DaemonSet")["spec"]["template"]["spec"]
    assert not {"nodeSelector", "runtimeClassName", "priorityClassName"} & pod.keys()
    assert pod["hostPID"] is False
    assert not any(volume["name"].startswith("cdi") for volume in pod["volumes"])
    assert "nvidia.com/gpu" not in container(items)["resources"]["limits"]


def test_four_servers_of_the_trials_templates_fit_beside_the_agent_on_a_node_of_two_cores() -> None:
    """kubeadm's and kind's own pods request 0.95 cores of such a node, zero-to-jupyterhub's none."""
    items = render(SIMULATED)
    requests = container(items)["resources"]["requests"]
    for name, text in one(items, "ConfigMap", "gpushare-templates")["data"].items():
        template = present(parse(TEMPLATE_FILE, text, name).content)
        assert float(quantity(requests["cpu"])) + 4 * present(template.resources.cpu.guarantee) <= 2 - 0.95


def test_image_with_the_simulated_driver_finds_it_without_a_path_in_the_values() -> None:
    stage = (ROOT / "Dockerfile").read_text().partition("FROM agent AS agent-simulated\n")[2]
    folder = present(re.search(r"^ENV LD_LIBRARY_PATH=(\S+)$", stage, flags=re.MULTILINE)).group(1)
    command = present(re.search(r'ln -s "\$\(python -c \'(.+?)\'\)" (\S+)$', stage, flags=re.MULTILINE))
    assert command.group(2) == folder
    said = subprocess.run([sys.executable, "-c", command.group(1)], capture_output=True, text=True, check=True).stdout
    assert Path(said.strip()) == gpushare_simgpu.folder()
    assert "LD_LIBRARY_PATH" not in {variable["name"] for variable in container(render(SIMULATED))["env"]}


def test_hub_image_brings_no_config_file() -> None:
    """A hub whose values are not ours keeps its spawner."""
    stage = (ROOT / "Dockerfile").read_text().partition(" AS hub\n")[2].partition("\nFROM ")[0]
    assert "pip install" in stage
    assert not re.search(r"^(COPY|ADD) ", stage, flags=re.MULTILINE)


def test_on_kind_the_container_has_a_share_of_a_simulated_gpu() -> None:
    agent = container(render(ON_KIND))
    (notebook,) = load(KIND / "share.yaml")["spec"]["containers"]
    assert notebook["image"] == agent["image"]
    assert notebook["resources"]["limits"] == {resource_name(0): "25"}
    compile("\n".join(notebook["args"]), "share.yaml", "exec")


def test_an_idle_policy_is_one_more_file_for_the_hub() -> None:
    policy = {
        "defaults": {"release_after": "10m"},
        "groups": {"staff": {"stop_after": "3d", "keep": {"longest": "1d"}}},
        "limits": {"release_after": "4h"},
        "quiet_hours": [{"start": "22:00", "end": "06:00", "time_zone": "Europe/Berlin", "actions": ["stop"]}],
    }
    data = one(render({"templates": TEMPLATE, "idlePolicy": policy}), "ConfigMap", "gpushare-templates")["data"]
    assert set(data) == {"quarter.yaml", "idle.yaml"}
    assert IdlePolicy.model_validate(yaml.safe_load(data["idle.yaml"])) == IdlePolicy.model_validate(policy)


def test_an_idle_policy_needs_templates_and_no_template_has_its_name() -> None:
    pins = {"users": {"ada": {"gpu": "GPU-00000000-0000-5000-8000-0123456789ab"}}}
    data = one(render({"templates": TEMPLATE, "placement": pins}), "ConfigMap", "gpushare-templates")["data"]
    assert yaml.safe_load(data["placement.yaml"]) == pins
    with pytest.raises(Exception, match="idlePolicy: needs templates"):
        render({"idlePolicy": {"defaults": {"release_after": "5m"}}})
    with pytest.raises(Exception, match=r"templates\.idle: the name is reserved"):
        render({"templates": {"idle": TEMPLATE["quarter"]}})


def test_layers_are_one_more_file_for_the_hub() -> None:
    layers = {
        "rules": [{"models": ["*A100*"], "layer": "mig", "options": {"mig": {"strategy": "mixed"}}}],
        "options": {"kai": {"queue": "notebooks"}, "time-slicing": {"replicas": 4}},
    }
    data = one(render({"templates": TEMPLATE, "layers": layers}), "ConfigMap", "gpushare-templates")["data"]
    assert set(data) == {"quarter.yaml", "layers.yaml"}
    assert LayersFile.model_validate(yaml.safe_load(data["layers.yaml"])) == LayersFile.model_validate(layers)


def test_layers_need_templates_and_no_template_has_their_name() -> None:
    with pytest.raises(Exception, match="layers: needs templates"):
        render({"layers": {"rules": []}})
    with pytest.raises(Exception, match=r"templates\.layers: the name is reserved"):
        render({"templates": {"layers": TEMPLATE["quarter"]}})
