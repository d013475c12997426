"""Templates beside KubeSpawner's profiles, in a hub: cards, defaults, answers, limits, named servers, settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubespawner import KubeSpawner

from gpushare_spawner.model.kubernetes.annotations import SESSION_LABEL, pod_session
from gpushare_spawner.spawner import base
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner
from tests.spawner.form.test_form import EVIL, Page
from tests.spawner.running_hub import Browser, until
from tests.spawner.test_stopped_servers import STOPPED, pages, stop_as_root, with_our_pages

from .sharing_hub import GpuNodes, everywhere
from .standin.client import path
from .standin.cluster import Cluster

MakeHub = Callable[..., Any]

OWN: list[dict[str, Any]] = [
    {"display_name": "Bare <i>pod</i>", "description": "<b>HTML</b> here", "slug": "bare"},
    {
        "display_name": "Choices",
        "slug": "choices",
        "profile_options": {
            "image": {
                "display_name": "<u>Image</u>",
                "unlisted_choice": {
                    "enabled": True,
                    "validation_regex": "^mine/",
                    "kubespawner_override": {"image": "{value}"},
                },
                "choices": {"one": {"display_name": "<s>One</s>", "kubespawner_override": {"image": "there/one:1"}}},
            }
        },
    },
]


def with_own(config: Any, **marks: Any) -> None:
    profiles = [dict(profile) for profile in OWN]
    for slug, mark in marks.items():
        next(profile for profile in profiles if profile["slug"] == slug)["default"] = mark
    config.KubeSpawner.profile_list = profiles


async def test_templates_and_profiles_are_on_one_form(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    (templates / "evil.yaml").write_text(f"name: evil\ndisplay_name: {json.dumps(EVIL[:70])}\ngpu: {{fraction: 0.1}}\n")
    await nodes.add(gpus=2)
    hub = await make_hub(with_own)
    browser = Browser(hub)
    await browser.log_in("ada")
    form = (await browser.open("/hub/spawn")).body.decode()
    assert "Bare <i>pod</i>" in form
    assert "<b>HTML</b> here" in form
    assert "<u>Image</u>" in form
    assert "<s>One</s>" in form
    assert "<script>alert(1)" not in form
    assert "Starts now" in form
    assert "GPU</dt><dd>1 of 2" in form.replace("\n", "")
    start = form.index('<div class="gpushare">')
    page = Page(form[start : form.index("</fieldset>", start)] + "</fieldset></div>")
    assert page.checked == ["cpu-only"]
    assert [field["value"] for field in page.inputs if field["type"] == "radio"][-2:] == ["bare", "choices"]
    fields = [
        ("profile", "choices"),
        ("profile-option-choices--image", "one"),
        ("profile-option-choices--image--unlisted-choice", ""),
    ]
    await browser.open("/hub/spawn/ada", form=fields)
    await hub.started("ada")
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    assert pod["spec"]["containers"][0]["image"] == "there/one:1"
    assert SESSION_LABEL not in pod["metadata"]["labels"]


async def test_a_template_is_started_from_the_form(make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(with_own)
    browser = Browser(hub)
    await browser.log_in("ada")
    await browser.open("/hub/spawn/ada", form=[("profile", "half-gpu")])
    await hub.started("ada")
    assert list((await nodes.held()).values()) == [50]


@pytest.mark.parametrize("own_form", [False, True])
async def test_the_hubs_pages_say_who_stopped_a_server(make_hub: MakeHub, nodes: GpuNodes, own_form: bool) -> None:
    await nodes.add(gpus=1)

    def configure(config: Any) -> None:
        with_our_pages(config)
        if own_form:
            with_own(config)
            config.KubeSpawner.profile_form_template = "{% for p in profile_list %}<p>{{ p.slug }}</p>{% endfor %}"

    hub = await make_hub(configure)
    await hub.start_server("ada", {"profile": "half-gpu"})
    await hub.started("ada")
    await stop_as_root(hub, "ada", "The exam <begins>.")
    assert await nodes.held() == {}
    for restarted in (False, True):
        if restarted:
            await hub.end(cleanup_servers=False)
            hub = await make_hub(configure)
        browser = Browser(hub)
        await browser.log_in("ada")
        found = await pages(browser)
        assert [page for page, said in found.items() if STOPPED not in said] == [], restarted
    await hub.start_server("ada", {"profile": "half-gpu"})
    await hub.started("ada")
    await hub.stop_server("ada")
    assert "root stopped" not in (await browser.open("/hub/spawn/ada")).body.decode()


async def test_a_refusal_shows_the_form_again(make_hub: MakeHub, nodes: GpuNodes) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    browser = Browser(hub)
    await browser.log_in("ada")
    answer = (await browser.open("/hub/spawn/ada", form=[("profile", "a100")])).body.decode()
    assert "A100 cannot be started on this cluster" in answer
    assert 'value="a100" aria-describedby' in answer


async def test_an_admins_own_form_gets_the_templates_escaped(
    make_hub: MakeHub, nodes: GpuNodes, templates: Path
) -> None:
    (templates / "evil.yaml").write_text(f"name: evil\ndisplay_name: {json.dumps(EVIL[:70])}\ngpu: {{fraction: 0.1}}\n")
    (templates / "quotas.yaml").write_text("users: {ada: {guarantee: 0.5}}\n")
    await nodes.add(gpus=1)

    def configure(config: Any) -> None:
        with_own(config, bare=True)
        config.KubeSpawner.profile_form_template = (
            "{% for p in profile_list %}<p>{{ p.slug }}|{{ p.default }}|{{ p.display_name }}"
            "|{{ [p.gpushare.text, p.gpushare.quota] | join(', ') if p.gpushare }}</p>{% endfor %}"
        )

    hub = await make_hub(configure)
    await hub.add_user("ada")
    form = await hub.spawner("ada").get_options_form()
    assert "<script>" not in form
    assert "<p>half-gpu|False|0.50 GPU|Starts now, in quota, 0.50 GPU left</p>" in form
    assert "<p>bare|True|Bare <i>pod</i>|</p>" in form


@pytest.mark.parametrize(
    ("marks", "template_marked", "expected"),
    [
        ({}, True, "cpu-only"),
        ({"choices": True}, True, "choices"),
        ({"choices": True}, False, "choices"),
        ({}, False, "bare"),
    ],
)
async def test_the_default_card_is_chosen_by_mark_and_order(
    make_hub: MakeHub, templates: Path, nodes: GpuNodes, marks: dict[str, bool], template_marked: bool, expected: str
) -> None:
    if not template_marked:
        file = templates / "cpu-only.yaml"
        file.write_text(file.read_text().replace("default: true\n", ""))
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: with_own(config, **marks))
    assert (await hub.start_server("ada")).code == 201
    assert hub.spawner("ada")._attempt.choice.profile.slug == expected
    # a profile is KubeSpawner's affair: nothing of it is kept with the server
    assert ("gpushare" in hub.spawner("ada").get_state()) == (expected == "cpu-only")


@pytest.mark.parametrize("waits", [60, 0])
async def test_wrong_choices_of_own_profiles_are_answered(make_hub: MakeHub, nodes: GpuNodes, waits: float) -> None:
    """``waits``: seconds that a request waits for its server; zero-to-jupyterhub sets 0."""
    await nodes.add(gpus=1)

    def configure(config: Any) -> None:
        with_own(config)
        config.JupyterHub.tornado_settings.update(slow_spawn_timeout=waits)

    hub = await make_hub(configure)
    for options, words in (
        (
            {"profile": "choices", "image": "none"},
            "Choices, Image: there is no choice 'none'; choose one of One (one).",
        ),
        ({"profile": "choices", "image": ["x"]}, "there is no choice ['x']"),
        ({"profile": "choices", "image--unlisted-choice": "theirs/x"}, "failed validation regex"),
    ):
        response = await hub.start_server("ada", options)
        assert response.code == 400, response.body
        assert words in json.loads(response.body)["message"]
    # KubeSpawner does not mind what it does not know
    response = await hub.start_server("bob", {"profile": "bare", "more": "of a hook"})
    assert response.code == (201 if waits else 202)
    await hub.started("bob")


@pytest.mark.parametrize(
    ("profile", "status", "said"),
    [
        ("nonsense", 400, "There is no template 'nonsense'"),
        ("a100", 409, "A100 cannot be started on this cluster"),
        ("three-gpus", 409, "3 GPUs cannot be started on this cluster"),
        ("half-gpu", 409, "0.1"),
        ("whole-gpu", 503, "queue"),
    ],
)
async def test_what_is_refused_at_once_is_answered_by_a_hub_that_does_not_wait_for_the_server(
    make_hub: MakeHub,
    nodes: GpuNodes,
    templates: Path,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    status: int,
    said: str,
) -> None:
    # a busy machine can take longer than the usual bound
    monkeypatch.setattr(base, "DECIDED_WITHIN", 20.0)
    await nodes.add(gpus=2)

    def configure(config: Any) -> None:
        config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0)
        if profile == "whole-gpu":
            config.GPUShareSpawner.queue_length = 1

    hub = await make_hub(configure)
    if profile == "half-gpu":
        (templates / "quotas.yaml").write_text("default: {maximum: 0.1}\n")
    if profile == "whole-gpu":
        for name in ("eve", "mia", "bob"):
            assert (await hub.start_server(name, {"profile": "whole-gpu"})).code == 202
    for server in (None, "second"):
        response = await hub.start_server("ada", {"profile": profile}, server)
        assert response.code == status, response.body
        assert said in json.loads(response.body)["message"]


async def test_a_spawn_that_waits_for_capacity_is_answered_after_the_first_pass(
    make_hub: MakeHub, nodes: GpuNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0))
    # so that no time-out is what ends the wait of the request
    monkeypatch.setattr(base, "DECIDED_WITHIN", 60.0)
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 202
    await hub.started("ada")
    await hub.add_user("bob")
    async with asyncio.timeout(15):
        assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 202
    (ticket,) = hub.reservations.queue
    assert ticket.ahead == 0


async def test_a_clash_of_names_keeps_the_profile(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await nodes.add(gpus=1)
    own = [{"display_name": "Mine", "slug": "half-gpu"}]
    hub = await make_hub(lambda config: config.KubeSpawner.update(profile_list=own))
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
    assert not await nodes.held()
    assert "The template 'half-gpu' is not offered" in caplog.text


async def test_the_limit_for_each_user_counts_named_servers(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=4)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201
    assert (await hub.start_server("ada", {"profile": "whole-gpu"}, "big")).code == 201
    response = await hub.start_server("ada", {"profile": "whole-gpu"}, "more")
    assert response.code == 409
    assert "You may run one server with" in json.loads(response.body)["message"]
    sessions = {pod_session(pod["metadata"]["annotations"]).session for pod in await cluster.pods()}
    assert sessions == {"ada", "ada+big"}


async def test_a_server_in_a_users_namespace_gets_its_share(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAMESPACE", cluster.namespace)
    node = await nodes.add(gpus=1)

    def configure(config: Any) -> None:
        config.KubeSpawner.enable_user_namespaces = True
        config.KubeSpawner.user_namespace_template = f"{cluster.namespace}-{{username}}"
        config.GPUShareSpawner.queue_length = 0

    async with everywhere(cluster, *(f"{cluster.namespace}-{name}" for name in ("ada", "bob"))):
        hub = await make_hub(configure)
        assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
        (pod,) = await cluster.admin.list(path("pods", f"{cluster.namespace}-ada"))
        assert pod_session(pod["metadata"]["annotations"]).gpus == (f"GPU-{node}-0",)
        # the other one's namespace is another, the GPU is the same
        assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 503
        assert (await hub.stop_server("ada")).code == 204


async def test_a_hub_that_waits_for_its_templates_starts_no_server_without_a_gpu(
    make_hub: MakeHub,
    nodes: GpuNodes,
    templates: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The hub first: the folder is there and empty until the ConfigMap is mounted."""
    await nodes.add(gpus=1)
    texts = {file: file.read_text() for file in templates.iterdir()}
    for file in texts:
        file.unlink()
    monkeypatch.setenv("GPUSHARE_TEMPLATES", str(templates))
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0))
    for _ in range(2):
        refused = await hub.start_server("ada")
        assert refused.code == 503
        assert json.loads(refused.body)["message"].startswith("This hub has no compute templates yet")
        monkeypatch.setattr(hub.spawner("ada").log, "handlers", [caplog.handler])
    assert "waiting for files there, on Kubernetes for the ConfigMap gpushare-templates" in caplog.text
    for file, text in texts.items():
        file.write_text(text)
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.spawner._TEMPLATES_FOR", 0.0)
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code in (201, 202)
    await hub.started("ada")


