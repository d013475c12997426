"""A node's report about sessions that are not its own changes no answer of any part of the service.

Two nodes with a pod each, as the watches have them. One node's report is replaced by a random one with foreign names,
ids, asks and ages; every part of the service is asked with and without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kubernetes_asyncio.client import ApiClient

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.controls import Ask, Exemption, Keep, Message
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.kubernetes import objects as objects_names
from gpushare_spawner.model.kubernetes.annotations import HUB, QUOTA, SESSION, TEMPLATE, SessionAnnotations, labels
from gpushare_spawner.model.kubernetes.node_reports import MOST_GONE, FirstIdentities
from gpushare_spawner.model.kubernetes.objects import REPORT_KEY, report_name
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import DeliveredReport, GpuReport, HostUseReport, Notice, Report, SessionReport
from gpushare_spawner.model.share import Tier, split_session_id
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, Counters
from gpushare_spawner.service.actions.keeps import controls_of_others
from gpushare_spawner.service.api.entries import node_entry, problems
from gpushare_spawner.service.api.router import Services
from gpushare_spawner.service.api.snapshots import Events, ServiceSnapshots
from gpushare_spawner.service.culler.asks import AskResponder
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings, SessionDecision
from gpushare_spawner.service.history.recorder import Meter, SpawnWatch
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.hub.client import Hub, HubServer, HubUser
from gpushare_spawner.service.kubernetes import cluster as cluster_module
from gpushare_spawner.service.kubernetes.cluster import Cluster
from gpushare_spawner.service.kubernetes.pod_sessions import trimmed
from gpushare_spawner.service.reports import NodeSnapshot, RecentReports, ask_all
from gpushare_spawner.service.sources import DashboardSources, ServiceSnapshot
from gpushare_spawner.service.units import gpu_bar, units_of
from gpushare_spawner.service.web.metrics import exposition
from tests.placement.reports import ledger_of
from tests.service.conftest import deciding
from tests.service.dashboards import NO_AGENT, PREFIX, sessions_shown

NOW = 1_790_000_000.0
OPENED = NOW - 3 * 3600
HOSTILE, HONEST = "node-a", "node-b"
USERS = ("victim", "own", "other", "nobody")
QUOTAS = Quotas.model_validate({"groups": {"optics": {"guarantee": 1}}, "users": {"victim": {}, "own": {}}})
TEMPLATES = {
    "quarter": Template(
        name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25},
        idle={"release_after": "45m", "stop_after": "2h", "warn_before": "5m"},
    ),
}  # fmt: skip


def pod(
    user: str, node: str, created: float = OPENED, phase: str = "Running", deleted: bool = False, hub: str | None = None
) -> dict[str, Any]:
    """A pod as the API server has it."""
    said = SessionAnnotations(
        session=user, template="quarter", share_units=25, gpus=(f"GPU-{node}",), gpu_indices=(0,),
        tier_since=OPENED, effective_units=25, notice=Notice(tier=Tier.RELEASED, at=NOW + 60, reason="Idle."),
    )  # fmt: skip
    metadata = {
        "namespace": "jhub", "name": f"jupyter-{user}-{node}", "resourceVersion": "7", "uid": f"{user}-{node}",
        "creationTimestamp": datetime.fromtimestamp(created, UTC).isoformat(), "labels": labels(),
        "annotations": said.annotations() | ({HUB: hub} if hub else {}),
    }  # fmt: skip
    if deleted:
        metadata["deletionTimestamp"] = metadata["creationTimestamp"]
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


def session(name: str, node: str, **changes: Any) -> SessionReport:
    """A session as an honest agent reports it."""
    values = {
        "id": name, "user": name, "template": "quarter", "gpus": (f"GPU-{node}",), "share_units": 25,
        "tier_since": OPENED, "effective_units": 25, "guaranteed_units": 25, "opened_at": OPENED, "kernels": 1,
        "kernels_busy": 0, "gpu_seconds": 100.0, "last_gpu_activity": OPENED + 60,
    }  # fmt: skip
    return SessionReport.model_validate(values | changes)


def report(node: str, *sessions: SessionReport) -> Report:
    gpu = GpuReport(index=0, uuid=f"GPU-{node}", model="Simulated GPU 16 GiB", memory_bytes=2**34)
    return Report(node=node, published_at=NOW, gpus=(gpu,), sessions=sessions)


def without_reports(decisions: Iterable[SessionDecision]) -> list[tuple[str, SessionDecision]]:
    """The decisions on the sessions of others than the hostile node's own, each with its node."""
    return [
        (one.node, dataclasses.replace(one, agent=NO_AGENT, report=NO_AGENT))
        for one in decisions
        if one.session.id != "own"
    ]


