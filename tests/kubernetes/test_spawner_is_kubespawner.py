"""GPUShareSpawner is a KubeSpawner: every test runs on KubeSpawner itself, and on ours without and with templates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import kubespawner
import pytest
from jupyterhub.objects import Hub, Server
from kubernetes_asyncio.client.models import V1Pod
from kubespawner import KubeSpawner
from traitlets.config import Config

from gpushare_spawner.model.kubernetes.annotations import SESSION_LABEL
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner
from tests.ports import free_port

from .sharing_hub import everywhere, kube_access
from .standin.client import path
from .standin.cluster import HUB_RULES, Cluster
from .standin.programs import Listeners

SHIPPED = Path(__file__).parents[2] / "templates"
DICT_PROFILES = kubespawner.version_info[:2] >= (7, 1)

PROFILES = [
    {
        "display_name": "Small <b>one</b>",
        "description": "With <a href='https://example.org'>a link</a>",
        "kubespawner_override": {"cpu_limit": 1, "environment": {"ADDED": "yes", "GONE": None}},
    },
    {
        "display_name": "Choices",
        "slug": "choices",
        "default": True,
        "profile_options": {
            "image": {
                "display_name": "Image",
                "unlisted_choice": {
                    "enabled": True,
                    "display_name": "Another",
                    "validation_regex": "^mine/",
                    "kubespawner_override": {"image": "{value}"},
                },
                "choices": {
                    "one": {"display_name": "One", "kubespawner_override": {"image": "there/one:1"}},
                    "two": {"display_name": "Two", "default": True, "kubespawner_override": {"image": "there/two:2"}},
                },
            }
        },
    },
]


class OutsideUser(Mock):
    """A user as KubeSpawner's own tests have them: nothing but a name."""

    server = Server()

    def __init__(self, name: str = "ada@example.org", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.url = self.server.url
        self.escaped_name = name

    def _get_child_mock(self, **kwargs: Any) -> Mock:
        return Mock(**kwargs)


@pytest.fixture(params=[pytest.param("KubeSpawner", id="theirs"), "no templates", "templates"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(cluster: Cluster, kind: str) -> Config:
    config = Config()
    config.KubeSpawner.namespace = cluster.namespace
    config.KubeSpawner.port = free_port()
    config.KubeSpawner.cmd = ["jupyterhub-singleuser"]
    config.KubeSpawner.start_timeout = 20
    config.KubeSpawner.delete_grace_period = 0
    if kind == "templates":
        config.GPUShareSpawner.templates_dir = str(SHIPPED)
    return config


Make = Callable[..., Any]


@pytest.fixture
async def make(cluster: Cluster, config: Config, kind: str) -> AsyncIterator[Make]:
    """Makes spawners as a hub would, outside of one."""
    spawner_class = KubeSpawner if kind == "KubeSpawner" else GPUShareSpawner
    rules = [*HUB_RULES, {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["delete"]}]
    async with kube_access(cluster, rules):

        def made(name: str = "start", **kwargs: Any) -> Any:
            given = {"hub": Hub(), "user": OutsideUser(name), "config": config, "api_token": "abc", **kwargs}
            return spawner_class(oauth_client_id="unused", **given)

        yield made


@pytest.fixture
async def node(cluster: Cluster) -> Any:
    return await cluster.make_node(programs=Listeners(start_seconds=0.1))


async def _callable(spawner: Any) -> Any:
    await asyncio.sleep(0)
    return PROFILES


@pytest.fixture(params=["list", "dict", "callable", "async"])
def profile_list(request: pytest.FixtureRequest) -> Any:
    if request.param == "dict":
        if not DICT_PROFILES:
            pytest.skip("KubeSpawner 7.0 has no dict")
        return {f"{number}-x": profile for number, profile in enumerate(PROFILES)}
    return {"list": PROFILES, "callable": lambda spawner: PROFILES, "async": _callable}[request.param]


async def test_profiles(make: Make, profile_list: Any) -> None:
    spawner = make(profile_list=profile_list, environment={"THERE": "x", "GONE": "y"})
    assert "choices" in await spawner.get_options_form()
    spawner.user_options = spawner.options_from_form({"profile": ["small-b-one-b"]})
    assert spawner.user_options == {"profile": "small-b-one-b"}
    assert spawner.cpu_limit is None
    await spawner.load_user_options()
    assert spawner.cpu_limit == 1
    assert spawner.environment == {"THERE": "x", "ADDED": "yes"}


@pytest.mark.parametrize(
    ("form", "options", "image"),
    [
        ({"profile-option-choices--image": ["one"]}, {"image": "one"}, "there/one:1"),
        (
            {"profile-option-choices--image--unlisted-choice": ["mine/x"]},
            {"image--unlisted-choice": "mine/x"},
            "mine/x",
        ),
        ({}, {}, "there/two:2"),
    ],
)
async def test_choices(make: Make, form: dict[str, Any], options: dict[str, str], image: str) -> None:
    spawner = make(profile_list=PROFILES)
    await spawner.get_options_form()
    spawner.user_options = spawner.options_from_form({"profile": ["choices"], **form})
    assert spawner.user_options == {"profile": "choices", **options}
    await spawner.load_user_options()
    assert spawner.image == image


async def test_the_default_profile_and_unknown_options(make: Make) -> None:
    spawner = make(profile_list=PROFILES)
    spawner.user_options = {"something": "of a hook"}
    await spawner.load_user_options()
    assert spawner.image == "there/two:2"


@pytest.mark.parametrize("options", [{"profile": "nothing"}, {"profile": "choices", "image--unlisted-choice": "x"}])
async def test_wrong_options(make: Make, options: dict[str, str]) -> None:
    spawner = make(profile_list=PROFILES)
    spawner.user_options = options
    with pytest.raises(ValueError, match=r"No such profile|regex"):
        await spawner.load_user_options()


async def test_html_of_profiles_is_html(make: Make) -> None:
    form = await make(profile_list=PROFILES).get_options_form()
    assert "Small <b>one</b>" in form
    assert "With <a href='https://example.org'>a link</a>" in form


async def test_no_form_without_profiles(make: Make, kind: str) -> None:
    form = await make().get_options_form()
    assert ("0.25 GPU" in form) if kind == "templates" else form == ""


async def test_own_options_form(make: Make) -> None:
    assert await make(options_form="<p>mine</p>", profile_list=PROFILES).get_options_form() == "<p>mine</p>"
    assert await make(options_form=lambda spawner: f"<p>{spawner.user.name}</p>").get_options_form() == "<p>start</p>"


@pytest.mark.parametrize("by", ["profile_form_template", "additional_profile_form_template_paths"])
async def test_own_form_template(make: Make, kind: str, by: str, tmp_path: Path) -> None:
    text = "{% for p in profile_list %}[{{ p.slug }}{{ '*' if p.default }} {{ p.display_name }}]{% endfor %}"
    (tmp_path / "form.html").write_text(text)
    given = {"profile_form_template": text, "additional_profile_form_template_paths": [str(tmp_path)]}[by]
    spawner = make(profile_list=PROFILES, **{by: given})
    form = await spawner.get_options_form()
    assert form.endswith("[small-b-one-b Small <b>one</b>][choices* Choices]")
    assert ("[quarter-gpu 0.25 GPU]" in form) == (kind == "templates")


async def test_start_poll_stop(make: Make, node: Any, cluster: Cluster) -> None:
    spawner = make()
    assert isinstance(await spawner.poll(), int)
    url = await spawner.start()
    pod = await cluster.pod(spawner.pod_name)
    assert pod is not None
    assert pod["status"]["phase"] == "Running"
    assert SESSION_LABEL not in pod["metadata"]["labels"]
    assert not any(name.startswith("gpushare") for name in pod["metadata"].get("annotations") or {})
    assert url == f"http://{pod['status']['podIP']}:{spawner.port}"
    assert await spawner.poll() is None
    await spawner.stop()
    assert await cluster.pod(spawner.pod_name) is None
    assert isinstance(await spawner.poll(), int)


async def test_progress(make: Make, node: Any) -> None:
    spawner = make("progress")
    started = spawner.start()
    events = [event async for event in spawner.progress()]
    assert all(isinstance(event["progress"], int) and isinstance(event["message"], str) for event in events)
    assert any("Started" in event["message"] for event in events)
    await started
    # asked again when it runs: the same, and an end
    assert [event["message"] async for event in spawner.progress()] == [event["message"] for event in events]


async def test_no_events_no_progress(make: Make) -> None:
    assert [event async for event in make(events_enabled=False).progress()] == []


async def test_hooks(make: Make, node: Any, cluster: Cluster) -> None:
    seen = []

    async def modify(spawner: Any, pod: V1Pod) -> V1Pod:
        pod.metadata.labels["from-hook"] = "yes"
        pod.spec.containers[0].env.append({"name": "HOOKED", "value": "1"})  # type: ignore[arg-type]
        return pod

    async def after(spawner: Any, pod: dict[str, Any]) -> None:
        seen.append(pod["metadata"]["uid"])

    spawner = make(modify_pod_hook=modify, after_pod_created_hook=after)
    await spawner.start()
    pod = await cluster.pod(spawner.pod_name)
    assert pod is not None
    assert pod["metadata"]["labels"]["from-hook"] == "yes"
    assert {"name": "HOOKED", "value": "1"} in pod["spec"]["containers"][0]["env"]
    assert seen == [pod["metadata"]["uid"]]


async def test_a_failing_hook_removes_the_pod(make: Make, node: Any, cluster: Cluster) -> None:
    async def fail(spawner: Any, pod: dict[str, Any]) -> None:
        raise RuntimeError("no")

    spawner = make(after_pod_created_hook=fail)
    with pytest.raises(RuntimeError, match="no"):
        await spawner.start()
    assert await cluster.pod(spawner.pod_name) is None


async def test_pre_spawn_hook(make: Make) -> None:
    seen = []
    spawner = make(pre_spawn_hook=lambda spawner: seen.append(spawner.user.name), profile_list=PROFILES)
    result = spawner.run_pre_spawn_hook()
    if asyncio.iscoroutine(result):
        await result
    assert seen == ["start"]


async def test_state_survives_a_change_of_templates(make: Make, node: Any, config: Config) -> None:
    old = make()
    await old.start()
    state = old.get_state()
    assert set(state) == {"kubespawner_version", "pod_name", "namespace", "dns_name"}
    config.KubeSpawner.pod_name_template = "new-{username}"
    new = make()
    assert new.pod_name != old.pod_name
    new.load_state(state)
    assert (new.pod_name, new.namespace, new.dns_name) == (old.pod_name, old.namespace, old.dns_name)
    assert await new.poll() is None
    await new.stop()
    new.clear_state()
    assert new.pod_name == "new-start"


async def test_a_pod_in_the_way_is_replaced(make: Make, node: Any, cluster: Cluster) -> None:
    await make().start()
    first = await cluster.pod("jupyter-start")
    await make().start()
    second = await cluster.pod("jupyter-start")
    assert first is not None
    assert second is not None
    assert first["metadata"]["uid"] != second["metadata"]["uid"]


async def test_reflectors_are_shared(make: Make, node: Any) -> None:
    first, second = make("one"), make("two")
    await asyncio.gather(first.start(), second.start())
    assert first.pod_reflector is second.pod_reflector
    assert first.event_reflector is second.event_reflector
    assert first.reflectors is KubeSpawner.reflectors
    assert set(KubeSpawner.reflectors) == {("pods", first.namespace), ("events", first.namespace)}


async def test_another_namespace_by_profile(make: Make, node: Any, cluster: Cluster) -> None:
    other = await cluster.make_namespace("-other")
    profile = {"display_name": "There", "slug": "there", "kubespawner_override": {"namespace": other}}
    async with everywhere(cluster, other):
        spawner = make(profile_list=[*PROFILES, profile])
        spawner.user_options = {"profile": "there"}
        await spawner.start()
        assert [pod["metadata"]["name"] for pod in await cluster.admin.list(path("pods", other))] == ["jupyter-start"]
        assert await spawner.poll() is None
        await spawner.stop()


async def test_user_namespaces(make: Make, node: Any, cluster: Cluster) -> None:
    own = f"{cluster.namespace}-ada"
    async with everywhere(cluster, own):
        spawner = make("ada", enable_user_namespaces=True, user_namespace_template=f"{cluster.namespace}-{{username}}")
        await spawner.start()
        assert spawner.namespace == own
        assert len(await cluster.admin.list(path("pods", own))) == 1
        assert await spawner.poll() is None
        await spawner.stop()


async def test_named_servers(make: Make, node: Any, cluster: Cluster) -> None:
    first, second = make("ada"), make("ada", orm_spawner=SimpleNamespace(name="gpu", server=None, user_options={}))
    await asyncio.gather(first.start(), second.start())
    assert len({pod["metadata"]["name"] for pod in await cluster.pods()}) == 2
    await second.stop()
    assert await first.poll() is None


async def test_volumes_and_their_end(make: Make, node: Any, cluster: Cluster) -> None:
    spawner = make("ada", storage_pvc_ensure=True, storage_capacity="1M")
    await spawner.start()
    claims = path("persistentvolumeclaims", cluster.namespace)
    assert [claim["metadata"]["name"] for claim in await cluster.admin.list(claims)] == [spawner.pvc_name]
    assert spawner.get_state()["pvc_name"] == spawner.pvc_name
    await spawner.stop()
    await spawner.delete_forever()
    assert not [c for c in await cluster.admin.list(claims) if not c["metadata"].get("deletionTimestamp")]


async def test_braces_in_annotations_and_environment(make: Make) -> None:
    spawner = make("ada", extra_annotations={"of": "{username}"}, environment={"JSON": '{{"a": 1}}'})
    pod = await spawner.get_pod_manifest()
    assert pod.metadata.annotations["of"] == "ada"
    environment = {variable.name: variable.value for variable in pod.spec.containers[0].env}
    assert environment["JSON"] == '{"a": 1}'
