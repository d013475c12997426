"""The dashboard: what whom is shown, and how."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest

from gpushare_spawner.idle.use import Observation, RecentUse
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import BudgetState, Quotas
from gpushare_spawner.model.report import BypassingProcess, DeliveredReport, GpuReport, GpuTimeReport, HostMemoryReport
from gpushare_spawner.model.share import Tier, UseRule
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.api.entries import problems
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from gpushare_spawner.service.sources import ServiceSnapshot, _cannot_stop
from gpushare_spawner.service.waiting import waiting_spawns
from gpushare_spawner.wording.amounts import utc
from tests.present import present
from tests.service.dashboards import GIB, MINUTE, NO_AGENT, NOW, TEMPLATES, afternoon, page, session, shown


def plain(html: str) -> str:
    """The text of a page, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_the_page_says_of_each_session_what_it_has_and_does() -> None:
    text = plain(page())
    assert (
        "ann 0.25 GPU GPU 0 active 0.25 of 0.25 GPU received 24 min of the 25 min that it was entitled to 12 waits"
        in text
    )
    assert "95 % under 194 ms GPU busy 1 kernel, 1 busy 6 GiB of 16 GiB 5 GiB on the GPU, 1 GiB paged out" in text
    assert "bob / thesis" in text
    assert "GPU idle for 41 min" in text
    assert "release of the share in 4 min user notified" in text
    assert "downgrade to 0.04 GPU in 5 min user notified" not in text  # nobody has told erin yet
    assert "downgrade to 0.04 GPU in 5 min if it stays idle" in text
    assert "waiting for the GPU" in text
    assert "0.25 GPU borrowed" in text
    assert "Bypassing: 1 process does GPU work with the library removed." in text
    assert "simulated" in text


def test_page_says_of_a_session_on_two_gpus_what_it_received_on_each() -> None:
    time = [
        GpuTimeReport(entitled_seconds=1500, delivered_seconds=1482),
        GpuTimeReport(entitled_seconds=60, delivered_seconds=60),
    ]
    total = DeliveredReport(entitled_seconds=1560, delivered_seconds=1542, gpus=tuple(time))
    two = session("fay", gpus=("GPU-1", "GPU-0"), share_units=100, last_units=50, delivered=total)
    assert (
        "received 25 min of the 26 min that it was entitled to "
        "GPU 1: received 24 min of the 25 min that it was entitled to "
        "GPU 0: received all that it was entitled to (1 min)"
    ) in plain(page(afternoon(two)))
    # a report of another length than the session's GPUs shows the sum only
    odd = two.model_copy(update={"delivered": total.model_copy(update={"gpus": tuple(time) * 2})})
    assert "GPU 0: received" not in plain(page(afternoon(odd)))


@pytest.mark.parametrize(
    ("borrowed", "said"), [(70, "0.70 + 0.20 GPU borrowed"), (40, "0.40 GPU borrowed"), (100, "1.50 GPU borrowed")]
)
def test_page_says_which_units_of_a_whole_gpu_and_half_of_another_are_borrowed(borrowed: int, said: str) -> None:
    units: dict[str, Any] = {"share_units": 100, "effective_units": 100, "guaranteed_units": 100, "last_units": 50}
    fay = session("fay", gpus=("GPU-1", "GPU-0"), borrowed_units=borrowed, **units)
    assert f"active {said} " in plain(page(afternoon(fay)))


def test_users_see_themselves_and_anonymous_totals() -> None:
    dashboard = shown(viewer=Caller("bob"), notes=("The service lacks the scope x: y.",))
    assert [one["user"] for one in dashboard["sessions"]] == ["bob"]
    assert dashboard["others"] == 4
    html = page(viewer=Caller("bob"), notes=("The service lacks the scope x: y.",))
    for name in ("ann", "carol", "dave", "erin", "lacks"):
        assert not re.search(rf"\b{name}\b", html)
    assert "4 sessions of other users." in plain(html)
    # the bar is whole all the same, in the same order
    assert [part["units"] for part in dashboard["nodes"][0]["gpus"][0]["bar"]] == [25, 10, 25, 40]
    assert [part["user"] for part in dashboard["nodes"][0]["gpus"][0]["bar"]] == [None, "bob", None, None]


