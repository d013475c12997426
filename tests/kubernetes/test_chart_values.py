"""The values for zero-to-jupyterhub: taken by its own schema, and saying what the parts of this project need."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml

from gpushare_spawner.service.hub.roles import ACT, CUSTOM, DRAIN, METRICS, SEE_ALL
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner
from tests.kubernetes.charts import AGENT_CHART, ROOT, VALUES, load, merged, z2jh_folder
from tests.present import present

HUB = load(VALUES / "jupyterhub.yaml")
EXAMPLES = ["kai", "autoscaling", "extra-packages"]
CONFIG_D = "/usr/local/etc/jupyterhub/jupyterhub_config.d"


Z2JH = tuple[dict[str, Any], jsonschema.Draft7Validator]


@pytest.fixture(scope="module")
def z2jh() -> Z2JH:
    """zero-to-jupyterhub's default values and its schema."""
    folder = z2jh_folder()
    if not (folder / "values.schema.yaml").is_file():
        pytest.skip(f"zero-to-jupyterhub's values.yaml and values.schema.yaml are not in {folder}; set GPUSHARE_Z2JH")
    return load(folder / "values.yaml"), jsonschema.Draft7Validator(load(folder / "values.schema.yaml"))


def problems(validator: jsonschema.Draft7Validator, values: dict[str, Any]) -> list[str]:
    return [f"/{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(values)]


@pytest.mark.parametrize("names", [[], *([name] for name in EXAMPLES), ["kai", "autoscaling"]])
def test_zero_to_jupyterhub_takes_them(z2jh: Z2JH, names: list[str]) -> None:
    defaults, validator = z2jh
    values = merged(defaults, HUB, *(load(VALUES / f"{name}.yaml") for name in names))
    assert problems(validator, values) == []


def test_its_schema_refuses_a_wrong_value_with_its_path(z2jh: Z2JH) -> None:
    defaults, validator = z2jh
    wrong = merged(defaults, HUB, {"hub": {"networkPolicy": {"ingres": []}}, "cull": {"enabled": "no"}})
    found = problems(validator, wrong)
    assert any(problem.startswith("/hub/networkPolicy: ") and "ingres" in problem for problem in found)
    assert any(problem.startswith("/cull/enabled: ") for problem in found)


def test_the_proxy_reaches_the_dashboard() -> None:
    files = [file["stringData"] for file in HUB["hub"]["extraFiles"].values()]
    (port,) = {present(re.search(r":(\d+)\"\n", text)).group(1) for text in files if "--ip=*" in text}
    hub, proxy = HUB["hub"], HUB["proxy"]["chp"]["networkPolicy"]
    assert [(extra["port"], extra["targetPort"]) for extra in hub["service"]["extraPorts"]] == [(int(port),) * 2]
    (ingress,), (egress,) = hub["networkPolicy"]["ingress"], proxy["egress"]
    assert [rule["port"] for rule in (*ingress["ports"], *egress["ports"])] == [int(port)] * 2
    assert ingress["from"] == [{"podSelector": {"matchLabels": {"component": "proxy"}}}]
    assert egress["to"] == [{"podSelector": {"matchLabels": {"component": "hub"}}}]


@pytest.mark.parametrize("names", [[], *([name] for name in EXAMPLES)])
def test_mounts_have_volumes_and_the_templates_are_where_the_hub_looks(names: list[str]) -> None:
    hub = merged(HUB, *(load(VALUES / f"{name}.yaml") for name in names))["hub"]
    mounts = {mount["name"]: mount["mountPath"] for mount in hub["extraVolumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in hub["extraVolumes"]}
    assert mounts["gpushare-templates"] == hub["extraEnv"]["GPUSHARE_TEMPLATES"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_settings_are_those_of_the_spawner(name: str) -> None:
    for section, settings in load(VALUES / f"{name}.yaml").get("hub", {}).get("config", {}).items():
        (owner,) = [owner for owner in GPUShareSpawner.mro() if owner.__name__ == section]
        traits = owner.class_traits(config=True)
        for setting, value in settings.items():
            traits[setting].validate(None, value)


def guide_example() -> dict[str, Any]:
    """Return the values of `your-own.yaml` in the guide."""
    text = (ROOT / "docs/guides/kubernetes.md").read_text()
    block = present(re.search(r"```yaml\n( *# your-own\.yaml\n.*?)```", text, re.DOTALL)).group(1)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def test_zero_to_jupyterhub_takes_the_guides_example(z2jh: Z2JH) -> None:
    defaults, validator = z2jh
    assert problems(validator, merged(defaults, HUB, guide_example())) == []


def test_scopes_of_the_guides_operators_are_those_that_the_hub_knows() -> None:
    (role,) = guide_example()["hub"]["loadRoles"].values()
    assert set(role["scopes"]) - {"access:services!service=gpushare"} <= CUSTOM.keys()
    assert {SEE_ALL, ACT, DRAIN} <= set(role["scopes"])


def test_there_is_one_culler() -> None:
    assert HUB["cull"] == {"enabled": False}


def test_prometheus_has_a_token_with_the_scopes_for_metrics() -> None:
    role = HUB["hub"]["loadRoles"]["gpushare-metrics"]
    assert role["scopes"] == ["access:services!service=gpushare", METRICS]
    assert set(role["services"]) <= set(HUB["hub"]["services"])


def test_the_chart_binds_the_service_account_that_zero_to_jupyterhub_makes(z2jh: Z2JH) -> None:
    defaults, _ = z2jh
    assert defaults["hub"]["serviceAccount"]["name"] is None  # then it is called like the hub
    assert load(AGENT_CHART / "values.yaml")["hub"]["serviceAccountName"] == "hub"


def test_packages_are_installed_beside_the_image_that_runs() -> None:
    hub = load(VALUES / "extra-packages.yaml")["hub"]
    (container,) = hub["initContainers"]
    assert container["image"] == f"{hub['image']['name']}:{hub['image']['tag']}"
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == hub["extraEnv"]["PYTHONPATH"]
