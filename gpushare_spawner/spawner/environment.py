"""The environment of a notebook server with a share, and of one without."""

from __future__ import annotations

import os
from collections.abc import Mapping

APPENDED = frozenset({"LD_PRELOAD"})
"""What others preload comes first: ours must see the CUDA driver that theirs may wrap."""
PREPENDED = frozenset({"LD_LIBRARY_PATH"})
"""A simulated driver must be found before an installed one."""

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not take one because the machine has one. (CUDA C++ Programming Guide,
CUDA environment variables: devices from the first invalid index on are invisible.)"""


def with_share(environment: Mapping[str, str], share: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with what the agent handed out: lists of paths are joined, the rest is replaced."""
    joined = dict(environment)
    for name, value in share.items():
        there = joined.get(name)
        if there and name in APPENDED | PREPENDED:
            parts = [there, value] if name in APPENDED else [value, there]
            joined[name] = os.pathsep.join(parts)
        else:
            joined[name] = value
    return joined
