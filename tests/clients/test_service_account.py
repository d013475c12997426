"""The agent's connection to the API server as its pod's service account."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import certifi
import pytest

from gpushare_spawner.clients import service_account
from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.clients.service_account import ServiceAccountConnection

MOST_MIB = 80
"""Of the agent with 50 sessions; without one it must stay below that by what sessions take."""
OF_SESSIONS_MIB = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text(Path(certifi.where()).read_text())
    return tmp_path


def test_it_is_there_in_a_pod_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert ServiceAccountConnection.of_this_pod(folder) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    found = ServiceAccountConnection.of_this_pod(folder)
    assert found is not None
    assert found._host == "https://[fd00::1]:443"
    (folder / "token").unlink()
    assert ServiceAccountConnection.of_this_pod(folder) is None


async def test_a_renewed_token_is_read_again_and_an_empty_one_is_a_failed_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_account, "READ_TOKEN_EVERY", 0.0)
    connection = ServiceAccountConnection("https://127.0.0.1:1", folder)
    assert connection._bearer() == "first"
    (folder / "token").write_text("second")
    assert connection._bearer() == "second"
    (folder / "token").write_text("")
    api = ClusterApi(connection)
    try:
        with pytest.raises(ApiFailure, match=r"cannot be reached: .*token is empty"):
            await api.list("/api/v1/pods")
        (folder / "token").write_text("third")
        with pytest.raises(ApiFailure, match="cannot be reached: Cannot connect to host") as failed:
            await api.list("/api/v1/pods")
        assert failed.value.status == 0
    finally:
        await api.close()


def test_what_the_agent_imports_leaves_room_for_its_sessions() -> None:
    """The library's models alone are 37 MiB."""
    program = (
        "import sys, aiohttp, grpc, gpushare_spawner.cli, gpushare_spawner.agent.kubernetes.cluster_agent\n"
        "status = open('/proc/self/status').read()\n"
        "print('kubernetes_asyncio' in sys.modules, status.split('VmRSS:')[1].split()[0])\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "False"
    assert int(said[1]) / 1024 < MOST_MIB - OF_SESSIONS_MIB
