"""A sitecustomize: hides modules from a process, as if their distributions were not installed. See test_extras.py."""

from __future__ import annotations

import sys
from collections.abc import Collection

MODULES: Collection[str]
MODULES = ()


class _Hidden:
    """A finder that refuses these modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a hidden module."""
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Hidden)