def test_everything_that_users_can_choose_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    quoted = "'\"><img src=x onerror=alert(1)>"
    nasty = session("mallory", id="mallory", server=evil, template=quoted)
    nasty = nasty.model_copy(update={"user": evil})
    html = page(afternoon(nasty), viewer=Caller(evil, is_admin=True), notes=(evil,))
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert html.count("&lt;script&gt;alert") >= 4
    assert len(re.findall("<script[^>]* src=", html)) == html.count("<script") == 3, "our own"


def test_admins_are_told_what_is_wrong_with_an_agent_and_users_only_that_it_is() -> None:
    silent = [NodeSnapshot(NO_AGENT, None, "no agent listens on /run/secret/control.sock")]
    admin = problems(silent, Caller("boss", is_admin=True), ["Template x.yaml:3: gpu: no"])
    assert admin == ("no agent listens on /run/secret/control.sock", "Template x.yaml:3: gpu: no")
    user = problems(silent, Caller("ann"), ["Template x.yaml:3: gpu: no"])
    assert user == ("An agent is unavailable, so sessions can be missing here.",)
    html = page(viewer=Caller("ann"), snapshots=silent)
    assert "An agent is unavailable" in html
    assert "Sessions are unknown while an agent is unavailable." in html


def test_a_limit_of_gpu_time_is_shown_with_the_share() -> None:
    report = afternoon(session("zoe", time_limit_units=40, gpus=("GPU-1",)))
    limits = {one["user"]: one["time_limit_units"] for one in shown(report)["sessions"]}
    assert (limits["zoe"], limits["ann"]) == (40, 100)
    assert page(report).count("at most 40 %") == 1
    assert "at most 100 %" not in page(report)


def test_processes_that_exceed_the_limit_without_the_library_are_named_and_so_is_an_agent_that_stops_none() -> None:
    hog = BypassingProcess(pid=4711, started=5)
    report = afternoon(session("zoe", bypassing_pids=(4711, 42), exceeding=(hog,), gpus=("GPU-1",)))
    assert "With 4711 the session holds more GPU memory than it may." in page(report)
    assert "more GPU memory than it may" not in page(afternoon())
    exam = Template.model_validate(
        {"name": "exam", "display_name": "Exam", "gpu": {"fraction": 0.5, "bypass": {"action": "stop"}}}
    )
    able, unable = report, report.model_copy(update={"stop_trouble": "it lacks the capability KILL"})
    assert list(_cannot_stop([able, unable], {})) == list(_cannot_stop([able], {"exam": exam})) == []
    assert list(_cannot_stop([able, unable], {"exam": exam})) == [
        "The agent of workstation cannot stop processes that bypass the library: it lacks the capability KILL. "
        "gpu.bypass of exam only notifies there."
    ]


def test_the_quotas_of_every_level_are_shown_with_cpu_and_memory_where_these_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resources = {"cpu": {"guarantee": 1.5}, "memory": {"guarantee": "4Gi"}}
    cores = {"name": "cores", "display_name": "C", "gpu": {"fraction": 0.25}, "resources": resources}
    monkeypatch.setitem(TEMPLATES, "cores", Template.model_validate(cores))
    report = afternoon(session("zoe", template="cores", quota="group:optics", gpus=("GPU-1",)))
    optics = {"optics": {"cpu": {"maximum": 8}}}
    physics = {"guarantee": 2, "teams": {"lasers": {"teams": optics}}}
    html = page(report, quotas=Quotas.model_validate({"groups": {"physics": physics}}))
    text = html.replace("\u00a0", " ")
    assert "physics / lasers" in text
    assert "<td>1.5 of 8</td>" in text
    assert text.count("<td>4 GiB</td>") == 3, "of the department, the team and its team"
    assert "CPU cores used" not in page(report, quotas=Quotas.model_validate({"groups": {"physics": {}}}))


