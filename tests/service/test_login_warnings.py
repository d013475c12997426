"""The hub's warning about logins of users who lack the custom scopes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gpushare_spawner.service.hub.roles import drop_login_warnings

EXPECTED = (
    "Service JupyterHub service gpushare requested scopes custom:gpushare:read,access:services!service=gpushare"
    " for user ann, granting only access:services!service=gpushare."
)
OTHER = "Service JupyterHub service reports requested scopes list:users for user ann, granting only []."


@pytest.fixture
def hub_log() -> Iterator[logging.Logger]:
    log = logging.getLogger("JupyterHub")
    before = list(log.filters)
    log.filters[:] = []  # another test's hub may have run in this process
    yield log
    log.filters[:] = before


def test_only_the_expected_warning_is_dropped(hub_log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    drop_login_warnings()
    hub_log.warning(EXPECTED)
    hub_log.warning(OTHER)
    assert [record.message for record in caplog.records] == [OTHER]


def test_two_config_files_add_one_filter(hub_log: logging.Logger) -> None:
    drop_login_warnings()
    drop_login_warnings()
    assert len(hub_log.filters) == 1
