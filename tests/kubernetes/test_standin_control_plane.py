"""Real control planes are found where the environment says, and what is wrong with them is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .standin.control_plane import api_server, cluster_of


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_api_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    program(tmp_path / "etcd", "exec sleep 60")
    program(tmp_path / "kube-apiserver", "echo 'unknown flag: --wrong' >&2; exit 1")
    with pytest.raises(RuntimeError, match="unknown flag: --wrong"), api_server(tmp_path, tmp_path):
        pass


def test_a_kubeconfig_says_where_the_cluster_is_and_who_we_are(tmp_path: Path) -> None:
    file = tmp_path / "config"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": "https://10.1.2.3:6443/", "insecure-skip-tls-verify": True}}],
        "users": [{"name": "a", "user": {"token": "secret"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    }
    file.write_text(json.dumps(config))
    credentials = cluster_of(str(file))
    assert (credentials.url, credentials.token, credentials.verify) == ("https://10.1.2.3:6443", "secret", False)
    assert credentials.ssl_context() is not None
