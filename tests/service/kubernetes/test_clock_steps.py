"""The service's clock is set: reports of before the step and the annotations of pods make nobody idle for longer."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.controls import Controls, Message
from gpushare_spawner.model.kubernetes.annotations import TIER, SessionAnnotations
from gpushare_spawner.model.kubernetes.objects import REPORT_KEY, report_name
from gpushare_spawner.model.report import Notice, Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings, SessionDecision
from gpushare_spawner.service.hub.client import Hub, HubServer, HubUser
from gpushare_spawner.service.kubernetes import cluster as node_module
from tests.present import present
from tests.service.kubernetes.test_forged_sessions import HONEST, World, pod, report, session
from tests.service.kubernetes.test_forged_sessions import HOSTILE as NODE

DAY, MINUTE = 86_400.0, 60.0
NOW = 1_790_000_000.0
TEMPLATES = {
    "quarter": Template(
        name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25},
        idle={"release_after": "45m", "stop_after": "8h", "warn_before": "5m"},
    ),
}  # fmt: skip
LAST_WORK = {"idle": NOW - 10 * MINUTE, "noticed": NOW - 43 * MINUTE, "working": NOW, "new": None}
"""By user. The user "new" has never worked, in a pod of a minute ago."""


def opened(user: str) -> float:
    return NOW - MINUTE if user == "new" else NOW - 50 * MINUTE


def pod_of(user: str) -> dict[str, Any]:
    notice = Notice(tier=Tier.RELEASED, at=NOW + 2 * MINUTE, reason="Idle.", cause="idle", after_seconds=45 * MINUTE)
    made = pod(user, NODE, created=opened(user))
    said = SessionAnnotations(
        session=user, template="quarter", share_units=25, gpus=(f"GPU-{NODE}",), gpu_indices=(0,),
        tier_since=opened(user), effective_units=25, notice=notice if user == "noticed" else None,
        controls=Controls(keeps=(NOW - 5 * MINUTE,)), messages=(Message(text="Hello.", by="root", at=NOW - MINUTE),),
    )  # fmt: skip
    made["metadata"]["annotations"] = said.annotations()
    return made


def reported(published_at: float, moved: float = 0.0) -> Report:
    """The node's report; `moved`: by how much the agent has moved its instants."""
    sessions = [
        session(
            user, NODE, opened_at=opened(user), last_gpu_activity=None if last is None else last + moved,
            gpu_seconds=0.0 if last is None else 100.0, gpu_busy=user == "working", clock_moved=moved,
            last_kernel_activity=NOW - 10 * MINUTE + moved, tier_since=opened(user) + moved,
        )
        for user, last in LAST_WORK.items()
    ]  # fmt: skip
    return report(NODE, *sessions).model_copy(update={"published_at": published_at})


class Steps:
    """The service over one node, with a clock that can be set."""

    def __init__(self) -> None:
        self.now, self.steady = NOW + 1, 1000.0
        self.world = World(reported(NOW), [pod_of(user) for user in LAST_WORK])
        del self.world.cluster._maps.objects[f"jhub/{report_name(HONEST)}"]
        self.clock = self.world.cluster._clock = WallClock(lambda: self.now, lambda: self.steady)
        servers = [
            HubServer(user, "", started=opened(user), last_activity=NOW, profile="quarter") for user in LAST_WORK
        ]
        self.world.known_users = tuple(HubUser(one.user, servers=(one,)) for one in servers)
        self.told: list[SessionDecision] = []
        settings = CullerSettings(max_age=10 * 3600)
        self.culler = Culler(
            ActionContext(self.world.cluster, cast("Hub", self.world), lambda: TEMPLATES, clock=self.clock),
            settings,
            notify=self._decided,
        )

    def _decided(self, decisions: Any) -> None:
        self.told = list(decisions)

    def passes(self, seconds: float, step: float = 0.0) -> None:
        self.now += seconds + step
        self.steady += seconds

    def publishes(self, one: Report) -> None:
        name = f"jhub/{report_name(NODE)}"
        cluster = self.world.cluster
        before = cluster._maps.objects[name]["metadata"]
        cluster._maps.objects[name] = {
            "metadata": before | {"resourceVersion": str(int(before["resourceVersion"]) + 1)},
            "data": {REPORT_KEY: one.model_dump_json()},
        }
        cluster._changed()

    async def decisions(self, step: float) -> dict[str, Any]:
        """What a round decides, with the instants as they were before the step."""
        await self.culler.round()
        return {one.session.id: comparable(one, step) for one in self.told}


