"""placement.yaml beside the templates: pins of users and groups, their mistakes, and what contradicts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.files import check_templates
from gpushare_spawner.doctor.finding import Level, Machine
from gpushare_spawner.model.template import PlacementPin, Template
from gpushare_spawner.templates.command import check
from gpushare_spawner.templates.folder import PolicyFolder

HERE, THERE = (f"GPU-0000000{number}-0000-5000-8000-0123456789ab" for number in (0, 1))
FILE = f"""\
users:
  ada: {{gpu: {HERE}}}
groups:
  exam: {{nodes: [n1, n2]}}
  guests: {{nodes: [n2]}}
"""


def template(**changes: object) -> Template:
    return Template.model_validate({"name": "t", "display_name": "T", "gpu": {"fraction": 0.5}, **changes})


def test_pins_of_a_user_are_their_own_and_those_of_their_groups(tmp_path: Path) -> None:
    (tmp_path / "placement.yaml").write_text(FILE)
    pins = PolicyFolder(tmp_path).load().placement
    assert pins is not None
    assert pins.of_user("bob", frozenset()) == []
    assert pins.of_user("ada", {"guests", "exam"}) == [
        ("users.ada", PlacementPin(gpu=HERE)),
        ("groups.exam", PlacementPin(nodes=("n1", "n2"))),
        ("groups.guests", PlacementPin(nodes=("n2",))),
    ]


def test_template_and_pins_all_hold() -> None:
    rules = {"apart_from": ["exam"], "nodes": ["n1", "n2"]}
    under = template(placement=rules).pinned(PlacementPin(nodes=("n2", "n3"))).pinned(PlacementPin(gpu=HERE))
    assert (under.placement.gpu, under.placement.nodes, under.placement.apart_from) == (HERE, ("n2",), ("exam",))
    assert under.pinned(PlacementPin(gpu=HERE)) == under
    assert template(gpu=None).pinned(PlacementPin(gpu=HERE)) == template(gpu=None)


@pytest.mark.parametrize(
    ("changes", "pin", "why"),
    [
        ({"placement": {"gpu": HERE}}, {"gpu": THERE}, f"it asks for GPU {HERE}, and not for GPU {THERE}"),
        ({"placement": {"nodes": ["a"]}}, {"nodes": ("b", "c")}, "it asks for the nodes a, and not for b, c"),
        ({"gpu": {"count": 2}}, {"gpu": HERE}, "its share is 2 GPUs, and not one GPU"),
        (
            {"gpu": {"fraction": 0.5, "layer": "mps"}},
            {"gpu": HERE},
            "its layer mps does not keep rules for the choice of the GPU",
        ),
    ],
)
def test_what_can_never_hold_is_named(changes: dict[str, object], pin: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        template(**changes).pinned(PlacementPin.model_validate(pin))


def test_check_names_mistakes_and_contradictions_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.yaml").write_text(f"name: t\ndisplay_name: T\ngpu: {{fraction: 1}}\nplacement: {{gpu: {THERE}}}\n")
    (tmp_path / "placement.yaml").write_text(FILE)
    assert check(tmp_path) == 0
    said = f"placement.yaml:2: users.ada: cannot use the template t: it asks for GPU {THERE}, and not for GPU {HERE}"
    assert said in capsys.readouterr().out.replace("\n", " ")
    (tmp_path / "placement.yaml").write_text("users:\n  ada: {gpus: x}\n")
    assert check(tmp_path) == 1
    assert "placement.yaml:2: users.ada.gpus: unknown field" in capsys.readouterr().out


def test_doctor_names_pins_to_gpus_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("name: t\ndisplay_name: T\ngpu: {fraction: 1}\n")
    (tmp_path / "placement.yaml").write_text(FILE)
    machine, gpu = Machine(Path("/nowhere"), {}), Gpu(0, THERE, "NVIDIA L4", 2**34, simulated=False)
    (note,) = [found for found in check_templates(tmp_path, (gpu,), machine) if found.level is not Level.OK]
    assert (note.where, note.what) == (
        str(tmp_path / "placement.yaml"), f"ada needs GPU {HERE}, which this machine does not have",
    )  # fmt: skip
    node = Machine(Path("/nowhere"), {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert {found.level for found in check_templates(tmp_path, (gpu,), node, {HERE})} == {Level.OK}
