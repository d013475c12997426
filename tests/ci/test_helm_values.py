"""What stands in helm-values/ and comes from elsewhere is the same as there."""

from __future__ import annotations

from types import ModuleType

import yaml

from tests.kubernetes.charts import ROOT


def test_the_written_files_are_as_make_helm_values_writes_them(helm_values: ModuleType) -> None:
    for file, text in helm_values.written().items():
        assert file.read_text() == text, f"{file.relative_to(ROOT)} is old: run `make helm-values`"


def test_config_files_stand_in_the_values_word_for_word() -> None:
    files = yaml.safe_load((ROOT / "helm-values" / "jupyterhub.yaml").read_text())["hub"]["extraFiles"].values()
    texts = {file["mountPath"].rpartition("/")[2]: file.get("stringData") for file in files}
    for name in ("10-gpushare.py", "20-gpushare-service.py"):
        assert texts[name] == (ROOT / "jupyterhub_config.d" / name).read_text()
