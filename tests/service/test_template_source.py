"""What the dashboard says of a folder of templates."""

from __future__ import annotations

from pathlib import Path

from gpushare_spawner.service.templates import TemplateSource


def test_a_problem_names_its_file_once(tmp_path: Path) -> None:
    (tmp_path / "quotas.yaml").write_text("users:\n  ada: {guarantee: -1}\n")
    (tmp_path / "a.yaml").write_text("name: a\n")
    template, quota = TemplateSource(tmp_path).problems
    assert template.startswith("Template a.yaml")
    assert quota.startswith("quotas.yaml:2: users.ada.guarantee: ")
