"""What the doctor's tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users can pass. tmp_path is below one that each run of pytest closes to others."""
    with tempfile.TemporaryDirectory(prefix="gpushare-doctor-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)
