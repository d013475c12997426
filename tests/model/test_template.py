from typing import Any

import pytest
from pydantic import ValidationError

from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.model.template import Template
from tests.present import present

QUARTER = {
    "name": "quarter-gpu",
    "display_name": "0.25 GPU",
    "gpu": {"fraction": 0.25, "memory": {"oversubscribe": True, "limit": "100%"}, "models": ["*A100*", "*h100*"]},
    "resources": {"cpu": {"guarantee": 1, "limit": 4}, "memory": {"guarantee": "4Gi", "limit": "16Gi"}},
    "access": {"groups": ["ml-course"]},
    "idle": {"downgrade_after": "15m", "downgrade_to": 0.1, "release_after": "45m", "stop_after": "8h"},
}


def test_the_template_of_the_reference() -> None:
    template = Template.model_validate(QUARTER)
    assert template.share == Share(units=25)
    assert template.resources.memory.limit == 16 * 2**30
    assert template.idle.release_after == 2700
    assert template.idle.warn_before == 300
    assert [template.idle.units(tier, template.share) for tier in Tier] == [25, 10, 0, 0]
    assert [template.idle.after(tier) for tier in Tier] == [None, 900, 2700, 28800]


def test_what_it_dumps_it_reads() -> None:
    template = Template.model_validate(QUARTER)
    assert Template.model_validate_json(template.model_dump_json()) == template


def test_access_and_models() -> None:
    template = Template.model_validate(QUARTER)
    assert template.access.allows("ada", {"ml-course"})
    assert not template.access.allows("ada", set())
    assert Template(name="all", display_name="All").access.allows("anybody", set())
    assert present(template.gpu).accepts("NVIDIA A100-SXM4-80GB")
    assert present(template.gpu).accepts("NVIDIA H100 PCIe")
    assert not present(template.gpu).accepts("Tesla P100")


def changed(**changes: Any) -> dict[str, Any]:
    return {**QUARTER, **changes}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (changed(name="Quarter GPU"), "name"),
        (changed(gpu={"fraction": 0}), "out of range"),
        (changed(gpu={"fraction": 0.25, "count": 0}), "count"),
        (changed(gpu={}), "give fraction"),
        (changed(gpu={"fraction": 1.5, "count": 2}), "on several GPUs already"),
        (changed(gpu={"fraction": 1.5, "memory": {"engine": "suspend"}}), "a share of one GPU"),
        (changed(gpu={"fraction": 65}), "from 0.01 to 64"),
        (changed(gpu={"fraction": 0.5, "count": 2, "memory": {"engine": "suspend"}}), "a share of one GPU"),
        (changed(gpu={"fraction": 0.5, "count": 2}, idle={"downgrade_after": "15m", "downgrade_to": 0.5}), "less than"),
        (changed(gpu={"fraction": 0.5, "count": 2, "time": {"limit": "25%"}}), "less than the share, 50%"),
        (changed(gpu={"fraction": 0.25, "memory": {"engine": "swap"}}), "engine"),
        (changed(gpu={"count": 2, "memory": {"engine": "suspend"}}), "a share of one GPU"),
        (changed(gpu={"fraction": 0.25, "memory": {"engine": "suspend", "oversubscribe": False}}), "oversubscribe"),
        (changed(gpu={"count": 0}), "greater than or equal to 1"),
        (changed(gpu={"count": True}), "count"),
        (changed(gpu={"fraction": 0.25, "colour": "red"}), "colour"),
        (changed(resources={"cpu": {"guarantee": 4, "limit": 1}}), "more than the limit"),
        (changed(idle={"downgrade_after": "15m"}), "belong together"),
        (changed(idle={"downgrade_after": "15m", "downgrade_to": 0.25}), "less than the share"),
        (changed(idle={"release_after": "8h", "stop_after": "45m"}), "must be more than"),
        (changed(idle={"release_after": 0}), "more than 0"),
        (changed(gpu=None, idle={"release_after": "45m"}), "need a gpu"),
        (changed(limits={"per_user": 0}), "per_user"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Template.model_validate(wrong)


def test_a_part_of_each_of_several_gpus_keeps_its_idle_actions_on_each() -> None:
    halves = Template.model_validate(
        changed(gpu={"fraction": 0.5, "count": 2}, idle={"downgrade_after": "15m", "downgrade_to": 0.1})
    )
    assert halves.share == Share(50, 2)
    more = Template.model_validate(
        changed(gpu={"fraction": "1.5"}, idle={"downgrade_after": "15m", "downgrade_to": 0.6})
    )
    assert (more.share, more.idle.units(Tier.DOWNGRADED, Share(100, 2, 50))) == (Share(100, 2, 50), 60)
    assert halves.idle.units(Tier.DOWNGRADED, Share(50, 2)) == 10


def releasing(
    cpu: str | float | None = "100m", memory: str | None = "1Gi", resources: Any = QUARTER["resources"], **idle: Any
) -> dict[str, Any]:
    kept = {name: amount for name, amount in (("cpu", cpu), ("memory", memory)) if amount is not None}
    return changed(resources=resources, idle={"release_after": "45m", "release_resources": kept, **idle})


def test_what_a_released_session_still_requests() -> None:
    kept = present(Template.model_validate(releasing()).idle.release_resources)
    assert (kept.cpu, kept.memory) == (0.1, 2**30)
    assert present(Template.model_validate(releasing(memory=None)).idle.release_resources).memory is None
    assert Template.model_validate(QUARTER).idle.release_resources is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (releasing(cpu=None, memory=None), "give cpu or memory"),
        (releasing(cpu=0), "cpu must be more than 0"),
        (releasing(release_after=None), "release_resources needs release_after"),
        (releasing(cpu="1"), "release_resources: cpu must be less than resources.cpu.guarantee"),
        (releasing(memory="8Gi"), "release_resources: memory must be less than resources.memory.guarantee"),
        (
            releasing(memory=None, resources={"cpu": {"limit": 4}, "memory": {"guarantee": "4Gi"}}),
            "release_resources: cpu needs resources.cpu.guarantee; a limit alone is requested in full",
        ),
        (
            releasing(resources={"cpu": {"guarantee": 4, "limit": 4}, "memory": {"guarantee": "4Gi", "limit": "4Gi"}}),
            "whose guarantees of cpu and memory are its limits",
        ),
        (
            releasing(memory=None, resources={"cpu": {"guarantee": 4, "limit": 4}, "memory": {"limit": "4Gi"}}),
            "whose guarantees of cpu and memory are its limits",
        ),
    ],
)
def test_what_kubernetes_would_refuse_to_resize_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Template.model_validate(wrong)
