"""What may be asked for, and what a person is told otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.form import as_entry
from gpushare_spawner.spawner.options import Choice, Profile, ProfileError, choose, profiles

PAGES = {
    "page": {
        "display_name": "First page",
        "choices": {
            "lab": {"display_name": "JupyterLab", "kubespawner_override": {"default_url": "/lab"}},
            "tree": {"display_name": "Files", "default": True, "kubespawner_override": {"default_url": "/tree"}},
        },
        "unlisted_choice": {
            "enabled": True,
            "display_name": "A page",
            "validation_regex": "/[a-z]+",
            "validation_message": "it starts with a slash",
            "kubespawner_override": {"default_url": "{value}", "environment": {"PAGE": '{"at": "{value}"}'}},
        },
    }
}
OFFERED = profiles(
    [
        Template(name="cpu", display_name="CPU"),
        Template.model_validate(
            {"name": "quarter", "display_name": "0.25 GPU", "gpu": {"fraction": 0.25}, "default": True}
        ),
        Template.model_validate(
            {"name": "course", "display_name": "Course", "access": {"groups": ["ml"], "users": ["tom"]}}
        ),
        Template.model_validate({"name": "one", "display_name": "One only", "limits": {"per_user": 1}}),
        Template.model_validate({"name": "two", "display_name": "Two only", "limits": {"per_user": 2}}),
        Template.model_validate({"name": "pages", "display_name": "Pages", "profile_options": PAGES}),
    ],
    [{"display_name": "Admin's own", "kubespawner_override": {"default_url": "/own"}}],
)


def chosen(
    options: Any,
    user: str = "ada",
    groups: tuple[str, ...] = (),
    running: Mapping[str, int] | None = None,
    others: frozenset[str] = frozenset(),
) -> Choice:
    return choose(options, OFFERED, user=user, groups=frozenset(groups), running=running or {}, others=others)


@pytest.mark.parametrize(
    ("options", "user", "groups", "running", "status", "says"),
    [
        (["quarter"], "ada", (), {}, 400, "must be an object"),
        ("quarter", "ada", (), {}, 400, "must be an object"),
        ({"profile": 25}, "ada", (), {}, 400, "must be the name of a template, not 25"),
        ({"profile": ["quarter"]}, "ada", (), {}, 400, "must be the name of a template"),
        ({"profile": "no-such"}, "ada", (), {}, 400, "There is no template 'no-such'. You may use: CPU (cpu),"),
        ({"profile": "x" * 500}, "ada", (), {}, 400, "..."),
        ({"profile": "course"}, "ada", (), {}, 403, "You may not use the template Course (course)"),
        ({"profile": "course"}, "ada", ("other",), {}, 403, "You may not use"),
        ({"profile": "one"}, "ada", (), {"one": 1}, 409, "one server with One only at a time"),
        ({"profile": "two"}, "ada", (), {"two": 2}, 409, "2 servers with Two only at a time"),
        ({"profil": "quarter"}, "ada", (), {}, 400, "Unknown option 'profil'"),
        ({"profile": "cpu", "page": "lab"}, "ada", (), {}, 400, "Unknown option 'page'; CPU has: profile"),
        (
            {"profile": "pages", "page": "nowhere"},
            "ada",
            (),
            {},
            400,
            "no choice 'nowhere'; choose one of JupyterLab (lab),",
        ),
        ({"profile": "pages", "page": 3}, "ada", (), {}, 400, "no choice 3"),
        ({"profile": "pages", "page": {}}, "ada", (), {}, 400, "no choice {}"),
        ({"profile": "pages", "page--unlisted-choice": "lab"}, "ada", (), {}, 400, "it starts with a slash"),
        ({"profile": "pages", "page--unlisted-choice": "/a\n"}, "ada", (), {}, 400, "it starts with a slash"),
        ({"profile": "pages", "page--unlisted-choice": ["/a"]}, "ada", (), {}, 400, "characters of text"),
        ({"profile": "pages", "page--unlisted-choice": "/" + "a" * 2000}, "ada", (), {}, 400, "at most 1000"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(
    options: Any, user: str, groups: tuple[str, ...], running: dict[str, int], status: int, says: str
) -> None:
    with pytest.raises(SpawnRefused) as refused:
        chosen(options, user, groups, running)
    assert refused.value.status_code == status
    assert says in refused.value.jupyterhub_message
    assert len(refused.value.jupyterhub_message) < 400


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        (None, "quarter"),
        ({}, "quarter"),
        ({"profile": ""}, "quarter"),
        ({"profile": "cpu"}, "cpu"),
        ({"profile": "admin-s-own"}, "admin-s-own"),
    ],
)
def test_right_options_choose_their_template(options: Any, slug: str) -> None:
    assert chosen(options).profile.slug == slug


def test_a_group_or_user_may_have_what_is_for_them() -> None:
    assert chosen({"profile": "course"}, groups=("ml",)).profile.slug == "course"
    assert chosen({"profile": "course"}, user="tom").profile.slug == "course"


def test_a_user_below_the_limit_may_start() -> None:
    assert chosen({"profile": "two"}, running={"two": 1, "one": 5}).profile.slug == "two"


def test_the_default_is_one_that_the_user_may_have() -> None:
    only = [Profile.of_template(template) for template in (
        Template.model_validate({"name": "vip", "display_name": "VIP", "default": True, "access": {"users": ["eve"]}}),
        Template(name="cpu", display_name="CPU"),
    )]  # fmt: skip
    assert choose({}, only, user="ada", groups=frozenset(), running={}).profile.slug == "cpu"
    with pytest.raises(SpawnRefused, match="no compute template that you may use"):
        choose({}, only[:1], user="ada", groups=frozenset(), running={})


def test_choices_become_overrides() -> None:
    assert chosen({"profile": "pages", "page": "lab"}).overrides == ({"default_url": "/lab"},)
    assert chosen({"profile": "pages"}).overrides == ({"default_url": "/tree"},)
    unlisted = chosen({"profile": "pages", "page--unlisted-choice": "/mine"}).overrides[0]
    assert unlisted == {"default_url": "/mine", "environment": {"PAGE": '{"at": "/mine"}'}}


def test_an_unlisted_choice_is_accepted_only_where_it_is_enabled() -> None:
    closed = profiles([], [{"display_name": "P", "profile_options": {"page": {"choices": {"lab": {}}}}}])
    with pytest.raises(SpawnRefused, match="choose one of lab"):
        choose({"profile": "p", "page--unlisted-choice": "/x"}, closed, user="a", groups=frozenset(), running={})


def test_options_of_the_admins_hooks_are_left_to_them() -> None:
    assert chosen({"profile": "cpu", "energy": 3}, others=frozenset({"energy"})).profile.slug == "cpu"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("x", "a profile is a dict"),
        ({"slug": "x"}, "display_name"),
        ({"display_name": "X", "kubespawner_override": []}, ""),
        ({"display_name": "X", "kubespawner_override": ["y"]}, "kubespawner_override must be a dict"),
        ({"display_name": "X", "slug": 3}, "slug must be a string"),
        ({"display_name": "X", "slug": "cpu"}, "'cpu' is taken"),
    ],
)
def test_profiles_that_make_no_sense_are_refused(entry: Any, says: str) -> None:
    templates = [Template(name="cpu", display_name="CPU")]
    if not says:
        assert len(profiles(templates, [entry])) == 2
        return
    with pytest.raises(ProfileError, match="entry 1.*" + says):
        profiles(templates, [entry])


def test_profiles_may_be_a_dict_by_slug() -> None:
    found = profiles([], {"b": {"display_name": "Second"}, "a": {"display_name": "First", "slug": "one"}})
    assert [(profile.slug, profile.display_name) for profile in found] == [("one", "First"), ("b", "Second")]
    with pytest.raises(ProfileError):
        profiles([], {"b": 3})


def test_a_template_becomes_a_profile_in_kubespawners_conventions() -> None:
    template = Template.model_validate(
        {
            "name": "big",
            "display_name": "Big",
            "description": "d",
            "gpu": {"fraction": 0.5},
            "resources": {"cpu": {"guarantee": 1, "limit": "4"}, "memory": {"guarantee": "4Gi"}},
            "image": "an/image:1",
            "kubespawner_override": {"default_url": "/x", "cpu_limit": 8},
        }
    )
    assert as_entry(Profile.of_template(template), None) == {
        "slug": "big",
        "display_name": "Big",
        "description": "d",
        "default": False,
        "kubespawner_override": {
            "cpu_guarantee": 1.0,
            "cpu_limit": 8,
            "mem_guarantee": 4 * 2**30,
            "image": "an/image:1",
            "default_url": "/x",
        },
        "profile_options": {},
    }


ACCOUNTS = QuotaAccounts(Quotas.model_validate({"users": {"ada": {}}, "groups": {"optics": {}, "ml": {}}})).of_user(
    "ada", {"ml", "optics"}
)


def charged(options: dict[str, Any]) -> str:
    return choose(options, OFFERED, user="ada", groups=frozenset(), running={}, accounts=ACCOUNTS).quota


@pytest.mark.parametrize(
    ("options", "quota"),
    [
        ({}, "user:ada"),
        ({"quota": ""}, "user:ada"),
        ({"quota": "ml"}, "group:ml"),
        ({"profile": "quarter", "quota": "optics"}, "group:optics"),
        ({"profile": "cpu", "quota": "optics"}, ""),
    ],
)
def test_a_server_with_a_gpu_is_charged_to_the_quota_that_was_chosen(options: dict[str, Any], quota: str) -> None:
    assert charged(options) == quota


@pytest.mark.parametrize("quota", ["physics", 3, ["ml"]])
def test_a_quota_that_the_user_does_not_have_is_refused(quota: Any) -> None:
    with pytest.raises(SpawnRefused, match="You may use: ada, optics, ml") as refused:
        charged({"quota": quota})
    assert refused.value.status_code == 400


def test_there_is_no_option_quota_where_there_are_no_quotas() -> None:
    with pytest.raises(SpawnRefused, match="Unknown option 'quota'"):
        chosen({"quota": "ml"})
    assert chosen({}).quota == ""


ADA: dict[str, Any] = {"user": "ada", "groups": frozenset(), "running": {}, "others": frozenset()}


def test_a_pattern_that_would_explode_is_answered_at_once() -> None:
    evil = {"page": {"choices": {"lab": {}}, "unlisted_choice": {"enabled": True, "validation_regex": "/(a+)+"}}}
    offered = profiles([], [{"display_name": "P", "profile_options": evil}])
    began = time.process_time()
    with pytest.raises(SpawnRefused, match="it must match"):
        choose({"profile": "p", "page--unlisted-choice": "/" + "a" * 500 + "!"}, offered, **ADA)
    assert time.process_time() - began < 1


def test_a_pattern_that_cannot_be_used_is_the_admins_error() -> None:
    choice = {"enabled": True, "validation_regex": "(?!x).*"}
    offered = profiles([], [{"display_name": "P", "profile_options": {"page": {"unlisted_choice": choice}}}])
    with pytest.raises(SpawnRefused, match="look-around") as refused:
        choose({"profile": "p", "page--unlisted-choice": "y"}, offered, **ADA)
    assert refused.value.refusal == "bad-template"
