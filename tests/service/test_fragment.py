"""jupyterhub_config.d/20-gpushare-service.py: joins what other files say, on JupyterHub 5 and 6."""

from __future__ import annotations

import types

import pytest
from traitlets.config import Config

from tests.service.real_hub import FRAGMENT

ACCESS = "access:services!service=gpushare"


def apply(config: Config, monkeypatch: pytest.MonkeyPatch, version: int) -> Config:
    """Run the fragment as hubs of this version do; only `c` is there."""
    hub = type("JupyterHub", (), {"extra_user_scopes": None} if version == 6 else {})
    monkeypatch.setitem(__import__("sys").modules, "jupyterhub.app", types.SimpleNamespace(JupyterHub=hub))
    exec(compile(FRAGMENT.read_text(), "main file", "exec"), {"c": config})
    return config


def roles(config: Config) -> dict[str, list[str]]:
    """Name and scopes of all roles, no name twice."""
    found = config.JupyterHub.load_roles
    found = found if isinstance(found, list) else found.get_value([])
    assert len({role["name"] for role in found}) == len(found)
    return {role["name"]: role.get("scopes", []) for role in found}


@pytest.mark.parametrize("version", [5, 6])
def test_users_may_open_the_board(monkeypatch, version):
    config = apply(Config(), monkeypatch, version)
    assert roles(config)["gpushare-service"] == ["list:users", "read:servers", "delete:servers"]
    if version == 5:
        assert roles(config)["user"] == ["self", ACCESS]
    else:
        assert "user" not in roles(config)
        assert config.JupyterHub.extra_user_scopes.get_value(set()) == {ACCESS}


@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize("as_list", [True, False])
def test_an_admins_own_role_user_is_extended_and_not_defined_again(monkeypatch, version, as_list):
    config = Config()
    if as_list:
        config.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", "read:hub"]}]
    else:
        config.JupyterHub.load_roles.append({"name": "user", "scopes": ["self", "read:hub"]})
    apply(config, monkeypatch, version)
    assert roles(config)["user"] == ["self", "read:hub", ACCESS]


def test_what_others_configured_stays(monkeypatch):
    config = Config()
    config.JupyterHub.services = [{"name": "other"}]
    config.JupyterHub.custom_scopes = {"custom:other": {"description": "x"}}
    config.JupyterHub.extra_user_scopes = {"read:hub"}
    apply(config, monkeypatch, 6)
    assert [service["name"] for service in config.JupyterHub.services] == ["other", "gpushare"]
    assert set(config.JupyterHub.custom_scopes) == {"custom:other", "custom:gpushare:read", "custom:gpushare:metrics"}
    assert config.JupyterHub.extra_user_scopes == {"read:hub", ACCESS}


def test_run_twice_it_still_is_one_service_with_one_role(monkeypatch):
    config = apply(apply(Config(), monkeypatch, 5), monkeypatch, 5)
    assert [service["name"] for service in config.JupyterHub.services.get_value([])] == ["gpushare"]
    assert roles(config)["user"].count(ACCESS) == 1


def test_the_service_is_told_where_things_are(monkeypatch):
    monkeypatch.setenv("GPUSHARE_TEMPLATES", "/srv/my templates")
    monkeypatch.setenv("GPUSHARE_CONTROL", "/run/x.sock")
    monkeypatch.setenv("GPUSHARE_SERVICE_OPTIONS", "--timeout=1h --max-age '2 h'")
    monkeypatch.setenv("GPUSHARE_SERVICE_URL", "http://127.0.0.1:4711")
    (service,) = apply(Config(), monkeypatch, 6).JupyterHub.services.get_value([])
    assert service["command"][1:] == [
        "-m", "gpushare_spawner.cli", "service", "--end-with-hub",
        "--templates-dir=/srv/my templates", "--control-socket=/run/x.sock",
        "--timeout=1h", "--max-age", "2 h",
    ]  # fmt: skip
    assert service["url"] == "http://127.0.0.1:4711"
