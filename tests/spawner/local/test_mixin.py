"""A start, from the options to the process with its share, and back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.node import Requested
from gpushare_spawner.placement.request import PlacementRequest
from gpushare_spawner.spawner import base
from gpushare_spawner.spawner.queue import snapshot
from gpushare_spawner.spawner.queue.queue import PlacementCheck, Verdict
from tests.placement.instances import instance
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import RunningHub, until


async def environment_of(spawner: object) -> dict[str, str]:
    response = await AsyncHTTPClient().fetch(spawner.server.url)  # type: ignore[attr-defined]
    return dict(line.split("=", 1) for line in response.body.decode().splitlines() if "=" in line)


async def test_a_server_holds_its_share_from_start_to_stop(hub: RunningHub, agent: FakeAgent) -> None:
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code in (201, 202), response.body
    spawner = await hub.started("ada")

    session = agent.sessions["ada"]
    assert (session.template, session.share_units, session.gpus) == ("quarter-gpu", 25, ("GPU-0",))
    assert session.confirmed
    assert session.pid == spawner.pid
    environment = await environment_of(spawner)
    assert environment["GPUSHARE_SOCKET"] == "/run/fake/ada/socket"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert environment["LD_PRELOAD"] == "/opt/fake/libgpushare.so"
    assert environment["LD_LIBRARY_PATH"].split(":")[0] == "/opt/fake/simgpu"

    await hub.stop_server("ada")
    await until(lambda: not agent.sessions)
    assert not hub.reservations.in_flight


async def test_a_template_without_a_gpu_asks_the_agent_nothing_and_hides_the_gpus(
    hub: RunningHub, agent: FakeAgent
) -> None:
    await agent.stop()
    response = await hub.start_server("ada", {"profile": "cpu-only"})
    assert response.code == 201, response.body
    environment = await environment_of(await hub.started("ada"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "GPUSHARE_SOCKET" not in environment
    assert not agent.asked("open")


async def test_the_api_says_why_a_spawn_is_refused(hub: RunningHub) -> None:
    response = await hub.start_server("ada", {"profile": "no-such"})
    assert response.code == 400
    assert "There is no template 'no-such'" in json.loads(response.body)["message"]


def at_once(config: Any) -> None:
    """As zero-to-jupyterhub configures the hub: a request does not wait for the server."""
    config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({"profile": "nonsense"}, 400, "There is no template 'nonsense'"),
        ({"profile": 5}, 400, "5"),
        ({"profile": "quarter-gpu", "gpus": 4}, 400, "gpus"),
        ({"profile": "course"}, 403, "course"),
        ({"quota": "theory"}, 400, "quota"),
        ({"profile": "a100"}, 409, "A100 cannot be started"),
        ({"profile": "three-gpus"}, 409, "3 GPUs cannot be started"),
        ({"profile": "half-gpu"}, 409, "0.1"),
    ],
)
async def test_what_is_refused_at_once_is_answered_by_a_hub_that_does_not_wait_for_the_server(
    make_hub: Any, templates: Path, monkeypatch: pytest.MonkeyPatch, options: Any, status: int, said: str
) -> None:
    # a busy machine can take longer than the usual bound
    monkeypatch.setattr(base, "DECIDED_WITHIN", 20.0)
    if options.get("profile") == "half-gpu":
        (templates / "quotas.yaml").write_text("default: {maximum: 0.1}\n")
    hub = await make_hub(at_once)
    for server in (None, "second"):
        for _ in range(2):
            response = await hub.start_server("ada", options, server)
            assert response.code == status, response.body
            assert said in json.loads(response.body)["message"]


@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_full_queue_is_answered_by_a_hub_that_does_not_wait_for_the_server(
    make_hub: Any, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    monkeypatch.setattr(base, "DECIDED_WITHIN", 20.0)

    def configure(config: Any) -> None:
        at_once(config)
        config.GPUShareMixin.queue_length = waiting

    for gpu in (0, 1):
        agent.occupy(f"other-{gpu}", 100, gpu=gpu)
    hub = await make_hub(configure)
    for number in range(waiting):
        assert (await hub.start_server(f"first-{number}", {"profile": "half-gpu"})).code == 202
    refused = await hub.start_server("ada", {"profile": "half-gpu"})
    assert refused.code == 503, refused.body
    assert "queue" in json.loads(refused.body)["message"]
    assert refused.headers["Retry-After"] == "120"


async def test_a_spawn_that_waits_for_capacity_is_answered_after_the_first_pass(
    make_hub: Any, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu in (0, 1):
        agent.occupy(f"other-{gpu}", 100, gpu=gpu)
    hub = await make_hub(at_once)
    await hub.add_user("ada")
    # so that no time-out is what ends the wait of the request
    monkeypatch.setattr(base, "DECIDED_WITHIN", 60.0)
    async with asyncio.timeout(15):
        assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 202
    (ticket,) = hub.reservations.queue
    assert ticket.ahead == 0


async def test_an_agent_that_does_not_answer_does_not_hold_the_request(make_hub: Any, agent: FakeAgent) -> None:
    hub = await make_hub(at_once)
    await agent.stop()
    async with asyncio.timeout(base.DECIDED_WITHIN + 2):
        assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 202


async def test_right_options_are_still_answered_before_the_server_runs(
    make_hub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hub = await make_hub(at_once)
    for _ in range(2):
        response = await hub.start_server("ada", {"profile": "quarter-gpu"})
        assert response.code == 202
        await hub.started("ada")
        await hub.stop_server("ada")
        await until(lambda: not hub.spawner("ada").active)
    assert "slow to become" not in caplog.text


async def test_a_hook_that_takes_long_does_not_hold_the_request(make_hub: Any) -> None:
    going_on = asyncio.Event()

    async def hook(spawner: Any) -> None:
        await going_on.wait()

    def configure(config: Any) -> None:
        at_once(config)
        config.Spawner.pre_spawn_hook = hook

    hub = await make_hub(configure)
    async with asyncio.timeout(base.DECIDED_WITHIN + 2):
        assert (await hub.start_server("ada", {"profile": "nonsense"})).code == 202
    going_on.set()


async def test_the_form_of_many_templates_asks_placement_once_for_each_share(
    hub: RunningHub, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cheap guard of what the form costs: `benchmarks.spawn` measures it."""
    for file in templates.iterdir():
        file.unlink()
    shares = (0.1, 0.2, 0.3, 0.4, 0.5)
    count = 8 * len(shares)
    for number in range(count):
        share = shares[number % len(shares)]
        text = f"{{name: t-{number}, display_name: T {number}, gpu: {{fraction: {share}}}}}"
        (templates / f"t-{number}.yaml").write_text(text)
    await hub.add_user("ada")
    asked: Counter[str] = Counter()
    verdict, guaranteed = PlacementCheck.verdict, snapshot.guaranteed_resources

    def counted_verdict(check: PlacementCheck, request: PlacementRequest) -> Verdict:
        asked["verdict"] += 1
        return verdict(check, request)

    def counted_request(template: Template) -> Requested:
        asked[template.name] += 1
        return guaranteed(template)

    monkeypatch.setattr(PlacementCheck, "verdict", counted_verdict)
    # the request of a template begins with this
    monkeypatch.setattr(snapshot, "guaranteed_resources", counted_request)
    form = await hub.spawner("ada").show_form()
    assert form.count("Starts now") == count
    assert asked.pop("verdict") == len(shares)
    assert asked == {f"t-{number}": 1 for number in range(count)}


