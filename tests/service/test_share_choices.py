"""Which shares a running session can change to, by its templates."""

from __future__ import annotations

from typing import Any

from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import choice_of, chosen
from gpushare_spawner.model.template import Template
from gpushare_spawner.service import dashboard
from gpushare_spawner.service.api.answers import SessionEntry
from gpushare_spawner.service.templates import allowed, other_units, templates_of_kind
from gpushare_spawner.wording.actions import not_allowed
from tests.service.dashboards import GIB, session

A100 = GpuReport(index=0, uuid="GPU-0", model="NVIDIA A100", memory_bytes=40 * GIB)


def template(name: str, access: dict[str, Any] | None = None, **gpu: Any) -> Template:
    return Template(name=name, display_name=name, gpu=gpu or None, access=access or {})


def test_choices_include_shares_with_fewer_units_on_the_last_gpu() -> None:
    templates = [template("a", fraction=1.5), template("b", count=2), template("c", count=2, fraction=0.5)]
    templates.append(template("d", fraction=1.2))
    own = session("ann", gpus=("GPU-0", "GPU-1"), share_units=100, last_units=20, effective_units=100)
    assert other_units(own, templates) == (50, 150, 100)
    shares = [one.share for one in templates if one.share is not None]
    assert [chosen(choice_of(share), share.count) for share in shares] == shares
    assert not_allowed((50, 150, 100), 2).startswith(
        "You can change this share to 2 × 0.50 GPU, 1.50 GPU or 2 GPUs, as your templates say."
    )


def test_dashboard_offers_the_next_larger_free_share_by_all_its_units() -> None:
    values: dict[str, Any] = {"share_units": 100, "last_units": 20, "gpu_count": 2, "largest_share_units": 70}
    entry = SessionEntry.model_construct(**values, share_choices=(50, 150, 100))
    assert dashboard._shares(entry) == [("0.5", "2 × 0.50 GPU"), ("1.5", "1.50 GPU"), ("1", "2 GPUs (not free now)")]
    assert dashboard._larger_share(entry) == "1.5"
    entry = entry.model_copy(update={"share_units": 50, "last_units": 0})
    assert dashboard._shares(entry)[1] == ("1.5", "1.50 GPU (not free now)"), "one GPU must be free completely"


TEMPLATES = {
    one.name: one
    for one in (
        template("quarter", fraction=0.25),
        template("half", {"groups": ["ml"]}, fraction=0.5),
        template("whole", count=1, models=["*A100*"]),
        template("h100", fraction=0.3, models=["*H100*"]),
        template("large", fraction=0.6, memory={"guarantee": "80Gi"}),
        template("plain", fraction=0.4, memory={"oversubscribe": False}),
        template("suspended", fraction=0.5, memory={"engine": "suspend"}),
        template("two", count=2),
        template("cpu"),
    )
}


def names(templates: list[Template]) -> list[str]:
    return [one.name for one in templates]


def test_templates_are_of_the_sessions_kind_of_gpu_and_memory() -> None:
    assert names(templates_of_kind(session("ann"), [A100], TEMPLATES)) == ["quarter", "half", "whole"]
    plain = session("ann", template="plain", share_units=40)
    assert names(templates_of_kind(plain, [A100], TEMPLATES)) == ["plain"]
    gone = session("ann", template="gone")
    assert names(templates_of_kind(gone, [A100], TEMPLATES)) == ["quarter", "half", "whole", "plain", "suspended"]


def test_session_chooses_among_shares_of_as_many_gpus_and_has_no_choice_on_unknown_ones() -> None:
    several = session("ann", gpus=("GPU-0", "GPU-1"), share_units=100, effective_units=100)
    other = A100.model_copy(update={"uuid": "GPU-1", "index": 1})
    halves = Template(name="halves", display_name="Halves", gpu={"count": 2, "fraction": 0.5})
    of_kind = templates_of_kind(several, [A100, other], {**TEMPLATES, "halves": halves})
    assert names(of_kind) == ["two", "halves"]
    assert other_units(several, of_kind) == (50,)
    assert templates_of_kind(session("ann"), [other], TEMPLATES) == []


def test_user_may_choose_what_their_groups_may_use_and_the_share_is_another_one() -> None:
    of_kind = templates_of_kind(session("ann"), [A100], TEMPLATES)
    assert other_units(session("ann"), allowed(of_kind, "ann", ("ml",))) == (50, 100)
    assert other_units(session("ann"), allowed(of_kind, "ann", ())) == (100,)
    assert other_units(session("ann"), allowed(of_kind, "ann", None)) == (100,), "unknown groups count as none"
    assert other_units(session("ann"), [TEMPLATES["cpu"]]) == ()