class World:
    """The service over what the watches have, and a hub that is written down."""

    def __init__(self, hostile: Report, pods: Sequence[dict[str, Any]] = (), hub: str = "") -> None:
        self.cluster = Cluster(ApiClient.__new__(ApiClient), "jhub", clock=lambda: NOW, hub=hub)
        pods = pods or [pod("own", HOSTILE), pod("victim", HONEST)]
        reports = [hostile, report(HONEST, session("victim", HONEST))]
        maps = [
            {
                "metadata": {"namespace": "jhub", "name": report_name(one.node), "resourceVersion": "7"},
                "data": {REPORT_KEY: one.model_dump_json()},
            }
            for one in reports
        ]
        watches: Any = ((self.cluster._pods, pods), (self.cluster._maps, maps), (self.cluster._layer_pods, []))
        for watched, objects in watches:
            watched.objects = {f"jhub/{one['metadata']['name']}": watched._convert(one) for one in objects}
            watched._heard = float("inf")
        self.patched: list[tuple[str, dict[str, Any]]] = []
        self.hub_asked: list[tuple[str, ...]] = []
        self.told: list[SessionDecision] = []
        servers = [HubServer(user, "", started=OPENED, last_activity=OPENED, profile="quarter") for user in USERS[:2]]
        self.known_users = tuple(HubUser(one.user, servers=(one,)) for one in servers)

    # -- the hub, as far as the culler and the actions ask it --

    async def users(self, with_ready_servers: bool = True) -> list[HubUser]:
        return list(self.known_users)

    async def server(self, user: str, name: str) -> HubServer | None:
        return next((one for known in self.known_users for one in known.servers if one.user == user), None)

    async def stop(self, user: str, name: str, remove: bool = False) -> None:
        self.hub_asked.append(("stop", user, name))

    async def start(self, user: str, name: str, options: Any) -> None:
        self.hub_asked.append(("start", user, name))

    async def patch(self, api: object, pod: Any, annotations: Any) -> dict[str, Any]:
        self.patched.append((pod.name, {name: text for name, text in annotations.items() if "answer" not in name}))
        return self.cluster._pods.objects[f"jhub/{pod.name}"]

    async def answers(self) -> dict[str, Any]:
        """What each part says about the sessions of others than the hostile node's own."""
        hub = cast("Hub", self)
        snapshots = await ask_all(self.cluster)
        actions = ActionContext(self.cluster, hub, lambda: TEMPLATES, clock=lambda: NOW, quotas=lambda: QUOTAS)
        recent = RecentReports(self.cluster, max_age=0)
        shots = ServiceSnapshots(DashboardSources(actions, recent, deciding(self.known_users)))
        api = await shots.current()
        usage = api.usage
        assert usage is not None
        meter, waits = Meter(), SpawnWatch(lambda user: "")
        waited: list[Any] = []
        for seen in (snapshot.report for snapshot in snapshots if snapshot.report is not None):
            meter.observe(seen, lambda one: one.quota)
            waits.observe_report(seen.model_copy(update={"sessions": ()}), {})
            waited += waits.observe_report(seen, {})
        amounts, _, _ = meter.take()
        recorded: list[Any] = []
        culler = Culler(actions, CullerSettings(), notify=self.told.extend)
        await culler.round()
        asks = AskResponder(self.cluster, actions)
        try:
            async with asyncio.timeout(0.01):
                await asks.poll()
        except TimeoutError:
            pass
        await asks.answered()
        victim = next((row.session for row in api.decisions if row.session.id == "victim"), session("victim", HONEST))
        viewers = (Caller("victim"), Caller("root", is_admin=True))
        services = Services(PREFIX, shots, Events(shots), actions)
        pages = [await sessions_shown(services, viewer) for viewer in viewers]
        controls, _ = await controls_of_others(actions, victim)
        return {
            "list": [(row.node, row.session) for row in api.decisions if row.session.id != "own"],
            "ids": sorted(api.by_id),
            "by id": [api.by_id[name].session for name in api.by_id if name != "own"],
            "by user": {user: [row.session.id for row in api.by_user.get(user, ())] for user in USERS},
            "dashboard": [[one for one in page["sessions"] if one["user"] != "own"] for page in pages],
            "others": [page["others"] for page in pages],
            "decisions": without_reports(api.decisions),
            "quotas": {account.name: usage.used(account) for account in usage.all_accounts()},
            "history": {subject: amount for (_, subject), amount in amounts.items() if subject.user != "own"},
            "waits": [one for one in waited if one.user != "own"],
            "told": without_reports(self.told),
            "keeps": controls,
            "metrics": [
                line for line in exposition(api, Counters()).decode().splitlines()
                if ('user="' in line and 'user="own"' not in line) or line.startswith("gpushare_quota_used")
            ],
            "at the hub": sorted(one for one in self.hub_asked if one[1] != "own"),
            "recorded": [one for one in recorded if one.user != "own"],
            "patched": sorted(name for name, _ in self.patched if "own" not in name),
            "units": api.bars[HONEST, f"GPU-{HONEST}"],
        }  # fmt: skip


NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""An example takes 0.2 s."""
names = st.sampled_from([*USERS, "victim+second", "own+second", "", "a\nb", "victim ", "=76ictim"])
instants = st.one_of(st.floats(0, 2 * NOW), st.sampled_from([0.0, NOW, NOW + 1e9, OPENED + 1]))
seconds = st.floats(0, 1e9)
asked = st.builds(
    Ask, number=st.integers(1, 99), kind=st.sampled_from(list(AskKind)), value=st.floats(0, 100), at=st.just(NOW)
)
forged = st.builds(
    SessionReport,
    id=names.filter(bool), user=names, server=names, template=st.sampled_from(["quarter", "cpu", "gone"]),
    quota=st.sampled_from(["", "group/optics", "user/victim"]),
    gpus=st.lists(st.sampled_from([f"GPU-{HOSTILE}", f"GPU-{HONEST}", "GPU-x"]), max_size=3).map(tuple),
    layer=st.sampled_from(list(LayerName)), share_units=st.integers(0, 100), borrowed_units=st.integers(0, 100),
    tier=st.sampled_from([Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED]), tier_since=instants,
    effective_units=st.integers(0, 100), guaranteed_units=st.integers(0, 100), yields=st.booleans(),
    opened_at=instants, confirmed=st.booleans(), gpu_busy=st.booleans(), gpu_seconds=seconds,
    kernels=st.none() | st.integers(0, 9), kernels_busy=st.none() | st.integers(0, 9),
    last_gpu_activity=st.none() | instants, last_kernel_activity=st.none() | instants,
    delivered=st.builds(DeliveredReport, entitled_seconds=seconds, delivered_seconds=seconds),
    host_use=st.none() | st.builds(HostUseReport, cpu_millicores=st.integers(0, 9), memory_bytes=st.integers(0, 9)),
    notice=st.none() | st.builds(Notice, tier=st.just(Tier.STOPPED), at=instants, reason=st.just("x")),
    keep=st.none() | st.builds(Keep, until=instants, since=instants, by=names),
    keeps=st.lists(instants, max_size=3).map(tuple),
    exemption=st.none() | st.builds(Exemption, until=st.none() | instants, by=names),
    message=st.none() | st.builds(Message, text=st.just("x"), by=names, at=instants),
    asks=st.lists(asked, max_size=3).map(tuple),
)  # fmt: skip
"""Sessions of anybody, of any age, that ask anything."""


STOP = Ask(number=7, kind=AskKind.STOP, at=NOW)
BUSY = {"gpu_busy": True, "kernels_busy": 1, "last_gpu_activity": NOW}


@pytest.mark.parametrize(
    "forged_session",
    [
        session("victim", HOSTILE, asks=(STOP,)),
        session("victim", HOSTILE, opened_at=NOW + 1e6),
        session("victim", HOSTILE, **BUSY),
        session("own", HOSTILE, user="victim"),
        session("own", HOSTILE, user="victim", asks=(STOP,)),
        session("own", HOSTILE, server="other", quota="user/victim", share_units=100, gpus=(f"GPU-{HONEST}",)),
        session("victim", HOSTILE, keep=Keep(until=NOW + 3600, since=NOW, by="victim"), keeps=(NOW, NOW, NOW)),
        session("new", HOSTILE, user="victim", server="new", quota="user/victim", share_units=100),
    ],
    ids=["asks-stop", "younger", "busy", "own-pod-other-user", "own-pod-asks-stop", "charged", "kept", "new-server"],
)
def test_a_forged_session_changes_no_answer_about_the_sessionscontrols_of_others(forged_session: SessionReport) -> None:
    own = () if forged_session.id == "own" else (session("own", HOSTILE),)
    honest = answers(report(HOSTILE, session("own", HOSTILE)))
    assert {one["user"] for one in honest["dashboard"][0]} == {"victim"}
    assert [one.id for _, one in honest["list"]] == ["victim"]
    assert answers(report(HOSTILE, forged_session, *own)) == honest


def test_what_its_own_notebook_server_asks_is_carried_out() -> None:
    """The test above would see a stop."""
    world = World(report(HOSTILE, session("own", HOSTILE, asks=(STOP,))))
    run(world)
    assert ("stop", "own", "") in world.hub_asked


def test_of_a_pod_that_ends_nothing_is_asked_and_its_users_new_server_counts() -> None:
    """A node can keep a pod of a user for ever in its end, while the user's server runs elsewhere by now."""
    pods = [pod("victim", HOSTILE, created=OPENED - 60, deleted=True), pod("victim", HONEST)]
    told = session("victim", HOSTILE, asks=(STOP,), opened_at=NOW, **BUSY)
    silent = answers(report(HOSTILE), pods)
    assert [(node, one.opened_at) for node, one in silent["list"]] == [(HONEST, OPENED)]
    assert answers(report(HOSTILE, told), pods) == silent
    only = World(report(HOSTILE, told), [pods[0]])
    run(only)
    assert only.hub_asked == [], "the last server of the user is ending too"


