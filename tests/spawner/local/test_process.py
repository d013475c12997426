"""The spawners beside the simple one, and the config file."""

from __future__ import annotations

import builtins
import importlib
import os
import pwd
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.spawner import LocalProcessSpawner
from traitlets.config import Config
from traitlets.utils.importstring import import_item

from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.local.mixin import GPUShareMixin
from gpushare_spawner.spawner.local.process import GPUShareLocalSpawner
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import RunningHub

ROOT = Path(__file__).parents[3]


def user(name: str) -> Any:
    return SimpleNamespace(name=name, id=7, settings={}, groups=[], spawners={}, url="/user/x", escaped_name=name)


def test_the_local_spawner_knows_the_users_uid() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    assert GPUShareLocalSpawner(user=user(me)).share_uid() == os.getuid()
    with pytest.raises(SpawnRefused, match="There is no user 'no-such-user' on this machine"):
        GPUShareLocalSpawner(user=user("no-such-user"))._uid()


def test_every_setting_is_documented() -> None:
    names = {**vars(GPUShareBase), **vars(GPUShareMixin)}
    own = {name for name in names if GPUShareMixin.class_traits(config=True).get(name)}
    assert own >= {"templates_dir", "agent_socket", "queue_length", "queue_timeout", "placement_strategy"}
    for name in own:
        assert GPUShareMixin.class_traits()[name].help, name


@pytest.mark.parametrize("strategy", ["gpushare_spawner.placement.strategy.BestFit", "class", "instance"])
def test_a_strategy_is_given_by_path_class_or_instance(strategy: str) -> None:
    from gpushare_spawner.placement.strategy import BestFit

    given: Any = {"class": BestFit, "instance": BestFit()}.get(strategy, strategy)
    assert isinstance(GPUShareLocalSpawner(user=user("ada"), placement_strategy=given)._strategy(), BestFit)


def test_a_strategy_for_an_earlier_version_is_refused_with_what_would_be_right() -> None:
    class Old:
        def choose(self, room: Any, share: Any, models: Any) -> tuple[str, ...] | None:
            return None

    with pytest.raises(TypeError, match=r"Old has choose\(room: .* It must be choose\(request, capacity\)"):
        GPUShareLocalSpawner(user=user("ada"), placement_strategy=Old)._strategy()


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_TEMPLATES", "/my/templates")
    monkeypatch.setenv("GPUSHARE_CONTROL", "/my/control.sock")
    spawner = GPUShareLocalSpawner(user=user("ada"))
    assert (spawner.templates_dir, spawner.agent_socket) == ("/my/templates", "/my/control.sock")


def test_entry_points_name_spawners() -> None:
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["jupyterhub.spawners"]
    # tests/config_files tests this one: its package is on no package index
    assert points.pop("gpushare-tljh") == "gpushare_spawner.spawner.local.tljh:GPUShareTLJHSpawner"
    for path in points.values():
        assert issubclass(import_item(path.replace(":", ".")), GPUShareBase)


# -- the config file --


@pytest.mark.parametrize(("before", "after"), [(None, "gpushare-local"), ("mine", "mine")])
def test_the_config_file_sets_the_spawner_only_where_the_admin_has_not(before: str | None, after: str) -> None:
    config = Config()
    if before is not None:
        config.JupyterHub.spawner_class = before
    # as zero-to-jupyterhub runs it: nothing but `c`
    exec((ROOT / "jupyterhub_config.d" / "10-gpushare.py").read_text(), {"c": config})
    assert config.JupyterHub.spawner_class == after


# -- systemd --


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """systemdspawner on commands that stand in for systemd's: a unit is a process whose pid is in a file."""
    module = pytest.importorskip("systemdspawner.systemdspawner", reason="the extra [systemd] is not installed")
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "systemd-run").write_text(
        "#!/bin/sh\n"
        "for word; do case $word in\n"
        "  --property=EnvironmentFile=*) set -a; . ${word#--property=EnvironmentFile=}; set +a;;\n"
        "esac; done\n"
        f'echo "$@" > {tmp_path}/run\n'
        "while case $1 in --unit|--working-directory) true;; --*) true;; *) false;; esac; do\n"
        "  case $1 in --unit|--working-directory) shift;; esac; shift\n"
        "done\n"
        f'"$@" </dev/null >/dev/null 2>&1 & echo $! > {tmp_path}/pid\n'
    )
    (commands / "systemctl").write_text(
        "#!/bin/sh\n"
        f"pid=$(cat {tmp_path}/pid 2>/dev/null || echo 0)\n"
        "case $1 in\n"
        '  is-active) [ "$pid" != 0 ] && kill -0 $pid 2>/dev/null;;\n'
        "  is-failed) false;;\n"
        "  show) echo $pid;;\n"
        f"  stop) kill $pid 2>/dev/null; rm -f {tmp_path}/pid;;\n"
        '  --version) echo "systemd 252 (252.1)";;\n'
        "esac\n"
    )
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(module.systemd, "RUN_ROOT", str(tmp_path / "run-root"))
    (tmp_path / "run-root").mkdir()
    return importlib.import_module("gpushare_spawner.spawner.local.systemd").GPUShareSystemdSpawner


async def test_a_systemd_unit_gets_the_share_in_its_environment(
    systemd: Any, make_hub: Any, agent: FakeAgent, tmp_path: Path
) -> None:
    def configure(config: Any) -> None:
        config.JupyterHub.spawner_class = systemd
        config.SystemdSpawner.username_template = pwd.getpwuid(os.getuid()).pw_name

    (tmp_path / "templates" / "limited.yaml").write_text(
        "name: limited\ndisplay_name: L\ngpu: {fraction: 0.25}\nresources: {cpu: {limit: 2}, memory: {limit: 1Gi}}\n"
    )
    hub: RunningHub = await make_hub(configure)
    response = await hub.start_server("ada", {"profile": "limited"})
    assert response.code == 201, response.body
    session = agent.sessions["ada"]
    assert session.pid == int((tmp_path / "pid").read_text())
    assert agent.asked("open")[0].uid == os.getuid()
    started = (tmp_path / "run").read_text()
    assert "--property=MemoryMax=1073741824" in started
    assert "--property=CPUQuota=200%" in started
    files = list((tmp_path / "run-root").rglob("*.env"))
    written = files[0].read_text()
    assert "GPUSHARE_SOCKET=/run/fake/ada/socket" in written
    assert "LD_PRELOAD=/opt/fake/libgpushare.so" in written
    assert (await hub.stop_server("ada")).code == 204
    assert not agent.sessions


@pytest.mark.parametrize("setting", ["dynamic_users", "isolate_devices"])
def test_systemd_settings_that_leave_no_gpu_are_refused(systemd: Any, setting: str) -> None:
    spawner = systemd(user=user("ada"), **{setting: True})
    with pytest.raises(SpawnRefused, match=f"this hub's setting {setting} is on"):
        spawner._uid()


def test_the_systemd_spawner_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("systemdspawner"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "gpushare_spawner.spawner.local.systemd", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'gpushare-spawner\[systemd\]'"):
        importlib.import_module("gpushare_spawner.spawner.local.systemd")


def test_the_mixin_goes_before_any_spawner() -> None:
    class Mine(GPUShareMixin, LocalProcessSpawner):  # type: ignore[misc]
        pass

    assert Mine.start is GPUShareMixin.start