def comparable(one: SessionDecision, step: float) -> dict[str, Any]:
    def back(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {field.name: back(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return round(value - step, 3) if isinstance(value, float) and value > 1e8 else value

    found: dict[str, Any] = back(one.decision)
    return found | {
        "message": back(one.session.messages[0].at), "keeps": [back(at) for at in one.session.keeps],
        "begun": back(one.session.begun), "opened": one.session.opened_at,
    }  # fmt: skip


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps()
    monkeypatch.setattr(node_module, "patch_annotations", made.world.patch)
    return made


@pytest.mark.parametrize("step", [DAY, -DAY, 3600.0, -3600.0])
@pytest.mark.parametrize("fresh", [False, True], ids=["old-report", "agent-reported-since"])
async def test_a_step_of_the_clock_changes_no_decision_and_warns_nobody(steps: Steps, step: float, fresh: bool) -> None:
    without = Steps()
    await steps.decisions(0.0)
    await without.decisions(0.0)
    steps.passes(5, step)
    without.passes(5)
    if fresh:
        steps.publishes(reported(NOW + 4 + step, step))
        without.publishes(reported(NOW + 4))
    expected = await without.decisions(0.0)
    assert {user: one["tier"] for user, one in expected.items()} == dict.fromkeys(LAST_WORK, Tier.ACTIVE)
    assert present(expected["noticed"]["notice"])["at"] == NOW + 2 * MINUTE
    assert await steps.decisions(step) == expected
    assert steps.world.patched == []
    assert steps.world.hub_asked == []


@pytest.mark.parametrize("step", [DAY, -DAY])
async def test_what_was_announced_is_done_at_its_time_all_the_same(steps: Steps, step: float) -> None:
    await steps.decisions(0.0)
    steps.passes(5, step)
    steps.publishes(reported(NOW + 5 + step, step))
    steps.passes(2 * MINUTE - 10)
    await steps.culler.round()
    assert steps.world.patched == []
    steps.passes(6)
    await steps.culler.round()
    assert [(name, patch[TIER]) for name, patch in steps.world.patched] == [(f"jupyter-noticed-{NODE}", "released")]


@pytest.mark.parametrize("step", [DAY, -DAY])
async def test_where_the_services_clock_alone_was_set_nothing_is_done(steps: Steps, step: float) -> None:
    """Reports of after the step have the agent's clock: they are old, or decided on as without the step."""
    await steps.decisions(0.0)
    steps.passes(5, step)
    for _ in range(10):
        steps.publishes(reported(steps.now - step))
        await steps.culler.round()
        steps.passes(5)
    assert steps.world.patched == []
    assert steps.world.hub_asked == []


async def test_a_node_whose_clock_is_a_little_ahead_is_heard_after_a_step_back(steps: Steps) -> None:
    steps.world.cluster.report(NODE)
    steps.passes(5, -DAY)
    steps.publishes(reported(steps.now + 2, -DAY))
    seen, _ = steps.world.cluster.report(NODE)
    assert present(seen.session("idle")).last_gpu_activity == present(LAST_WORK["idle"]) - DAY


async def test_a_silent_agent_is_said_to_be_silent_in_utc(steps: Steps) -> None:
    steps.passes(600)
    with pytest.raises(AgentUnreachable, match=r"has published nothing since 2026-09-21 \d\d:\d\d UTC$"):
        steps.world.cluster.report(NODE)


def test_what_a_pod_got_after_the_step_is_not_moved(steps: Steps) -> None:
    steps.world.cluster.report(NODE)
    steps.passes(5, DAY)
    later = pod("later", NODE, created=steps.now)
    steps.world.cluster._pods.objects["jhub/later"] = later
    steps.world.cluster._changed()
    seen, _ = steps.world.cluster.report(NODE)
    assert present(seen.session("later")).begun == steps.now
    moved: SessionReport = present(seen.session("idle"))
    assert (moved.begun, moved.opened_at) == (opened("idle") + DAY, opened("idle"))