def test_a_session_over_quota_is_marked_and_its_quota_is_named() -> None:
    quotas = Quotas.model_validate({"groups": {"optics": {"guarantee": 0.25}}, "users": {"erin": {"guarantee": 1}}})
    older = session("zoe", quota="group:optics", opened_at=NOW - 9000, gpus=("GPU-1",))
    newer = session("yan", quota="group:optics", opened_at=NOW - 8000, gpus=("GPU-1",))
    data = shown(afternoon(older, newer), quotas=quotas)
    found = {one["user"]: (one["quota"], one["in_quota"]) for one in data["sessions"]}
    assert found["zoe"] == ("the quota of group optics", True)
    assert found["yan"] == ("the quota of group optics", False)
    assert found["ann"] == ("the default quota of user ann", False), "opened before there were quotas"
    html = page(afternoon(older, newer), quotas=quotas)
    assert "More than the quota of group optics guarantees: spawns in quota come first" in html
    assert html.count(">over quota<") == sum(not in_quota for _, in_quota in found.values())
    assert ">over quota<" not in page(afternoon(older, newer))


def test_a_session_of_another_layer_says_what_can_be_done_and_shows_no_figures_that_are_not_known() -> None:
    unknown = {"last_gpu_activity": None, "memory_bytes": 0, "gpu_use_known": False}
    kai = session("kim", layer=LayerName.KAI, gpus=("kai/kim/0",), **unknown)
    report = afternoon().model_copy(update={"gpus": (), "sessions": (kai,)})
    (said,) = shown(report)["sessions"]
    assert (said["layer"], said["gpus"], said["tier"]) == ("kai", [], "active")
    text = plain(page(report))
    sentence = (
        "KAI Scheduler shares its GPU. The share counts when GPUs are assigned. While sessions work, nothing keeps "
        "them within their shares. Nothing measures this server's GPU work. When the server is idle, it can only be "
        "stopped."
    )
    assert sentence in unescape(text)
    assert "no GPU work yet" not in text
    assert "all on the GPU" not in text
    # the template's downgrade and release are beyond the layer, and the hub has not said when the server was used
    assert said["next"] is None
    (own,) = [one for one in shown()["sessions"] if one["user"] == "erin"]
    assert own["next"]["tier"] == "downgraded"
    assert sentence not in unescape(plain(page()))


def test_an_observed_session_of_another_layer_shows_what_the_agent_measures() -> None:
    kim = session("kim", layer=LayerName.KAI, gpus=("kai/kim/0",), gpu_seconds=7200.0)
    text = unescape(plain(page(afternoon().model_copy(update={"sessions": (kim,)}))))
    assert "2 h of GPU work" in text
    assert "not measured" not in text
    assert "Nothing measures" not in text
    assert "KAI Scheduler shares its GPU." in text


@pytest.mark.parametrize("layer", [LayerName.NATIVE, LayerName.MPS])
def test_the_dialog_offers_what_the_layer_can_do(layer: LayerName) -> None:
    html = page(afternoon(session("mia", gpus=("GPU-1",), layer=layer)))
    found = re.search(r'aria-label="Actions for mia"[^>]*data-target="([^"]*)"', html)
    may = set(json.loads(unescape(present(found)[1]))["may"])
    assert {"keep", "stop", "restart", "message", "exempt"} <= may
    beyond = {"release", "share", "tier"}
    assert (may & beyond) == (beyond if layer is LayerName.NATIVE else set())


def test_a_node_whose_gpus_no_agent_reports_names_the_layers_of_its_sessions() -> None:
    there = [
        session(user, layer=layer, gpus=(f"x/{user}/0",))
        for user, layer in (("kim", LayerName.KAI), ("kit", LayerName.KAI), ("tim", LayerName.TIME_SLICING))
    ]
    report = afternoon().model_copy(update={"gpus": (), "sessions": tuple(there)})
    text = plain(page(report))
    assert (
        "Sessions have GPUs of this node by KAI Scheduler and NVIDIA time-slicing. No agent reports these GPUs." in text
    )
    assert "No agent reports a GPU of this node" not in text


