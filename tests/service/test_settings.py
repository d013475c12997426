"""The culler's settings: from the command line, and against those of templates."""

from __future__ import annotations

import argparse

import pytest

from gpushare_spawner.idle.keep import KeepRule
from gpushare_spawner.model.template import Idle, KeepLimits
from gpushare_spawner.service.command import configure, culler_settings
from gpushare_spawner.service.culler.decisions import CullerSettings

HOUR = 3600.0


def given(*options: str) -> CullerSettings:
    parser = argparse.ArgumentParser()
    configure(parser)
    return culler_settings(parser.parse_args(options))


def test_limits_of_keeps_come_from_options_and_templates_have_the_last_word() -> None:
    assert given().keep_rule(None) == KeepRule(8 * HOUR, 2, 2)
    settings = given("--keep-longest=4h", "--keep-per-day=1", "--keep-at-once=5")
    assert settings.keep_rule(None) == settings.keep_rule(Idle()) == KeepRule(4 * HOUR, 1, 5)
    assert settings.keep_rule(Idle(keep=KeepLimits(longest="12h"))) == KeepRule(12 * HOUR, 1, 5)
    assert settings.keep_rule(Idle(keep=KeepLimits(longest=0, per_day=0, at_once=0))) == KeepRule(0, 0, 0)


@pytest.mark.parametrize("option", ["--keep-longest=-1h", "--keep-per-day=-1", "--keep-at-once=1.5", "--keep-at-once="])
def test_an_option_that_is_no_number_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given(option)
    assert "is not a" in capsys.readouterr().err
