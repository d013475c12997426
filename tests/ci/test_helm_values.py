"""What stands in helm-values/ and comes from elsewhere is the same as there."""

from __future__ import annotations

import json
from types import ModuleType

import yaml
from jsonschema import Draft7Validator

from tests.kubernetes.charts import ROOT


def test_the_written_files_are_as_make_helm_values_writes_them(helm_values: ModuleType) -> None:
    for file, text in helm_values.written().items():
        assert file.read_text() == text, f"{file.relative_to(ROOT)} is old: run `make helm-values`"


def test_config_files_stand_in_the_values_word_for_word() -> None:
    files = yaml.safe_load((ROOT / "helm-values" / "jupyterhub.yaml").read_text())["hub"]["extraFiles"].values()
    texts = {file["mountPath"].rpartition("/")[2]: file.get("stringData") for file in files}
    for name in ("10-gpushare.py", "20-gpushare-service.py"):
        assert texts[name] == (ROOT / "jupyterhub_config.d" / name).read_text()


def test_a_value_of_several_types_is_checked_as_in_the_quotas_file(helm_values: ModuleType) -> None:
    schema = json.loads(helm_values.with_templates(helm_values.CHART_SCHEMA.read_text()))
    quota = Draft7Validator({"$ref": "#/definitions/Quota", "definitions": schema["definitions"]})
    term = {"hours": 1, "term": {"from": "2026-10-01", "to": "2027-01-31"}}
    for budget in ({"hours": 4, "window": "12h"}, [{"hours": 4, "window": "day"}, term], {"hours": 4, "window": 7200}):
        assert quota.is_valid({"budget": budget})
    (error,) = quota.iter_errors({"budget": [{"hours": -1, "window": "day"}]})
    assert list(error.absolute_path) == ["budget", 0, "hours"]
    (error,) = quota.iter_errors({"budget": {"hours": 1, "windw": "day"}})
    assert "windw" in error.message