def test_trouble_of_a_layer_and_cuda_contexts_stand_at_the_session_and_its_gpu() -> None:
    down = "The MPS daemon of GPU 0 is not running, and GPU work fails: it ended."
    on_gpu = {"gpus": ("GPU-0",), "layer": LayerName.MPS, "layer_trouble": down, "context_bytes": 2**28}
    report = afternoon(session("mia", **on_gpu), session("max", **on_gpu))
    (gpu, *_) = shown(report)["nodes"][0]["gpus"]
    assert (gpu["layers"], gpu["trouble"], gpu["context_bytes"]) == (["NVIDIA MPS"], [down], 2**29)
    html = page(report)
    assert html.count(f'<p class="problem">{down}</p>') == 3, "once at the GPU, and at each session"
    assert html.count(">NVIDIA MPS</span>") == 3
    assert "CUDA contexts 512 MiB" in plain(html)
    (own,) = shown(report, Caller("mia"))["sessions"]
    assert (own["layer_title"], own["layer_trouble"]) == ("NVIDIA MPS", down)


def test_gpu_counts_its_suspended_sessions() -> None:
    report = afternoon(session("sue", gpus=("GPU-1",), engine="suspend", suspended=True))
    assert [gpu["suspended"] for gpu in shown(report)["nodes"][0]["gpus"]] == [0, 1]
    assert "1 suspended" in plain(page(report))


def test_a_dashboard_without_anything() -> None:
    html = page(afternoon().model_copy(update={"gpus": (), "sessions": ()}), Caller("ann"))
    assert "No agent reports a GPU of this node." in html
    assert "You have no session with a GPU share." in html


def test_a_session_that_starts_and_a_template_that_is_gone() -> None:
    text = plain(page(afternoon(session("fred", gpus=("GPU-1",), confirmed=False), session("gina", template="old"))))
    assert "fred 0.25 GPU GPU 1 starting" in text
    assert "gina old" in text
    assert "the template no longer exists" in text


def test_no_line_breaks_between_a_number_and_its_unit_on_the_page() -> None:
    body = page().partition("<main")[2]
    assert "\u00a0GiB" in body
    assert not re.search(r"\d (GiB|MiB|min|h|s|%)\b", re.sub(r'(title|aria-label)="[^"]*"', "", body))


def test_a_server_that_waits_for_what_it_gave_back_is_told_so() -> None:
    said = "They are restored when capacity is free."
    assert said not in plain(page())
    assert plain(page(afternoon(session("jo", gpus=("GPU-1",), lacks_requests=True)))).count(said) == 1


def test_suspended_sessions_reasons_against_it_and_context_memory_are_shown() -> None:
    said = "cannot be suspended and keeps its GPU memory: It is busy."
    text = plain(page(afternoon(session("jo", gpus=("GPU-1",), engine="suspend", not_suspendable="It is busy."))))
    assert said in text
    assert "for CUDA contexts" not in text
    text = plain(page(afternoon(session("jo", gpus=("GPU-1",), suspended=True, context_bytes=300 * 2**20))))
    assert "active suspended" in text
    assert "300 MiB for CUDA contexts" in text


@pytest.mark.parametrize(("needed", "refuses"), [(0, False), (7 * GIB, False), (8 * GIB, True), (9 * GIB, True)])
def test_a_used_up_budget_of_host_memory_is_explained(needed: int, refuses: bool) -> None:
    host = HostMemoryReport(budget_bytes=8 * GIB, needed_bytes=needed, paged_out_bytes=0)
    text = plain(page(afternoon().model_copy(update={"host_memory": host})))
    assert "budget 8 GiB" in text
    assert ("memory allocations beyond a guarantee are refused" in text) is refuses


