"""Real API servers for the tests: one started from KUBEBUILDER_ASSETS, or that of the cluster of a KUBECONFIG."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes_asyncio import config
from kubernetes_asyncio.client import Configuration

from gpushare_spawner.demo.machine import free_ports
from tests.present import present

from .client import Credentials

_START_SECONDS = 60
# without controllers nobody would do what these admission plugins wait for
_DISABLED = "ServiceAccount,TaintNodesByCondition,StorageObjectInUseProtection"


@contextlib.contextmanager
def api_server(assets: Path, folder: Path) -> Iterator[Credentials]:
    """etcd and kube-apiserver from `assets`, with RBAC, without controllers, scheduler or nodes."""
    etcd_port, peer_port, port = free_ports(3)
    token = secrets.token_urlsafe(24)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "service-accounts.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    etcd_url = f"http://127.0.0.1:{etcd_port}"
    etcd = [
        str(assets / "etcd"), f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={etcd_url}",
        f"--advertise-client-urls={etcd_url}", f"--listen-peer-urls=http://127.0.0.1:{peer_port}", "--unsafe-no-fsync",
    ]  # fmt: skip
    server = [
        str(assets / "kube-apiserver"), f"--etcd-servers={etcd_url}", "--bind-address=127.0.0.1",
        f"--secure-port={port}", "--advertise-address=127.0.0.1",
        f"--cert-dir={folder / 'certificates'}", f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'service-accounts.key'}",
        f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
        f"--disable-admission-plugins={_DISABLED}", "--service-cluster-ip-range=10.0.0.0/24", "--allow-privileged=true",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for command in (etcd, server):
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("wb"))
            process = stack.enter_context(_ended(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)))
        credentials = Credentials(f"https://127.0.0.1:{port}", token, verify=False)
        _wait_until_ready(credentials, process, folder / "kube-apiserver.log")
        yield credentials


def cluster_of(kubeconfig: str) -> Credentials:
    """Whom the kubeconfig's current context makes us. Raises kubernetes_asyncio's ConfigException."""
    configuration = Configuration()
    asyncio.run(config.load_kube_config(config_file=kubeconfig, client_configuration=configuration))
    certificate = (configuration.cert_file, configuration.key_file or "") if configuration.cert_file else None
    return Credentials(
        present(configuration.host).rstrip("/"),
        (configuration.api_key.get("BearerToken") or "").removeprefix("Bearer "),
        ca_file=configuration.ssl_ca_cert,
        client_certificate=certificate,
        verify=configuration.verify_ssl,
    )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(credentials: Credentials, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    request = urllib.request.Request(
        credentials.url + "/readyz", headers={"Authorization": f"Bearer {credentials.token}"}
    )
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, context=credentials.ssl_context(), timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the API server of KUBEBUILDER_ASSETS does not start:\n{log.read_text()[-4000:]}")
