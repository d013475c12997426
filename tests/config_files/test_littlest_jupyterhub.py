"""jupyterhub_config.d/tljh in The Littlest JupyterHub (TLJH): by TLJH's own files where it is installed, else by a
stand-in that reads config files in the same way."""

from __future__ import annotations

import importlib
import importlib.util
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from traitlets.utils.importstring import import_item

from gpushare_spawner.service.hub.roles import FOR_FORM
from gpushare_spawner.shipped import shipped
from gpushare_spawner.spawner.hub import HUB_PAGES, SpawnRefused

STAND_IN = str(Path(__file__).with_name("stand_in"))


class TLJH:
    """A folder like /opt/tljh with our config file in it."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.files = prefix / "config" / "jupyterhub_config.d"
        self.files.mkdir(parents=True)
        (prefix / "state").mkdir()
        ours = shipped("gpushare-tljh.py")
        (self.files / ours.name).write_text(ours.read_text())

    def say(self, yaml: str) -> None:
        """What `tljh-config set` writes."""
        (self.prefix / "config" / "config.yaml").write_text(yaml)

    def read(self) -> dict[str, Any]:
        """What a hub has of it."""
        package = importlib.util.find_spec("tljh")
        assert package is not None
        assert package.origin is not None
        hub = JupyterHub()
        hub.load_config_file(str(Path(package.origin).with_name("jupyterhub_config.py")))
        return {
            "spawner": hub.spawner_class,
            "groups": hub.spawner_class(parent=hub, user=user("ada")).user_groups,
            "pages": hub.template_paths,
            "services": {service["name"]: service.get("command", []) for service in hub.services},
            "roles": {role["name"]: role["scopes"] for role in hub.load_roles},
        }


@pytest.fixture
def tljh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TLJH]:
    """TLJH, or the stand-in behind everything else on the path; forgotten afterwards: config files look for it."""
    pytest.importorskip("systemdspawner", reason="the extra [systemd] is not installed")
    monkeypatch.setenv("TLJH_INSTALL_PREFIX", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, STAND_IN])
    forget()
    yield TLJH(tmp_path)
    forget()


def forget() -> None:
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "tljh" or name.endswith("spawner.local.tljh")
    ]:
        del sys.modules[name]


def user(name: str) -> Any:
    return SimpleNamespace(name=name, id=7, settings={}, groups=[], spawners={}, url="/user/x", escaped_name=name)


def test_tljh_gets_its_own_spawner_with_shared_gpus(tljh: TLJH) -> None:
    tljh.say("users: {extra_user_groups: {docker: [ada]}}")
    hub = tljh.read()
    assert hub["spawner"].__name__ == "GPUShareTLJHSpawner"
    bases = [base.__name__ for base in hub["spawner"].__mro__]
    assert bases.index("GPUShareMixin") < bases.index("UserCreatingSpawner")
    assert hub["groups"] == {"docker": ["ada"]}


def test_tljhs_culler_makes_way_for_ours_with_its_settings(tljh: TLJH, caplog: Any) -> None:
    caplog.set_level("INFO")
    tljh.say("services: {cull: {timeout: 3600, max_age: 7200}}")
    hub = tljh.read()
    assert list(hub["services"]) == ["gpushare"]
    assert {"--timeout=3600", "--max-age=7200", "--remove-named-servers=false"} <= set(hub["services"]["gpushare"])
    assert "replaces TLJH's idle culler" in caplog.text
    scopes = ["list:users", "read:servers", "delete:servers", "read:users:groups", "start:servers"]
    assert hub["roles"]["gpushare-service"] == [*scopes, *FOR_FORM]


def test_a_culler_that_the_admin_disabled_stops_no_server_without_a_template(tljh: TLJH, caplog: Any) -> None:
    caplog.set_level("INFO")
    tljh.say("services: {cull: {enabled: false}}")
    hub = tljh.read()
    assert list(hub["services"]) == ["gpushare"]
    assert not [word for word in hub["services"]["gpushare"] if word.startswith("--timeout")]
    assert "left out" not in caplog.text


def test_deleting_idle_users_is_said_to_be_ignored(tljh: TLJH, caplog: Any) -> None:
    tljh.say("services: {cull: {users: true}}")
    tljh.read()
    assert "services.cull.users is ignored" in caplog.text


@pytest.mark.parametrize("name", ["01-other.py", "zz-other.py"])
def test_services_and_settings_of_other_files_stay(tljh: TLJH, name: str) -> None:
    (tljh.files / name).write_text("c.JupyterHub.services.append({'name': 'other', 'url': 'http://127.0.0.1:1'})")
    assert set(tljh.read()["services"]) == {"gpushare", "other"}


def test_the_page_of_a_pending_spawn_is_ours_before_the_hubs(tljh: TLJH) -> None:
    assert tljh.read()["pages"][0] == HUB_PAGES


def test_a_spawner_of_a_later_file_stays(tljh: TLJH) -> None:
    (tljh.files / "zz-mine.py").write_text(
        "from tljh.user_creating_spawner import UserCreatingSpawner\n"
        "c.JupyterHub.spawner_class = type('Mine', (UserCreatingSpawner,), {})\n"
    )
    assert tljh.read()["spawner"].__name__ == "Mine"


def spawner_of(name: str) -> Any:
    return import_item("gpushare_spawner.spawner.local.tljh.GPUShareTLJHSpawner")(user=user(name))


def test_the_user_of_the_machine_is_made_before_the_session_is_opened(
    tljh: TLJH, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(importlib.import_module("tljh.user"), "ensure_user", made.append)
    monkeypatch.setattr(pwd, "getpwnam", lambda name: {"jupyter-ada": SimpleNamespace(pw_uid=4711)}[made[0]])
    assert spawner_of("ada").share_uid() == 4711


def test_a_user_that_cannot_be_made_is_refused_with_a_reason(tljh: TLJH, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise subprocess.CalledProcessError(3, ["useradd", name])

    monkeypatch.setattr(importlib.import_module("tljh.user"), "ensure_user", fail)
    with pytest.raises(SpawnRefused, match="The user jupyter-ada@b could not be created on this machine"):
        spawner_of("ada@b").share_uid()


def test_the_spawner_without_tljh_says_which_one_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tljh", None)
    monkeypatch.delitem(sys.modules, "gpushare_spawner.spawner.local.tljh", raising=False)
    with pytest.raises(ImportError, match="gpushare-systemd or gpushare-local"):
        importlib.import_module("gpushare_spawner.spawner.local.tljh")
