"""What applies to a session: template, defaults, groups, limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.idle.keep import KeepRule
from gpushare_spawner.idle.policy import effective_idle
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.template import Idle, Template

HOUR = 3600.0


def template(gpu: dict[str, Any] | None = None, **idle: Any) -> Template:
    return Template.model_validate(
        {"name": "t", "display_name": "T", "gpu": gpu if gpu is not None else {"fraction": 0.25}, "idle": idle}
    )


def policy(**parts: Any) -> IdlePolicy:
    return IdlePolicy.model_validate(parts)


def test_defaults_are_for_what_the_template_does_not_give() -> None:
    found = effective_idle(
        template(release_after="5m"), policy(defaults={"release_after": "1h", "stop_after": "8h", "warn_before": "1m"})
    )
    assert (found.release_after, found.stop_after, found.warn_before) == (300, 8 * HOUR, 60)


def test_null_in_a_template_means_never() -> None:
    assert effective_idle(template(stop_after=None), policy(defaults={"stop_after": "8h"})).stop_after is None
    assert effective_idle(template(), policy(defaults={"stop_after": "8h"})).stop_after == 8 * HOUR


def test_limits_bound_the_built_in_limits_of_keeps_too() -> None:
    bounds = policy(limits={"keep": {"longest": "2h", "per_day": 9}})
    assert KeepRule.of(effective_idle(template(), bounds)) == KeepRule(2 * HOUR, 2, 2)
    assert KeepRule.of(effective_idle(template(keep={"per_day": 12}), bounds)) == KeepRule(2 * HOUR, 9, 2)
    assert effective_idle(template(), policy(limits={"keep": {"longest": "9h"}})).keep is None


def test_the_first_group_of_the_file_overrides_the_template() -> None:
    groups = {"staff": {"release_after": "1h"}, "ml": {"release_after": "2h", "stop_after": "9h"}}
    found = effective_idle(template(release_after="5m"), policy(groups=groups), {"ml", "staff", "other"})
    assert (found.release_after, found.stop_after) == (HOUR, None)
    assert effective_idle(template(release_after="5m"), policy(groups=groups), {"other"}).release_after == 300


def test_a_group_can_say_never() -> None:
    given_up = policy(groups={"staff": {"release_after": None}})
    assert effective_idle(template(release_after="5m"), given_up, {"staff"}).release_after is None


def test_limits_bound_templates_groups_and_what_never_comes() -> None:
    bounds = policy(
        limits={"release_after": "30m", "stop_after": "1d", "warn_before": "10m", "keep": {"longest": "8h"}},
        groups={"staff": {"release_after": None, "warn_before": "1h", "keep": {"longest": "2d", "per_day": 5}}},
    )
    for groups in ((), {"staff"}, None):
        found = effective_idle(template(release_after="5h", keep={"longest": "10h"}), bounds, groups)
        assert (found.release_after, found.stop_after) == (1800, 24 * HOUR)
        assert found.warn_before <= 600
        assert found.keep is not None
        assert found.keep.longest == 8 * HOUR
    assert effective_idle(template(keep={"longest": "10h", "at_once": 1}), bounds, {"staff"}).keep.model_dump() == {  # type: ignore[union-attr]
        "longest": 8 * HOUR, "per_day": 5, "at_once": 1
    }  # fmt: skip


def test_an_action_that_comes_after_a_deeper_one_is_left_out() -> None:
    bounds = policy(limits={"release_after": "10m"})
    found = effective_idle(template(downgrade_after="15m", downgrade_to=0.1, release_after="45m"), bounds)
    assert (found.downgrade_after, found.downgrade_to, found.release_after) == (None, None, 600)


def test_a_downgrade_to_no_less_than_the_share_is_left_out() -> None:
    defaults = policy(defaults={"downgrade_after": "5m", "downgrade_to": 0.25})
    assert effective_idle(template(), defaults).downgrade_after is None
    assert effective_idle(template(gpu={"fraction": 0.5}), defaults).downgrade_after == 300


def test_without_a_gpu_only_the_stop_counts() -> None:
    cpu = Template.model_validate({"name": "c", "display_name": "C"})
    everything = {"downgrade_after": "5m", "downgrade_to": 0.1, "release_after": "1h", "stop_after": "8h"}
    found = effective_idle(cpu, policy(defaults=everything, limits={"release_after": "5m"}))
    assert (found.downgrade_after, found.release_after, found.stop_after) == (None, None, 8 * HOUR)


def test_of_unknown_groups_the_most_generous_counts() -> None:
    groups = {"staff": {"release_after": "1h"}, "guests": {"release_after": "5m", "warn_before": "1h"}}
    found = effective_idle(template(release_after="30m"), policy(groups=groups), None)
    assert (found.release_after, found.warn_before) == (HOUR, HOUR)
    never = policy(groups=groups | {"ops": {"release_after": None}})
    assert effective_idle(template(release_after="30m"), never, None).release_after is None


TIMES = st.none() | st.sampled_from([60.0, 300.0, 600.0, 1800.0, HOUR, 8 * HOUR, 24 * HOUR])
SHARES = st.sampled_from([0.1, 0.25, 0.5])


@st.composite
def idles(draw: st.DrawFn, downgrade: bool = True) -> dict[str, Any]:
    """Valid times in order, some of them written and some not."""
    names = ["downgrade_after", "release_after", "stop_after"] if downgrade else ["release_after", "stop_after"]
    times = sorted(draw(st.sets(st.integers(1, 100_000), min_size=len(names), max_size=len(names))))
    found: dict[str, Any] = {}
    for name, time in zip(names, times, strict=True):
        choice = draw(st.sampled_from(["given", "never", "silent"]))
        if choice != "silent":
            found[name] = float(time) if choice == "given" else None
    if found.get("downgrade_after") is not None:
        found["downgrade_to"] = draw(SHARES)
    if draw(st.booleans()):
        found["warn_before"] = float(draw(st.integers(0, 5000)))
    return found


@st.composite
def templates(draw: st.DrawFn) -> Template:
    idle = draw(idles())
    share = draw(st.sampled_from([0.05, 0.25, 1.0, None]))
    if share is None:
        idle = {name: value for name, value in idle.items() if name in ("stop_after", "warn_before")}
    elif idle.get("downgrade_to", 0.0) >= share:
        idle = {name: value for name, value in idle.items() if not name.startswith("downgrade")}
    return Template.model_validate(
        {"name": "t", "display_name": "T", "gpu": {"fraction": share} if share else None, "idle": idle}
    )


POLICIES = st.builds(
    lambda defaults, groups, limits: IdlePolicy.model_validate(
        {"defaults": defaults, "groups": groups, "limits": limits}
    ),
    idles(),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), idles(), max_size=3),
    idles(downgrade=False),
)
GROUPS = st.none() | st.sets(st.sampled_from(["a", "b", "d"]))


@given(templates(), POLICIES, GROUPS)
def test_the_result_is_a_valid_template_within_the_limits(
    one: Template, bounds: IdlePolicy, groups: set[str] | None
) -> None:
    found = effective_idle(one, bounds, groups)
    Template.model_validate(one.model_dump() | {"idle": found.model_dump()})
    if bounds.limits.stop_after is not None:
        assert found.stop_after is not None
        assert found.stop_after <= bounds.limits.stop_after
    if bounds.limits.release_after is not None and one.gpu is not None:
        # or the server is stopped sooner
        latest = found.release_after if found.release_after is not None else found.stop_after
        assert latest is not None
        assert latest <= bounds.limits.release_after
    if bounds.limits.warn_before is not None:
        assert found.warn_before <= bounds.limits.warn_before


@given(templates(), GROUPS)
def test_an_empty_policy_changes_nothing(one: Template, groups: set[str] | None) -> None:
    assert effective_idle(one, IdlePolicy(), groups) == one.idle


@given(templates(), POLICIES, st.sets(st.sampled_from(["a", "b", "c", "d"])))
def test_unknown_groups_never_cost_more_than_known_ones(one: Template, bounds: IdlePolicy, groups: set[str]) -> None:
    known, unknown = effective_idle(one, bounds, groups), effective_idle(one, bounds, None)
    for name in ("release_after", "stop_after"):
        earlier, later = getattr(known, name), getattr(unknown, name)
        if name == "release_after" and (earlier is None or later is None):
            continue  # left out beside a stop that comes no later
        assert later is None or (earlier is not None and later >= earlier)


@pytest.mark.parametrize("field", ["when", "min_use"])
def test_other_fields_follow_the_same_order(field: str) -> None:
    values: dict[str, Any] = {"when": ("pressure", "always"), "min_use": (1.0, 2.0)}
    first, second = values[field]
    found = policy(defaults={field: first}, groups={"a": {field: second}})
    assert getattr(effective_idle(template(), found), field) == first
    assert getattr(effective_idle(template(**{field: second}), found), field) == second
    assert getattr(effective_idle(template(**{field: first}), found, {"a"}), field) == second
    assert getattr(Idle(), field) is None
