"""jupyterhub_config.d/ in a cluster: by zero-to-jupyterhub, by The Littlest JupyterHub and by a plain hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from jupyterhub.orm import Role
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

FOLDER = Path(__file__).parents[2] / "jupyterhub_config.d"
CONFIG_FILES = [FOLDER / "10-gpushare.py", FOLDER / "20-gpushare-service.py"]
KUBE = "gpushare_spawner.spawner.kubernetes.spawner.GPUShareSpawner"


@pytest.fixture(autouse=True)
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("POD_NAMESPACE", "jhub")


def by_zero_to_jupyterhub(base_url: str = "/", **more: dict[str, Any]) -> Config:
    """What its main file has set when it executes the config files, in its own namespace."""
    config = Config(more)
    config.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
    config.JupyterHub.hub_bind_url = "http://:8081"
    config.JupyterHub.hub_connect_url = "http://my-release-hub:8081"
    config.JupyterHub.base_url = base_url
    config.JupyterHub.services = [{"name": "mine"}]

    def get_config(key: str, default: Any = None) -> Any:
        raise AssertionError("that one is zero-to-jupyterhub's")

    namespace = {"c": config, "get_config": get_config, "__file__": "/usr/local/etc/jupyterhub/jupyterhub_config.py"}
    for file in CONFIG_FILES:
        exec(compile(file.read_text(), file.name, "exec"), namespace)
    return config


def by_a_config_file(folder: Path, text: str = "") -> Config:
    """A config file of one's own that loads these, as The Littlest JupyterHub loads those in its folder."""
    loads = "".join(f"load_subconfig({str(file)!r})\n" for file in CONFIG_FILES)
    (folder / "jupyterhub_config.py").write_text(f"c = get_config()\n{loads}\n{text}\n")
    return PyFileConfigLoader("jupyterhub_config.py", str(folder)).load_config()


def service(config: Config) -> dict[str, Any]:
    services = config.JupyterHub.services
    services = services if isinstance(services, list) else services.get_value([])
    ours: dict[str, Any]
    (ours,) = [one for one in services if one["name"] == "gpushare"]
    return ours


def test_zero_to_jupyterhub() -> None:
    config = by_zero_to_jupyterhub()
    assert config.JupyterHub.spawner_class == KUBE
    ours = service(config)
    assert ours["command"][1:] == [
        "-m", "gpushare_spawner.cli", "service", f"--end-with-hub={os.getpid()}", "--namespace=jhub", "--ip=*",
        "--url=http://localhost:8081/hub/api",
    ]  # fmt: skip
    assert ours["url"] == "http://my-release-hub:10190"
    assert ours["environment"] == {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert {one["name"] for one in config.JupyterHub.services} == {"mine", "gpushare"}


def test_a_base_url_leads_to_the_hubs_api() -> None:
    assert "--url=http://localhost:8081/jupyter/hub/api" in service(by_zero_to_jupyterhub("/jupyter/"))["command"]


def test_a_namespace_for_each_user() -> None:
    assert "--all-namespaces" not in service(by_zero_to_jupyterhub())["command"]
    config = by_zero_to_jupyterhub(KubeSpawner={"enable_user_namespaces": True})
    assert "--all-namespaces" in service(config)["command"]


def test_nodes_that_are_added_later() -> None:
    assert "--nodes-are-added" not in service(by_zero_to_jupyterhub())["command"]
    config = by_zero_to_jupyterhub(GPUShareSpawner={"nodes_are_added": True})
    assert "--nodes-are-added" in service(config)["command"]


def test_users_pods_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_NAMESPACE", "users")
    assert "--namespace=users" in service(by_zero_to_jupyterhub())["command"]


def test_a_plain_hub_in_a_cluster(tmp_path: Path) -> None:
    config = by_a_config_file(tmp_path)
    assert config.JupyterHub.spawner_class == KUBE
    ours = service(config)
    assert ours["command"][4:] == [f"--end-with-hub={os.getpid()}", "--namespace=jhub"]
    assert ours["url"] == "http://127.0.0.1:10190"
    hub = JupyterHub(config=config)  # the traits take what the config files give
    assert [one["name"] for one in hub.services] == ["gpushare"]
    assert {role["name"] for role in hub.load_roles} >= {"gpushare-service"}


def test_a_spawner_of_ones_own_stays(tmp_path: Path) -> None:
    config = by_a_config_file(tmp_path, 'c.JupyterHub.spawner_class = "mine.MySpawner"')
    assert config.JupyterHub.spawner_class == "mine.MySpawner"


def test_gpus_on_the_hubs_own_machine_even_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_CONTROL", "/run/gpushare/control.sock")
    config = by_a_config_file(tmp_path)
    assert config.JupyterHub.spawner_class == "gpushare-local"
    assert service(config)["command"][4:] == [
        f"--end-with-hub={os.getpid()}",
        "--control-socket=/run/gpushare/control.sock",
    ]


def test_the_littlest_jupyterhub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert by_a_config_file(tmp_path).JupyterHub.spawner_class == "gpushare-local"
    mine = 'c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"'
    assert by_a_config_file(tmp_path, mine).JupyterHub.spawner_class == "kubespawner.KubeSpawner"


ROLE = '{"name": "user", "scopes": ["self", "read:hub"]}'


@pytest.mark.parametrize(
    ("before", "after", "others"),
    [
        ("", "", set()),
        (f"c.JupyterHub.load_roles = [{ROLE}]", "", {"read:hub"}),
        ("", f"c.JupyterHub.load_roles.append({ROLE})", {"read:hub"}),
    ],
    ids=["nobody's", "before", "after"],
)
async def test_the_hub_that_is_installed_lets_everybody_open_the_board(
    tmp_path: Path, before: str, after: str, others: set[str]
) -> None:
    """JupyterHub 5 does not start where a role is defined twice; 6 forgets what is added to a role of one's own."""
    loads = "".join(f"load_subconfig({str(file)!r})\n" for file in CONFIG_FILES)
    (tmp_path / "jupyterhub_config.py").write_text(f"c = get_config()\n{before}\n{loads}\n{after}\n")
    config = PyFileConfigLoader("jupyterhub_config.py", str(tmp_path)).load_config()
    config.JupyterHub.db_url = f"sqlite:///{tmp_path}/hub.sqlite"
    hub = JupyterHub(config=config)
    hub.init_db()
    hub.authenticator = hub.authenticator_class(parent=hub, db=hub.db)
    try:
        await hub.init_role_creation()
        scopes = set(Role.find(hub.db, "user").scopes)
    finally:
        hub.db.close()
    assert scopes == {"self", "access:services!service=gpushare", "custom:gpushare:act-own"} | others