def test_an_agent_that_cannot_write_its_records_is_a_problem_for_admins_alone() -> None:
    full = afternoon().model_copy(update={"state_trouble": "No space left on device (/var/lib/gpushare/records)"})
    assert problems([NodeSnapshot(NO_AGENT, afternoon())], Caller("root", is_admin=True), ()) == ()
    (said,) = problems([NodeSnapshot(NO_AGENT, full)], Caller("root", is_admin=True), ())
    assert full.node in said
    assert "No space left on device (/var/lib/gpushare/records)" in said
    assert said in plain(page(full))
    assert problems([NodeSnapshot(NO_AGENT, full)], Caller("ann"), ()) == ()


def test_a_released_borrower_does_not_borrow() -> None:
    idle = session("hugo", tier=Tier.RELEASED, borrowed_units=25, effective_units=0)
    reclaimed = session("ida", borrowed_units=25, guaranteed_units=0)
    dashboard = shown(afternoon(idle, reclaimed))
    borrowed = {one["user"]: one["borrowed_units"] for one in dashboard["sessions"]}
    assert (borrowed["hugo"], borrowed["ida"], borrowed["dave"]) == (0, 0, 25)
    assert plain(page(afternoon(idle, reclaimed))).count("0.25 GPU borrowed") == 1


def test_a_session_without_gpu_work_is_idle_since_its_start() -> None:
    new = session("new", gpus=("GPU-1",), opened_at=NOW - 120, tier_since=NOW - 120, last_gpu_activity=None)
    assert "no GPU work yet started 2 min ago" in plain(page(afternoon(new)))


def test_units_of_an_idle_owner_are_not_called_used() -> None:
    html = page()
    assert "guaranteed to its owner</li>" in html
    assert "used by" not in html
    assert 'aria-label="0.35\u00a0GPU guaranteed to owners, 0.25\u00a0GPU borrowed, 0.40\u00a0GPU lent' in html


def starting(user: str, seconds: float, profile: str = "half", name: str = "") -> HubServer:
    return HubServer(user, name, ready=False, pending="spawn", started=NOW - seconds, profile=profile)


QUEUE = (starting("uma", 200), starting("ann", 90, "quarter", "two"), starting("vic", 10))


def test_the_queue_says_who_waits_for_what_how_long_and_the_position() -> None:
    dashboard = shown(pending=QUEUE)
    text = plain(page(pending=QUEUE)).replace(" Actions", "")
    assert "Queue 1 uma waits for 0.50 GPU for 3 min 20 s 2 ann / two waits for 0.25 GPU for 1 min 30 s 3 vic" in text
    assert [one["since"] for one in dashboard["queue"]["spawns"]] == [NOW - 200, NOW - 90, NOW - 10]


def test_users_see_their_own_position_and_how_many_others_wait() -> None:
    dashboard = shown(viewer=Caller("ann"), pending=QUEUE)
    assert [(one["user"], one["position"]) for one in dashboard["queue"]["spawns"]] == [("ann", 2)]
    html = page(viewer=Caller("ann"), pending=QUEUE)
    assert "2 other spawns wait." in plain(html)
    assert "uma " not in plain(html)
    assert "vic " not in plain(html)


def test_the_queue_says_what_the_page_of_the_spawn_says() -> None:
    told = {
        ("uma", ""): QueueProgress(queue_position=2, waits_for="All <GPUs> are full.", cancelled_at=NOW + 300),
        ("ann", "two"): QueueProgress(queue_position=1, estimated_minutes=10),
        ("zoe", ""): QueueProgress(queue_position=1, estimated_minutes=45),
    }
    text = plain(page(pending=QUEUE, told=told)).replace(" Actions", "").replace("\u00a0", " ")
    ends = utc(NOW + 300)
    assert (
        "Queue 1 ann / two waits for 0.25 GPU for 1 min 30 s Estimated wait: about 10 min "
        "2 uma waits for 0.50 GPU for 3 min 20 s "
        f"All &lt;GPUs&gt; are full. If the server cannot start by {ends}, the spawn is cancelled. "
        "3 vic waits for 0.50 GPU for 10 s"
    ) in text
    assert "45 min" not in text.split("vic waits")[1][:40]
    own = plain(page(viewer=Caller("vic"), pending=QUEUE, told=told))
    assert "Estimated wait" not in own
    assert "are full" not in own