MIRROR: dict[str, dict[str, Any]] = {
    "mirror": {"annotations": {objects_names.MIRROR: "x"}},
    "owned": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": HOSTILE, "uid": "1"}]},
}


@pytest.mark.parametrize("mark", MIRROR.values(), ids=MIRROR)
@pytest.mark.parametrize("created", [OPENED - 60, OPENED, NOW - 60], ids=["older", "as-old", "younger"])
@pytest.mark.parametrize("user", ["victim", "victim+second", "nobody"])
@pytest.mark.parametrize("hub", ["", "http://theirs"])
def test_a_pod_that_its_node_has_made_changes_no_answer_about_the_sessionscontrols_of_others(
    mark: dict[str, Any], created: float, user: str, hub: str
) -> None:
    """A kubelet can create a static pod's mirror, with any labels and annotations, in the hub's namespace."""
    pods = [pod("own", HOSTILE), pod("victim", HONEST)]
    mirror = pod(user, HOSTILE, created=created, hub=hub or None)
    for part, value in mark.items():
        mirror["metadata"][part] = {**mirror["metadata"][part], **value} if part == "annotations" else value
    forged = report(HOSTILE, session("own", HOSTILE), session(user, HOSTILE, asks=(STOP,), opened_at=created, **BUSY))
    honest = answers(report(HOSTILE, session("own", HOSTILE)), pods, hub="http://ours")
    assert answers(forged, [*pods, mirror], hub="http://ours") == honest
    world = World(forged, [*pods, mirror], hub="http://ours")
    assert [pod.session.session for pod in world.cluster.all_pods()] == ["own", "victim"]
    assert [world.cluster.report(node)[0].others for node in (HOSTILE, HONEST)] == [(), ()]


@pytest.mark.parametrize("created", [OPENED, NOW - 60], ids=["as-old", "younger"])
def test_a_pod_that_claims_the_session_of_an_older_one_that_runs_takes_units_and_nothing_else(created: float) -> None:
    """Without admission policies a node can claim a session by the pods that it runs."""
    pods = [pod("own", HOSTILE), pod("victim", HONEST)]
    claimant = pod("victim", HOSTILE, created=created)
    claimant["metadata"]["name"] = "other-pod"
    told = report(HOSTILE, session("own", HOSTILE), session("victim", HOSTILE, asks=(STOP,), **BUSY))
    honest = answers(report(HOSTILE, session("own", HOSTILE)), pods)
    found = answers(told, [claimant, *pods])
    # its units are said to be somebody else's
    for name in ("others", "dashboard"):
        found.pop(name), honest.pop(name)
    assert found == honest


