"""Where the service's pages find the hub's stylesheet, logo and pages."""

from __future__ import annotations

import pytest

from gpushare_spawner.service.web.app import HubTheme


@pytest.mark.parametrize(
    ("base", "host", "home"),
    [
        ("/", "", "/hub/home"),
        ("/jupyter/", "", "/jupyter/hub/home"),
        ("/jupyter", "", "/jupyter/hub/home"),
        ("/", "https://hub.example.org", "https://hub.example.org/hub/home"),
    ],
)
def test_pages_of_the_hub_are_found_by_its_environment(
    base: str, host: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_BASE_URL", base)
    monkeypatch.setenv("JUPYTERHUB_HOST", host)
    theme = HubTheme.of_environment()
    assert theme.page("home") == home
    assert theme.source.strip() == host, "a host of its own has to be in the policy of the page"