def test_spawns_that_hold_a_share_or_need_none_do_not_wait() -> None:
    cpu = Template(name="cpu", display_name="CPU only")
    pending = (starting("ann", 5), starting("zoe", 5, "cpu"), starting("gus", 5, "gone"))
    assert waiting_spawns(pending, [afternoon()], {**TEMPLATES, "cpu": cpu}) == []
    assert "No spawn waits for a GPU." in plain(page(pending=pending))


def test_only_spawns_that_could_use_the_same_gpus_are_ahead() -> None:
    gpus = (
        GpuReport(index=0, uuid="a", model="NVIDIA A100", memory_bytes=GIB),
        GpuReport(index=1, uuid="b", model="NVIDIA L4", memory_bytes=GIB),
    )
    report = afternoon().model_copy(update={"gpus": gpus, "sessions": ()})
    templates = {
        name: Template(name=name, display_name=name, gpu={"fraction": 0.5, "models": models})
        for name, models in (("big", ["*A100*"]), ("small", ["*L4*"]), ("any", []))
    }
    pending = [starting(name, 5, name) for name in ("big", "small", "any")]
    assert [(one.server.user, one.position) for one in waiting_spawns(pending, [report], templates)] == [
        ("big", 1),
        ("small", 1),
        ("any", 3),
    ]


def test_gpus_with_too_little_memory_for_the_guarantee_are_not_the_same_gpus() -> None:
    gpus = (
        GpuReport(index=0, uuid="a", model="NVIDIA A100", memory_bytes=80 * GIB),
        GpuReport(index=1, uuid="b", model="NVIDIA L4", memory_bytes=24 * GIB),
    )
    report = afternoon().model_copy(update={"gpus": gpus, "sessions": ()})
    large = {"fraction": 0.5, "memory": {"guarantee": "40Gi"}}
    templates = {
        "large": Template(name="large", display_name="large", gpu=large),
        "small": Template(name="small", display_name="small", gpu={"fraction": 0.5, "models": ["*L4*"]}),
    }
    pending = [starting(name, 5, name) for name in ("large", "small")]
    assert [one.position for one in waiting_spawns(pending, [report], templates)] == [1, 1]


def test_an_unknown_queue_is_not_an_empty_one() -> None:
    assert "Unknown at the moment" in plain(page(pending=None))


def test_without_any_report_it_is_unknown_who_waits() -> None:
    starting = HubServer(user="ann", name="", ready=False, pending="spawn", started=NOW - 9, profile="quarter-gpu")
    silent = [NodeSnapshot(NO_AGENT, None, "silent")]
    assert "Unknown at the moment" in plain(page(pending=(starting,), snapshots=silent))


def test_refused_allocations_are_counted() -> None:
    assert re.findall(r"(\d+) allocations? refused", page()) == ["3"]


def test_admins_see_whose_share_short_work_would_have_kept() -> None:
    use, rule = RecentUse(), UseRule(min_use=0.2)
    for minutes in range(30, -1, -1):
        at = NOW - minutes * MINUTE
        seen = session("ann", last_gpu_activity=at, gpu_seconds=at / 1e6)
        use.update("ann", Observation.of(seen), at, rule)
    report = afternoon().model_copy(update={"sessions": (seen, session("bob"))})
    sentence = "Short GPU work recurs and would keep the share if it counted as use."
    ann, bob = shown(report, use=use)["sessions"]
    assert ann["short_work"] == f"{sentence} Use is GPU work of at least 0.2 s at a time or within 5 min."
    assert bob["short_work"] == ""
    assert plain(page(report, use=use)).count(sentence) == 1
    assert shown(report, Caller("ann"), use=use)["sessions"][0]["short_work"] == ""


