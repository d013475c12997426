"""Kubernetes' names: subdomains, qualified names, and how its messages quote them."""

from __future__ import annotations

import json
import re

SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def is_qualified(key: str) -> bool:
    """Whether it is a name, or a domain, a slash and a name."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > 253 or not SUBDOMAIN.fullmatch(prefix)):
        return False
    return bool(_QUALIFIED.fullmatch(name))


def quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
