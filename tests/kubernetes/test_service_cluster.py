"""The culler's side of a cluster, as a service account with the hub's rights."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest

from gpushare_spawner.clients import object_watch
from gpushare_spawner.model.control import (
    AgentUnreachable,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    NoticeRequest,
    StopProcessesRequest,
    TierRequest,
)
from gpushare_spawner.model.controls import Ask, Controls, Cordon, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.kubernetes import node_reports
from gpushare_spawner.model.kubernetes.annotations import SHARE, borrowed_patch, notice_patch, tier_patch
from gpushare_spawner.model.kubernetes.objects import REPORT_STALE_SECONDS, report_name
from gpushare_spawner.model.report import BypassingProcess, GpuReport, Notice, Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions import share
from gpushare_spawner.service.actions.context import ActionContext, ActionRefused, Actor, RefusalCode
from gpushare_spawner.service.culler.asks import AskResponder
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes import cluster as cluster_module
from gpushare_spawner.service.kubernetes.cluster import Cluster, NodeAgent
from gpushare_spawner.wording import actions as words
from tests.kubernetes.service_namespace import (
    HUB_RULES,
    HubNamespace,
    as_the_hub,
    eventually,
    has,
    make_namespace,
    seen,
)
from tests.kubernetes.standin.client import path
from tests.kubernetes.standin.cluster import Cluster as StandInCluster
from tests.kubernetes.standin.faults import by_service_accounts
from tests.present import present
from tests.service.conftest import MINUTE, Clock, clock, hub, hub_server, templates  # noqa: F401
from tests.service.fake_hub import FakeHub


@pytest.fixture
async def namespace(cluster: StandInCluster, clock: Clock) -> HubNamespace:  # noqa: F811
    return await make_namespace(cluster, clock)


@pytest.fixture
async def nodes(namespace: HubNamespace) -> AsyncIterator[Cluster]:
    async with as_the_hub(namespace) as running:
        yield running


# -- what is seen ------------------------------------------------------------------------------------------------------


async def test_report_and_pods_make_one_picture(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    assert agent.report_age() < 5
    await namespace.annotate("ann", tier_patch(Tier.RELEASED, namespace.now(), 0))
    agent = await seen(nodes, "node-a", has("ann", tier=Tier.RELEASED))
    session = present((await agent.report()).session("ann"))
    assert (session.effective_units, session.guaranteed_units) == (0, 0)


async def test_a_session_is_starting_until_pod_and_agent_agree(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("new", phase="Pending")
    namespace.sessions["node-a"].clear()
    await namespace.publish()
    await seen(nodes, "node-a", has("new", confirmed=False, share_units=25))


async def test_a_session_without_its_pod_counts_for_nothing(
    namespace: HubNamespace,
    nodes: Cluster,
    clock: Clock,  # noqa: F811
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", confirmed=True))
    await namespace.admin.delete(namespace.at("pods", "jupyter-ann"), grace=0)
    agent = await seen(nodes, "node-a", lambda report: not report.sessions)
    assert not (await agent.report()).unconfirmed, "the agent may need a moment to hear of it"
    clock.forward(cluster_module.UNCONFIRMED_AFTER)
    await namespace.publish()
    (left,) = (await (await seen(nodes, "node-a", lambda report: True)).report()).unconfirmed
    assert left.id == "ann"


async def test_a_pod_that_is_being_deleted_is_left_alone(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    await namespace.admin.delete(namespace.at("pods", "jupyter-ann"), grace=300)
    await seen(nodes, "node-a", has("ann", confirmed=False))
    with pytest.raises(ControlRefused, match="no running pod"):
        await agent.send(TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle"))


async def test_a_pod_whose_annotations_are_wrong_takes_no_other_down(
    namespace: HubNamespace, nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await namespace.open("ann")
    await namespace.open("bob")
    await namespace.publish()
    await seen(nodes, "node-a", has("bob", confirmed=True))
    await namespace.annotate("ann", {SHARE: "a lot"})
    await seen(nodes, "node-a", lambda report: [one.id for one in report.sessions] == ["bob"])
    (said,) = [record.message for record in caplog.records if "jupyter-ann" in record.message]
    assert "gpushare-spawner.io/share is 'a lot'" in said


async def test_a_pod_that_breaks_again_and_the_next_pod_of_its_name_are_logged(
    namespace: HubNamespace, nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> int:
        return sum("Pod jupyter-ann: ignored" in record.message for record in caplog.records)

    async def broken() -> None:
        await namespace.annotate("ann", {SHARE: "a lot"})
        await seen(nodes, "node-a", lambda report: [one.id for one in report.sessions] == ["bob"])

    await namespace.open("ann")
    await namespace.open("bob")
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", confirmed=True))
    share = (await namespace.admin.get(namespace.at("pods", "jupyter-ann")))["metadata"]["annotations"][SHARE]
    await broken()
    await namespace.annotate("bob", tier_patch(Tier.RELEASED, namespace.now(), 0))
    await seen(nodes, "node-a", has("bob", tier=Tier.RELEASED))
    assert logged() == 1
    await namespace.annotate("ann", {SHARE: share})
    await seen(nodes, "node-a", has("ann", confirmed=True))
    await broken()
    assert logged() == 2
    await namespace.admin.delete(namespace.at("pods", "jupyter-ann"), grace=0)
    await namespace.open("ann")
    await broken()
    await eventually(lambda: bool(list(nodes)) and logged() == 3)


async def test_an_old_report_is_none(namespace: HubNamespace, nodes: Cluster, clock: Clock) -> None:  # noqa: F811
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    clock.forward(REPORT_STALE_SECONDS + 1)
    with pytest.raises(AgentUnreachable, match="node-a: its agent has published nothing since"):
        await agent.report()


async def test_a_node_with_sessions_and_no_report_counts_as_one_that_does_not_answer(
    namespace: HubNamespace, nodes: Cluster
) -> None:
    await namespace.open("ann", node="node-b")
    await eventually(lambda: [agent.node for agent in nodes] == ["node-b"])
    with pytest.raises(AgentUnreachable, match="node-b: its agent has published no report"):
        await next(iter(nodes)).report()


async def test_a_report_that_cannot_be_read_is_said_once(
    namespace: HubNamespace, nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await namespace.write_report("node-c", '{"version": 2}')
    await eventually(lambda: [agent.node for agent in nodes] == ["node-c"])
    for _ in range(3):
        with pytest.raises(AgentUnreachable):
            await next(iter(nodes)).report()
    said = [record.message for record in caplog.records if "not a report that this version can read" in record.message]
    assert len(said) == 1
    assert "version" in said[0]


async def test_a_report_beyond_its_bounds_is_refused_and_admins_read_why(
    namespace: HubNamespace, nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = GpuReport(index=0, uuid="GPU-node-a", model="x", memory_bytes=1)
    honest = Report(node="node-a", published_at=namespace.now(), gpus=(gpu,)).model_dump(mode="json")
    honest["gpus"][0]["capacity_units"] = 1_000_000
    for number in range(3):
        await namespace.write_report("node-a", json.dumps(honest | {"published_at": namespace.now() + number}))
        await seen_problem(nodes, "its report is refused: .*gpus.0.capacity_units: .* less than or equal to 1000")
    assert len([one for one in caplog.records if "capacity_units" in one.message]) == 1


async def seen_problem(nodes: Cluster, text: str) -> None:
    """Wait until the only node's report fails in this way."""
    while True:
        for agent in nodes:
            try:
                await agent.report()
            except AgentUnreachable as error:
                if re.search(text, str(error)):
                    return
        await asyncio.sleep(0.01)


