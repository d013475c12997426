"""The demo's templates: the shipped ones, only quicker."""

from __future__ import annotations

from pathlib import Path

from gpushare_spawner.demo.command import write_demo_templates
from gpushare_spawner.templates.folder import PolicyFolder
from tests.present import present

SHIPPED = Path(__file__).resolve().parent.parent.parent / "templates"


def test_every_shipped_template_is_there_with_short_times(tmp_path: Path) -> None:
    write_demo_templates(SHIPPED, tmp_path)
    shipped, quick = PolicyFolder(SHIPPED).load(), PolicyFolder(tmp_path).load()
    assert not shipped.problems
    assert not quick.problems
    assert [template.name for template in quick.templates] == [template.name for template in shipped.templates]
    for before, after in zip(shipped.templates, quick.templates, strict=True):
        assert after.model_copy(update={"idle": before.idle}) == before, "nothing else changes"
        for step, seconds in (("release_after", 120), ("stop_after", 1800)):
            had = getattr(before.idle, step) is not None
            assert getattr(after.idle, step) == (seconds if had else None), "the same steps, only sooner"
        lends = before.share is not None and before.share.units > 10
        assert after.idle.downgrade_after == (60 if lends else None), "the demo shows each action"
    quarter = next(template for template in quick.templates if template.gpu and present(template.share).units == 25)
    assert (quarter.idle.downgrade_after, quarter.idle.release_after, quarter.idle.warn_before) == (60, 120, 20)
    assert quarter.idle.min_use == 0


def test_templates_that_are_no_longer_shipped_go(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("name: old")
    write_demo_templates(SHIPPED, tmp_path)
    assert not (tmp_path / "old.yaml").exists()


def test_a_broken_template_is_not_hidden(tmp_path: Path) -> None:
    shipped, into = tmp_path / "shipped", tmp_path / "into"
    shipped.mkdir()
    (shipped / "broken.yaml").write_text("name: [unclosed")
    (shipped / "list.yaml").write_text("- 1\n")
    write_demo_templates(shipped, into)
    assert {path.name for path in into.iterdir()} == {"broken.yaml", "list.yaml"}
    assert len(PolicyFolder(into).load().problems) == 2
