"""Which idle actions apply to the sessions of a user, by the idle policy and the hub's groups."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpushare_spawner.idle.policy import NoAction
from gpushare_spawner.idle.use import RecentUse
from gpushare_spawner.model.report import GpuReport, SessionReport
from gpushare_spawner.service.culler.actions import judge
from gpushare_spawner.service.culler.decisions import CullerSettings, decide_sessions
from gpushare_spawner.service.culler.pressure import candidates
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.idle_culler_hook import cull_arbiter
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from gpushare_spawner.service.templates import SessionTemplates, TemplateSource, UserGroups
from tests.present import present
from tests.service.dashboards import NO_AGENT

HOUR = 3600.0
NOON = 1_764_158_400.0
"""2025-11-26 12:00 UTC."""
QUARTER = "name: quarter\ndisplay_name: Q\ngpu: {fraction: 0.25}\nidle: {release_after: 1h, warn_before: 1m}\n"
CPU = "name: cpu\ndisplay_name: C\nidle: {stop_after: 2h}\n"
GROUPS: dict[str, Collection[str] | None] = {"ada": ("staff", "ml"), "bob": (), "eve": ("ml",), "new": None}


@pytest.fixture
def source(tmp_path: Path) -> TemplateSource:
    (tmp_path / "quarter.yaml").write_text(QUARTER)
    (tmp_path / "cpu.yaml").write_text(CPU)
    return TemplateSource(tmp_path, GROUPS.get)


def policy(source: TemplateSource, text: str) -> SessionTemplates:
    (source.path / "idle.yaml").write_text(text)
    return source()


def server(user: str, hours_idle: float, profile: str = "cpu") -> HubServer:
    return HubServer(user, "", started=0.0, last_activity=NOON - hours_idle * HOUR, profile=profile)


def report(user: str, hours_idle: float) -> KnownReport:
    gpu = GpuReport(index=0, uuid="GPU-0", model="A100", memory_bytes=80 * 2**30)
    session = SessionReport(
        id=user, user=user, template="quarter", gpus=("GPU-0",), share_units=25, effective_units=25,
        guaranteed_units=25, tier_since=NOON - hours_idle * HOUR, opened_at=NOON - hours_idle * HOUR,
    )  # fmt: skip
    return KnownReport(node="node", published_at=NOON, gpus=(gpu,), sessions=(session,))


def test_a_users_group_decides_and_unknown_groups_cost_nothing(source: TemplateSource) -> None:
    templates = policy(source, "groups: {ml: {release_after: 5m}, staff: {release_after: 4h}}\n")
    found = {user: present(templates.of_user("quarter", user)).idle.release_after for user in GROUPS}
    assert found == {"ada": 300, "bob": HOUR, "eve": 300, "new": 4 * HOUR}
    assert templates["quarter"].idle.release_after == HOUR
    assert templates.of_user("gone", "ada") is None
    assert templates.of_user(None, "ada") is None
    assert set(templates) == {"quarter", "cpu"}


def test_the_culler_decides_by_the_users_group(source: TemplateSource) -> None:
    templates = policy(source, "groups: {ml: {release_after: 5m}}\n")
    for user, expected in (("ada", NoAction.NOTICE_PERIOD), ("bob", NoAction.NOT_YET)):
        (one,) = decide_sessions([NodeSnapshot(NO_AGENT, report(user, 0.5))], None, templates, NOON, CullerSettings())
        assert one.decision.no_action is expected
        assert present(one.template).idle.release_after == (300 if user == "ada" else HOUR)


def test_pressure_counts_by_the_users_group(source: TemplateSource) -> None:
    templates = policy(source, "groups: {ml: {when: pressure, release_after: 5m}}\n")
    use = RecentUse()
    assert candidates([report("bob", 5)], templates, NOON, use) == []
    assert len(candidates([report("ada", 5)], templates, NOON, use)) == 1


def test_servers_without_a_share_follow_groups_limits_and_quiet_hours(source: TemplateSource) -> None:
    templates = policy(source, "groups: {ml: {stop_after: null}}\nlimits: {stop_after: 10h}\n")
    settings = CullerSettings()

    def stops(user: str, hours: float, at: float = NOON) -> bool:
        return bool(judge(server(user, hours), templates, settings, at, agents_answered=True).stop_because)

    assert stops("bob", 3)
    assert not stops("ada", 3)
    assert stops("ada", 11)
    templates = policy(source, 'quiet_hours: [{start: "11:00", end: "13:00", time_zone: UTC}]\n')
    assert not stops("bob", 3)
    assert stops("bob", 3, NOON + 2 * HOUR)


def test_the_sentence_on_the_dashboard_names_the_end_of_quiet_hours(source: TemplateSource) -> None:
    quiet = 'quiet_hours: [{start: "11:00", end: "13:00", time_zone: UTC, actions: [release]}]\n'
    (one,) = decide_sessions(
        [NodeSnapshot(NO_AGENT, report("bob", 5))], None, policy(source, quiet), NOON, CullerSettings()
    )
    assert one.decision.no_action is NoAction.NOTICE_PERIOD
    assert present(one.decision.upcoming).at == NOON + HOUR


def test_templates_are_made_anew_only_where_a_file_changes(source: TemplateSource) -> None:
    first = policy(source, "defaults: {stop_after: 8h}\n")
    assert source()["quarter"] is first["quarter"]
    assert first["quarter"].idle.stop_after == 8 * HOUR
    assert policy(source, "defaults: {stop_after: 9h}\n")["quarter"].idle.stop_after == 9 * HOUR
    assert source.problems == []
    policy(source, "default: {}\n")
    assert source.problems == [
        "idle.yaml:1: default: unknown field; did you mean 'defaults'?; the last valid version of the idle policy "
        "stays in force"
    ]


def test_groups_need_a_scope_only_where_the_policy_has_some(source: TemplateSource) -> None:
    assert not source.needs_groups
    policy(source, "defaults: {stop_after: 8h}\n")
    assert not source.needs_groups
    policy(source, "groups: {ml: {stop_after: 8h}}\n")
    assert source.needs_groups


def test_groups_are_those_that_the_hub_said_last() -> None:
    said: list[HubUser] | None = [HubUser("ada", servers=(HubServer("ada", "", groups=("ml",)),)), HubUser("bob")]
    groups = UserGroups(lambda: said)
    assert (groups("ada"), groups("bob"), groups("eve")) == (("ml",), None, None)
    said = None
    assert groups("ada") == ("ml",)
    said = [HubUser("ada", servers=(HubServer("ada", "", groups=()),))]
    assert groups("ada") == ()


def test_groups_are_known_while_another_thread_reads_a_new_list() -> None:
    asked: list[object] = []

    class ReadSlowly(list[HubUser]):
        def __iter__(self) -> Iterator[HubUser]:
            if not asked:
                asked.append("first")
                asked.append(groups("ada"))
            return super().__iter__()

    said = ReadSlowly([HubUser("ada", servers=(HubServer("ada", "", groups=("ml",)),))])
    groups = UserGroups(lambda: said)
    assert groups("ada") == ("ml",)
    assert asked == ["first", ("ml",)]


def test_the_hook_for_the_other_culler_follows_defaults_and_limits(source: TemplateSource) -> None:
    policy(source, "limits: {stop_after: 1h}\n")
    hook = cull_arbiter(source.path)
    options = {"user_options": {"profile": "cpu"}}
    assert hook(inactive=timedelta(minutes=70), inactive_limit=60, server=options)
    begin = datetime.now(UTC) - timedelta(hours=1)
    quiet = {"start": f"{begin:%H:%M}", "end": f"{begin + timedelta(hours=12):%H:%M}", "time_zone": "UTC"}
    policy(source, f"quiet_hours: {json.dumps([quiet])}\n")
    assert not cull_arbiter(source.path)(inactive=timedelta(hours=70), inactive_limit=60, server=options)
