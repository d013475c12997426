"""Traits that a choice sets, that are put back, and that another choice would set."""

from __future__ import annotations

from typing import Any

import pytest
from traitlets import Any as AnyValue
from traitlets import Dict, Integer, List
from traitlets.config import LoggingConfigurable

from gpushare_spawner.spawner.options import Choice, Overrides, Profile

NAMES = ("labels", "nodes", "hook")


class Traits(LoggingConfigurable):
    labels = Dict({"of": "the admin"})
    nodes: Any = List()
    hook = AnyValue(None, allow_none=True)
    size = Integer(1)


@pytest.fixture
def traits() -> Traits:
    return Traits()


@pytest.fixture
def overrides(traits: Traits) -> Overrides:
    return Overrides(traits)


def profile(override: dict[str, Any], **options: Any) -> Profile:
    return Profile("p", "P", override=override, options=options)


def test_what_another_profile_would_set_is_told_without_setting_it(overrides: Overrides, traits: Traits) -> None:
    overrides.apply_choice(Choice(profile({"labels": {"chosen": "yes"}, "nodes": ["chosen"]})))
    found = overrides.instead(profile({"labels": {"zone": "x"}, "size": 7}), NAMES)
    assert found == {"labels": {"of": "the admin", "zone": "x"}, "nodes": [], "hook": None}
    assert (traits.labels, traits.nodes) == ({"of": "the admin", "chosen": "yes"}, ["chosen"])
    overrides.undo()
    assert (traits.labels, traits.nodes) == ({"of": "the admin"}, [])


@pytest.mark.parametrize(
    "unknown",
    [
        profile({"labels": lambda spawner: {}}),
        profile({}, zone={"choices": {"a": {"kubespawner_override": {"labels": {"zone": "a"}}}}}),
        profile({}, zone={"unlisted_choice": {"enabled": True, "kubespawner_override": {"nodes": ["{value}"]}}}),
    ],
)
def test_only_a_spawn_can_tell_what_functions_and_choices_set(overrides: Overrides, unknown: Profile) -> None:
    assert overrides.instead(unknown, NAMES) is None


def test_choices_that_set_something_else_do_not_matter(overrides: Overrides) -> None:
    image = {"choices": {"a": {"kubespawner_override": {"size": 2}}, "b": {"display_name": "B"}}}
    assert overrides.instead(profile({}, image=image), NAMES) is not None
