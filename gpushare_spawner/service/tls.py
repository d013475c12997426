"""TLS with the certificates that the hub makes for itself and for its services."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

from jupyterhub.utils import make_ssl_context


def own_tls() -> ssl.SSLContext | None:
    """For the hub's proxy, with the certificates that the hub made for this service."""
    return _tls(ssl.Purpose.CLIENT_AUTH, *(os.environ.get(f"JUPYTERHUB_SSL_{part}", "") for part in _PARTS))


def hub_tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    own = tuple(os.environ.get(f"JUPYTERHUB_SSL_{part}", "") for part in _PARTS)
    if all(own):
        return _tls(ssl.Purpose.SERVER_AUTH, *own)
    if not options.ssl_enabled:
        return None
    folder = Path(options.internal_certs_location)
    return _tls(
        ssl.Purpose.SERVER_AUTH,
        str(folder / "hub-internal/hub-internal.key"),
        str(folder / "hub-internal/hub-internal.crt"),
        str(folder / "hub-ca/hub-ca.crt"),
    )


_PARTS = ("KEYFILE", "CERTFILE", "CLIENT_CA")


def _tls(purpose: ssl.Purpose, key: str, certificate: str, authority: str) -> ssl.SSLContext:
    context: ssl.SSLContext = make_ssl_context(key, certificate, cafile=authority, purpose=purpose)
    return context
