"""jupyterhub_config.d/20-gpushare-service.py: joins what other files say, on JupyterHub 5 and 6."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from traitlets import Dict, List
from traitlets.config import Config, Configurable
from traitlets.config.loader import PyFileConfigLoader

from tests.service.real_hub import CONFIG_FILE

ACCESS = "access:services!service=gpushare"
GRANTED = [ACCESS, "custom:gpushare:act-own"]


def apply(config: Config, monkeypatch: pytest.MonkeyPatch, version: int) -> Config:
    """Run the config file as hubs of this version do; only `c` is there."""
    set_version(monkeypatch, version)
    exec(compile(CONFIG_FILE.read_text(), "main file", "exec"), {"c": config})
    return config


def set_version(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    hub = type("JupyterHub", (), {"extra_user_scopes": None} if version == 6 else {})
    monkeypatch.setitem(sys.modules, "jupyterhub.app", types.SimpleNamespace(JupyterHub=hub))


class Reader(Configurable):
    """Takes its configuration as the hub does."""

    load_roles = List(Dict(), config=True)


def roles(config: Config) -> dict[str, list[str]]:
    """Name and scopes of all roles as the hub sees them, no name twice."""
    found = Reader(config=Config({"Reader": {"load_roles": config.JupyterHub.load_roles}})).load_roles
    assert len({role["name"] for role in found}) == len(found)
    return {role["name"]: role.get("scopes", []) for role in found}


@pytest.mark.parametrize("version", [5, 6])
def test_users_may_open_the_dashboard(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    config = apply(Config(), monkeypatch, version)
    assert roles(config)["gpushare-service"] == [
        "list:users", "read:servers", "delete:servers", "read:users:groups", "start:servers",
        "access:services!service=gpushare", "custom:gpushare:read",
    ]  # fmt: skip
    if version == 5:
        assert roles(config)["user"] == ["self", *GRANTED]
    else:
        assert "user" not in roles(config)
        assert config.JupyterHub.extra_user_scopes.get_value(set()) == set(GRANTED)


ORDERS = {
    "before, a list": "c.JupyterHub.load_roles = [USER]; load(ours)",
    "before, appended": "c.JupyterHub.load_roles.append(USER); load(ours)",
    "after, appended": "load(ours); c.JupyterHub.load_roles.append(USER)",
    "after, appended to a list": "c.JupyterHub.load_roles = []; load(ours); c.JupyterHub.load_roles.append(USER)",
    "after, extended": "load(ours); c.JupyterHub.load_roles.extend([USER])",
    "in another file before": "load(theirs); load(ours)",
    "in another file after": "load(ours); load(theirs)",
    "between other files": "load('first.py'); load(ours); load('second.py'); load(theirs)",
    "prepended": "c.JupyterHub.load_roles.prepend([USER]); load(ours)",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("version", [5, 6])
def test_an_admins_own_role_user_is_extended_and_not_defined_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, order: str
) -> None:
    """Files that are loaded with load_subconfig, as The Littlest JupyterHub does it, see nothing of each other."""
    set_version(monkeypatch, version)
    user = {"name": "user", "scopes": ["self", "read:hub"]}
    (tmp_path / "theirs.py").write_text(f"c.JupyterHub.load_roles.append({user})")
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(f"c.JupyterHub.load_roles.append({{'name': '{name}'}})")
    where = f"load = load_subconfig; ours, theirs = {str(CONFIG_FILE)!r}, 'theirs.py'"
    (tmp_path / "main.py").write_text(f"c = get_config(); USER = {user}\n{where}\n{order}\n")
    config = PyFileConfigLoader("main.py", str(tmp_path)).load_config()
    assert roles(config)["user"] == ["self", "read:hub", *GRANTED]


def test_a_role_user_without_scopes_keeps_the_hubs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.JupyterHub.load_roles = [{"name": "user", "description": "Us"}]
    assert roles(apply(config, monkeypatch, 5))["user"] == ["self", *GRANTED]


def test_scopes_for_everybody_that_come_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.JupyterHub.extra_user_scopes = ["read:hub"]
    assert apply(config, monkeypatch, 6).JupyterHub.extra_user_scopes == {"read:hub", *GRANTED}


def test_what_others_configured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.JupyterHub.services = [{"name": "other"}]
    config.JupyterHub.custom_scopes = {"custom:other": {"description": "x"}}
    config.JupyterHub.extra_user_scopes = {"read:hub"}
    apply(config, monkeypatch, 6)
    assert [service["name"] for service in config.JupyterHub.services] == ["other", "gpushare"]
    ours = {f"custom:gpushare:{name}" for name in ("read", "metrics", "act-own", "act", "drain")}
    assert set(config.JupyterHub.custom_scopes) == {"custom:other"} | ours
    assert set(config.JupyterHub.services[1]["oauth_client_allowed_scopes"]) == ours
    assert config.JupyterHub.extra_user_scopes == {"read:hub", *GRANTED}


def test_run_twice_it_still_is_one_service_with_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    config = apply(apply(Config(), monkeypatch, 5), monkeypatch, 5)
    assert [service["name"] for service in config.JupyterHub.services.get_value([])] == ["gpushare"]
    assert roles(config)["user"].count(ACCESS) == 1


def history_of(config: Config) -> str | None:
    (service,) = config.JupyterHub.services.get_value([])
    assert "history" not in " ".join(service["command"]), "a password would be on the command line"
    url: str | None = service["environment"].get("GPUSHARE_HISTORY")
    return url


def test_the_history_lies_beside_the_hubs_sqlite_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSHARE_HISTORY", raising=False)
    config = Config({"JupyterHub": {"db_url": "sqlite:////var/lib/jupyterhub/jupyterhub.sqlite"}})
    assert history_of(apply(config, monkeypatch, 6)) == "sqlite:////var/lib/jupyterhub/gpushare-history.sqlite"
    elsewhere = Config({"JupyterHub": {"db_url": "postgresql://db/hub"}})
    assert history_of(apply(elsewhere, monkeypatch, 6)) is None
    monkeypatch.setenv("GPUSHARE_HISTORY", "false")
    assert history_of(apply(Config({"JupyterHub": {"db_url": "sqlite:////x/y"}}), monkeypatch, 6)) == "false"


def test_the_service_is_told_where_things_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_TEMPLATES", "/srv/my templates")
    monkeypatch.setenv("GPUSHARE_CONTROL", "/run/x.sock")
    monkeypatch.setenv("GPUSHARE_SERVICE_OPTIONS", "--timeout=1h --max-age '2 h'")
    monkeypatch.setenv("GPUSHARE_SERVICE_URL", "http://127.0.0.1:4711")
    (service,) = apply(Config(), monkeypatch, 6).JupyterHub.services.get_value([])
    assert service["command"][1:] == [
        "-m", "gpushare_spawner.cli", "service", f"--end-with-hub={os.getpid()}",
        "--templates-dir=/srv/my templates", "--control-socket=/run/x.sock",
        "--timeout=1h", "--max-age", "2 h",
    ]  # fmt: skip
    assert service["url"] == "http://127.0.0.1:4711"


def test_the_service_gets_the_notifiers_and_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_NOTIFIERS", "/etc/gpushare/notifiers.yaml")
    monkeypatch.setenv("GPUSHARE_SECRET_SMTP", "hush")
    (service,) = apply(Config(), monkeypatch, 6).JupyterHub.services.get_value([])
    assert "--notifiers=/etc/gpushare/notifiers.yaml" in service["command"]
    assert service["environment"]["GPUSHARE_SECRET_SMTP"] == "hush"
    assert "hush" not in " ".join(service["command"])