@pytest.mark.parametrize(
    ("older", "younger", "counts"),
    [
        ({}, {}, "older"),
        ({}, {"phase": "Pending"}, "older"),
        ({"phase": "Pending"}, {}, "younger"),
        ({"phase": "Pending"}, {"phase": "Pending"}, "older"),
        ({"deleted": True}, {}, "younger"),
        ({"deleted": True}, {"phase": "Pending"}, "younger"),
        ({}, {"deleted": True}, "older"),
        ({"deleted": True}, {"deleted": True}, "younger"),
    ],
    ids=str,
)
def test_of_two_pods_of_one_session_the_older_one_counts_unless_it_ends(
    older: dict[str, Any], younger: dict[str, Any], counts: str
) -> None:
    pods = [pod("victim", HOSTILE, created=NOW - 90, **older), pod("victim", HONEST, created=NOW - 60, **younger)]
    for order in (pods, pods[::-1]):
        (found,) = World(report(HOSTILE), order).cluster.all_pods()
        assert found.node == (HOSTILE if counts == "older" else HONEST)


def test_a_pod_keeps_the_identity_with_which_it_was_seen_first(caplog: pytest.LogCaptureFixture) -> None:
    pods = [pod("own", HOSTILE, created=OPENED - 60), pod("victim", HONEST)]
    told = report(HOSTILE, session("own", HOSTILE), session("victim", HOSTILE, asks=(STOP,), **BUSY))
    world = World(told, pods)
    before = run(World(told, pods))
    for number, changes in enumerate(
        ({SESSION: "victim"}, {SESSION: "victim", QUOTA: "user/victim", TEMPLATE: "gone"}, {HUB: "http://theirs"}, {})
    ):
        taken = pod("own", HOSTILE, created=OPENED - 60)
        taken["metadata"]["annotations"] |= changes
        taken["metadata"]["resourceVersion"] = str(8 + number)
        event: dict[str, Any] = {"type": "MODIFIED", "object": taken}
        if number == 1:
            # who takes the label off a pod and sets it again makes no new one
            world.cluster._pods._take({"type": "DELETED", "object": taken})
            assert [pod.session.session for pod in world.cluster.all_pods()] == ["victim"]
        world.cluster._pods._take(event)
        found = {pod.session.session: pod for pod in world.cluster.all_pods()}
        assert (found["own"].node, found["victim"].node) == (HOSTILE, HONEST)
        assert (found["own"].session.quota, found["own"].session.template) == ("", "quarter")
    assert run(world) == before
    (said,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert "jhub/jupyter-own-node-a was the server of session own when it was first seen" in said
    assert SESSION in said


def test_identities_are_kept_of_pods_that_are_there_and_of_some_that_have_left() -> None:
    identities = FirstIdentities(logging.getLogger())
    for number in range(3 * MOST_GONE):
        identities.with_first(trimmed(pod(f"user-{number}", HONEST)))
    there = {f"user-{number}-{HONEST}" for number in range(10)}
    identities.forget(there, len(there))
    assert len(identities._first) == MOST_GONE + 10
    assert there < identities._first.keys()
    assert f"user-{3 * MOST_GONE - 1}-{HONEST}" in identities._first


def test_the_units_of_another_hubs_pods_are_taken_and_nothing_else_of_them_counts() -> None:
    pods = [pod("victim", HONEST, hub="http://ours"), pod("bob", HONEST, hub="http://theirs")]
    world = World(report(HOSTILE), pods, hub="http://ours")
    seen, _ = world.cluster.report(HONEST)
    assert [one.id for one in seen.sessions] == ["victim"]
    assert units_of(gpu_bar(seen.gpus[0], seen.allocated_to), "free") == 50
    assert ledger_of([seen]).allocations.keys() == {"victim", "jhub/jupyter-bob-node-b"}
    assert {one.user for one in seen.others} == {""}


def test_an_unconfirmed_session_is_shown_to_admins_when_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    world = World(report(HOSTILE, session("victim\x1b[2J", HOSTILE), session("own", HOSTILE)))
    now = [NOW]
    world.cluster._clock = WallClock.of(lambda: now[0])
    seen, _ = world.cluster.report(HOSTILE)
    assert seen.unconfirmed == (), "a report follows the end of a pod within seconds"
    now[0] += cluster_module.UNCONFIRMED_AFTER
    for _ in range(3):
        seen, _ = world.cluster.report(HOSTILE)
    (one,) = seen.unconfirmed
    assert (one.id, one.since) == ("victim\x1b[2J", NOW)
    (said,) = [record.getMessage() for record in caplog.records]
    assert r"'victim\x1b[2J'" in said
    snapshots = [NodeSnapshot(next(iter(world.cluster)), seen)]
    assert problems(snapshots, Caller("root", is_admin=True), ()) == (said,)
    assert problems(snapshots, Caller("victim"), ()) == ()
    assert node_entry(seen, Caller("root", is_admin=True)).unconfirmed == (one,)
    assert node_entry(seen, Caller("bob")).unconfirmed == ()
    metrics = exposition(ServiceSnapshot(NOW, snapshots), Counters()).decode()
    assert 'gpushare_unconfirmed_sessions{node="node-a"} 1.0' in metrics


@pytest.mark.parametrize("by", [-86_400.0, 3600.0])
def test_a_nodes_clock_that_was_set_makes_no_pod_older_or_younger(by: float) -> None:
    """The API server says when a pod was created: its session would be idle, or over its quota, by the node's step."""
    seen, _ = World(report(HOSTILE, session("own", HOSTILE, clock_moved=by))).cluster.report(HOSTILE)
    assert [(one.id, one.begun) for one in seen.sessions] == [("own", OPENED)]


def test_a_node_that_reports_the_gpu_of_another_changes_nothing_of_it() -> None:
    """The name of the hostile node is the first one."""
    own = session("own", HOSTILE)
    world = World(report(HOSTILE, own))
    before, _ = world.cluster.report(HONEST)
    forged = report(HOSTILE, own)
    unhealthy = forged.gpus[0].model_copy(update={"index": 1, "uuid": f"GPU-{HONEST}", "healthy": False})
    forged = forged.model_copy(update={"gpus": (*forged.gpus, unhealthy)})
    (name,) = (name for name in world.cluster._maps.objects if HOSTILE in name)
    item = world.cluster._maps.objects[name]
    changed = {"metadata": item["metadata"] | {"resourceVersion": "8"}, "data": {}}
    changed["data"][REPORT_KEY] = forged.model_dump_json()
    world.cluster._maps.objects[name] = changed
    world.cluster._changed()
    reports = [world.cluster.report(node)[0] for node in (HOSTILE, HONEST)]
    assert reports[1] == before
    assert ledger_of(reports).capacity.gpus[f"GPU-{HONEST}"].node == HONEST


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("name", ["own", "own+second"])
def test_a_session_with_a_pod_does_not_come_and_go(name: str, reported: bool) -> None:
    """While its agent restarts or has not heard of it yet, and while its pod starts: always there, under one age."""
    shown = []
    for phase, deleted in (("Pending", False), ("Running", False), ("Running", True)):
        sessions = [session(name, HOSTILE, opened_at=OPENED + 5)] if reported else []
        world = World(report(HOSTILE, *sessions), [pod(name, HOSTILE, phase=phase, deleted=deleted)])
        seen, _ = world.cluster.report(HOSTILE)
        shown += [(one.id, one.user, one.server, one.opened_at) for one in seen.sessions]
        assert (seen.unconfirmed, seen.others) == ((), ())
    user, server = split_session_id(name)
    assert shown == [(name, user, server, OPENED)] * 3


def run(world: World) -> dict[str, Any]:
    """Let each part answer once."""

    async def all_answers() -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster_module, "patch_annotations", world.patch)
            return await world.answers()

    return asyncio.run(all_answers())


def answers(hostile: Report, pods: Sequence[dict[str, Any]] = (), hub: str = "") -> dict[str, Any]:
    """What each part says of the sessions of others than ``own``."""
    return run(World(hostile, pods, hub))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=NO_SHRINKING)
@given(st.lists(forged, max_size=4), st.booleans())
def test_what_a_node_reports_changes_no_answer_about_the_sessionscontrols_of_others(
    sessions: list[SessionReport], with_own: bool
) -> None:
    own = (session("own", HOSTILE),) if with_own else ()
    honest = answers(report(HOSTILE, session("own", HOSTILE)))
    assert [one.id for _, one in honest["list"]] == ["victim"]
    assert {one["user"] for one in honest["dashboard"][0]} == {"victim"}
    assert answers(report(HOSTILE, *sessions, *own)) == honest