async def test_a_start_without_options_does_not_repeat_options_that_were_refused(hub: RunningHub) -> None:
    assert (await hub.start_server("ada", {"profile": 5})).code == 400
    response = await hub.start_server("ada")
    assert response.code == 201, response.body
    assert (await hub.started("ada"))._attempt.template_name == "cpu-only"


async def test_a_start_without_options_takes_those_that_were_accepted_last(hub: RunningHub) -> None:
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    await hub.started("ada")
    await hub.stop_server("ada")
    await until(lambda: not hub.spawner("ada").active)
    assert (await hub.start_server("ada", {"profile": "qarter-gpu"})).code == 400
    await hub.start_server("ada")
    assert (await hub.started("ada"))._attempt.template_name == "quarter-gpu"


async def test_a_template_that_is_gone_is_never_replaced_silently(hub: RunningHub, templates: Path) -> None:
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    await hub.started("ada")
    await hub.stop_server("ada")
    await until(lambda: not hub.spawner("ada").active)
    (templates / "quarter-gpu.yaml").unlink()
    for _ in range(2):
        response = await hub.start_server("ada")
        assert response.code == 400
        assert "There is no template 'quarter-gpu'" in json.loads(response.body)["message"]


async def test_template_with_a_layer_of_clusters_is_refused_on_one_machine(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    (templates / "kai.yaml").write_text("{name: kai, display_name: kai, gpu: {fraction: 0.25, layer: kai}}")
    response = await hub.start_server("ada", {"profile": "kai"})
    assert response.code == 500
    said = json.loads(response.body)["message"]
    assert "The template kai shares GPUs by KAI Scheduler, which works on Kubernetes only." in said
    assert not agent.asked("open")


async def test_template_with_mps_gets_a_gpu_without_native_sessions(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    (templates / "mps.yaml").write_text("{name: mps, display_name: mps, gpu: {fraction: 0.25, layer: mps}}")
    agent.occupy("bob", 25, gpu=0)
    assert (await hub.start_server("ada", {"profile": "mps"})).code == 201
    (asked,) = agent.asked("open")
    assert (asked.gpus, asked.layer, asked.memory_limit) == (("GPU-1",), LayerName.MPS, "25%")
    assert "By NVIDIA MPS. Each session is kept within its part" in await hub.spawner("ada").show_form()


async def test_template_with_several_gpus_by_mps_is_refused(hub: RunningHub, agent: FakeAgent, templates: Path) -> None:
    (templates / "mps.yaml").write_text("{name: mps, display_name: mps, gpu: {count: 2, layer: mps}}")
    response = await hub.start_server("ada", {"profile": "mps"})
    assert response.code == 500
    assert "a server can use one of them" in json.loads(response.body)["message"]
    assert not agent.asked("open")


def with_an_instance(agent: FakeAgent) -> None:
    """The second GPU of the machine is in MIG mode, and has two instances."""
    small, large = instance("MIG-1", "1g.10gb", "GPU-1", 1), instance("MIG-3", "3g.40gb", "GPU-1", 1)
    agent.gpus = (agent.gpus[0], large, small)


async def test_template_with_mig_gets_the_smallest_instance_and_its_card_says_the_size(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    with_an_instance(agent)
    agent.occupy("bob", 40, gpus=("MIG-3",), layer=LayerName.MIG)
    (templates / "mig.yaml").write_text("{name: mig, display_name: mig, gpu: {fraction: 0.1, layer: mig}}")
    assert (await hub.start_server("ada", {"profile": "mig"})).code == 201
    (asked,) = agent.asked("open")
    assert (asked.gpus, asked.layer, asked.memory_limit) == (("MIG-1",), LayerName.MIG, "100%")
    assert (asked.share_units, asked.borrowed_units) == (10, 0)
    # now, while it is free, and later, when the next server waits for it
    card = "Each server has a MIG instance (1g.10gb) to itself: 1/7 of one GPU&#39;s time and 9.5 GiB of memory."
    assert card in (await hub.spawner("ada").show_form()).replace("\N{NO-BREAK SPACE}", " ")


async def test_layers_file_gives_templates_without_a_layer_that_of_the_gpu_model(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    with_an_instance(agent)
    (templates / "small.yaml").write_text("{name: small, display_name: small, gpu: {fraction: 0.1}}")
    (templates / "layers.yaml").write_text(
        "rules: [{models: ['*A100*'], layer: mig}, {models: ['Simulated*'], layer: mps}]"
    )
    for user in ("ada", "bob", "cem"):
        assert (await hub.start_server(user, {"profile": "small"})).code == 201
    asked = [(one.gpus[0], one.layer) for one in agent.asked("open")]
    assert asked == [("MIG-1", LayerName.MIG), ("MIG-3", LayerName.MIG), ("GPU-0", LayerName.MPS)]