async def test_a_report_of_a_node_in_another_nodes_configmap_is_ignored(
    namespace: HubNamespace, nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent may write its own node's ConfigMap alone; what it puts in is its own choice."""
    await namespace.open("ann", node="node-a")
    await namespace.publish("node-a", ann={"gpu_busy": True})
    await eventually(lambda: [agent.node for agent in nodes] == ["node-a"])
    lie = Report(node="node-a", published_at=namespace.now() + 1, gpus=(), sessions=())
    await namespace.write_report("node-b", lie.model_dump_json())
    await eventually(lambda: [agent.node for agent in nodes] == ["node-a", "node-b"])
    honest, liar = list(nodes)
    assert present((await honest.report()).session("ann")).gpu_busy
    with pytest.raises(AgentUnreachable):
        await liar.report()
    assert [one for one in caplog.records if "gpushare-report-node-b has a report of node node-a" in one.message]


async def test_nodes_come_and_go(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.publish("node-a")
    await namespace.publish("node-b")
    await eventually(lambda: [agent.node for agent in nodes] == ["node-a", "node-b"])
    await namespace.admin.delete(namespace.at("configmaps", report_name("node-a")))
    await eventually(lambda: [agent.node for agent in nodes] == ["node-b"])


async def test_other_configmaps_and_pods_are_not_read(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.admin.create(
        namespace.at("configmaps"), {"metadata": {"name": "other"}, "data": {"report.json": "x"}}
    )
    pod = {"metadata": {"name": "other"}, "spec": {"nodeName": "n", "containers": [{"name": "a", "image": "b"}]}}
    await namespace.admin.create(namespace.at("pods"), pod)
    await namespace.publish("node-a")
    await eventually(lambda: [agent.node for agent in nodes] == ["node-a"])


# -- what is done ------------------------------------------------------------------------------------------------------


async def test_a_step_is_written_to_the_pod_with_its_guard(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    idle_since = namespace.now() - 900
    await agent.send(
        TierRequest(id="ann", tier=Tier.DOWNGRADED, effective_units=10, reason="idle", if_idle_since=idle_since)
    )
    session = await namespace.session("ann")
    assert (session.tier, session.effective_units, session.tier_since) == (Tier.DOWNGRADED, 10, namespace.now())
    assert session.idle_since == pytest.approx(idle_since, abs=0.002)


async def test_a_session_that_makes_way_gives_up_its_units_with_the_same_patch(
    namespace: HubNamespace, nodes: Cluster
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    until = namespace.now() + 600
    await agent.send(TierRequest(id="ann", tier=Tier.DOWNGRADED, effective_units=5, reason="", yields_until=until))
    said = await namespace.session("ann")
    assert (said.tier, said.effective_units, said.borrowed_units) == (Tier.DOWNGRADED, 5, 20)
    assert said.yields_until == pytest.approx(until, abs=0.001)
    agent = await seen(nodes, "node-a", has("ann", yields=True))
    await agent.send(TierRequest(id="ann", tier=Tier.DOWNGRADED, effective_units=5, reason="nobody waits"))
    assert (await namespace.session("ann")).yields_until is None


async def test_notices_come_and_go(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    coming = NoticeRequest(id="ann", tier=Tier.RELEASED, at=namespace.now() + 300, reason="Idle.", effective_units=0)
    await agent.send(coming)
    said = (await namespace.session("ann")).notice
    assert said == Notice(tier=Tier.RELEASED, at=coming.at, reason="Idle.", effective_units=0)
    agent = await seen(nodes, "node-a", has("ann", notice=said))
    await agent.send(NoticeRequest(id="ann", tier=None))
    assert (await namespace.session("ann")).notice is None


async def test_a_cordon_is_written_to_the_report_and_seen_at_once(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.publish()
    agent = await seen(nodes, "node-a", lambda report: True)
    gpu = Cordon(gpu="GPU-node-a", by="boss", reason="Fan.", since=1.0, drain=True, stop_at=9.0)
    await agent.send(CordonRequest(gpu="GPU-node-a", cordon=gpu))
    assert (await agent.report()).cordon("GPU-node-a") == gpu
    assert (await agent.report()).gpus[0].cordoned
    await agent.send(CordonRequest(cordon=Cordon(by="boss", since=2.0)))
    await namespace.publish()  # the agent's next report
    agent = await seen(nodes, "node-a", lambda report: len(report.cordons) == 2)
    await agent.send(CordonRequest(gpu="GPU-node-a", cordon=None))
    await agent.send(CordonRequest(cordon=None))
    assert (await agent.report()).cordons == ()
    assert not (await agent.report()).gpus[0].cordoned
    with pytest.raises(ControlRefused) as refused:
        await agent.send(CordonRequest(gpu="GPU-x", cordon=gpu))
    assert refused.value.code == "unknown-gpu"


async def test_a_cordon_without_the_right_says_which(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.publish()
    agent = await seen(nodes, "node-a", lambda report: True)
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}
    await namespace.rights([pods, {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}])
    with pytest.raises(ControlRefused, match="may not patch ConfigMaps in"):
        await agent.send(CordonRequest(cordon=Cordon(by="boss", since=2.0)))
    assert (await agent.report()).cordons == ()


async def test_a_step_is_refused_where_the_agent_has_changed_the_pod(namespace: HubNamespace, nodes: Cluster) -> None:
    """Twice: where the watch has brought the change already, and where only the API server knows it."""
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    step = TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle")
    await namespace.annotate("ann", borrowed_patch(5))
    with pytest.raises(ControlRefused) as refused:
        await agent.send(step)  # at once, before the watch
    assert refused.value.code == "busy"
    await seen(nodes, "node-a", has("ann", borrowed_units=5))
    with pytest.raises(ControlRefused) as refused:
        await agent.send(step)  # its decision was made on what was before
    assert refused.value.code == "busy"
    assert (await namespace.session("ann")).tier is Tier.ACTIVE


async def test_a_pods_own_status_does_not_stand_in_the_way(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    before = next(iter(nodes._pods.objects.values()))["metadata"]["resourceVersion"]
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    await namespace.admin.patch(namespace.at("pods", "jupyter-ann", "status"), ready)
    await eventually(lambda: next(iter(nodes._pods.objects.values()))["metadata"]["resourceVersion"] != before)
    await agent.send(TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    assert (await namespace.session("ann")).tier is Tier.RELEASED


class Target:
    """The session "ann" as somebody saw it."""

    def __init__(self, agent: NodeAgent, session: SessionReport) -> None:
        self.agent, self.session, self.node = agent, session, "node-a"


@pytest.mark.parametrize(
    ("tier", "units", "said"),
    [(Tier.RELEASED, 0, words.RELEASED), (Tier.DOWNGRADED, 10, "The session is downgraded now and has 0.10 GPU.")],
)
@pytest.mark.parametrize("answer", ["follows", "undoes", "undoes an earlier release", "is silent"])
async def test_the_answer_to_a_change_of_a_tier_says_what_the_agent_did(
    namespace: HubNamespace,
    nodes: Cluster,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tier: Tier,
    units: int,
    said: str,
    answer: str,
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    if answer == "undoes an earlier release":
        # work has restored the share, and the report does not say so yet
        await namespace.publish(ann={"tier": tier, "effective_units": units})
        await eventually(lambda: present(nodes.reported("node-a", "ann")).tier is tier)
    one = Target(agent, present((await agent.report()).session("ann")))
    monkeypatch.setattr(cluster_module, "DECIDED_WITHIN", 0.3 if answer == "is silent" else 60.0)
    history: list[Action] = []
    actions = ActionContext(nodes, hub, lambda: templates, record=history.append, clock=namespace.now)
    root = Actor("root", is_admin=True)
    acting = share.release(actions, one, root) if tier is Tier.RELEASED else share.change_tier(actions, one, root, tier)
    task = asyncio.create_task(acting)
    await seen(nodes, "node-a", has("ann", tier=tier))
    assert not task.done(), "the patch alone is no answer"
    if answer.startswith("undoes"):
        await namespace.annotate("ann", tier_patch(Tier.ACTIVE, namespace.now(), 25))
        with pytest.raises(ActionRefused) as refused:
            await task
        assert (refused.value.code, refused.value.text) == (RefusalCode.BUSY, words.WORKED_MEANWHILE)
        assert not history
        return
    if answer == "follows":
        await namespace.publish(ann={"tier": tier, "effective_units": units})
    assert (await task).text == (said if answer == "follows" else words.TIER_UNDER_WAY)
    assert len(history) == (answer == "follows"), "what the agent may still undo has not happened"


@pytest.mark.parametrize("undone", [False, True])
async def test_a_change_that_is_under_way_is_recorded_and_told_when_its_agent_has_decided(
    namespace: HubNamespace,
    nodes: Cluster,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    undone: bool,
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    one = Target(agent, present((await agent.report()).session("ann")))
    monkeypatch.setattr(cluster_module, "DECIDED_WITHIN", 0.3)
    history: list[Action] = []
    actions = ActionContext(nodes, hub, lambda: templates, record=history.append, clock=namespace.now)
    outcome = await share.release(actions, one, Actor("root", is_admin=True), why="A class begins.")
    assert (outcome.changed, outcome.text) == (True, words.TIER_UNDER_WAY)
    assert (history, (await namespace.session("ann")).messages) == ([], ())
    if undone:
        await namespace.annotate("ann", tier_patch(Tier.ACTIVE, namespace.now(), 25))
        await eventually(lambda: not actions.followed)
        assert (history, (await namespace.session("ann")).messages) == ([], ())
        return
    await namespace.publish(ann={"tier": Tier.RELEASED, "effective_units": 0})
    await eventually(lambda: not actions.followed)
    assert [(one.action, one.actor) for one in history] == [("released", "root")]
    (message,) = (await namespace.session("ann")).messages
    assert message.text == words.released_by("root", "A class begins.")


@pytest.mark.parametrize("work", [{"gpu_busy": True}, {"waiting": True}, {"last_gpu_activity": 1_000_000.5}])
async def test_a_step_is_refused_where_a_newer_report_shows_work(
    namespace: HubNamespace, nodes: Cluster, work: dict[str, bool | float]
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    await namespace.publish(ann=work)
    await seen(nodes, "node-a", has("ann", **work))
    with pytest.raises(ControlRefused) as refused:
        await agent.send(
            TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle", if_idle_since=1_000_000.0)
        )
    assert refused.value.code == "busy"
    assert (await namespace.session("ann")).tier is Tier.ACTIVE


async def test_without_the_right_to_patch_it_says_which_right(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    await namespace.rights(HUB_RULES[:2])
    with pytest.raises(ControlRefused, match="may not patch pods in the namespace"):
        await agent.send(TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle"))


@pytest.mark.parametrize("fault", ["500", "429", "reset", "lost"])
async def test_a_patch_that_fails_is_said_and_may_be_tried_again(
    namespace: HubNamespace, nodes: Cluster, fault: Literal["500", "429", "reset", "lost"]
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    step = TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle")
    namespace.cluster.faults.fail_next("patch", "pods", fault)
    with pytest.raises(AgentUnreachable):
        await agent.send(step)
    if fault == "lost":
        await seen(nodes, "node-a", has("ann", tier=Tier.RELEASED))
    else:
        await agent.send(step)
    assert (await namespace.session("ann")).tier is Tier.RELEASED


async def test_only_the_verbs_that_it_needs(namespace: HubNamespace) -> None:
    await namespace.rights(
        [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]},
            {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]},
        ]
    )
    async with as_the_hub(namespace) as nodes:
        await namespace.open("ann")
        await namespace.publish()
        agent = await seen(nodes, "node-a", has("ann", confirmed=True))
        namespace.cluster.calls.clear()
        await agent.send(TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle"))
        namespace.cluster.faults.cut_watches()
        await seen(nodes, "node-a", has("ann", tier=Tier.RELEASED))
        await eventually(lambda: namespace.cluster.calls.get(("watch", "configmaps"), 0) > 0)
    schedulers = {("watch", "nodes"), ("list", "nodes")}
    asked = {call for call in namespace.cluster.calls if call not in schedulers}
    assert asked <= {("patch", "pods"), ("watch", "pods"), ("watch", "configmaps")}


async def test_pods_in_namespaces_of_their_users(namespace: HubNamespace) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}
    token = await namespace.cluster.service_account("hub-everywhere", HUB_RULES, cluster_rules=[rule])
    await namespace.open("ann")
    pod = await namespace.admin.get(namespace.at("pods", "jupyter-ann"))
    await namespace.admin.delete(namespace.at("pods", "jupyter-ann"), grace=0)
    theirs = await namespace.cluster.make_namespace("-ann")
    metadata = {key: pod["metadata"][key] for key in ("name", "labels", "annotations")}
    spec = {"nodeName": "node-a", "containers": [{"name": "notebook", "image": "notebook"}]}
    await namespace.admin.create(path("pods", theirs), {"metadata": metadata, "spec": spec})
    await namespace.admin.patch(path("pods", theirs, "jupyter-ann", "status"), {"status": {"phase": "Running"}})
    await namespace.publish()
    async with as_the_hub(namespace, all_namespaces=True, token=token) as nodes:
        agent = await seen(nodes, "node-a", has("ann", confirmed=True))
        await agent.send(TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle"))
        await seen(nodes, "node-a", has("ann", tier=Tier.RELEASED))


# -- when the API server is not well -----------------------------------------------------------------------------------


async def test_watches_that_end_or_fail_are_begun_again(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", confirmed=True))
    namespace.cluster.faults.fail_next("watch", "pods", "500", times=2)
    namespace.cluster.faults.fail_next("watch", "configmaps", "reset", times=2)
    namespace.cluster.faults.cut_watches()
    await namespace.publish(ann={"kernels_busy": 1})
    await namespace.annotate("ann", tier_patch(Tier.RELEASED, namespace.now(), 0))
    await seen(nodes, "node-a", has("ann", kernels_busy=1, tier=Tier.RELEASED))


async def test_a_watch_that_is_too_old_reads_everything_anew(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", confirmed=True))
    for fault in ("500", "410"):
        namespace.cluster.faults.fail_next("watch", "pods", fault, of=by_service_accounts)
    namespace.cluster.faults.cut_watches()
    await namespace.admin.delete(namespace.at("pods", "jupyter-ann"), grace=0)
    await namespace.open("bob")
    await namespace.publish()
    await seen(nodes, "node-a", lambda report: [one.id for one in report.sessions] == ["bob"])


async def test_what_happened_while_nobody_listened_is_as_old_as_that(namespace: HubNamespace, nodes: Cluster) -> None:
    """A report that a new watch brings at once may have been published at any time since the last one broke."""
    await namespace.open("ann")
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", confirmed=True))
    namespace.cluster.faults.fail_next("watch", "configmaps", "500", times=2)
    namespace.cluster.faults.cut_watches()
    await namespace.publish(ann={"kernels_busy": 1})
    nodes._maps._heard = present(nodes._maps._heard) - 60  # as if it had been silent for a minute before
    agent = await seen(nodes, "node-a", has("ann", kernels_busy=1))
    assert agent.report_age() >= 60
    await asyncio.sleep(object_watch._CATCHING_UP)
    await namespace.publish(ann={"kernels_busy": 2})
    agent = await seen(nodes, "node-a", has("ann", kernels_busy=2))
    assert agent.report_age() < 5


async def test_what_a_list_brings_has_no_known_age(namespace: HubNamespace) -> None:
    """Nobody knows what happened between the report and the start of the service: no server is stopped on it."""
    await namespace.open("ann")
    await namespace.publish()
    async with as_the_hub(namespace) as nodes:
        agent = await seen(nodes, "node-a", has("ann", confirmed=True))
        assert agent.report_age() == float("inf")
        await namespace.publish(ann={"kernels_busy": 1})
        agent = await seen(nodes, "node-a", has("ann", kernels_busy=1))
        assert agent.report_age() < 5


async def test_without_rights_it_says_so_and_goes_on_trying(
    namespace: HubNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    await namespace.rights([])
    monkeypatch.setattr(object_watch, "LONGEST_PAUSE", 0.2)
    async with as_the_hub(namespace, patience=0.3) as nodes:
        (agent,) = nodes
        with pytest.raises(AgentUnreachable, match=r"pods of the namespace .* cannot be read: the API server says 403"):
            await agent.report()
        assert sum("pods of the namespace" in record.message for record in caplog.records) == 1
        await namespace.rights(HUB_RULES)
        await seen(nodes, "node-a", has("ann", confirmed=True))


async def test_a_silent_api_server_is_not_believed_for_ever(
    namespace: HubNamespace, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    monkeypatch.setattr(object_watch, "LOST_AFTER", -1.0)
    with pytest.raises(AgentUnreachable):
        await agent.report()
    assert len(list(nodes)) == 1


# -- session controls --------------------------------------------------------------------------------------------------


def asking(*asks: Ask) -> dict[str, Any]:
    return {"asks": asks, "opened_at": 0.0}


async def test_controls_are_written_to_the_pod_and_seen_at_once(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("ann")
    await namespace.publish()
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    controls = Controls(keep=Keep(until=2e9, since=1e9, by="ann"), keeps=(1e9,), exemption=Exemption(by="root"))
    await agent.send(ControlsRequest.of("ann", controls))
    # before the watch brings it: a second request must not be decided on what was before the first
    session = present((await agent.report()).session("ann"))
    assert session.controls == controls
    message = Message(text="Please save your work.", by="root", at=1e9)
    await agent.send(MessageRequest(id="ann", message=message))
    said = await namespace.session("ann")
    assert (said.controls, said.messages) == (controls, (message,))
    await seen(nodes, "node-a", has("ann", keep=controls.keep, exemption=controls.exemption, messages=(message,)))


async def test_processes_to_stop_are_named_on_the_pod_as_long_as_its_user_has_the_notice(
    namespace: HubNamespace, nodes: Cluster
) -> None:
    await namespace.open("ann")
    process = BypassingProcess(pid=4711, started=5)
    await namespace.publish(ann={"exceeding": (process,)})
    agent = await seen(nodes, "node-a", has("ann", exceeding=(process,)))
    message = Message(text="Over.", by="culler", at=1e9, cause=MessageCause.BYPASS)
    await agent.send(MessageRequest(id="ann", message=message))
    await agent.report()
    await agent.send(StopProcessesRequest(id="ann", processes=(process,)))
    assert (await namespace.session("ann")).stop_processes == (process,)
    await agent.report()
    await agent.send(MessageRequest(id="ann", message=message.model_copy(update={"cause": MessageCause.ADMIN})))
    assert (await namespace.session("ann")).stop_processes == (process,)
    await agent.report()
    await agent.send(MessageRequest.withdraw("ann", MessageCause.BYPASS))
    assert (await namespace.session("ann")).stop_processes == ()


async def test_what_a_notebook_server_asks_is_carried_out_once_and_answered_on_the_pod(
    namespace: HubNamespace,
    nodes: Cluster,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
) -> None:
    """The report goes on having the ask until the agent has seen the answer."""
    await namespace.open("ann")
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", confirmed=True))
    recorded: list[Action] = []
    actions = ActionContext(nodes, hub, lambda: templates, record=recorded.append, clock=namespace.now)
    asks = AskResponder(nodes, actions)
    looking = asyncio.create_task(asks.poll())
    await asyncio.sleep(0.05)
    assert not looking.done()
    began = time.monotonic()
    await namespace.publish(ann=asking(Ask(number=7, kind=AskKind.KEEP, value=3600, at=namespace.now())))
    await looking
    await asks.answered()
    assert time.monotonic() - began < 5
    said = await namespace.session("ann")
    assert [(answer.number, answer.done, answer.text) for answer in said.answers] == [
        (7, True, "The GPU share is kept for 1 h.")
    ]
    assert present(said.controls.keep).by == "ann"
    # another service on the same report
    async with as_the_hub(namespace) as others:
        again = AskResponder(others, ActionContext(others, hub, lambda: templates, clock=namespace.now))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(again.poll(), 0.2)
        await again.answered()
    assert await namespace.session("ann") == said
    assert [action.action for action in recorded] == ["keep"]


async def test_a_stop_that_another_node_asks_in_a_users_name_is_not_carried_out(
    namespace: HubNamespace,
    nodes: Cluster,
    hub: Hub,  # noqa: F811
    hub_server: FakeHub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
) -> None:
    """The node may write what it likes into its report. What its own session asks in the same report is carried out."""
    for user, node in (("ann", "node-a"), ("bob", "node-b")):
        hub_server.add(user)
        await namespace.open(user, node=node)
        await namespace.publish(node)
    await seen(nodes, "node-b", has("bob", confirmed=True))
    forged = namespace.sessions["node-a"]["ann"]
    stop = Ask(number=7, kind=AskKind.STOP, at=namespace.now())
    namespace.sessions["node-b"]["ann"] = forged.model_copy(update={"asks": (stop,), "opened_at": namespace.now()})
    keep = Ask(number=8, kind=AskKind.KEEP, value=3600, at=namespace.now())
    await namespace.publish("node-b", bob={"asks": (keep, stop), "user": "ann"})
    asks = AskResponder(nodes, ActionContext(nodes, hub, lambda: templates, clock=namespace.now))
    await asks.poll()
    await asks.answered()
    assert present((await namespace.session("bob")).controls.keep).by == "bob"
    assert (await namespace.session("ann")).controls.keep is None
    assert hub_server.deleted == ["/users/bob/server"]


async def test_asks_of_an_agent_that_has_ended_are_not_looked_at_for_ever(
    namespace: HubNamespace,
    clock: Clock,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await namespace.open("ann")
    await namespace.publish(ann=asking(Ask(number=7, kind=AskKind.STOP, at=namespace.now())))
    async with as_the_hub(namespace) as nodes:
        assert [agent.node for agent in await nodes.asking()] == ["node-a"]
        clock.forward(REPORT_STALE_SECONDS + 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(nodes.asking(), 0.1)
        clock.forward(-REPORT_STALE_SECONDS - 1)
        await nodes.asking()
    monkeypatch.setattr(node_reports, "ASK_SECONDS", 0.0)
    async with as_the_hub(namespace) as nodes:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(nodes.asking(), 0.1)


# -- the culler on a nodes: the same loop ----------------------------------------------------------------------------


@pytest.fixture
def make_culler(nodes: Cluster, hub: Hub, templates: dict[str, Template], clock: Clock) -> Callable[[], Culler]:  # noqa: F811
    def make() -> Culler:
        return Culler(ActionContext(nodes, hub, lambda: templates, clock=clock), CullerSettings(cull_every=1e-9))

    return make


async def in_step(namespace: HubNamespace, nodes: Cluster, user: str) -> None:
    """The watch has brought what the pod says now."""
    said = await namespace.session(user)
    await seen(nodes, "node-a", has(user, tier=said.tier, notice=said.notice))


async def test_the_way_down(
    namespace: HubNamespace,
    nodes: Cluster,
    make_culler: Callable[[], Culler],
    hub_server: FakeHub,  # noqa: F811
    clock: Clock,  # noqa: F811
) -> None:
    ann = await namespace.open("ann")
    opened = clock()
    hub_server.add("ann", last_activity=opened)
    log: list[tuple[float, Tier, Tier | None]] = []
    for minute in (0, 9, 10, 14, 15, 39, 40, 44, 45, 474, 475, 479, 480):
        clock.now = opened + minute * MINUTE
        if minute:
            # each culler is new: as after a restart, it knows nothing
            namespace.sessions["node-a"]["ann"] = ann.model_copy(update={"gpu_seconds": float(minute)})
        await namespace.publish()
        await seen(nodes, "node-a", has("ann", confirmed=True, gpu_seconds=float(minute)))
        culler = make_culler()
        await culler.round()
        await asyncio.gather(*culler._under_way.values())
        said = await namespace.session("ann")
        await in_step(namespace, nodes, "ann")
        log.append((minute, said.tier, said.notice.tier if said.notice else None))
        assert bool(hub_server.deleted) == (minute == 480)
    active, down, released, stopped = Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED
    assert log == [
        (0, active, None), (9, active, None), (10, active, down), (14, active, down),
        (15, down, None), (39, down, None), (40, down, released), (44, down, released),
        (45, released, None), (474, released, None), (475, released, stopped), (479, released, stopped),
        (480, released, stopped),
    ]  # fmt: skip
    assert hub_server.deleted == ["/users/ann/server"]


async def test_a_stop_waits_for_a_fresh_report(
    namespace: HubNamespace,
    nodes: Cluster,
    make_culler: Callable[[], Culler],
    hub_server: FakeHub,  # noqa: F811
    clock: Clock,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that went to work since the report is not in it. The next report is waited for, and acted on at once."""
    await namespace.open("ann")
    hub_server.add("ann", last_activity=clock())
    await namespace.annotate("ann", tier_patch(Tier.RELEASED, clock(), 0))
    clock.forward(8 * 60 * MINUTE)
    told = Notice(tier=Tier.STOPPED, at=clock(), reason="told")
    await namespace.annotate("ann", notice_patch(told))
    await namespace.publish()
    await seen(nodes, "node-a", has("ann", notice=told))
    old = time.monotonic() - 30
    monkeypatch.setitem(nodes._maps.arrived, f"{namespace.name}/{report_name('node-a')}", old)
    culler = make_culler()
    await culler.round()
    assert hub_server.deleted == []
    assert not [asked for asked in hub_server.asked if asked[1] == "/users/ann"]
    culler.reports_changed()
    assert culler._woken.is_set()
    await namespace.publish(ann={"kernels_busy": 1})
    await seen(nodes, "node-a", has("ann", kernels_busy=1))
    await culler.round()
    assert hub_server.deleted == []
    assert (await namespace.session("ann")).notice is None


async def test_a_node_that_is_silent_holds_up_no_other(
    namespace: HubNamespace,
    nodes: Cluster,
    make_culler: Callable[[], Culler],
    clock: Clock,  # noqa: F811
) -> None:
    await namespace.open("ann")
    await namespace.open("bob", node="node-b")
    await namespace.publish("node-b")
    clock.forward(10 * MINUTE)
    await namespace.publish("node-a")
    await seen(nodes, "node-a", has("ann", confirmed=True))
    await eventually(lambda: len(list(nodes)) == 2)
    await make_culler().round()
    assert (await namespace.session("ann")).notice is not None
    assert (await namespace.session("bob")).notice is None


async def test_a_round_asks_the_api_server_nothing_while_nothing_is_to_be_done(
    namespace: HubNamespace, nodes: Cluster, make_culler: Callable[[], Culler]
) -> None:
    for number in range(20):
        await namespace.open(f"user-{number}")
    await namespace.publish()
    await seen(nodes, "node-a", has("user-19", confirmed=True))
    await asyncio.sleep(0.05)
    culler = make_culler()
    namespace.cluster.calls.clear()
    for _ in range(10):
        await culler.round()
    assert namespace.cluster.calls == {}