def test_a_session_over_its_memory_limit_is_seen_as_one() -> None:
    over = session("ivy", gpus=("GPU-1",), memory_bytes=17 * GIB, resident_bytes=12 * GIB)
    html = page(afternoon(over))
    assert html.count(">over its limit<") == html.count('class="part owned over"') == 1
    assert "0.25\u00a0GPU guaranteed to its owner: ivy, over its memory limit" in html
    assert "paged out 5 GiB" in plain(html)
    assert "over its memory limit" not in page(afternoon(over), viewer=Caller("ann"))


def test_filters_order_and_pages_are_links_that_keep_each_other() -> None:
    html = page(afternoon(), asks={"tier": "active", "sort": "-memory", "offset": "2", "nodes_from": "x", "q": "a"})
    assert 'aria-sort="descending"' in html
    assert '<option value="active" selected>' in html
    assert "?q=a&amp;tier=active&amp;sort=memory" in html, "the other way round"
    assert "?q=a&amp;tier=active&amp;sort=-memory&amp;user=erin" in html, "and from its first page"
    assert "No session matches the filter." in plain(page(afternoon(), asks={"q": "nobody"}))
    assert page(afternoon(), asks={"tier": "asleep", "sort": "colour", "limit": "1"}).count('class="session ') == 5


def test_users_with_few_sessions_see_them_first_and_no_filters() -> None:
    html = page(viewer=Caller("bob"))
    assert html.index('id="sessions"') < html.index('id="gpus"')
    assert 'id="filters"' not in html
    admins = page()
    assert admins.index('id="gpus"') < admins.index('id="sessions"')
    assert 'id="filters"' in admins


def on_two_nodes() -> list[NodeSnapshot]:
    """Two nodes of two GPUs; one of these is reported by both."""
    gpus = {node: [GpuReport(index=0, uuid="GPU-a", model="A", memory_bytes=GIB)] for node in ("n2", "n1")}
    for node, there in gpus.items():
        there.append(GpuReport(index=1, uuid=f"GPU-{node}", model="A", memory_bytes=GIB))
    reports = [KnownReport(node=node, published_at=NOW, gpus=tuple(there)) for node, there in gpus.items()]
    return [NodeSnapshot(NO_AGENT, report) for report in reports]


def test_admins_are_told_of_a_gpu_that_two_nodes_report() -> None:
    snapshots = on_two_nodes()
    (problem,) = problems(snapshots, Caller("boss", is_admin=True), [])
    assert problem.startswith("GPU GPU-a is reported by the nodes n1 and n2. It counts for n1 alone")
    assert problems(snapshots, Caller("ann"), []) == ()
    html = page(viewer=Caller("boss", is_admin=True), snapshots=snapshots)
    assert "is reported by the nodes n1 and n2" in html


def test_a_gpu_that_two_nodes_report_counts_once() -> None:
    snapshot = ServiceSnapshot(NOW, on_two_nodes(), templates=TEMPLATES)
    assert (snapshot.units["free"], snapshot.available_units) == (300, 300)
    assert [(report.node, gpu.uuid) for report, gpu in snapshot.counted_gpus] == [
        ("n2", "GPU-n2"), ("n1", "GPU-a"), ("n1", "GPU-n1"),
    ]  # fmt: skip


def test_budgets_are_shown_with_what_is_left_and_admins_can_grant_more() -> None:
    quotas = Quotas.model_validate({"groups": {"optics": {"budget": {"hours": 4, "window": "day"}}}})
    states = (
        BudgetState(account="group:optics", hours=4, used=4, window=86400.0, more_at=NOW + 3600),
        BudgetState(account="default:zoe", hours=4, granted=2, used=1, window=86400.0),
    )
    html = page(quotas=quotas, budgets=states)
    assert "used up" in html
    assert "none of 4.00 GPU-hours left in 24 h (group optics)" in html
    assert "user zoe" in html
    assert "budgets/group%3Aoptics" in html
    assert html.count("end-grant") == 2, "the form, and the target with a grant"