async def test_templates_that_come_later_need_no_restart(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, tmp_path: Path
) -> None:
    later = tmp_path / "later"
    later.mkdir()
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.GPUShareSpawner.update(templates_dir=str(later)))
    assert (await hub.start_server("ada", {"whatever": "is ignored"})).code == 201
    await hub.add_user("bob")
    assert await hub.spawner("bob").get_options_form() == ""
    assert set(KubeSpawner.reflectors) == {("pods", cluster.namespace), ("events", cluster.namespace)}
    before = hub.spawner("ada").pod_reflector
    (later / "half.yaml").write_text("name: half\ndisplay_name: Half\ngpu: {fraction: 0.5}\n")
    await asyncio.sleep(0.6)
    assert await asyncio.gather(*(hub.spawner("ada").poll() for _ in range(20))) == [None] * 20
    assert hub.spawner("ada").pod_reflector is before
    assert "Half" in await hub.spawner("bob").get_options_form()
    assert (await hub.start_server("bob", {"profile": "half"})).code == 201
    assert (await hub.stop_server("ada")).code == 204
    await until(lambda: not hub.spawner("ada").active)


def test_every_setting_is_documented() -> None:
    ours = [base for base in GPUShareSpawner.__mro__ if base.__module__.startswith("gpushare_spawner.")]
    names = {name for base in ours for name in vars(base)}
    own = {name for name in names if name in GPUShareSpawner.class_traits(config=True)}
    assert own >= {"templates_dir", "share_unit_size", "claims_overcommit", "nodes_are_added"}
    for name in own:
        assert GPUShareSpawner.class_traits()[name].help, name
