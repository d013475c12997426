"""What options stand for where templates and KubeSpawner's profiles are offered beside each other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.form import Offer, checked_texts, names_template
from gpushare_spawner.spawner.options import Choice, Profile

TEMPLATES = [Template(name=name, display_name=name.upper()) for name in ("half", "whole", "taken")]
OWN: list[dict[str, Any]] = [
    {"slug": "own", "display_name": "Own", "profile_options": {"image": {"choices": {"a": {}, "b": {}}}}},
    {"slug": "taken", "display_name": "Taken"},
]
OFFER = Offer.of(TEMPLATES, OWN, OWN)


def chosen(options: Any, offer: Offer = OFFER, wrong: str = "") -> tuple[str, Any]:
    """The slug of the chosen card, and the options that were checked as those of a template; None where none were."""
    seen: list[Any] = []

    def choose_template(cards: Sequence[Profile], options: Any) -> Choice:
        seen.append(options)
        return Choice(next(card for card in cards if card.slug == options["profile"]))

    def own_profile(slug: str, own: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if wrong:
            raise ValueError(wrong)
        return next(entry for entry in own if entry["slug"] == slug)

    choice = offer.choose(options, lambda cards: cards, choose_template, own_profile)
    return choice.profile.slug, seen[0] if seen else None


def test_a_template_that_has_a_profiles_slug_is_left_out() -> None:
    assert [card.slug for card in OFFER.cards] == ["half", "whole", "own", "taken"]
    assert OFFER.clashes == ("taken",)
    assert chosen({"profile": "taken"}) == ("taken", None)


def test_a_template_is_checked_with_all_its_options() -> None:
    assert chosen({"profile": "half", "more": 1}) == ("half", {"profile": "half", "more": 1})


def test_options_without_a_profile_mean_the_default_card() -> None:
    # KubeSpawner's rule: its first profile
    assert chosen(None) == ("own", None)
    assert chosen({}, Offer.of(TEMPLATES, [], [])) == ("half", {"profile": "half"})
    marked = [{**OWN[0]}, {**OWN[1], "default": True}]
    assert chosen({}, Offer.of(TEMPLATES, marked, marked)) == ("taken", None)


def test_choices_of_a_profile_are_checked_with_clear_words() -> None:
    assert chosen({"profile": "own", "image": "a"}) == ("own", None)
    with pytest.raises(SpawnRefused, match="Own, image: there is no choice 'c'; choose one of a, b"):
        chosen({"profile": "own", "image": "c"})
    with pytest.raises(SpawnRefused, match="KubeSpawner says no"):
        chosen({"profile": "own"}, wrong="KubeSpawner says no")


@pytest.mark.parametrize(
    ("options", "named"), [(None, False), ({}, False), ({"profile": "half"}, True), ({"profile": "own"}, False), (5, 0)]
)
def test_options_that_name_a_template(options: Any, named: bool) -> None:
    assert names_template(options, TEMPLATES) is bool(named)


def profile_with(pattern: str) -> list[dict[str, Any]]:
    choice = {"enabled": True, "validation_regex": pattern, "kubespawner_override": {"image": "{value}"}}
    return [{"slug": "own", "display_name": "Own", "profile_options": {"image": {"unlisted_choice": choice}}}]


def test_texts_for_kubespawners_profiles_are_checked_in_linear_time() -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="unlisted_choice for image that failed validation regex"):
        checked_texts(profile_with("^(a+)+$"), {"profile": "own", "image--unlisted-choice": "a" * 900 + "!"})
    assert time.process_time() - began < 1
    with pytest.raises(ValueError, match="look-around"):
        checked_texts(profile_with("(?=a)"), {"profile": "own", "image--unlisted-choice": "a"})
    with pytest.raises(ValueError, match="at most 1000 characters"):
        checked_texts(profile_with("a"), {"profile": "own", "image--unlisted-choice": "a" * 1001})


def test_kubespawner_gets_the_profiles_without_patterns() -> None:
    entries = profile_with("^mine/")
    options = {"profile": "own", "image--unlisted-choice": "mine/x"}
    (checked,) = checked_texts(entries, options)
    assert "validation_regex" not in checked["profile_options"]["image"]["unlisted_choice"]
    assert checked["profile_options"]["image"]["unlisted_choice"]["kubespawner_override"] == {"image": "{value}"}
    assert entries == profile_with("^mine/")
    # the patterns of other profiles say nothing
    assert checked_texts(entries, {"profile": "other", "image--unlisted-choice": "x"})
