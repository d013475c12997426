"""The connection to an API server: as a pod with a token that is renewed, or by a kubeconfig."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from kubernetes_asyncio.config import incluster_config

from gpushare_spawner.clients.api import cluster_client
from gpushare_spawner.clients.service_account import NoCluster


@pytest.fixture
def service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a pod finds its service account in."""
    import certifi

    for name in ("token", "ca.crt"):
        constant = "SERVICE_TOKEN_FILENAME" if name == "token" else "SERVICE_CERT_FILENAME"
        monkeypatch.setattr(incluster_config, constant, str(tmp_path / name))
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_text(Path(certifi.where()).read_text())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return tmp_path


async def test_a_token_that_the_kubelet_renews_is_read_again(
    service_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", datetime.timedelta(0))
    async with await cluster_client() as client:
        assert client.configuration.host == "https://[fd00::1]:443"
        for token in ("first", "second"):
            (service_account / "token").write_text(token)
            headers: dict[str, str] = {}
            await client.update_params_for_auth(headers, [], ["BearerToken"])
            assert headers == {"authorization": f"Bearer {token}"}


async def test_without_a_cluster_it_says_what_it_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for kubeconfig in (tmp_path / "none", tmp_path):
        monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        with pytest.raises(NoCluster, match=r"neither a service account of a pod .* nor a usable \$KUBECONFIG"):
            await cluster_client()
